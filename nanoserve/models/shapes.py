"""Shapes and sizes of models, without their weights. No torch here."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.published_shapes import load_shape, published_shapes
from nanoserve.costs.counts import ModelCounts
from nanoserve.models.gguf_directory import gguf_config
from nanoserve.models.hub import SMOLLM2, NamedModel, is_gguf, packaged_smollm2
from nanoserve.models.hub_files import quantization_of
from nanoserve.utils.files import unreadable_as_model_error


@unreadable_as_model_error()
def find_shape(spec: str, quantization: str | None) -> ModelConfig:
    """The shape of a model as `load_shape` knows it, or of a .gguf file, or `smollm2`, with its
    quantization or that of `--quantization`. No weights are needed. Raises UsageError and
    ModelError in one line."""
    path = Path(spec).expanduser()
    packaged = packaged_smollm2()
    if spec == SMOLLM2 and packaged is not None and not path.exists():
        path = packaged
    if is_gguf(path):
        return gguf_config(path).rounded(quantization)
    return load_shape(spec).rounded(quantization)


_CONTEXT = 4096
"""Tokens of a conversation for which memory is counted."""
_BASE_BYTES = 512 << 20
"""Bytes of a chat beside weights and KV cache; it has 0.28 GiB with the bundled model of 8 MiB."""
_MATRICES = (
    *("attn_q", "attn_k", "attn_v", "attn_output", "attn_qkv", "attn_gate", "ssm_out"),
    *("ffn_gate", "ffn_up", "ffn_down", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
    *("shortconv.in_proj", "shortconv.out_proj"),
)
"""Matrices of a layer that are quantized, as GGUF calls them."""
_WITH_MORE_BITS = ("attn_v", "attn_qkv", "ffn_down", "ffn_down_exps")
"""Matrices that Q4_K_M stores as Q6_K in some layers."""
_OF_ODD_COLUMNS = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
"""Types of blocks of 256, and what is stored instead where 256 does not divide the columns."""


def named_shape(row: NamedModel, *, is_in_file: bool = False) -> ModelConfig:
    """The shape of a named model with the quantization of its file."""
    config = dict(published_shapes()[row.shape])
    if row.file is not None:
        types = _tensor_types(config, quantization_of(row.file))
        quantization = {"quant_method": "gguf", "tensor_types": types}
        config |= {"tensor_names": "gguf", "quantization_config": quantization}
    shape = ModelConfig.from_hf(config, source=row.shape)
    if shape.quantization is None or not is_in_file:
        return shape
    return replace(shape, quantization=replace(shape.quantization, is_in_file=True))


def _tensor_types(config: Mapping[str, Any], quantization: str) -> dict[str, str]:
    """The type of each matrix, as llama.cpp's quantizer chooses it (src/llama-quant.cpp)."""
    usual, more = quantization, quantization
    if quantization == "Q4_K_M":
        usual, more = "Q4_K", "Q6_K"
    types = {"token_embd": usual, "output": more}
    if config.get("tie_word_embeddings"):
        types["token_embd"] = more
    layers, inner = config["num_hidden_layers"], config.get("intermediate_size", 0)
    for layer in range(layers):
        is_at_an_end = layer < layers // 8 or layer >= 7 * layers // 8
        has_more_bits = is_at_an_end or (layer - layers // 8) % 3 == 2
        for matrix in _MATRICES:
            kind = usual
            if has_more_bits and matrix in _WITH_MORE_BITS:
                kind = more
            if matrix == "ffn_down" and inner % 256 != 0:
                kind = _OF_ODD_COLUMNS.get(kind, kind)
            types[f"blk.{layer}.{matrix}"] = kind
    return types


def file_bytes(row: NamedModel) -> int:
    """Bytes of a named model's matrices in its files. A vocabulary is a few MiB more."""
    return round(ModelCounts(named_shape(row, is_in_file=True)).stage_weight_bytes(0))


def memory_bytes(row: NamedModel) -> int:
    """Bytes of memory that a conversation of 4,096 tokens with a named model takes."""
    counts = ModelCounts(named_shape(row))
    kv_bytes = _CONTEXT * counts.kv_bytes_per_token(0) + counts.all_state_bytes
    return round(counts.stage_weight_bytes(0) + kv_bytes) + _BASE_BYTES
