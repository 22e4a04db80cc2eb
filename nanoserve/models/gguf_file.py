"""Read a GGUF file: metadata, and where each tensor lies. Every length and offset is checked before
it is followed.

The format is little-endian: magic, version, counts, metadata, tensor descriptions, padding, data.
Nothing outside the file is read, and nothing in it is executed. The data stay in the mapped file.
"""

import math
import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from nanoserve.config.quantization import BLOCK_TYPES, BlockType
from nanoserve.errors import ModelError, shown
from nanoserve.utils.files import unusable_file

Item = TypeVar("Item")

MAGIC = b"GGUF"
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor of numbers that rotary frequencies are divided by: those of Llama 3, and those of
Gemma 4's layers without a window."""
_VERSIONS = (2, 3)
_MAX_ENTRIES = 65_536
"""Most metadata keys, and most tensors: ten times what real models have."""
_MAX_DIMENSIONS = 4
_MAX_NAME_BYTES = 64 << 10
_DEFAULT_ALIGNMENT = 32

_LENGTH = struct.Struct("<Q")
# Scalar types of metadata by their number: the format characters of `struct`.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
# Names of all types of tensors, in the order of their numbers.
_TYPE_NAMES = (
    "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS "
    "IQ3_XXS IQ1_S IQ4_NL"
    " IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 Q4_0_4_4 Q4_0_4_8 Q4_0_8_8 TQ1_0 TQ2_0 "
    "IQ4_NL_4_4 IQ4_NL_4_8"
    " IQ4_NL_8_8 MXFP4 NVFP4 Q1_0"
)

_FIRST_OF_SEVERAL = re.compile(r"(.+)-00001-of-(\d{5})(\.gguf)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class GgufStrings:
    """An array of strings in the header. They stay in the mapped file, and are decoded each time
    they are read. Iterating over them raises ModelError for one that is not UTF-8."""

    path: Path
    data: mmap.mmap
    """The mapped file."""
    offset: int
    """First byte of the first string's length, from the beginning of the file. All lengths have
    been checked."""
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[str]:
        data, end = self.data, self.offset
        for _ in range(self.count):
            first = end + _LENGTH.size
            end = first + _LENGTH.unpack_from(data, end)[0]
            try:
                yield data[first:end].decode()
            except UnicodeDecodeError as error:
                raise _not_utf8(self.path) from error


Metadata = int | float | bool | str | GgufStrings | memoryview
"""A value of the header; arrays are views of the mapped file."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's form, and its place in the file."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as in torch; the last dimension is stored contiguously."""
    type: BlockType
    data: mmap.mmap
    """The mapped file."""
    offset: int
    """First byte, from the beginning of the file."""

    @property
    def row_bytes(self) -> int:
        blocks = self.shape[-1] // self.type.size
        return blocks * self.type.num_bytes

    @property
    def num_bytes(self) -> int:
        rows = math.prod(self.shape[:-1])
        return rows * self.row_bytes

    @property
    def end(self) -> int:
        """First byte after it."""
        return self.offset + self.num_bytes


def open_gguf(path: Path) -> "GgufFile":
    """The open file. Its header is read once in a process, however often it is opened, unless the
    file has changed. Raises ModelError as `GgufFile` does."""
    try:
        status = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    return _opened(path, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))


@cache
def _opened(path: Path, identity: tuple[int, ...]) -> "GgufFile":
    return GgufFile(path)


class GgufFile:
    """An open GGUF file, with the tensors of all files of a model that is split. Raises ModelError,
    one line that names the file, if one is damaged or of another kind."""

    def __init__(self, path: Path, *, is_first: bool = True) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise _unreadable(path, error) from error
        self._mapped = [self.data]
        self._position = 0
        self.metadata: dict[str, Metadata] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self._read_header()
        count = self.get("split.count", int, 0)
        if is_first and count not in (0, 1):  # joined files keep the key, as 0
            self._add_other_files(count)

    def _add_other_files(self, count: int) -> None:
        first = _FIRST_OF_SEVERAL.fullmatch(self.path.name)
        if first is None or int(first[2]) != count:
            name = f"-00001-of-{count!s:0>5.9}.gguf"
            instead = (
                f"give the first, whose name ends in {name}; llama-gguf-split --merge joins them"
            )
            raise self.fail(f"one of several files of a model; {instead}")
        stem, last, ending = first.groups()
        for number in range(2, count + 1):
            path = self.path.with_name(f"{stem}-{number:05}-of-{last}{ending}")
            other = GgufFile(path, is_first=False)
            known = self.tensors.keys() & other.tensors.keys()
            if known:
                raise other.fail(
                    f"tensor {shown(min(known))} is also in an earlier file of the model"
                )
            self.tensors |= other.tensors
            self._mapped.append(other.data)

    def release_pages(self) -> None:
        """Give the memory of what was read back to the system. It is read again where it is looked
        at."""
        for data in self._mapped:
            data.madvise(mmap.MADV_DONTNEED)

    def find(self, key: str, kind: type[Item]) -> Item | None:
        """The metadata under that key, if there are any; a whole number is a float, too, but true
        and false are not numbers."""
        value = self.metadata.get(key)
        if kind is float and type(value) is int:
            value = float(value)
        if value is not None and type(value) is not kind:
            raise self.fail(f"{key} must be of type {kind.__name__}, not {_shown(value)}")
        return value

    def get(self, key: str, kind: type[Item], default: Item) -> Item:
        """The metadata under that key, or the default."""
        found = self.find(key, kind)
        if found is None:
            return default
        return found

    def need(self, key: str, kind: type[Item]) -> Item:
        """The metadata under that key, which must be there."""
        found = self.find(key, kind)
        if found is None:
            raise self.fail(f"{key} is missing")
        return found

    def listed(self, key: str, kind: type[Item], count: int) -> list[Item]:
        """The array of so many items of that kind under that key, which must be there."""
        value: Any = self.metadata.get(key)
        if is_array(value) and len(value) == count:
            items = list(value)
            if set(map(type, items)) <= {kind}:
                return items
        raise self.fail(f"{key} is missing or not an array of {count} items of {kind.__name__}")

    def rope_factors(self) -> list[float]:
        """The numbers that rotary frequencies are divided by; empty if there are none."""
        tensor = self.tensors.get(ROPE_FACTORS)
        if tensor is None:
            return []
        if tensor.type.name != "F32":
            raise self.fail(f"tensor {ROPE_FACTORS} is {tensor.type.name}, not F32")
        count = tensor.num_bytes // 4
        return list(struct.unpack_from(f"<{count}f", tensor.data, tensor.offset))

    def fail(self, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {problem}")

    def _read_header(self) -> None:
        if self._take(4) != MAGIC:
            raise unusable_file(self.path, f"{self.path}: not a GGUF file")
        version = self._number("I")
        if version and version % (1 << 16) == 0:
            raise self.fail(
                "a big-endian file; convert it with `gguf-convert-endian FILE little` of the "
                "package gguf"
            )
        if version not in _VERSIONS:
            raise self.fail(f"GGUF version {version} is not read; convert the file to version 3")
        num_tensors = self._number("Q")
        num_entries = self._number("Q")
        if max(num_tensors, num_entries) > _MAX_ENTRIES:
            raise self.fail(
                f"{num_tensors} tensors and {num_entries} metadata keys; at most {_MAX_ENTRIES} "
                "are read"
            )
        for _ in range(num_entries):
            key = self._string(_MAX_NAME_BYTES)
            if key in self.metadata:
                raise self.fail(f"metadata key {shown(key)} occurs twice")
            kind = self._number("I")
            self.metadata[key] = self._value(kind)
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment % 8:
            raise self.fail(f"general.alignment must be a multiple of 8, not {_shown(alignment)}")
        described = [self._tensor() for _ in range(num_tensors)]
        start = -(-self._position // alignment) * alignment
        for tensor in described:
            if tensor.name in self.tensors:
                raise self.fail(f"tensor {shown(tensor.name)} occurs twice")
            if tensor.offset % alignment:
                raise self.fail(
                    f"tensor {shown(tensor.name)} does not begin at a multiple of {alignment} bytes"
                )
            self.tensors[tensor.name] = replace(tensor, offset=start + tensor.offset)
        self._check_places()

    def _check_places(self) -> None:
        placed = sorted(self.tensors.values(), key=lambda tensor: tensor.offset)
        for tensor, following in pairwise(placed):
            if tensor.end > following.offset:
                raise self.fail(f"tensors {shown(tensor.name)} and {shown(following.name)} overlap")
        if placed:
            last = placed[-1]
            if last.end > len(self.data):
                raise self.fail(
                    f"tensor {shown(last.name)} ends beyond the file, which is truncated"
                )

    def _tensor(self) -> GgufTensor:
        """The next description, whose offset is counted from the data's beginning."""
        name = self._string(_MAX_NAME_BYTES)
        num_dimensions = self._number("I")
        if not 0 < num_dimensions <= _MAX_DIMENSIONS:
            raise self.fail(
                f"tensor {shown(name)} has {num_dimensions} dimensions; 1 to {_MAX_DIMENSIONS} are "
                "read"
            )
        sizes = [self._number("Q") for _ in range(num_dimensions)]
        shape = tuple(reversed(sizes))
        block_type = self._block_type(name, self._number("I"))
        offset = self._number("Q")
        if not 0 < math.prod(shape) * block_type.num_bytes <= len(self.data) * block_type.size:
            raise self.fail(
                f"tensor {shown(name)} of shape {list(shape)} does not fit into the file"
            )
        if shape[-1] % block_type.size:
            raise self.fail(
                f"tensor {shown(name)}: rows of {shape[-1]} are not whole blocks of "
                f"{block_type.size}"
            )
        return GgufTensor(name, shape, block_type, self.data, offset)

    def _block_type(self, tensor_name: str, number: int) -> BlockType:
        """The type of tensors that has this number in the file."""
        names = _TYPE_NAMES.split()
        type_name = f"number {number}"
        if number < len(names):
            type_name = names[number]
        found = BLOCK_TYPES.get(type_name)
        if found is None:
            known = ", ".join(BLOCK_TYPES)
            raise self.fail(
                f"tensor {shown(tensor_name)} has type {type_name}, which is not read; use a file "
                f"of {known}"
            )
        return found

    # ------------------------------------------------------------------------------------ Reading
    # bytes in order

    def _skip(self, count: int) -> int:
        """Go on by `count` bytes. Returns the place where they begin."""
        first = self._position
        if count > len(self.data) - first:
            raise self._truncated()
        self._position = first + count
        return first

    def _take(self, count: int) -> bytes:
        first = self._skip(count)
        return self.data[first : first + count]

    def _number(self, character: str) -> Any:
        form = f"<{character}"
        (number,) = struct.unpack(form, self._take(struct.calcsize(form)))
        return number

    def _numbers(self, character: Any, count: int) -> memoryview:
        """A view of numbers in the mapped file: they take no memory of their own."""
        size = count * struct.calcsize(f"<{character}")
        first = self._skip(size)
        view: memoryview = memoryview(self.data)[first : first + size].cast(character)
        return view

    def _string(self, most: int | None = None) -> str:
        length = self._number("Q")
        if most is not None and length > most:
            raise self.fail(f"a name of {length} bytes; at most {most} are read")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            raise _not_utf8(self.path) from error

    def _strings(self, count: int) -> GgufStrings:
        """A view of strings in the mapped file. Only their lengths are read, to find where they
        end."""
        data = self.data
        end = self._position
        last = len(data) - _LENGTH.size
        for _ in range(count):
            if end > last:
                raise self._truncated()
            end += _LENGTH.size + _LENGTH.unpack_from(data, end)[0]
        first = self._skip(end - self._position)
        return GgufStrings(self.path, data, first, count)

    def _value(self, kind: int) -> Metadata:
        if kind in _SCALARS:
            number: Metadata = self._number(_SCALARS[kind])
            return number
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise self.fail(f"metadata of the unknown type {kind}")
        kind, count = self._number("I"), self._number("Q")
        if kind in _SCALARS:
            return self._numbers(_SCALARS[kind], count)
        if kind != _STRING:
            raise self.fail(f"a metadata array of the type {kind}, which is not read")
        return self._strings(count)

    def _truncated(self) -> ModelError:
        return self.fail("the file ends in its header, it is truncated")


def is_array(value: Metadata | None) -> bool:
    return value is not None and not isinstance(value, int | float | str)


def _shown(value: Metadata) -> str:
    if is_array(value):
        return "an array"
    return shown(value)


def _unreadable(path: Path, error: Exception) -> ModelError:
    return ModelError(f"{path}: cannot be read as GGUF ({error})")


def _not_utf8(path: Path) -> ModelError:
    return ModelError(f"{path}: a text in the header is not UTF-8")
