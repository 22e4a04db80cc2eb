"""Quantization of a checkpoint's matrices, as its config.json describes it. No torch here."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from nanoserve.errors import ModelError, UsageError, shown


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of GGUF tensors: `size` values are stored in `num_bytes` bytes."""

    name: str
    size: int
    num_bytes: int
    added_bytes: int = 0
    """More bytes in memory, which has scales of 8 bits or more and codes of 4, 5, 6 or 8 bits."""

    @property
    def loaded_bits(self) -> float:
        """Bits of a value in memory."""
        return 8 * (self.num_bytes + self.added_bytes) / self.size


_BLOCK_TYPES = [
    BlockType("F32", 1, 4),
    BlockType("F16", 1, 2),
    BlockType("Q4_0", 32, 18),
    BlockType("Q4_1", 32, 20),
    BlockType("Q5_0", 32, 22),
    BlockType("Q5_1", 32, 24),
    BlockType("Q8_0", 32, 34),
    BlockType("Q2_K", 256, 84, 144),
    BlockType("Q3_K", 256, 110, 100),
    BlockType("Q4_K", 256, 144, 4),
    BlockType("Q5_K", 256, 176, 4),
    BlockType("Q6_K", 256, 210),
    BlockType("IQ4_NL", 32, 18, 16),
    BlockType("MXFP4", 32, 17, 5),
    BlockType("BF16", 1, 2),
]
BLOCK_TYPES = {block_type.name: block_type for block_type in _BLOCK_TYPES}
"""The types that are read, by name."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """The `quantization_config` of a config.json, as far as tensors are read by it."""

    method: str  # compressed-tensors, gptq, awq, fp8 or mxfp4; gguf; rounding, by --quantization
    bits: int = 8
    group: int = -1
    """Columns that share a scale; -1 means all of a row."""
    rows: int = 1  # rows that share a scale
    zero_is_stored_less_one: bool = False  # GPTQ version 1 stores zero points less one
    has_zeros: bool = False  # whether every matrix of compressed-tensors must have zero points
    is_float: bool = False  # whether matrices are stored as numbers of 8 bits and loaded as numbers
    ignored: tuple[str, ...] = ()
    """Modules that are said not to be quantized: parts of names, or `re:` and a regular
    expression."""
    # the quantized matrices of a GGUF file, each with its type
    tensor_types: tuple[tuple[str, str], ...] = ()
    groups: tuple[int, ...] = ()
    """If there are any, each matrix takes the first of them that divides its columns, instead of
    `group`."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str) -> "Quantization":
        """Read a `quantization_config`. The loader knows the modules that are left alone by their
        tensors, the cost model by the list of them. Raises ModelError, one line that begins with
        `source`, for what is not supported."""
        read = cls._of_method(config.get("quant_method"), config, source)
        ignored = config.get("ignore") or config.get("modules_to_not_convert")
        if not isinstance(ignored, list):
            return read
        return replace(read, ignored=tuple(name for name in ignored if isinstance(name, str)))

    @classmethod
    def _of_method(cls, method: Any, config: Mapping[str, Any], source: str) -> "Quantization":
        if method in ("gptq", "awq"):
            return cls._of_words(method, config, source)
        if method == "fp8":
            rows, group = 1, -1
            if config.get("weight_block_size"):
                rows, group = _block(config["weight_block_size"], source)
            return cls("fp8", 8, group, rows, is_float=True)
        if method == "mxfp4":
            return cls("mxfp4", 4, 32)
        if method == "compressed-tensors":
            return cls._of_compressed_tensors(config, source)
        types = config.get("tensor_types")
        if method == "gguf" and isinstance(types, dict):
            return cls(
                "gguf", tensor_types=tuple((name, str(kind)) for name, kind in types.items())
            )
        instead = (
            "choose one of compressed-tensors, GPTQ, AWQ, fp8, MXFP4 or GGUF, or 16 bits and "
            "--quantization int4"
        )
        raise ModelError(f"{source}: quantization method {shown(method)} is not read; {instead}")

    @classmethod
    def _of_words(cls, method: str, config: Mapping[str, Any], source: str) -> "Quantization":
        """GPTQ and AWQ, whose numbers are packed into words."""
        bits = config.get("bits", config.get("w_bit"))
        group = config.get("group_size", config.get("q_group_size"))
        if not isinstance(bits, int) or bits not in _BITS_OF_WORDS[method] or not _is_group(group):
            raise ModelError(
                f"{source}: {method} with {shown(bits)} bits in groups of {shown(group)} is not "
                "read"
            )
        if method == "awq":
            version = config.get("version", "gemm")
            if str(version).lower() != "gemm":
                raise ModelError(
                    f"{source}: AWQ of version {shown(version)} is not read; only gemm is"
                )
            return cls(method, bits, group)
        packing = config.get("checkpoint_format") or "gptq"
        if packing not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
            raise ModelError(
                f"{source}: GPTQ in the format {shown(packing)} is not read; only gptq and gptq_v2 "
                "are"
            )
        return cls(method, bits, group, zero_is_stored_less_one=packing == "gptq")

    @classmethod
    def _of_compressed_tensors(cls, config: Mapping[str, Any], source: str) -> "Quantization":
        weights = _compressed_weights(config, source)
        stored = config.get("format")
        if stored is not None and stored not in _COMPRESSED_FORMATS:
            raise ModelError(
                f"{source}: format {shown(stored)} is not read; only "
                f"{', '.join(_COMPRESSED_FORMATS)} are"
            )
        rows = 1
        group = weights.get("group_size")
        if not group:
            group = -1
        if weights.get("strategy") == "block":
            rows, group = _block(weights.get("block_structure"), source)
        bits = weights.get("num_bits")
        kind = weights.get("type")
        if (kind, bits, rows > 1) not in _COMPRESSED_TYPES or not _is_group(group):
            found = f"type {shown(kind)} in {shown(bits)} bits and groups of {shown(group)}"
            raise ModelError(f"{source}: weights of {found} are not read")
        has_zeros = weights.get("symmetric") is False
        return cls(
            "compressed-tensors",
            int(bits or 0),
            group,
            rows,
            has_zeros=has_zeros,
            is_float=kind == "float",
        )

    @classmethod
    def rounding(cls, text: str, *, on_gpu: bool) -> "Quantization":
        """Parse ``--quantization``. A group that the user did not name is 32 on a CPU; on a GPU it
        is the largest of 128, 64 and 32 that divides a matrix. Raises UsageError."""
        wanted = Rounding.parse(text)
        if wanted.group is not None:
            return cls("rounding", wanted.bits, wanted.group)
        if on_gpu:
            return cls("rounding", wanted.bits, groups=_GPU_GROUPS)
        return cls("rounding", wanted.bits, groups=_CPU_GROUPS)

    def group_of(self, columns: int, head: int = 0) -> int | None:
        """Columns that share a scale in rows of that many; None if no group divides them. The
        columns of attention's output matrix belong to heads of the size `head`, 0 for other
        matrices, and ranks have whole heads: where a group divides a head, it is taken, so that no
        rank cuts it."""
        groups = self.groups
        if not groups and self.group < 0:
            groups = (columns,)  # a group is a whole row
        elif not groups:
            groups = (self.group,)
        dividing = [group for group in groups if columns % group == 0]
        for group in dividing:
            if head % group == 0:
                return group
        if not dividing:
            return None
        return dividing[0]

    def unit(self, size: int) -> int:
        """A rank's part of an inner size is a multiple of this: the columns of `down` that are
        packed together. So every degree has the same groups. It is 1 where nothing is packed, or a
        whole row is."""
        if self.method == "gguf":
            down_types = {kind for name, kind in self.tensor_types if ".ffn_down" in name}
            sizes = [BLOCK_TYPES[kind].size for kind in down_types if kind in BLOCK_TYPES]
            return max((block for block in sizes if size % block == 0), default=1)
        if self.is_float or (self.group < 0 and not self.groups):
            return 1
        return self.group_of(size) or 1

    def leaves_alone(self, module: str) -> bool:
        """Whether this module is one of the ignored ones."""
        for pattern in self.ignored:
            expression = rf"(.*\.)?{pattern}(\.|$)"
            if pattern.startswith("re:"):
                expression = pattern.removeprefix("re:")
            with suppress(re.error):
                if re.match(expression, module):
                    return True
        return False


_BITS_OF_WORDS = {"gptq": (4, 8), "awq": (4,)}
_COMPRESSED_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_COMPRESSED_TYPES = [
    ("int", 3, False),
    ("int", 4, False),
    ("int", 8, False),
    ("float", 8, False),
    ("float", 8, True),
]
"""Types and bits of weights, and whether several rows may share a scale."""


def _compressed_weights(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The only scheme with weights. A scheme of attention alone has none: it is about the cache."""
    groups, found = config.get("config_groups"), []
    if isinstance(groups, dict):
        for scheme in groups.values():
            if isinstance(scheme, dict) and scheme.get("weights") is not None:
                found.append(scheme["weights"])
    if len(found) != 1 or not isinstance(found[0], dict):
        raise ModelError(
            f"{source}: quantization_config must have one entry of config_groups with weights"
        )
    return found[0]


def _is_group(value: Any) -> bool:
    return type(value) is int and (value == -1 or value > 0)


def _block(value: Any, source: str) -> tuple[int, int]:
    """Rows and columns of a block."""
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(size) is int and size > 0 for size in value)
    ):
        raise ModelError(
            f"{source}: the block of rows and columns that share a scale must be two sizes: "
            f"{shown(value)}"
        )
    return value[0], value[1]


_CPU_GROUPS, _GPU_GROUPS = (32,), (128, 64, 32)

WEIGHT_BITS: Mapping[str, tuple[int, ...]] = {
    "rtn": (3, 4, 8),
    "awq": (3, 4, 8),
    "gptq": (3, 4, 8),
    "llm-int8": (8,),
}
"""The methods of ``nanoserve quantize``, and the bits that weights may have with each."""
CALIBRATING = ("awq", "gptq")  # methods that run a text through the model


@dataclass(frozen=True, slots=True)
class Rounding:
    """A choice of ``--quantization``, which rounds weights to nearest while they load."""

    bits: int
    group: int | None
    """Columns that share a scale, if the user named them."""

    @classmethod
    def parse(cls, text: str) -> "Rounding":
        """int4 or int8, perhaps with a group, as int4:64. Raises UsageError."""
        named = re.fullmatch(r"(int4|int8)(?::(\d{1,6}))?", str(text), re.ASCII)
        if named is None:
            raise UsageError(
                "quantization must be int4 or int8, perhaps with a group as in int4:64, not "
                f"{shown(text)}"
            )
        bits = int(named[1].removeprefix("int"))
        if named[2] is None:
            return cls(bits, None)
        group = int(named[2])
        if group == 0 or group % 32:
            raise UsageError(f"quantization {text}: a group is a multiple of 32 columns")
        return cls(bits, group)
