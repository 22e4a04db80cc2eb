"""Quantized matrices of Hugging Face checkpoints: which stored tensors make one, and how they are decoded.

Methods: compressed-tensors (packed integers, int8, fp8), GPTQ (versions 1 and 2), AWQ (gemm), and blocks of fp8.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nanoserve.quantization import Quantization
from triton_ops import GroupQuantized

Read = Callable[[str], Any]
"""Finds a stored tensor by its name: an object that is sliced like one."""

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of each of its eight columns."""
_WORD_BITS = 32


INTEGERS = "integers"
"""The stored format of a quantized matrix."""
_SUFFIXES = {
    "compressed-tensors": (
        "weight_packed",
        "weight",
        "weight_scale",
        "weight_shape",
        "weight_zero_point",
        "weight_g_idx",
    ),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "fp8": ("weight", "weight_scale_inv"),
}
"""Names of the tensors of a module that make its matrix, the one with the numbers first."""
_NEEDED = {"compressed-tensors": "weight_scale", "gptq": "qzeros", "awq": "qzeros", "fp8": "weight_scale_inv"}
"""Of them, one that only quantized modules have."""
_UNUSED = ("input_scale", "input_zero_point", "output_scale", "weight_global_scale")


def matrices(
    stored: Mapping[str, Any], quantization: Quantization, read: Read
) -> Iterator[tuple[str, list[str], tuple[int, ...]]]:
    """Each quantized module of a checkpoint, the names of its tensors, and the shape of its matrix."""
    needed = f".{_NEEDED[quantization.method]}"
    for name in stored:
        if not name.endswith(needed):
            continue
        module = name.removesuffix(needed)
        suffixes = (*_SUFFIXES[quantization.method], *_UNUSED)
        parts = [f"{module}.{suffix}" for suffix in suffixes if f"{module}.{suffix}" in stored]
        shape = stored[parts[0]].shape
        numbers = _WORD_BITS // quantization.bits
        if quantization.method == "gptq":
            shape = (shape[1], shape[0] * numbers)
        elif quantization.method == "awq":
            shape = (shape[1] * numbers, shape[0])
        elif parts[0].endswith("packed"):
            shape = tuple(read(f"{module}.weight_shape")[:].tolist())
        yield module, parts, shape


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 [N, W] -> uint8 [N, count]: numbers of so many bits, the lowest bits first, dense across words."""
    if _WORD_BITS % bits == 0:
        shifts = torch.arange(0, _WORD_BITS, bits)
        return (words[:, :, None] >> shifts & ((1 << bits) - 1)).to(torch.uint8).flatten(1)[:, :count]
    each = (words[:, :, None] >> torch.arange(_WORD_BITS) & 1).flatten(1)[:, : count * bits]
    weights = 1 << torch.arange(bits)
    return (each.view(len(words), count, bits) * weights).sum(-1).to(torch.uint8)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """The inverse of `unpack_words`: numbers from 0, of any integer dtype, [N, K] -> int32 [N, W]."""
    blocks = functional.pad(codes, (0, -codes.shape[1] % _WORD_BITS)).view(len(codes), -1, _WORD_BITS).long()
    words = blocks.new_zeros(*blocks.shape[:2], bits + 1)
    for place in range(_WORD_BITS):
        word, shift = divmod(place * bits, _WORD_BITS)
        shifted = blocks[:, :, place] << shift
        words[:, :, word] |= shifted & 0xFFFFFFFF
        words[:, :, word + 1] |= shifted >> _WORD_BITS
    return words[:, :, :bits].flatten(1)[:, : -(-codes.shape[1] * bits // _WORD_BITS)].to(torch.int32)


def decode(read: Read, module: str, rows: slice, quantization: Quantization) -> GroupQuantized | Tensor:
    """Some rows of a module's matrix, a multiple of 16 or to the end: integers, or float32 numbers for fp8."""
    return _DECODERS[quantization.method](read, module, rows, quantization)


def _decode_compressed(read: Read, module: str, rows: slice, quantization: Quantization) -> GroupQuantized | Tensor:
    """Packed codes are stored with half of their range added, and so are their zero points."""
    scales = read(f"{module}.weight_scale")
    if (packed := read(f"{module}.weight_packed")) is None:
        stored, scale = read(f"{module}.weight")[rows], scales[rows] if len(scales.get_shape()) == 2 else scales[:]
        if stored.dtype == torch.int8:
            return GroupQuantized(stored, 8, scale.view(-1, 1).expand(len(stored), 1).contiguous())
        values: Tensor = stored.float() * scale.float()
        return values
    shape, bits = read(f"{module}.weight_shape")[:].tolist(), quantization.bits
    zeros = None
    if zero_points := read(f"{module}.weight_zero_point"):
        zeros = unpack_words(zero_points[:].T, bits, shape[0]).T[rows]
    codes = unpack_words(packed[rows], bits, shape[1])
    return _integers(codes, bits, scales[rows], zeros, read(f"{module}.weight_g_idx"))


def _decode_gptq(read: Read, module: str, rows: slice, quantization: Quantization) -> GroupQuantized:
    """Words lie along the columns of the matrix; zero points along its rows."""
    words, scales, bits = read(f"{module}.qweight")[:, rows], read(f"{module}.scales")[:, rows], quantization.bits
    zeros = unpack_words(read(f"{module}.qzeros")[:], bits, read(f"{module}.scales").get_shape()[1])[:, rows]
    codes = unpack_words(words.T, bits, len(words) * _WORD_BITS // bits)
    if quantization.zero_is_stored_less_one:
        zeros = zeros + 1 & (1 << bits) - 1
    return _integers(codes, bits, scales.T, zeros.T, read(f"{module}.g_idx"))


def _decode_awq(read: Read, module: str, rows: slice, quantization: Quantization) -> GroupQuantized:
    """Words lie along the rows of the matrix, eight to a word in an order of their own."""
    scales = read(f"{module}.scales")[:, rows]

    def unpacked(name: str) -> Tensor:
        words = read(f"{module}.{name}")
        numbers = unpack_words(words[:], quantization.bits, words.get_shape()[1] * len(_AWQ_ORDER))
        return numbers.view(len(numbers), -1, len(_AWQ_ORDER))[:, :, _AWQ_ORDER].flatten(1)[:, rows].T

    return _integers(unpacked("qweight"), quantization.bits, scales.T, unpacked("qzeros"), None)


def _decode_fp8(read: Read, module: str, rows: slice, quantization: Quantization) -> Tensor:
    """Blocks of 128 rows and columns share a number, by which they are multiplied, whatever its name says."""
    stored, scales = read(f"{module}.weight"), read(f"{module}.weight_scale_inv")[:].float()
    height, width = (-(-size // count) for size, count in zip(stored.get_shape(), scales.shape, strict=True))
    taken = torch.arange(stored.get_shape()[0])[rows] // height
    each = scales[taken].repeat_interleave(width, dim=1)[:, : stored.get_shape()[1]]
    values: Tensor = stored[rows].float() * each
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


_DECODERS: Mapping[str, Callable[[Read, str, slice, Quantization], GroupQuantized | Tensor]] = {
    "compressed-tensors": _decode_compressed,
    "gptq": _decode_gptq,
    "awq": _decode_awq,
    "fp8": _decode_fp8,
}
