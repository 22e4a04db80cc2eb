"""Quantized matrices of Hugging Face checkpoints: which stored tensors make one, and how they are decoded.

Methods: compressed-tensors (packed integers, int8, fp8), GPTQ (versions 1 and 2), AWQ (gemm), fp8 and MXFP4. Modules
that are left alone are known by their tensors, whatever config.json says of them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nanoserve.errors import ModelError
from nanoserve.models.weights import LayerNames
from nanoserve.quantization import Quantization
from triton_ops import GroupQuantized

Read = Callable[[str], Any]
"""Finds a stored tensor by its name: an object that is sliced like one; None if there is none."""

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of each of its eight columns."""
_WORD_BITS = 32
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the sizes of MXFP4's numbers of 4 bits, whose highest bit is their sign (OCP Microscaling 1.0, 5.3.3)."""


class Header(Protocol):
    """A tensor of the checkpoint, as the header of its file describes it."""

    @property
    def path(self) -> Path: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...


class Matrix(NamedTuple):
    """A quantized matrix of a checkpoint."""

    name: str
    """The tensor's name in a checkpoint that is not quantized."""
    parts: list[str]
    """The stored tensors that make it, the one with the numbers first."""
    shape: tuple[int, ...]
    decode: Callable[[Read, slice], GroupQuantized | Tensor]
    """Reads some rows, a multiple of 16 or to the end: integers, or float32 numbers for fp8."""


INTEGERS = "integers"
"""The stored format of a quantized matrix."""
_SUFFIXES = {
    "compressed-tensors": ("weight_packed", "weight_shape", "weight", "weight_scale"),
    "gptq": ("qweight", "qzeros", "scales"),
    "awq": ("qweight", "qzeros", "scales"),
    "fp8": ("weight", "weight_scale_inv", "weight_scale"),
}
"""Names of tensors of a module that show that its matrix is quantized; `weight` does if it is narrow."""
_UNUSED = ("input_scale", "input_zero_point", "output_scale")
_WORDS, _INDICES, _FLOATS = ("I32",), ("I32", "I64"), ("F16", "BF16", "F32")
_NARROW = ("I8", "F8_E4M3")


def matrices(
    stored: Mapping[str, Header], quantization: Quantization, layer: LayerNames, read: Read
) -> Iterator[Matrix]:
    """Each quantized matrix of a checkpoint. Raises ModelError, one line that names the file and the tensor, if one is
    missing or does not fit the others."""
    if quantization.method == "mxfp4":
        yield from _mxfp4_matrices(stored, layer)
        return
    paths: dict[str, Path] = {}
    for name, header in stored.items():
        module, _, suffix = name.rpartition(".")
        if suffix in _SUFFIXES.get(quantization.method, ()) and (suffix != "weight" or header.dtype in _NARROW):
            paths.setdefault(module, header.path)
    for module, path in paths.items():
        found = _Module(module, path, stored, quantization, read)
        shape = found.check_words() if quantization.method in ("gptq", "awq") else found.check_compressed()
        found.parts += [name for suffix in _UNUSED if (name := f"{module}.{suffix}") in stored]
        decode = partial(_DECODERS[quantization.method], module, quantization)
        yield Matrix(f"{module}.weight", found.parts, shape, decode)


@dataclass(slots=True)
class _Module:
    """A module whose matrix is quantized. Its tensors are checked to fit each other, and noted as its parts."""

    name: str
    path: Path
    stored: Mapping[str, Header]
    quantization: Quantization
    read: Read
    parts: list[str] = field(default_factory=list)

    def check_words(self) -> tuple[int, int]:
        """The shape of a matrix of GPTQ or AWQ."""
        per_word = _WORD_BITS // self.quantization.bits
        first, second = self._check("qweight", _WORDS)
        is_gptq = self.quantization.method == "gptq"
        rows, columns = (second, first * per_word) if is_gptq else (second * per_word, first)
        groups = self._groups(columns)
        self._check("qzeros", _WORDS, (groups, self._words(rows)))
        self._check("scales", _FLOATS, (groups, rows))
        if is_gptq:
            self._check_order("g_idx", columns, groups)
        return rows, columns

    def check_compressed(self) -> tuple[int, int]:
        """The shape of a matrix of compressed-tensors or fp8."""
        method, group, height = self.quantization.method, self.quantization.group, self.quantization.rows
        is_packed = method == "compressed-tensors" and self._has("weight_packed")
        main = "weight_packed" if is_packed else "weight"
        dtypes = _WORDS if is_packed else _NARROW[1:] if method == "fp8" else _NARROW
        rows, columns = self._check(main, dtypes)
        if self.stored[self.parts[0]].dtype == "F8_E4M3":
            scales = -(-rows // height), 1 if group < 0 else -(-columns // group)
            inverse = "_inv" if method == "fp8" and group > 0 else ""
            whole = [(1,), ()] if (height, group) == (1, -1) else []
            self._check(f"weight_scale{inverse}", (*_FLOATS, "F8_E8M0"), scales, *whole)
            return rows, columns
        if is_packed:
            self._check("weight_shape", _INDICES, (2,))
            rows, columns = self.read(f"{self.name}.weight_shape")[:].tolist()
            self._check(main, dtypes, (rows, self._words(columns)))
        groups = self._groups(columns)
        scales, whole = (rows, groups), [(1,), ()] if group < 0 else []
        self._check("weight_scale", _FLOATS, scales, *whole)
        if self.quantization.has_zeros or self._has("weight_zero_point"):
            zeros = [(self._words(rows), groups)] if is_packed else [scales, *whole]
            self._check("weight_zero_point", _WORDS if is_packed else ("I8",), *zeros)
        self._check_order("weight_g_idx", columns, groups)
        return rows, columns

    def _has(self, suffix: str) -> bool:
        return f"{self.name}.{suffix}" in self.stored

    def _check(self, suffix: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a tensor: one of these, or of any matrix that is not empty."""
        name = f"{self.name}.{suffix}"
        if name not in self.parts:
            self.parts.append(name)
        return _checked(self.stored, name, self.path, dtypes, *shapes)

    def _check_order(self, suffix: str, columns: int, groups: int) -> None:
        """Check the tensor that names the group of each column, if there is one."""
        if self._has(suffix):
            self._check(suffix, _INDICES, (columns,))
            ordered = self.read(self.parts[-1])[:].long().sort().values
            if not torch.equal(ordered, torch.arange(columns) // (columns // groups)):
                raise _fail(self.path, self.parts[-1], f"does not give each of {groups} groups as many columns")

    def _groups(self, columns: int) -> int:
        group = columns if self.quantization.group < 0 else self.quantization.group
        if columns % group:
            raise _fail(self.path, self.parts[0], f"has rows of {columns}, which groups of {group} do not divide")
        return columns // group

    def _words(self, count: int) -> int:
        return -(-count * self.quantization.bits // _WORD_BITS)


def _checked(
    stored: Mapping[str, Header], name: str, path: Path, dtypes: tuple[str, ...], *shapes: tuple[int, ...]
) -> tuple[int, ...]:
    found = stored.get(name)
    if found is None:
        raise _fail(path, name, "is missing")
    known = found.shape in shapes if shapes else len(found.shape) == 2
    if found.dtype not in dtypes or not known or 0 in found.shape:
        wanted = " or ".join(str(list(shape)) for shape in shapes) or "two sizes"
        what = f"is {found.dtype} of shape {list(found.shape)}, not {' or '.join(dtypes)} of {wanted}"
        raise _fail(found.path, name, what)
    return found.shape


def _fail(path: Path, name: str, problem: str) -> ModelError:
    return ModelError(f"{path}: tensor {name} {problem}; the file is damaged, or not of its quantization_config")


def _mxfp4_matrices(stored: Mapping[str, Header], layer: LayerNames) -> Iterator[Matrix]:
    """Linear layers, and the experts of a layer in one tensor: those of gate and up one after another."""
    fused = {"gate_up_proj": layer.expert_gate_up, "down_proj": (layer.expert_down,)}
    stems = {name[:-7]: found.path for name, found in stored.items() if name.endswith(("_blocks", "_scales"))}
    for stem, path in stems.items():
        parts = [f"{stem}_blocks", f"{stem}_scales"]
        shape = stored[parts[0]].shape if parts[0] in stored else ()
        experts, rows, groups = shape[:-3], *(shape[-3:-1] if len(shape) in (3, 4) else (1, 1))
        _checked(stored, parts[0], path, ("U8",), (*experts, rows, groups, 16))
        _checked(stored, parts[1], path, ("U8",), (*experts, rows, groups))
        if not experts:
            yield Matrix(stem, parts, (rows, groups * 32), partial(_decode_mxfp4, stem, None, 0))
            continue
        prefix, _, matrix = stem.rpartition(".")
        names = fused.get(matrix, ())
        if not names or rows % len(names):
            raise _fail(path, parts[0], f"of shape {list(shape)} is no matrix of experts that is known")
        for expert in range(experts[0]):
            for place, name in enumerate(names):
                decode = partial(_decode_mxfp4, stem, expert, place * rows // len(names))
                yield Matrix(f"{prefix}.{expert}.{name}.weight", parts, (rows // len(names), groups * 32), decode)


def _decode_mxfp4(stem: str, expert: int | None, first: int, read: Read, rows: slice) -> GroupQuantized:
    """Codes of 5 bits, which hold twice the numbers, with half of the scale: both are exact."""
    taken = slice(first + rows.start, first + rows.stop)
    blocks, exponents = (
        read(f"{stem}_{name}")[taken if expert is None else (expert, taken)] for name in ("blocks", "scales")
    )
    table = torch.tensor([16 + size for size in _E2M1] + [16 - size for size in _E2M1], dtype=torch.uint8)
    codes = table[torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1).int()]
    scales = 2.0 ** (exponents.double() - 128)
    return GroupQuantized(codes, 5, scales.where(exponents < 255, torch.nan).bfloat16(), zero=16)


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 [N, W] -> uint8 [N, count]: numbers of so many bits, the lowest bits first, dense across words."""
    if _WORD_BITS % bits == 0:
        shifts = torch.arange(0, _WORD_BITS, bits)
        return (words[:, :, None] >> shifts & ((1 << bits) - 1)).to(torch.uint8).flatten(1)[:, :count]
    each = (words[:, :, None] >> torch.arange(_WORD_BITS) & 1).flatten(1)[:, : count * bits]
    weights = 1 << torch.arange(bits)
    return (each.view(len(words), count, bits) * weights).sum(-1).to(torch.uint8)


def _decode_compressed(module: str, quantization: Quantization, read: Read, rows: slice) -> GroupQuantized | Tensor:
    """Packed codes are stored with half of their range added, and so are their zero points."""
    packed, zero_points = read(f"{module}.weight_packed"), read(f"{module}.weight_zero_point")
    bits, zeros, order = quantization.bits, None, read(f"{module}.weight_g_idx")
    if packed is not None:
        shape = read(f"{module}.weight_shape")[:].tolist()
        if zero_points is not None:
            zeros = unpack_words(zero_points[:].T, bits, shape[0]).T[rows]
        codes = unpack_words(packed[rows], bits, shape[1])
        return _integers(codes, bits, _taken(read(f"{module}.weight_scale"), rows, len(codes)), zeros, order)
    stored = read(f"{module}.weight")[rows]
    if stored.dtype != torch.int8:
        return _decode_fp8(module, quantization, read, rows)
    if zero_points is not None:
        zeros = _taken(zero_points, rows, len(stored)).contiguous().view(torch.uint8) ^ 128
    codes, scales = stored.view(torch.uint8) ^ 128, _taken(read(f"{module}.weight_scale"), rows, len(stored))
    return _integers(codes, 8, scales, zeros, order)


def _taken(numbers: Any, rows: slice, count: int) -> Tensor:
    """The numbers [n, G] of so many rows, all of which may share one."""
    found: Tensor = numbers[...]
    return found[rows] if found.numel() > 1 else found.reshape(1, 1).expand(count, 1)


def _decode_gptq(module: str, quantization: Quantization, read: Read, rows: slice) -> GroupQuantized:
    """Words lie along the columns of the matrix; zero points along its rows."""
    words, scales, bits = read(f"{module}.qweight")[:, rows], read(f"{module}.scales")[:, rows], quantization.bits
    zeros = unpack_words(read(f"{module}.qzeros")[:], bits, read(f"{module}.scales").get_shape()[1])[:, rows]
    codes = unpack_words(words.T, bits, len(words) * _WORD_BITS // bits)
    if quantization.zero_is_stored_less_one:
        zeros = zeros + 1 & (1 << bits) - 1
    return _integers(codes, bits, scales.T, zeros.T, read(f"{module}.g_idx"))


def _decode_awq(module: str, quantization: Quantization, read: Read, rows: slice) -> GroupQuantized:
    """Words lie along the rows of the matrix, eight to a word in an order of their own."""
    scales = read(f"{module}.scales")[:, rows]

    def unpacked(name: str) -> Tensor:
        words = read(f"{module}.{name}")
        numbers = unpack_words(words[:], quantization.bits, words.get_shape()[1] * len(_AWQ_ORDER))
        return numbers.view(len(numbers), -1, len(_AWQ_ORDER))[:, :, _AWQ_ORDER].flatten(1)[:, rows].T

    return _integers(unpacked("qweight"), quantization.bits, scales.T, unpacked("qzeros"), None)


def _decode_fp8(module: str, quantization: Quantization, read: Read, rows: slice) -> Tensor:
    """Blocks of rows and columns share a number, by which they are multiplied, whatever its name says."""
    stored = read(f"{module}.weight")
    numbers = read(f"{module}.weight_scale_inv") or read(f"{module}.weight_scale")
    scales, (height, columns) = numbers[...].float(), stored.get_shape()
    if scales.numel() > 1:
        taken = torch.arange(height)[rows] // quantization.rows
        width = columns if quantization.group < 0 else quantization.group
        scales = scales[taken].repeat_interleave(width, dim=1)[:, :columns]
    values: Tensor = stored[rows].float() * scales
    return values


def _integers(codes: Tensor, bits: int, scales: Tensor, zeros: Tensor | None, groups: Any) -> GroupQuantized:
    """Codes that are stored with half of their range added; `groups` names the group of each column, if they are not in
    order."""
    half, order = 1 << bits - 1, None
    if groups is not None and not torch.equal(groups[:], groups[:].sort().values):
        order = groups[:].argsort(stable=True)
        codes = codes[:, order]
    if bits == 8:
        codes = (codes.to(torch.int16) - half).to(torch.int8)
    zero = 0 if bits == 8 else half
    zeros = None if zeros is None else zeros.contiguous()
    return GroupQuantized(codes.contiguous(), max(bits, 4), scales.contiguous(), zero=zero, zeros=zeros, order=order)


_DECODERS: Mapping[str, Callable[[str, Quantization, Read, slice], GroupQuantized | Tensor]] = {
    "compressed-tensors": _decode_compressed,
    "gptq": _decode_gptq,
    "awq": _decode_awq,
    "fp8": _decode_fp8,
}
