"""Quantized matrices of Hugging Face checkpoints: which stored tensors make one, and how they are decoded.

Methods: compressed-tensors (packed integers, int8, fp8), GPTQ (versions 1 and 2), AWQ (gemm), and blocks of fp8.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanoserve.errors import ModelError
from triton_ops import GroupQuantized

Read = Callable[[str], Any]
"""Finds a stored tensor by its name: an object that is sliced like one."""

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of each of its eight columns."""
_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class Quantization:
    """The `quantization_config` of a config.json, as far as tensors are read by it."""

    method: str
    """compressed-tensors, gptq, awq or fp8."""
    bits: int = 8
    group: int = -1
    """Columns that share a scale; -1 means all of a row."""
    zero_is_stored_less_one: bool = False
    """GPTQ version 1 stores zero points less one."""
    ignored: tuple[str, ...] = ()
    """Modules that are not quantized: names, beginnings of names, or `re:` and a regular expression."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str) -> "Quantization":
        """Raises ModelError, one line that begins with `source`, for methods and settings that are not read."""
        method = config.get("quant_method")
        if method in ("gptq", "awq"):
            return cls._of_words(method, config, source)
        if method == "fp8":
            return cls("fp8", ignored=_names(config.get("modules_to_not_convert")))
        if method == "compressed-tensors":
            return cls._of_compressed_tensors(config, source)
        instead = "choose a checkpoint of compressed-tensors, GPTQ, AWQ or GGUF, or the one in 16 bits"
        raise ModelError(f"{source}: quantization method {method!r:.40} is not read; {instead}")

    @classmethod
    def _of_words(cls, method: str, config: Mapping[str, Any], source: str) -> "Quantization":
        bits, group = config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size"))
        if bits not in ((4, 8) if method == "gptq" else (4,)) or not isinstance(group, int):
            raise ModelError(f"{source}: {method} with {bits!r:.20} bits in groups of {group!r:.20} is not read")
        if method == "awq" and config.get("version", "gemm").lower() != "gemm":
            raise ModelError(f"{source}: AWQ of version {config['version']!r:.20} is not read; only gemm is")
        older = method == "gptq" and config.get("checkpoint_format", "gptq") != "gptq_v2"
        return cls(method, bits, group, older, _names(config.get("modules_to_not_convert")))

    @classmethod
    def _of_compressed_tensors(cls, config: Mapping[str, Any], source: str) -> "Quantization":
        groups = config.get("config_groups")
        schemes = list(groups.values()) if isinstance(groups, dict) else []
        weights = schemes[0].get("weights") if len(schemes) == 1 and isinstance(schemes[0], dict) else None
        if not isinstance(weights, dict):
            raise ModelError(f"{source}: quantization_config must have one entry of config_groups with weights")
        bits, kind = weights.get("num_bits"), weights.get("type")
        if (kind, bits) not in (("int", 3), ("int", 4), ("int", 8), ("float", 8)):
            raise ModelError(f"{source}: weights of type {kind!r:.20} in {bits!r:.20} bits are not read")
        return cls("compressed-tensors", bits, weights.get("group_size") or -1, ignored=_names(config.get("ignore")))

    def leaves_alone(self, module: str) -> bool:
        return any(_matches(pattern, module) for pattern in self.ignored)


def _names(value: Any) -> tuple[str, ...]:
    return tuple(name for name in value or () if isinstance(name, str))


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return module == pattern or module.startswith(f"{pattern}.") or f".{pattern}." in f".{module}."


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 [N, W] -> uint8 [N, count]: numbers of so many bits, the lowest bits first, dense across words."""
    if _WORD_BITS % bits == 0:
        shifts = torch.arange(0, _WORD_BITS, bits)
        return (words[:, :, None] >> shifts & ((1 << bits) - 1)).to(torch.uint8).flatten(1)[:, :count]
    each = (words[:, :, None] >> torch.arange(_WORD_BITS) & 1).flatten(1)[:, : count * bits]
    weights = 1 << torch.arange(bits)
    return (each.view(len(words), count, bits) * weights).sum(-1).to(torch.uint8)


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
        return stored.float() * scale.float()
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
        zeros = zeros + 1
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
    return stored[rows].float() * each


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
