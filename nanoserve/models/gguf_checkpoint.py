"""The tensors of a GGUF file under the names and in the order of a Hugging Face checkpoint."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nanoserve.models.gguf_blocks import decode_blocks
from nanoserve.models.gguf_directory import ROPE_FACTORS
from nanoserve.models.gguf_file import GgufFile, GgufTensor
from nanoserve.models.packed import MatrixForm
from triton_ops import GroupQuantized

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_mlp_layernorm",
}
_SPARSE_NAMES = {
    "qwen3moe": ("mlp.gate", "mlp.experts.{}.", ("gate_proj", "up_proj", "down_proj")),
    "llama": ("block_sparse_moe.gate", "block_sparse_moe.experts.{}.", ("w1", "w3", "w2")),
}
"""Names of the router, of an expert and of its three matrices, by architecture."""
_EXPERT_MATRICES = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class GgufSlice:
    """One tensor as the checkpoint knows it; it is indexed with slices, like a slice of safetensors."""

    tensor: GgufTensor
    expert: int | None = None
    halves: int = 0
    """Length of heads whose rows are stored in pairs, one of each half (`permute` of llama.cpp's converter); 0 if
    the rows lie in order."""

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
    def form(self) -> MatrixForm | None:
        """How a quantized matrix is packed, found by decoding a row."""
        if self.tensor.type.size == 1:
            return None
        return MatrixForm(decode_blocks(self._stored_rows()[:1], self.tensor.type).format, None)

    def quantized(self, rows: slice) -> GroupQuantized:
        """Rows of a quantized matrix."""
        return decode_blocks(self._stored_rows()[self._rows(rows)], self.tensor.type)

    def _rows(self, taken: slice) -> Tensor:
        """The places of rows in the file."""
        rows = torch.arange(self.get_shape()[0])[taken]
        if self.halves:
            rows = rows // self.halves * self.halves + _paired(rows % self.halves, self.halves)
        return rows

    def _stored_rows(self) -> Tensor:
        """uint8 [N, bytes of a row], in the mapped file."""
        tensor, count = self.tensor, self.tensor.num_bytes
        stored = torch.frombuffer(tensor.data, dtype=torch.uint8, offset=tensor.offset, count=count)
        if self.expert is None:
            return stored.view(-1, tensor.row_bytes)
        return stored.view(tensor.shape[0], -1, tensor.row_bytes)[self.expert]


def _paired(row: Tensor, size: int) -> Tensor:
    """Where a row of a head of that size lies in the file: the converter stores the two halves of a head in turn."""
    half = size // 2
    return row % half * 2 + row // half


class GgufCheckpoint:
    """A GGUF file with the interface of an open safetensors file. Raises ModelError as `GgufFile` does."""

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
    architecture = file.metadata.get("general.architecture")
    heads = {
        "attn_q": file.metadata.get(f"{architecture}.attention.head_count"),
        "attn_k": file.metadata.get(f"{architecture}.attention.head_count_kv"),
    }
    for name, tensor in file.tensors.items():
        stem, _, ending = name.rpartition(".")
        if name == ROPE_FACTORS:
            continue  # part of the config
        if not stem.startswith("blk.") or stem.count(".") < 2:
            yield f"{_NAMES.get(stem, stem)}.{ending}", GgufSlice(tensor)
            continue
        _, index, matrix = stem.split(".", 2)
        prefix = f"model.layers.{index}."
        if matrix in _EXPERT_MATRICES and len(tensor.shape) == 3 and architecture in _SPARSE_NAMES:
            _, expert, matrices = _SPARSE_NAMES[architecture]
            for number in range(tensor.shape[0]):
                suffix = matrices[_EXPERT_MATRICES.index(matrix)]
                yield f"{prefix}{expert.format(number)}{suffix}.{ending}", GgufSlice(tensor, number)
            continue
        known = _LAYER_NAMES.get(matrix, matrix)
        if matrix == "ffn_gate_inp" and architecture in _SPARSE_NAMES:
            known = _SPARSE_NAMES[architecture][0]
        elif architecture == "glm4" and matrix == "ffn_up":
            known = "mlp.gate_up_proj"
        count = heads.get(matrix) if architecture == "llama" else None
        rows = tensor.shape[0] // count if count else 0
        yield f"{prefix}{known}.{ending}", GgufSlice(tensor, halves=rows)
