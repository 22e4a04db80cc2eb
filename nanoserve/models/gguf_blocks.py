"""The decoders of GGUF's block types."""

from collections.abc import Callable

import torch
from torch import Tensor

from nanoserve.quantization import BlockType
from triton_ops import GroupQuantized


def decode_blocks(stored: Tensor, block_type: BlockType) -> GroupQuantized:
    """Rows of a quantized GGUF tensor, uint8 [N, bytes of a row], as integers and scales."""
    blocks = stored.reshape(-1, block_type.num_bytes)
    bits, zero, decode = _DECODERS[block_type.name]
    parts = {name: part.reshape(len(stored), -1) for name, part in decode(blocks).items()}
    return GroupQuantized(bits=bits, zero=zero, **parts)


Decoded = dict[str, Tensor]
"""The fields of B blocks, each [B, numbers of a block]."""


def _half(blocks: Tensor, first: int) -> Tensor:
    """The number at that byte of every block, float16 [B, 1]."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16)


def _nibbles(stored: Tensor) -> Tensor:
    """uint8 [B, n] -> [B, 2 * n]: the low halves of all bytes, then the high halves."""
    return torch.cat((stored & 15, stored >> 4), dim=1)


def _q8_0(blocks: Tensor) -> Decoded:
    return {"codes": blocks[:, 2:].contiguous().view(torch.int8), "scales": _half(blocks, 0)}


def _q4_0(blocks: Tensor) -> Decoded:
    return {"codes": _nibbles(blocks[:, 2:]), "scales": _half(blocks, 0)}


def _q4_1(blocks: Tensor) -> Decoded:
    return {"codes": _nibbles(blocks[:, 4:]), "scales": _half(blocks, 0), "minimums": -_half(blocks, 2)}


def _q5_0(blocks: Tensor) -> Decoded:
    shifts = torch.arange(8, dtype=torch.uint8)
    fifth = (blocks[:, 2:6, None] >> shifts & 1).flatten(1)
    return {"codes": _nibbles(blocks[:, 6:]) | fifth << 4, "scales": _half(blocks, 0)}


def _k_numbers(blocks: Tensor) -> Decoded:
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


def _q4_k(blocks: Tensor) -> Decoded:
    return {"codes": _k_nibbles(blocks[:, 16:]), **_k_numbers(blocks)}


def _q5_k(blocks: Tensor) -> Decoded:
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = (blocks[:, None, 16:48] >> shifts & 1).flatten(1)
    return {"codes": _k_nibbles(blocks[:, 48:]) | fifth << 4, **_k_numbers(blocks)}


def _q6_k(blocks: Tensor) -> Decoded:
    """Every 128 values have 64 bytes of lower halves and 32 bytes of upper pairs of bits."""
    low = _nibbles(blocks[:, :128].reshape(-1, 64)).view(len(blocks), -1)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 1, 32) >> shifts & 3).view(len(blocks), -1)
    return {
        "codes": low | high << 4,
        "super_scales": _half(blocks, 208),
        "scales": blocks[:, 192:208].contiguous().view(torch.int8),
    }


_DECODERS: dict[str, tuple[int, int, Callable[[Tensor], Decoded]]] = {
    "Q8_0": (8, 0, _q8_0),
    "Q4_0": (4, 8, _q4_0),
    "Q4_1": (4, 0, _q4_1),
    "Q5_0": (5, 16, _q5_0),
    "Q4_K": (4, 0, _q4_k),
    "Q5_K": (5, 0, _q5_k),
    "Q6_K": (6, 32, _q6_k),
}
"""Bits of a code, the code of zero, and the decoder of each type."""
