"""Check the named models (nanoserve/models/model_table.toml): their sizes, and what the hub has.

    python -m scripts.check_models

A row whose sizes do not follow from its configuration, or whose repository, file or license is
another on the hub, is printed with the page that the row cites, and the exit code is 1. Nothing is
downloaded. Without a network only the sizes are checked.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.published_shapes import published_shapes
from nanoserve.config.quantization import BLOCK_TYPES
from nanoserve.costs.counts import ModelCounts
from nanoserve.costs.weight_bits import matrix_bits
from nanoserve.models.hub import NamedModel, named_models
from nanoserve.models.hub_files import quantization_of

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
_MXFP4_BITS = 4.25
"""Bits of a number in MXFP4: 4, and its share of 8 bits for each 32."""
_TOLERANCE = 0.06
"""By how much a file may be larger or smaller: it has a vocabulary, and some quantizers choose
other types for some matrices."""


def main() -> int:
    problems = [problem for row in named_models().values() for problem in size_problems(row)]
    try:
        for row in named_models().values():
            problems += hub_problems(row)
    except ConnectionError as error:
        print(f"the hub is not asked: {error}", file=sys.stderr)
    for problem in problems:
        print(problem)
    return int(bool(problems))


def size_problems(row: NamedModel) -> Iterator[str]:
    """The sizes of a row that do not follow from its configuration."""
    for name, computed in (("file_bytes", file_bytes(row)), ("memory_bytes", memory_bytes(row))):
        if getattr(row, name) != computed:
            yield f"{row.name}: {name} must be {computed}, not {getattr(row, name)}"


def hub_problems(row: NamedModel) -> Iterator[str]:
    """List what the hub says otherwise than a row. Raises ConnectionError without a network."""
    from huggingface_hub import HfApi, errors

    try:
        info = HfApi().model_info(row.repository, files_metadata=True, timeout=30)
    except errors.RepositoryNotFoundError:
        yield f"{row.name}: the hub has no {row.repository}; it is named at {row.page}"
        return
    except errors.HfHubHTTPError as error:
        yield f"{row.name}: {row.repository}: {error}; it is named at {row.page}"
        return
    except Exception as error:  # each HTTP library has errors of its own
        raise ConnectionError(str(error)) from error
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or ()}
    weights = [row.file]
    if row.file is None:
        weights = [name for name in sizes if name.endswith(".safetensors") and "/" not in name]
    missing = [name for name in weights if name not in sizes]
    if missing or not weights:
        yield f"{row.name}: {row.repository} has no {row.file or 'weights'}; see {row.page}"
        return
    stored = sum(sizes[str(name)] for name in weights)
    if abs(stored - row.file_bytes) > _TOLERANCE * stored:
        yield f"{row.name}: {row.repository} has {stored} bytes, not {row.file_bytes}"
    card: dict[str, Any] = {}
    if info.card_data is not None:
        card = info.card_data.to_dict()
    stated = card.get("license_name") or card.get("license")
    if stated != row.license:
        yield f"{row.name}: the license of {row.repository} is {stated}, not {row.license}"


def file_bytes(row: NamedModel) -> int:
    """Bytes of the matrices of a row in its files."""
    shape = _shape(row)
    if shape.quantization is None:
        return round(ModelCounts(shape).stage_weight_bytes(0))
    if shape.quantization.method == "mxfp4":
        numbers = ModelCounts(replace(shape, quantization=None)).stage_weight_bytes(0) / 2
        experts = _expert_weights(shape)
        return round(2 * (numbers - experts) + _MXFP4_BITS / 8 * experts)
    as_stored = {name: replace(kind, added_bytes=0) for name, kind in BLOCK_TYPES.items()}
    matrix_bits.cache_clear()
    with patch.dict(BLOCK_TYPES, as_stored):
        stored = round(ModelCounts(shape).stage_weight_bytes(0))
    matrix_bits.cache_clear()
    return stored


def memory_bytes(row: NamedModel) -> int:
    """Bytes of memory that a conversation of 4,096 tokens takes."""
    counts = ModelCounts(_shape(row))
    kv_bytes = _CONTEXT * counts.kv_bytes_per_token(0) + counts.all_state_bytes
    return round(counts.stage_weight_bytes(0) + kv_bytes) + _BASE_BYTES


def _expert_weights(shape: ModelConfig) -> int:
    """Weights of all experts: gate, up and down."""
    assert shape.moe is not None
    layers = sum(shape.is_sparse(layer) for layer in range(shape.num_layers))
    experts = layers * shape.moe.num_experts
    return experts * 3 * shape.hidden_size * shape.moe.intermediate_size


def _shape(row: NamedModel) -> ModelConfig:
    """The shape of a row with the quantization of its file."""
    config = dict(published_shapes()[row.shape])
    if row.file is not None:
        types = _tensor_types(config, quantization_of(row.file))
        quantization = {"quant_method": "gguf", "tensor_types": types}
        config |= {"tensor_names": "gguf", "quantization_config": quantization}
    return ModelConfig.from_hf(config, source=row.shape)


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


if __name__ == "__main__":
    sys.exit(main())
