"""A GGUF file with the interface of an open safetensors file: each expert is a tensor, Llama's
heads are in order."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from nanoserve.config.quantization import BlockType
from nanoserve.models.gguf_directory import ROPE_FACTORS
from nanoserve.models.gguf_file import GgufFile, GgufTensor, is_array, open_gguf
from nanoserve.models.gguf_hybrid import GRANITES
from nanoserve.models.gguf_recurrent import TiledHeads, num_drafting_layers, tiled_heads
from nanoserve.models.packed import MatrixForm
from triton_ops import GroupQuantized

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class GgufSlice:
    """One tensor as the checkpoint knows it; it is indexed with slices, like a slice of
    safetensors."""

    tensor: GgufTensor
    expert: int | None = None
    head_size: int = 0
    """Rows of a head, if its two halves are stored in turn (`permute` of llama.cpp's converter); 0:
    rows are in order."""
    is_kernel: bool = False
    """Whether it is the kernel of a convolution, which safetensors have as [channels, 1, size]."""

    row_heads: TiledHeads | None = None
    """The order of value heads over rows, where it is another one."""
    column_heads: TiledHeads | None = None
    """Their order over columns."""
    is_decay: bool = False
    """Whether the numbers are -exp of those that safetensors have."""
    is_vector: bool = False
    """Whether safetensors have its rows one after another."""

    def get_shape(self) -> list[int]:
        shape = list(self.tensor.shape)
        if self.is_vector:
            return [prod(shape)]
        if self.is_kernel and len(shape) == 2:
            return [shape[0], 1, shape[1]]
        if self.expert is None:
            return shape
        return shape[1:]

    def get_dtype(self) -> str:
        return self.tensor.type.name

    def __getitem__(self, taken: tuple[slice, ...]) -> Tensor:
        """The selected part; quantized types as float32."""
        if self.tensor.type.size > 1:
            return self.quantized(taken[0]).dequantize()[:, taken[1]]
        dtype = _PLAIN[self.tensor.type.name]
        values = self._stored_rows()
        rows = self._rows(taken[0])
        if len(self.get_shape()) == 1:
            numbers = values.view(dtype).flatten()[rows]
            if self.is_decay:
                numbers = numbers.neg().log()
            return numbers
        matrix = values[rows].view(dtype)
        if self.is_decay:
            matrix = matrix.neg().log()
        if self.is_kernel:
            return matrix[:, None]
        if self.column_heads is not None:
            matrix = matrix[:, self.column_heads.places(torch.arange(matrix.shape[1]))]
        return matrix[:, taken[1]]

    @property
    def form(self) -> MatrixForm | None:
        """How a quantized matrix is packed, found by decoding a row; None for numbers."""
        if self.tensor.type.size == 1:
            return None
        row = self.quantized(slice(0, 1))
        return MatrixForm(row.format, row.order)

    def quantized(self, rows: slice) -> GroupQuantized:
        """Rows of a quantized matrix."""
        block, heads = self.tensor.type, self.column_heads
        stored = self._stored_rows()[self._rows(rows)]
        if heads is None:
            return decode_blocks(stored, block)
        if heads.size % block.size == 0:  # a head is whole blocks
            blocks = stored.view(len(stored), -1, block.num_bytes)
            of_blocks = replace(heads, size=heads.size // block.size)
            places = of_blocks.places(torch.arange(blocks.shape[1]))
            return decode_blocks(blocks[:, places].flatten(1), block)
        places = heads.places(torch.arange(self.tensor.shape[-1]))
        return replace(decode_blocks(stored, block), order=places.argsort())

    def _rows(self, taken: slice) -> Tensor:
        """The places of rows in the file."""
        rows = torch.arange(self.get_shape()[0])[taken]
        if self.row_heads is not None:
            return self.row_heads.places(rows)
        size = self.head_size
        if size == 0:
            return rows
        half = size // 2
        row_of_head = rows % size
        first_of_head = rows - row_of_head
        row_of_half = row_of_head % half
        is_second_half = row_of_head // half
        return first_of_head + 2 * row_of_half + is_second_half

    def _stored_rows(self) -> Tensor:
        """uint8 [N, bytes of a row], in the mapped file."""
        tensor = self.tensor
        stored = torch.frombuffer(
            tensor.data, dtype=torch.uint8, offset=tensor.offset, count=tensor.num_bytes
        )
        if self.expert is None:
            return stored.view(-1, tensor.row_bytes)
        by_expert = stored.view(tensor.shape[0], -1, tensor.row_bytes)
        return by_expert[self.expert]


@dataclass(frozen=True, slots=True)
class LatentMatrix:
    """The matrix that makes keys and values of latents, as safetensors have it: the rows of a
    head's keys, then those of its values. A file has the parts of each head apart, that of keys
    transposed. It is not packed, since its numbers are needed both ways."""

    keys: GgufTensor
    """[heads, kv_lora_rank, qk_nope_head_dim]"""
    values: GgufTensor
    """[heads, v_head_dim, kv_lora_rank]"""
    form: ClassVar[None] = None

    def get_shape(self) -> list[int]:
        heads, size, _ = self.values.shape
        return [heads * (size + self.keys.shape[2]), self.values.shape[2]]

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, taken: tuple[slice, ...]) -> Tensor:
        """The selected part as float32."""
        num_rows, _ = self.get_shape()
        rows = range(num_rows)[taken[0]]
        of_head = num_rows // self.values.shape[0]
        whole = (slice(None), slice(None))
        found = []
        for head in range(rows.start // of_head, -(-rows.stop // of_head)):
            keys = GgufSlice(self.keys, head)[whole].float()
            values = GgufSlice(self.values, head)[whole].float()
            first = head * of_head
            matrix = torch.cat((keys.T, values))
            found.append(matrix[max(0, rows.start - first) : rows.stop - first])
        return torch.cat(found)[:, taken[1]]


class GgufCheckpoint:
    """A GGUF file whose tensors have the names of `checkpoint_names`. Raises ModelError as
    `GgufFile` does."""

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

    def get_slice(self, name: str) -> GgufSlice | LatentMatrix:
        return self._slices[name]


def _slices(file: GgufFile) -> Iterator[tuple[str, GgufSlice | LatentMatrix]]:
    heads = _heads_in_turn(file)
    value_heads = tiled_heads(file)
    drafting = _drafting_layers(file)
    for name, tensor in file.tensors.items():
        stem, _, ending = name.rpartition(".")
        matrix = stem.rpartition(".")[2]
        if name == ROPE_FACTORS or name.startswith(drafting):
            continue  # these are part of the config, and those are not used
        if matrix == "attn_k_b" and len(tensor.shape) == 3:
            values = file.tensors.get(name.replace("attn_k_b", "attn_v_b"))
            heads_and_rank = tensor.shape[:2]
            if values is None or (values.shape[0], values.shape[-1]) != heads_and_rank:
                raise file.fail(f"tensor {name} has no attn_v_b of the same heads and latents")
            yield name.replace("attn_k_b", "attn_kv_b"), LatentMatrix(tensor, values)
            continue
        if matrix == "attn_v_b":
            continue  # this is a part of that matrix
        if matrix.endswith("_exps") and len(tensor.shape) == 3:
            for expert in range(tensor.shape[0]):
                yield f"{stem}.{expert}.{ending}", GgufSlice(tensor, expert)
            continue
        is_vector = (ending in ("ssm_a", "ssm_d") and tensor.shape[-1] == 1) or matrix == "ssm_norm"
        found = GgufSlice(
            tensor,
            is_kernel=stem.endswith((".shortconv.conv", ".ssm_conv1d")),
            is_vector=is_vector and tensor.type.size == 1,
        )
        if ending == "ssm_a":
            found = replace(found, is_decay=True, row_heads=value_heads.get(ending))
        elif matrix == "ssm_out":
            found = replace(found, column_heads=value_heads.get(matrix))
        elif matrix in value_heads:
            found = replace(found, row_heads=value_heads[matrix])
        elif heads.get(matrix, 0) > 0:
            found = replace(found, head_size=tensor.shape[0] // heads[matrix])
        yield name, found


def _heads_in_turn(file: GgufFile) -> dict[str, int]:
    """The numbers of heads whose halves are stored in turn, by the names of their matrices: those
    of Llama and of what is converted like it."""
    architecture = file.get("general.architecture", str, "")
    if architecture not in ("llama", "smollm3", "mistral3", *GRANITES):
        return {}
    num_heads = file.get(f"{architecture}.attention.head_count", int, 0)
    key = f"{architecture}.attention.head_count_kv"
    if is_array(file.metadata.get(key)):  # of each layer: 0, or always the same number
        counts = file.listed(key, int, file.need(f"{architecture}.block_count", int))
        return {"attn_q": num_heads, "attn_k": max(counts, default=0)}
    return {"attn_q": num_heads, "attn_k": file.get(key, int, num_heads)}


def _drafting_layers(file: GgufFile) -> tuple[str, ...]:
    """Beginnings of the names of tensors in layers for drafts."""
    architecture = file.get("general.architecture", str, "")
    count = file.get(f"{architecture}.block_count", int, 0)
    drafting = num_drafting_layers(file, architecture)
    return tuple(f"blk.{layer}." for layer in range(count - drafting, count))


# ------------------------------------------------------------------------------------ Blocks of
# values


def decode_blocks(stored: Tensor, block_type: BlockType) -> GroupQuantized:
    """Rows of a quantized GGUF tensor, uint8 [N, bytes of a row], as integers and scales."""
    rows = len(stored)
    blocks = stored.reshape(-1, block_type.num_bytes)
    numbers = {"scales": _half(blocks, 0)}
    zero = 0
    match block_type.name:
        case "Q8_0":
            bits = 8
            codes = blocks[:, 2:].contiguous().view(torch.int8)
        case "Q4_0":
            bits = 4
            codes = _nibbles(blocks[:, 2:])
            zero = 8
        case "Q4_1":
            bits = 4
            codes = _nibbles(blocks[:, 4:])
            numbers["minimums"] = -_half(blocks, 2)
        case "Q5_0":
            bits = 5
            codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6, None])
            zero = 16
        case "Q4_K":
            bits = 4
            codes = _k_nibbles(blocks[:, 16:])
            numbers = _k_numbers(blocks)
        case "Q5_K":
            bits = 5
            codes = _k_nibbles(blocks[:, 48:]) | _fifth_bits(blocks[:, None, 16:48])
            numbers = _k_numbers(blocks)
        case "Q6_K":
            bits = 6
            codes = _six_bits(blocks)
            zero = 32
            scales = blocks[:, 192:208].contiguous().view(torch.int8)
            numbers = {"super_scales": _half(blocks, 208), "scales": scales}
    parts = {name: part.reshape(rows, -1) for name, part in numbers.items()}
    return GroupQuantized(codes.reshape(rows, -1), bits, zero=zero, **parts)


def _half(blocks: Tensor, first: int) -> Tensor:
    """The number at that byte of every block, float16 [B, 1]."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16)


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
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)
    pairs = blocks[:, 128:192].reshape(-1, 1, 32) >> shifts[:, None] & 3
    high = pairs.view(count, -1) << 4
    return low | high
