"""Quantized matrices of Hugging Face checkpoints: which stored tensors make one, and how they are decoded.

Methods: compressed-tensors (packed integers, int8, fp8), GPTQ (versions 1 and 2), AWQ (gemm), fp8 and MXFP4. Modules
that are left alone are recognized by their tensors, not by config.json.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.quantization import Quantization
from nanoserve.errors import ModelError
from nanoserve.models.weights import TensorPart
from triton_ops import GroupQuantized

OpenFile = Callable[[Path], Any]
Decode = Callable[[OpenFile, slice], GroupQuantized | Tensor]
"""Reads some rows of a matrix, a multiple of 16 or to the end: integers, or float32 numbers for fp8."""
Read = Callable[[str], Any]
"""Finds a stored tensor by its name: an object that is sliced like one; None if there is none."""
_Rows = Callable[[Read, slice], GroupQuantized | Tensor]

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of each of its eight columns."""
_WORD_BITS = 32
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the sizes of MXFP4's numbers of 4 bits, whose highest bit is their sign (OCP Microscaling 1.0, 5.3.3)."""

INTEGERS = "integers"
"""The stored format of a quantized matrix."""
_WORDS, _INDICES, _FLOATS = ("I32",), ("I32", "I64"), ("F16", "BF16", "F32")
_OPTIONAL = ("weight_zero_point", "g_idx")
_UNUSED = ("input_scale", "input_zero_point", "output_scale")

_Known = tuple[tuple[str, ...], list[tuple[int, ...]]]
"""The dtypes and the shapes that a tensor may have."""


def find_matrix(
    part: TensorPart, stored: Mapping[str, Any], config: ModelConfig, open_file: OpenFile
) -> tuple[list[str], Decode] | None:
    """The tensors that make a part of the model, the one with the numbers first, and their decoder; None if the part is
    not quantized. `stored` has the StoredTensor of every name. Raises ModelError, one line that names the
    file and the tensor, if one is missing or does not fit the part."""
    plain, module, quantization = stored.get(part.name), part.name.removesuffix(".weight"), config.quantization
    stacked = _stacked_name(part)
    if stacked in stored:
        wanted_shape = (config.moe.num_experts, *reversed(part.shape)) if config.moe is not None else ()
        found = stored[stacked]
        if found.shape != wanted_shape:
            shapes = f"{list(found.shape)}, config.json says {list(wanted_shape)}"
            raise ModelError(f"{found.path}: tensor {stacked} has shape {shapes}")
        return [stacked], lambda files, rows: files(found.path).get_slice(found.name)[part.expert, :, rows].T
    if quantization is None or quantization.method not in (*_DECODERS, "mxfp4") or len(part.shape) != 2:
        return None
    if plain is not None and plain.dtype not in ("I8", "F8_E4M3"):
        return None

    def reader(files: OpenFile) -> Read:
        return lambda name: files(stored[name].path).get_slice(stored[name].name) if name in stored else None

    if quantization.method == "mxfp4":
        wanted, decode = _mxfp4(part, config)
    else:
        suffixes = _wanted(*part.shape, None if plain is None else plain.dtype, quantization)
        wanted = {f"{module}.{suffix}": known for suffix, known in suffixes.items()}
        decode = partial(_DECODERS[quantization.method], module, quantization)
    names = [name for name in wanted if name in stored]
    if not names:
        return None
    for name, known in wanted.items():
        if problem := _problem(name, known, part, stored.get(name), quantization, reader(open_file)):
            path = stored[name if name in stored else names[0]].path
            raise ModelError(f"{path}: tensor {name} {problem}; the file is damaged, or not of its config.json")
    return names + [f"{module}.{suffix}" for suffix in _UNUSED], lambda files, rows: decode(reader(files), rows)


def _stacked_name(part: TensorPart) -> str:
    """The tensor that holds this matrix of all experts of a layer; empty for other matrices."""
    if part.expert is None:
        return ""
    return f"{part.name.rsplit('.', 3)[0]}.{part.parameter.rpartition('.')[2]}_proj"


def _problem(
    name: str, known: _Known, part: TensorPart, found: Any, quantization: Quantization, read: Read
) -> str | None:
    """What is wrong with a tensor of a matrix; `found` describes it as it is stored."""
    (dtypes, shapes), columns, group = known, part.shape[1], quantization.group
    if found is None:
        needed = not name.endswith(_OPTIONAL) or (name.endswith("point") and quantization.has_zeros)
        return "is missing" if needed else None
    if found.dtype in ("I32", "I8", "U8") and group > 0 and columns % group:
        return f"has rows of {columns}, which groups of {group} do not divide"
    if found.dtype not in dtypes or found.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        return f"is {found.dtype} of shape {list(found.shape)}, not {' or '.join(dtypes)} of {wanted}"
    if name.endswith("weight_shape") and (shape := read(name)[:].tolist()) != list(part.shape):
        return f"is {shape}, but config.json says {list(part.shape)}"
    in_order = torch.arange(columns) // (group if group > 0 else columns)
    if name.endswith("g_idx") and not torch.equal(read(name)[:].long().sort().values, in_order):
        return f"does not give each of {int(in_order[-1]) + 1} groups as many columns"
    return None


def _wanted(rows: int, columns: int, dtype: str | None, quantization: Quantization) -> dict[str, _Known]:
    """The tensors of a module by the ends of their names, the one with the numbers first; `dtype` is that of the tensor
    `weight`."""

    def words(count: int) -> int:
        return -(-count * quantization.bits // _WORD_BITS)

    method, group, height = quantization.method, quantization.group, quantization.rows
    groups = 1 if group < 0 else -(-columns // group)
    found: dict[str, _Known]
    if method in ("gptq", "awq"):
        qweight = (words(columns), rows) if method == "gptq" else (columns, words(rows))
        found = {"qweight": (_WORDS, [qweight]), "qzeros": (_WORDS, [(groups, words(rows))])}
        found["scales"] = _FLOATS, [(groups, rows)]
        return found | ({"g_idx": (_INDICES, [(columns,)])} if method == "gptq" else {})
    whole: list[tuple[int, ...]] = [(1,), ()] if (height, group) == (1, -1) else []
    if method == "fp8" or dtype == "F8_E4M3":
        scale = "weight_scale_inv" if method == "fp8" and group > 0 else "weight_scale"
        scales = (*_FLOATS, "F8_E8M0"), [(-(-rows // height), groups), *whole]
        return {"weight": (("F8_E4M3",), [(rows, columns)]), scale: scales}
    if dtype == "I8":
        found = {"weight": (("I8",), [(rows, columns)]), "weight_zero_point": (("I8",), [(rows, groups), *whole])}
    else:
        found = {"weight_packed": (_WORDS, [(rows, words(columns))]), "weight_shape": (_INDICES, [(2,)])}
        found["weight_zero_point"] = _WORDS, [(words(rows), groups)]
    found["weight_scale"] = _FLOATS, [(rows, groups), *whole]
    return found | {"weight_g_idx": (_INDICES, [(columns,)])}


def _mxfp4(part: TensorPart, config: ModelConfig) -> tuple[dict[str, _Known], _Rows]:
    """The tensors and the decoder of a matrix. All experts of a layer have theirs in one tensor."""
    (rows, columns), stem = part.shape, part.name
    leading: tuple[int, ...] = ()
    decode = partial(_decode_mxfp4, stem, None, 0)
    if part.expert is not None and config.moe is not None:
        stem, leading = _stacked_name(part), (config.moe.num_experts,)
        if part.parameter.endswith("gate_up"):
            rows = 2 * config.moe.intermediate_size
        decode = partial(_decode_mxfp4, stem, part.expert, part.first_row)
    shape = (*leading, rows, columns // 32)
    return {f"{stem}_blocks": (("U8",), [(*shape, 16)]), f"{stem}_scales": (("U8",), [shape])}, decode


def _decode_mxfp4(stem: str, expert: int | None, first: int, read: Read, rows: slice) -> GroupQuantized:
    """Codes of 5 bits for twice the numbers, and half of the scale: both are exact."""
    taken: Any = slice(first + rows.start, first + rows.stop)
    taken = taken if expert is None else (expert, taken)
    blocks, exponents = read(f"{stem}_blocks")[taken], read(f"{stem}_scales")[taken]
    table = torch.tensor([16 + size for size in _E2M1] + [16 - size for size in _E2M1], dtype=torch.uint8)
    codes = table[torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1).int()]
    scales = 2.0 ** (exponents.double() - 128)
    return GroupQuantized(codes, 5, scales.where(exponents < 255, torch.nan).bfloat16(), zero=16)


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 [N, W] -> uint8 [N, count]: numbers of `bits` bits, the lowest bits first, dense across words."""
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


def _decode_compressed(module: str, quantization: Quantization, read: Read, rows: slice) -> GroupQuantized | Tensor:
    """Packed codes are stored with half of their range added, and so are their zero points."""
    scales, zero_points = read(f"{module}.weight_scale"), read(f"{module}.weight_zero_point")
    bits, zeros, order = quantization.bits, None, read(f"{module}.weight_g_idx")
    if (narrow := read(f"{module}.weight")) is not None:
        if narrow.get_dtype() != "I8":
            return _decode_fp8(module, quantization, read, rows)
        codes = narrow[rows].view(torch.uint8) ^ 128
        if zero_points is not None:
            zeros = _taken(zero_points, rows, len(codes)).contiguous().view(torch.uint8) ^ 128
        return _integers(codes, 8, _taken(scales, rows, len(codes)), zeros, order)
    shape = read(f"{module}.weight_shape")[:].tolist()
    if zero_points is not None:
        zeros = unpack_words(zero_points[:].T, bits, shape[0]).T[rows]
    codes = unpack_words(read(f"{module}.weight_packed")[rows], bits, shape[1])
    return _integers(codes, bits, _taken(scales, rows, len(codes)), zeros, order)


def _taken(numbers: Any, rows: slice, count: int) -> Tensor:
    """The numbers of `count` rows, [count, G], from one for each row or one for all."""
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
    scales, first = read(f"{module}.scales")[:, rows], rows.start // len(_AWQ_ORDER)

    def unpacked(name: str) -> Tensor:
        words = read(f"{module}.{name}")[:, first : -(-rows.stop // len(_AWQ_ORDER))]
        numbers = unpack_words(words, quantization.bits, words.shape[1] * len(_AWQ_ORDER))
        ordered = numbers.view(len(numbers), -1, len(_AWQ_ORDER))[:, :, _AWQ_ORDER].flatten(1).T
        return ordered[rows.start % len(_AWQ_ORDER) :][: scales.shape[1]]

    return _integers(unpacked("qweight"), quantization.bits, scales.T, unpacked("qzeros"), None)


def _decode_fp8(module: str, quantization: Quantization, read: Read, rows: slice) -> Tensor:
    """A block of rows and columns is multiplied by its scale, also where that is called inverse."""
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
