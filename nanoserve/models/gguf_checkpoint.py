"""A GGUF file with the interface of an open safetensors file: each expert is a tensor, Llama's heads are in order."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nanoserve.models.gguf_blocks import decode_blocks
from nanoserve.models.gguf_directory import ROPE_FACTORS
from nanoserve.models.gguf_file import GgufFile, GgufTensor
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
        self._slices = dict(_slices(GgufFile(path)))

    def __enter__(self) -> "GgufCheckpoint":
        return self

    def __exit__(self, *error: object) -> None:
        """The mapping lives as long as the views of it."""

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
