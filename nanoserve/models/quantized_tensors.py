"""Quantized matrices of Hugging Face checkpoints: which stored tensors make one, and how they are
decoded.

Methods: compressed-tensors (packed integers, int8, fp8), GPTQ (versions 1 and 2), AWQ (gemm), fp8
and MXFP4. Modules that are left alone are recognized by their tensors, not by config.json.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.quantization import Quantization
from nanoserve.errors import ModelError
from nanoserve.models.tensor_parts import TensorPart
from triton_ops import GroupQuantized

OpenFile = Callable[[Path], Any]
Decode = Callable[[OpenFile, slice], GroupQuantized | Tensor]
"""Reads some rows of a matrix, a multiple of 16 or to the end: integers, or float32 numbers for
fp8."""
Read = Callable[[str], Any]
"""Finds a stored tensor by its name: an object that is sliced like one; None if there is none."""
_Rows = Callable[[Read, slice], GroupQuantized | Tensor]

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of each of its eight columns."""
_WORD_BITS = 32
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the sizes of MXFP4's numbers of 4 bits, whose highest bit is their sign (OCP Microscaling
1.0, 5.3.3)."""

INTEGERS = "integers"
"""The stored format of a quantized matrix."""
_WORDS = ("I32",)
_INDICES = ("I32", "I64")
_FLOATS = ("F16", "BF16", "F32")
_FP8_SCALES = ("F16", "BF16", "F32", "F8_E8M0")
_OPTIONAL = ("weight_zero_point", "g_idx")
_UNUSED = ("input_scale", "input_zero_point", "output_scale")


class _Known(NamedTuple):
    """The dtypes and the shapes that a tensor may have."""

    dtypes: tuple[str, ...]
    shapes: list[tuple[int, ...]]


def find_matrix(
    part: TensorPart, stored: Mapping[str, Any], config: ModelConfig, open_file: OpenFile
) -> tuple[list[str], Decode] | None:
    """The tensors that make a part of the model, the one with the numbers first, and their decoder;
    None if the part is not quantized. `stored` has the StoredTensor of every name. Raises
    ModelError, one line that names the file and the tensor, if one is missing or does not fit the
    part."""
    for stacked in (_stacked_name(part), _stacked_module_name(part)):
        if stacked in stored:
            return [stacked], _stacked_decoder(part, stored[stacked], stacked, config)
    quantization = config.quantization
    if quantization is None or len(part.shape) != 2:
        return None
    if quantization.method != "mxfp4" and quantization.method not in _DECODERS:
        return None
    plain = stored.get(part.name)
    if plain is not None and plain.dtype not in ("I8", "F8_E4M3"):
        return None
    module = part.name.removesuffix(".weight")
    decode: _Rows
    if quantization.method == "mxfp4":
        wanted, decode = _mxfp4(part, config)
    else:
        wanted = _wanted(module, part, plain, quantization)
        decode = partial(_DECODERS[quantization.method], module, quantization)
    names = [name for name in wanted if name in stored]
    if not names:
        return None

    def reader(files: OpenFile) -> Read:
        return partial(_find_tensor, stored, files)

    def decode_rows(files: OpenFile, rows: slice) -> GroupQuantized | Tensor:
        return decode(reader(files), rows)

    for name, known in wanted.items():
        found = stored.get(name)
        problem = _problem(name, known, part, found, quantization, reader(open_file))
        if problem is not None:
            path = stored[names[0]].path
            if found is not None:
                path = found.path
            raise ModelError(
                f"{path}: tensor {name} {problem}; the file is damaged, or not of its config.json"
            )
    unused = [f"{module}.{suffix}" for suffix in _UNUSED]
    return names + unused, decode_rows


def _find_tensor(stored: Mapping[str, Any], files: OpenFile, name: str) -> Any:
    """A stored tensor of that name in the files, to be sliced; None if there is none."""
    found = stored.get(name)
    if found is None:
        return None
    return files(found.path).get_slice(found.name)


def _stacked_decoder(part: TensorPart, found: Any, name: str, config: ModelConfig) -> Decode:
    """The decoder of an expert's matrix, which is stored in one tensor with those of all experts:
    transposed (gpt-oss), or with the rows of gate before those of up (Qwen3.5, Granite)."""
    wanted: tuple[int, ...] = ()
    is_transposed = False
    if config.moe is not None:
        rows, columns = part.shape
        is_transposed = config.moe.style == "gpt_oss"
        if is_transposed:
            wanted = (config.moe.num_experts, columns, rows)
        elif part.parameter.endswith("gate_up"):
            first_rows = config.moe.intermediate_size * (2 if config.moe.is_gated else 1)
            wanted = (config.moe.num_experts, first_rows, columns)
        else:
            wanted = (config.moe.num_experts, rows, columns)
    if found.shape != wanted:
        shapes = f"{list(found.shape)}, config.json says {list(wanted)}"
        raise ModelError(f"{found.path}: tensor {name} has shape {shapes}")

    def decode_rows(files: OpenFile, rows: slice) -> Tensor:
        stacked = files(found.path).get_slice(found.name)
        if is_transposed:
            transposed: Tensor = stacked[part.expert, :, rows]
            return transposed.T
        first, after, _ = rows.indices(part.shape[0])
        matrix: Tensor = stacked[part.expert, part.first_row + first : part.first_row + after]
        return matrix

    return decode_rows


def _stacked_name(part: TensorPart) -> str:
    """The tensor that holds this matrix of all experts of a layer; empty for other matrices."""
    if part.expert is None:
        return ""
    experts = part.name.rsplit(".", 3)[0]
    matrix = part.parameter.rpartition(".")[2]
    return f"{experts}.{matrix}_proj"


def _stacked_module_name(part: TensorPart) -> str:
    """That tensor, where it is the weight of a module (Granite); empty for other matrices."""
    if part.expert is None:
        return ""
    module = part.name.removesuffix(f".{part.expert}.weight")
    return f"{module}.weight"


def _problem(
    name: str, known: _Known, part: TensorPart, found: Any, quantization: Quantization, read: Read
) -> str | None:
    """A tensor's fault that makes a matrix unreadable, or None; `found` describes the tensor as it
    is stored."""
    columns = part.shape[1]
    group = quantization.group
    if found is None:
        if _is_needed(name, quantization):
            return "is missing"
        return None
    if found.dtype in ("I32", "I8", "U8") and group > 0 and columns % group:
        return f"has rows of {columns}, which groups of {group} do not divide"
    if found.dtype not in known.dtypes or found.shape not in known.shapes:
        dtypes = " or ".join(known.dtypes)
        shapes = " or ".join(str(list(shape)) for shape in known.shapes)
        return f"is {found.dtype} of shape {list(found.shape)}, not {dtypes} of {shapes}"
    if name.endswith("weight_shape"):
        shape = read(name)[:].tolist()
        if shape != list(part.shape):
            return f"is {shape}, but config.json says {list(part.shape)}"
    if name.endswith("g_idx"):
        span = columns
        if group > 0:
            span = group
        in_order = torch.arange(columns) // span
        groups = read(name)[:].long()
        if not torch.equal(groups.sort().values, in_order):
            return f"does not give each of {int(in_order[-1]) + 1} groups as many columns"
    return None


def _is_needed(name: str, quantization: Quantization) -> bool:
    """Whether a matrix cannot be read without the tensor of this name."""
    if name.endswith("point") and quantization.has_zeros:
        return True
    return not name.endswith(_OPTIONAL)


def _wanted(
    module: str, part: TensorPart, plain: Any, quantization: Quantization
) -> dict[str, _Known]:
    """The tensors of a module by their names, the one with the numbers first; `plain` is the tensor
    `weight`, if there is one."""
    rows, columns = part.shape
    dtype = None
    if plain is not None:
        dtype = plain.dtype
    if quantization.method in ("gptq", "awq"):
        wanted = _wanted_words(rows, columns, quantization)
    elif quantization.method == "fp8" or dtype == "F8_E4M3":
        wanted = _wanted_fp8(rows, columns, quantization)
    else:
        wanted = _wanted_compressed(rows, columns, dtype, quantization)
    return {f"{module}.{suffix}": known for suffix, known in wanted.items()}


def _words(count: int, bits: int) -> int:
    """Words of 32 bits that hold so many numbers."""
    return -(-count * bits // _WORD_BITS)


def _groups(columns: int, group: int) -> int:
    """Groups of columns in a row; -1 is a group of all columns."""
    if group < 0:
        return 1
    return -(-columns // group)


def _whole(quantization: Quantization) -> list[tuple[int, ...]]:
    """The shapes of a scale for the whole matrix, which may stand for a scale of each row."""
    if quantization.rows == 1 and quantization.group == -1:
        return [(1,), ()]
    return []


def _wanted_words(rows: int, columns: int, quantization: Quantization) -> dict[str, _Known]:
    """The tensors of GPTQ, whose words lie along the columns, and of AWQ, whose words lie along the
    rows."""
    bits = quantization.bits
    groups = _groups(columns, quantization.group)
    qweight = (columns, _words(rows, bits))
    if quantization.method == "gptq":
        qweight = (_words(columns, bits), rows)
    wanted = {
        "qweight": _Known(_WORDS, [qweight]),
        "qzeros": _Known(_WORDS, [(groups, _words(rows, bits))]),
        "scales": _Known(_FLOATS, [(groups, rows)]),
    }
    if quantization.method == "gptq":
        wanted["g_idx"] = _Known(_INDICES, [(columns,)])
    return wanted


def _wanted_fp8(rows: int, columns: int, quantization: Quantization) -> dict[str, _Known]:
    """The tensors of numbers of 8 bits, with a scale for each block of rows and columns."""
    scale = "weight_scale"
    if quantization.method == "fp8" and quantization.group > 0:
        scale = "weight_scale_inv"
    blocks = (-(-rows // quantization.rows), _groups(columns, quantization.group))
    return {
        "weight": _Known(("F8_E4M3",), [(rows, columns)]),
        scale: _Known(_FP8_SCALES, [blocks] + _whole(quantization)),
    }


def _wanted_compressed(
    rows: int, columns: int, dtype: str | None, quantization: Quantization
) -> dict[str, _Known]:
    """The tensors of integers as compressed-tensors stores them: int8, or packed into words."""
    bits = quantization.bits
    groups = _groups(columns, quantization.group)
    whole = _whole(quantization)
    wanted: dict[str, _Known] = {}
    if dtype == "I8":
        wanted["weight"] = _Known(("I8",), [(rows, columns)])
        wanted["weight_zero_point"] = _Known(("I8",), [(rows, groups)] + whole)
    else:
        wanted["weight_packed"] = _Known(_WORDS, [(rows, _words(columns, bits))])
        wanted["weight_shape"] = _Known(_INDICES, [(2,)])
        wanted["weight_zero_point"] = _Known(_WORDS, [(_words(rows, bits), groups)])
    wanted["weight_scale"] = _Known(_FLOATS, [(rows, groups)] + whole)
    wanted["weight_g_idx"] = _Known(_INDICES, [(columns,)])
    return wanted


def _mxfp4(part: TensorPart, config: ModelConfig) -> tuple[dict[str, _Known], _Rows]:
    """The tensors and the decoder of a matrix. All experts of a layer have theirs in one tensor."""
    rows, columns = part.shape
    stem = part.name
    shape: tuple[int, ...] = (rows, columns // 32)
    decode = partial(_decode_mxfp4, stem, None, 0)
    if part.expert is not None and config.moe is not None:
        stem = _stacked_name(part)
        if part.parameter.endswith("gate_up"):
            rows = 2 * config.moe.intermediate_size
        shape = (config.moe.num_experts, rows, columns // 32)
        decode = partial(_decode_mxfp4, stem, part.expert, part.first_row)
    wanted = {
        f"{stem}_blocks": _Known(("U8",), [(*shape, 16)]),
        f"{stem}_scales": _Known(("U8",), [shape]),
    }
    return wanted, decode


def _decode_mxfp4(
    stem: str, expert: int | None, first: int, read: Read, rows: slice
) -> GroupQuantized:
    """Codes of 5 bits for twice the numbers, and half of the scale: both are exact."""
    taken: Any = slice(first + rows.start, first + rows.stop)
    if expert is not None:
        taken = (expert, taken)
    blocks = read(f"{stem}_blocks")[taken]
    exponents = read(f"{stem}_scales")[taken]
    nibbles = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)
    return GroupQuantized(mxfp4_codes(nibbles), 5, mxfp4_scales(exponents), zero=16)


def mxfp4_codes(nibbles: Tensor) -> Tensor:
    """Twice the numbers that these stand for, and 16, so that no code is negative."""
    positive = [16 + size for size in _E2M1]
    negative = [16 - size for size in _E2M1]
    table = torch.tensor(positive + negative, dtype=torch.uint8)
    return table[nibbles.int()]


def mxfp4_scales(exponents: Tensor) -> Tensor:
    """Half of the scales that these bytes stand for, in bfloat16."""
    scales = 2.0 ** (exponents.double() - 128)
    return scales.where(exponents < 255, torch.nan).bfloat16()


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 [N, W] -> uint8 [N, count]: numbers of `bits` bits, the lowest bits first, dense across
    words."""
    if _WORD_BITS % bits == 0:
        shifts = torch.arange(0, _WORD_BITS, bits)
        mask = (1 << bits) - 1
        numbers = words[:, :, None] >> shifts & mask
        return numbers.to(torch.uint8).flatten(1)[:, :count]
    single_bits = words[:, :, None] >> torch.arange(_WORD_BITS) & 1
    single_bits = single_bits.flatten(1)[:, : count * bits]
    weights = 1 << torch.arange(bits)
    numbers = single_bits.view(len(words), count, bits) * weights
    return numbers.sum(-1).to(torch.uint8)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """The inverse of `unpack_words`: numbers from 0, of any integer dtype, [N, K] -> int32 [N,
    W]."""
    rows, columns = codes.shape
    padded = functional.pad(codes, (0, -columns % _WORD_BITS))
    blocks = padded.view(rows, -1, _WORD_BITS).long()
    words = blocks.new_zeros(rows, blocks.shape[1], bits + 1)
    for place in range(_WORD_BITS):
        word, shift = divmod(place * bits, _WORD_BITS)
        shifted = blocks[:, :, place] << shift
        words[:, :, word] |= shifted & 0xFFFFFFFF
        words[:, :, word + 1] |= shifted >> _WORD_BITS
    filled = words[:, :, :bits].flatten(1)
    return filled[:, : _words(columns, bits)].to(torch.int32)


def _decode_compressed(
    module: str, quantization: Quantization, read: Read, rows: slice
) -> GroupQuantized | Tensor:
    """Packed codes are stored with half of their range added, and so are their zero points."""
    scales = read(f"{module}.weight_scale")
    zero_points = read(f"{module}.weight_zero_point")
    order = read(f"{module}.weight_g_idx")
    narrow = read(f"{module}.weight")
    zeros = None
    if narrow is not None:
        if narrow.get_dtype() != "I8":
            return _decode_fp8(module, quantization, read, rows)
        codes = narrow[rows].view(torch.uint8) ^ 128
        if zero_points is not None:
            own = _taken(zero_points, rows, len(codes))
            zeros = own.contiguous().view(torch.uint8) ^ 128
        return _integers(codes, 8, _taken(scales, rows, len(codes)), zeros, order)
    bits = quantization.bits
    height, width = read(f"{module}.weight_shape")[:].tolist()
    if zero_points is not None:
        unpacked = unpack_words(zero_points[:].T, bits, height)
        zeros = unpacked.T[rows]
    codes = unpack_words(read(f"{module}.weight_packed")[rows], bits, width)
    return _integers(codes, bits, _taken(scales, rows, len(codes)), zeros, order)


def _taken(numbers: Any, rows: slice, count: int) -> Tensor:
    """The numbers of `count` rows, [count, G], from one for each row or one for all."""
    found: Tensor = numbers[...]
    if found.numel() > 1:
        return found[rows]
    return found.reshape(1, 1).expand(count, 1)


def _decode_gptq(
    module: str, quantization: Quantization, read: Read, rows: slice
) -> GroupQuantized:
    """Words lie along the columns of the matrix; zero points along its rows."""
    bits = quantization.bits
    words = read(f"{module}.qweight")[:, rows]
    codes = unpack_words(words.T, bits, len(words) * _WORD_BITS // bits)
    stored_scales = read(f"{module}.scales")
    height = stored_scales.get_shape()[1]
    scales = stored_scales[:, rows]
    zeros = unpack_words(read(f"{module}.qzeros")[:], bits, height)
    zeros = zeros[:, rows]
    if quantization.zero_is_stored_less_one:
        most = (1 << bits) - 1
        zeros = zeros + 1 & most
    return _integers(codes, bits, scales.T, zeros.T, read(f"{module}.g_idx"))


def _decode_awq(module: str, quantization: Quantization, read: Read, rows: slice) -> GroupQuantized:
    """Words lie along the rows of the matrix, eight to a word in an order of their own."""
    scales = read(f"{module}.scales")[:, rows]
    in_word = len(_AWQ_ORDER)
    first = rows.start // in_word
    after = -(-rows.stop // in_word)

    def unpacked(name: str) -> Tensor:
        words = read(f"{module}.{name}")[:, first:after]
        numbers = unpack_words(words, quantization.bits, words.shape[1] * in_word)
        by_word = numbers.view(len(numbers), -1, in_word)
        ordered = by_word[:, :, _AWQ_ORDER].flatten(1).T
        begin = rows.start - first * in_word
        return ordered[begin : begin + scales.shape[1]]

    return _integers(unpacked("qweight"), quantization.bits, scales.T, unpacked("qzeros"), None)


def _decode_fp8(module: str, quantization: Quantization, read: Read, rows: slice) -> Tensor:
    """A block of rows and columns is multiplied by its scale, also where that is called inverse."""
    stored = read(f"{module}.weight")
    stored_scales = read(f"{module}.weight_scale_inv")
    if stored_scales is None:
        stored_scales = read(f"{module}.weight_scale")
    scales = stored_scales[...].float()
    height, columns = stored.get_shape()
    if scales.numel() > 1:
        block_of_row = torch.arange(height)[rows] // quantization.rows
        width = quantization.group
        if width < 0:
            width = columns
        of_columns = scales[block_of_row].repeat_interleave(width, dim=1)
        scales = of_columns[:, :columns]
    values: Tensor = stored[rows].float() * scales
    return values


def _integers(
    codes: Tensor, bits: int, scales: Tensor, zeros: Tensor | None, groups: Any
) -> GroupQuantized:
    """Codes that are stored with half of their range added; `groups` names the group of each
    column, if they are not in order."""
    order = None
    if groups is not None:
        of_columns = groups[:]
        if not torch.equal(of_columns, of_columns.sort().values):
            order = of_columns.argsort(stable=True)
            codes = codes[:, order]
    zero = 1 << bits - 1
    if bits == 8:
        codes = (codes.to(torch.int16) - zero).to(torch.int8)
        zero = 0
    if zeros is not None:
        zeros = zeros.contiguous()
    return GroupQuantized(
        codes.contiguous(), max(bits, 4), scales.contiguous(), zero=zero, zeros=zeros, order=order
    )


_DECODERS: Mapping[str, Callable[[str, Quantization, Read, slice], GroupQuantized | Tensor]] = {
    "compressed-tensors": _decode_compressed,
    "gptq": _decode_gptq,
    "awq": _decode_awq,
    "fp8": _decode_fp8,
}
