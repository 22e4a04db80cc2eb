"""Matrices of small integers with a scale for each group of columns: the one form that every quantized format is
decoded into, and the decoders of GGUF's block types.

A value is ``codes * scales - minimums``, with the scale and the minimum of its row and group.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoserve.models.gguf_file import BlockType


@dataclass(frozen=True, slots=True)
class GroupQuantized:
    """A matrix [N, K] of integers in groups of K / G columns."""

    codes: Tensor
    """int8 or uint8 [N, K]."""
    scales: Tensor
    """float32 [N, G]."""
    minimums: Tensor | None = None
    """float32 [N, G]; None means zero."""

    def dequantize(self) -> Tensor:
        """float32 [N, K]. The operations and their order are those of the formats' reference implementations."""
        rows, groups = self.scales.shape
        values = self.codes.view(rows, groups, -1).float() * self.scales[:, :, None]
        if self.minimums is not None:
            values -= self.minimums[:, :, None]
        return values.view(rows, -1)


def decode_blocks(stored: Tensor, block_type: BlockType) -> GroupQuantized:
    """Rows of a quantized GGUF tensor, uint8 [N, bytes of a row], as integers and scales."""
    rows = len(stored)
    blocks = stored.reshape(-1, block_type.num_bytes)
    codes, scales, minimums = _DECODERS[block_type.name](blocks)
    return GroupQuantized(
        codes.reshape(rows, -1),
        scales.reshape(rows, -1),
        None if minimums is None else minimums.reshape(rows, -1),
    )


Decoded = tuple[Tensor, Tensor, Tensor | None]
"""Codes, scales and minimums of B blocks: [B, values of a block], [B, groups of a block] twice."""


def _halves(blocks: Tensor, first: int) -> Tensor:
    """The float16 number at that byte of every block, as float32 [B, 1]."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16).float()


def _nibbles(stored: Tensor) -> Tensor:
    """uint8 [B, n] -> [B, 2 * n]: the low halves of all bytes, then the high halves."""
    return torch.cat((stored & 15, stored >> 4), dim=1)


def _q8_0(blocks: Tensor) -> Decoded:
    return blocks[:, 2:].contiguous().view(torch.int8), _halves(blocks, 0), None


def _q4_0(blocks: Tensor) -> Decoded:
    return _nibbles(blocks[:, 2:]).to(torch.int8) - 8, _halves(blocks, 0), None


def _q4_1(blocks: Tensor) -> Decoded:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), -_halves(blocks, 2)


def _q5_0(blocks: Tensor) -> Decoded:
    shifts = torch.arange(8, dtype=torch.uint8)
    fifth = (blocks[:, 2:6, None] >> shifts & 1).flatten(1)
    return (_nibbles(blocks[:, 6:]) | fifth << 4).to(torch.int8) - 16, _halves(blocks, 0), None


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums of the eight groups of a block of Q4_K or Q5_K: [B, 8] twice. Each group has two integers of
    6 bits, which lie in 12 bytes, and are multiplied by the two numbers of the block."""
    low, middle, high = blocks[:, 4:16].split(4, dim=1)
    scales = torch.cat((low & 63, (high & 15) | (low >> 2 & 48)), dim=1)
    minimums = torch.cat((middle & 63, (high >> 4) | (middle >> 2 & 48)), dim=1)
    return _halves(blocks, 0) * scales, _halves(blocks, 2) * minimums


def _k_nibbles(stored: Tensor) -> Tensor:
    """uint8 [B, 128] -> [B, 256]: every 32 bytes hold two groups."""
    return _nibbles(stored.reshape(-1, 32)).view(len(stored), -1)


def _q4_k(blocks: Tensor) -> Decoded:
    return _k_nibbles(blocks[:, 16:]), *_k_scales(blocks)


def _q5_k(blocks: Tensor) -> Decoded:
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = (blocks[:, None, 16:48] >> shifts & 1).flatten(1)
    return _k_nibbles(blocks[:, 48:]) | fifth << 4, *_k_scales(blocks)


def _q6_k(blocks: Tensor) -> Decoded:
    """Every 128 values have 64 bytes of lower halves and 32 bytes of upper pairs of bits."""
    low = _nibbles(blocks[:, :128].reshape(-1, 64))
    shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 1, 32) >> shifts & 3).flatten(1)
    codes = (low | high << 4).to(torch.int8) - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return codes.view(len(blocks), -1), _halves(blocks, 208) * scales, None


_DECODERS: dict[str, Callable[[Tensor], Decoded]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
