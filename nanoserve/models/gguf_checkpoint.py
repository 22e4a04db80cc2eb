"""A GGUF file with the interface of an open safetensors file: each expert is a tensor, Llama's heads are in order."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nanoserve.config.quantization import BlockType
from nanoserve.models.gguf_directory import ROPE_FACTORS
from nanoserve.models.gguf_file import GgufFile, GgufTensor, open_gguf
from triton_ops import GroupQuantized, PackedFormat

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class GgufSlice:
    """One tensor as the checkpoint knows it; it is indexed with slices, like a slice of safetensors."""

    tensor: GgufTensor
    expert: int | None = None
    head_size: int = 0
    """Rows of a head, if its two halves are stored in turn (`permute` of llama.cpp's converter); 0: rows are in
    order."""

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape if self.expert is None else self.tensor.shape[1:])

    def get_dtype(self) -> str:
        return self.tensor.type.name

    def __getitem__(self, taken: tuple[slice, ...]) -> Tensor:
        """The selected part; quantized types as float32."""
        if self.tensor.type.size > 1:
            return self.quantized(taken[0]).dequantize()[:, taken[1]]
        values = self._stored_rows()
        if len(self.get_shape()) == 1:
            return values.view(_PLAIN[self.tensor.type.name])[0][self._rows(taken[0])]
        return values[self._rows(taken[0])].view(_PLAIN[self.tensor.type.name])[:, taken[1]]

    @property
    def format(self) -> PackedFormat | None:
        """How a quantized matrix is packed, found by decoding a row; None for numbers."""
        return None if self.tensor.type.size == 1 else decode_blocks(self._stored_rows()[:1], self.tensor.type).format

    def quantized(self, rows: slice) -> GroupQuantized:
        """Rows of a quantized matrix."""
        return decode_blocks(self._stored_rows()[self._rows(rows)], self.tensor.type)

    def _rows(self, taken: slice) -> Tensor:
        """The places of rows in the file."""
        rows, size = torch.arange(self.get_shape()[0])[taken], self.head_size
        if not size:
            return rows
        row, half = rows % size, size // 2
        return rows - row + row % half * 2 + row // half

    def _stored_rows(self) -> Tensor:
        """uint8 [N, bytes of a row], in the mapped file."""
        tensor, count = self.tensor, self.tensor.num_bytes
        stored = torch.frombuffer(tensor.data, dtype=torch.uint8, offset=tensor.offset, count=count)
        if self.expert is None:
            return stored.view(-1, tensor.row_bytes)
        return stored.view(tensor.shape[0], -1, tensor.row_bytes)[self.expert]


class GgufCheckpoint:
    """A GGUF file whose tensors have the names of `checkpoint_names`. Raises ModelError as `GgufFile` does."""

    def __init__(self, path: Path) -> None:
        self._file = open_gguf(path)
        self._slices = dict(_slices(self._file))

    def __enter__(self) -> "GgufCheckpoint":
        return self

    def __exit__(self, *error: object) -> None:
        """The file stays mapped for whoever opens it next, and for the views of it."""
        self._file.release_pages()

    def keys(self) -> Iterator[str]:
        return iter(self._slices)

    def get_slice(self, name: str) -> GgufSlice:
        return self._slices[name]


def _slices(file: GgufFile) -> Iterator[tuple[str, GgufSlice]]:
    count = file.get("llama.attention.head_count", int, 0)
    heads = {"attn_q": count, "attn_k": file.get("llama.attention.head_count_kv", int, count)}  # of Llama alone
    for name, tensor in file.tensors.items():
        stem, _, ending = name.rpartition(".")
        matrix = stem.rpartition(".")[2]
        if matrix.endswith("_exps") and len(tensor.shape) == 3:
            for expert in range(tensor.shape[0]):
                yield f"{stem}.{expert}.{ending}", GgufSlice(tensor, expert)
        elif name != ROPE_FACTORS:  # these are part of the config
            permuted = heads.get(matrix, 0)
            yield name, GgufSlice(tensor, head_size=tensor.shape[0] // permuted if permuted else 0)


# ------------------------------------------------------------------------------------ Blocks of values


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
