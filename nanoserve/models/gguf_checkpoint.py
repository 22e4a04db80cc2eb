"""A GGUF file with the interface of an open safetensors file: each expert is a tensor, Llama's
heads are in order."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from nanoserve.models.gguf_blocks import decode_blocks
from nanoserve.models.gguf_directory import GATE_UP_EXPERTS
from nanoserve.models.gguf_file import ROPE_FACTORS, GgufFile, GgufTensor, is_array, open_gguf
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
    in_turn_with: GgufTensor | None = None
    """A tensor of the same form whose rows lie between those of an expert of this one, or whose
    numbers lie between those of its biases."""

    def get_shape(self) -> list[int]:
        shape = list(self.tensor.shape)
        if self.in_turn_with is not None:
            shape[1] *= 2
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
        """uint8 [N, bytes of a row], in the mapped file or, where two tensors take turns, of
        both."""
        stored = self._bytes_of(self.tensor)
        if self.in_turn_with is None:
            return stored
        size = self.tensor.row_bytes
        if self.expert is None:  # one number of each
            size = self.tensor.type.num_bytes
        others = self._bytes_of(self.in_turn_with)
        pairs = torch.stack((stored.view(-1, size), others.view(-1, size)), dim=1)
        return pairs.view(self.get_shape()[0], -1)

    def _bytes_of(self, tensor: GgufTensor) -> Tensor:
        """uint8 [N, bytes of a row], in the mapped file."""
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
    takes_turns = file.get("general.architecture", str, "") == "gpt-oss"
    for name, tensor in file.tensors.items():
        stem, _, ending = name.rpartition(".")
        matrix = stem.rpartition(".")[2]
        if name == ROPE_FACTORS or name.startswith(drafting):
            continue  # these are part of the config, and those are not used
        other = None
        if takes_turns and matrix == "ffn_up_exps":
            continue  # it is read with the gate
        if takes_turns and matrix == "ffn_gate_exps":
            stem, other = _gate_and_up(file, name, tensor)
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
                found = GgufSlice(tensor, expert, in_turn_with=other)
                yield f"{stem}.{expert}.{ending}", found
            continue
        if other is not None:
            yield f"{stem}.{ending}", GgufSlice(tensor, in_turn_with=other)
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


def _gate_and_up(file: GgufFile, name: str, gate: GgufTensor) -> tuple[str, GgufTensor]:
    """The name of both together without its ending, and the tensor of up. Rows of both take turns
    in gpt-oss."""
    up_name = name.replace("ffn_gate_exps", "ffn_up_exps")
    up = file.tensors.get(up_name)
    if up is None or up.shape != gate.shape or up.type != gate.type or len(gate.shape) < 2:
        raise file.fail(f"tensors {name} and {up_name} must have the same shape and type")
    return name.rpartition(".")[0].replace("ffn_gate_exps", GATE_UP_EXPERTS), up


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
