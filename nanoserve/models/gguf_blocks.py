"""The decoder of GGUF's block types."""

import torch
from torch import Tensor

from nanoserve.quantization import BlockType
from triton_ops import GroupQuantized


def decode_blocks(stored: Tensor, block_type: BlockType) -> GroupQuantized:
    """Rows of a quantized GGUF tensor, uint8 [N, bytes of a row], as integers and scales."""
    blocks = stored.reshape(-1, block_type.num_bytes)
    numbers, zero = {"scales": _half(blocks, 0)}, 0
    match block_type.name:
        case "Q8_0":
            bits, codes = 8, blocks[:, 2:].contiguous().view(torch.int8)
        case "Q4_0":
            bits, codes, zero = 4, _nibbles(blocks[:, 2:]), 8
        case "Q4_1":
            bits, codes = 4, _nibbles(blocks[:, 4:])
            numbers["minimums"] = -_half(blocks, 2)
        case "Q5_0":
            bits, codes, zero = 5, _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6, None]), 16
        case "Q4_K":
            bits, codes, numbers = 4, _k_nibbles(blocks[:, 16:]), _k_numbers(blocks)
        case "Q5_K":
            bits, codes = 5, _k_nibbles(blocks[:, 48:]) | _fifth_bits(blocks[:, None, 16:48])
            numbers = _k_numbers(blocks)
        case "Q6_K":
            bits, codes, zero = 6, _six_bits(blocks), 32
            scales = blocks[:, 192:208].contiguous().view(torch.int8)
            numbers = {"super_scales": _half(blocks, 208), "scales": scales}
    parts = {name: part.reshape(len(stored), -1) for name, part in numbers.items()}
    return GroupQuantized(codes.reshape(len(stored), -1), bits, zero=zero, **parts)


def _half(blocks: Tensor, first: int) -> Tensor:
    """The number at that byte of every block, float16 [B, 1]."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16)


def _nibbles(stored: Tensor) -> Tensor:
    """uint8 [B, n] -> [B, 2 * n]: the low halves of all bytes, then the high halves."""
    return torch.cat((stored & 15, stored >> 4), dim=1)


def _fifth_bits(stored: Tensor) -> Tensor:
    """uint8 [B, n, m], one of n or m being 1 -> [B, 8 * n * m]: each bit of a byte, above a nibble."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (stored >> (shifts if stored.shape[2] == 1 else shifts[:, None]) & 1).flatten(1) << 4


def _k_numbers(blocks: Tensor) -> dict[str, Tensor]:
    """Scales and minimums of the eight groups of a block of Q4_K or Q5_K: integers of 6 bits, which lie in 12 bytes and
    are multiplied by the two numbers of the block."""
    low, middle, high = torch.split(blocks[:, 4:16], 4, dim=1)
    return {
        "super_scales": _half(blocks, 0),
        "scales": torch.cat((low & 63, (high & 15) | (low >> 2 & 48)), dim=1).to(torch.int8),
        "super_minimums": _half(blocks, 2),
        "minimums": torch.cat((middle & 63, (high >> 4) | (middle >> 2 & 48)), dim=1),
    }


def _k_nibbles(stored: Tensor) -> Tensor:
    """uint8 [B, 128] -> [B, 256]: every 32 bytes hold two groups."""
    return _nibbles(stored.reshape(-1, 32)).view(len(stored), -1)


def _six_bits(blocks: Tensor) -> Tensor:
    """Every 128 values of Q6_K have 64 bytes of lower halves and 32 bytes of upper pairs of bits."""
    low = _nibbles(blocks[:, :128].reshape(-1, 64)).view(len(blocks), -1)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    return low | (blocks[:, 128:192].reshape(-1, 1, 32) >> shifts & 3).view(len(blocks), -1) << 4
