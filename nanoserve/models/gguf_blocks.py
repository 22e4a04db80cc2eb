"""Blocks of the quantized types of GGUF, decoded into integers and the numbers that they are
multiplied by. Layouts are those of ggml-common.h in llama.cpp."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nanoserve.config.quantization import BlockType
from nanoserve.models.quantized_tensors import mxfp4_codes, mxfp4_scales
from triton_ops import GroupQuantized

_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of the codes of IQ4_NL: they are denser around zero."""


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The integers of B blocks and their numbers, by the names that GroupQuantized has for them."""

    bits: int
    codes: Tensor
    """[B, n], all columns of a block."""
    numbers: Mapping[str, Tensor]
    """Each [B, g]: one for each group of columns, or one for the block."""
    zero: int = field(default=0, kw_only=True)


def decode_blocks(stored: Tensor, block_type: BlockType) -> GroupQuantized:
    """Rows of a quantized GGUF tensor, uint8 [N, bytes of a row], as integers and scales."""
    rows = len(stored)
    found = _READERS[block_type.name](stored.reshape(-1, block_type.num_bytes))
    parts = {name: part.reshape(rows, -1) for name, part in found.numbers.items()}
    return GroupQuantized(found.codes.reshape(rows, -1), found.bits, zero=found.zero, **parts)


# ------------------------------------------------------------------------------------ Blocks of 32
# values


def _q4_0(blocks: Tensor) -> _Blocks:
    return _Blocks(4, _nibbles(blocks[:, 2:]), {"scales": _half(blocks, 0)}, zero=8)


def _q4_1(blocks: Tensor) -> _Blocks:
    return _Blocks(4, _nibbles(blocks[:, 4:]), _half_numbers(blocks))


def _q5_0(blocks: Tensor) -> _Blocks:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6, None])
    return _Blocks(5, codes, {"scales": _half(blocks, 0)}, zero=16)


def _q5_1(blocks: Tensor) -> _Blocks:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8, None])
    return _Blocks(5, codes, _half_numbers(blocks))


def _q8_0(blocks: Tensor) -> _Blocks:
    codes = blocks[:, 2:].contiguous().view(torch.int8)
    return _Blocks(8, codes, {"scales": _half(blocks, 0)})


def _iq4_nl(blocks: Tensor) -> _Blocks:
    """The values that codes of 4 bits stand for are integers of 8 bits."""
    values = torch.tensor(_IQ4_NL, dtype=torch.int8)
    codes = values[_nibbles(blocks[:, 2:]).int()]
    return _Blocks(8, codes, {"scales": _half(blocks, 0)})


def _mxfp4(blocks: Tensor) -> _Blocks:
    codes = mxfp4_codes(_nibbles(blocks[:, 1:]))
    return _Blocks(5, codes, {"scales": mxfp4_scales(blocks[:, :1])}, zero=16)


# ------------------------------------------------------------------------------------ Blocks of
# 256 values


def _q2_k(blocks: Tensor) -> _Blocks:
    """Each of 16 groups has a scale in the lower half of a byte and a minimum in the upper half."""
    codes = _pairs_of_bits(blocks[:, 16:80])
    numbers = {
        "super_scales": _half(blocks, 80),
        "scales": (blocks[:, :16] & 15).view(torch.int8),
        "super_minimums": _half(blocks, 82),
        "minimums": blocks[:, :16] >> 4,
    }
    return _Blocks(6, codes, numbers)


def _q3_k(blocks: Tensor) -> _Blocks:
    """A third bit of every code lies before the other two. Codes are raised to the zero that 6 bits
    have.

    The 16 scales have 6 bits: 4 in the halves of 8 bytes, and 2 in the pairs of 4 more bytes.
    """
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    third_bits = (blocks[:, None, :32] >> shifts & 1).flatten(1) << 2
    codes = (_pairs_of_bits(blocks[:, 32:96]) | third_bits) + (32 - 4)
    upper_pairs = (blocks[:, None, 104:108] >> shifts[::2] & 3).flatten(1)
    scales = _nibbles(blocks[:, 96:104]) | upper_pairs << 4
    numbers = {"super_scales": _half(blocks, 108), "scales": scales.view(torch.int8) - 32}
    return _Blocks(6, codes, numbers, zero=32)


def _q4_k(blocks: Tensor) -> _Blocks:
    return _Blocks(4, _k_nibbles(blocks[:, 16:]), _k_numbers(blocks))


def _q5_k(blocks: Tensor) -> _Blocks:
    codes = _k_nibbles(blocks[:, 48:]) | _fifth_bits(blocks[:, None, 16:48])
    return _Blocks(5, codes, _k_numbers(blocks))


def _q6_k(blocks: Tensor) -> _Blocks:
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    numbers = {"super_scales": _half(blocks, 208), "scales": scales}
    return _Blocks(6, _six_bits(blocks), numbers, zero=32)


_READERS: Mapping[str, Callable[[Tensor], _Blocks]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


# ------------------------------------------------------------------------------------ Parts of
# blocks


def _half(blocks: Tensor, first: int) -> Tensor:
    """The number at that byte of every block, float16 [B, 1]."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16)


def _half_numbers(blocks: Tensor) -> dict[str, Tensor]:
    """A scale, and the smallest value, which is added."""
    return {"scales": _half(blocks, 0), "minimums": -_half(blocks, 2)}


def _nibbles(stored: Tensor) -> Tensor:
    """uint8 [B, n] -> [B, 2 * n]: the low halves of all bytes, then the high halves."""
    low = stored & 15
    high = stored >> 4
    return torch.cat((low, high), dim=1)


def _fifth_bits(stored: Tensor) -> Tensor:
    """uint8 [B, n, m], one of n or m being 1 -> [B, 8 * n * m]: each bit of a byte, above a
    nibble."""
    shifts = torch.arange(8, dtype=torch.uint8)
    if stored.shape[2] > 1:
        shifts = shifts[:, None]
    bits = stored >> shifts & 1
    return bits.flatten(1) << 4


def _k_numbers(blocks: Tensor) -> dict[str, Tensor]:
    """Scales and minimums of the eight groups of a block of Q4_K or Q5_K: integers of 6 bits, which
    lie in 12 bytes and are multiplied by the two numbers of the block.

    The first four groups have the low 6 bits of the first 4 and the next 4 bytes. The last four
    have 4 bits in the last 4 bytes, scales in the low halves and minimums in the high ones, and 2
    more bits at the top of the other bytes.
    """
    first, middle, last = torch.split(blocks[:, 4:16], 4, dim=1)
    upper_scales = (last & 15) | (first >> 2 & 48)
    upper_minimums = (last >> 4) | (middle >> 2 & 48)
    scales = torch.cat((first & 63, upper_scales), dim=1)
    minimums = torch.cat((middle & 63, upper_minimums), dim=1)
    return {
        "super_scales": _half(blocks, 0),
        "scales": scales.to(torch.int8),
        "super_minimums": _half(blocks, 2),
        "minimums": minimums,
    }


def _k_nibbles(stored: Tensor) -> Tensor:
    """uint8 [B, 128] -> [B, 256]: every 32 bytes hold two groups."""
    pairs = _nibbles(stored.reshape(-1, 32))
    return pairs.view(len(stored), -1)


def _six_bits(blocks: Tensor) -> Tensor:
    """Every 128 values of Q6_K have 64 bytes of lower halves and 32 bytes of upper pairs of
    bits."""
    count = len(blocks)
    low = _nibbles(blocks[:, :128].reshape(-1, 64)).view(count, -1)
    return low | _pairs_of_bits(blocks[:, 128:192]) << 4


def _pairs_of_bits(stored: Tensor) -> Tensor:
    """uint8 [B, 64] -> [B, 256]: every 32 bytes hold 128 codes of 2 bits, those of the lowest bits
    first."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)
    pairs = stored.reshape(-1, 2, 1, 32) >> shifts[:, None] & 3
    return pairs.flatten(1)
