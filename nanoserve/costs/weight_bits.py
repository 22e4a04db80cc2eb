"""Bits that a weight takes in memory, with its share of scales, in each matrix of a quantized model.

Codes of 3 bits take 4, those of MXFP4 5; a scale takes 16, a zero point 8. Matrices of fp8 are loaded as numbers.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache

from nanoserve.config.checkpoint_names import checkpoint_names
from nanoserve.config.model_config import ModelConfig
from nanoserve.config.quantization import BLOCK_TYPES, Quantization

Bits = tuple[float | None, ...]
"""For each block of rows of a matrix; one may stand for all. None means numbers in the model's own format."""
NUMBERS: Bits = (None,)
ROWS = 16
"""Rows that are packed together, the last ones padded."""
_KEPT = {"rounding": ("router",), "compressed-tensors": ("embedding",)}
"""Matrices that a method leaves as numbers; others leave these three: embedding, head, router."""


@lru_cache(maxsize=4096)
def matrix_bits(model: ModelConfig, layer: int | None) -> Mapping[str, Bits]:
    """The bits of every matrix of a layer by name, or those of the embedding and the head, which may be one matrix;
    empty if the model is not quantized."""
    quantization, moe, names = model.quantization, model.moe, checkpoint_names(model)
    if quantization is None:
        return {}
    # The columns of each matrix, and the modules of its blocks.
    matrices: dict[str, tuple[int, Iterable[str]]] = {}
    if layer is None:
        matrices["embedding"] = model.hidden_size, [names.embedding.removesuffix(".weight")]
        matrices["head"] = model.hidden_size, [names.lm_head.removesuffix(".weight")]
    else:
        own = names.layer
        model = model.of_layer(layer)
        matrices["qkv"] = model.hidden_size, own.qkv
        matrices["output"] = model.num_heads * model.head_dim, [own.output]
        if moe is None or not model.is_sparse(layer):
            matrices["gate_up"] = model.hidden_size, own.gate_up
            matrices["down"] = model.intermediate_size, [own.down]
        else:
            matrices["router"] = model.hidden_size, [own.router]
            matrices["expert_gate_up"] = model.hidden_size, [name.format(0) for name in own.expert_gate_up]
            matrices["expert_down"] = moe.intermediate_size, [own.expert_down.format(0)]
    prefix = "" if layer is None else names.layer_prefix.format(layer)
    found = {
        matrix: _bits(quantization, matrix, columns, [prefix + module for module in modules], model.head_dim)
        for matrix, (columns, modules) in matrices.items()
    }
    return found | {"head": found["embedding"]} if layer is None and model.tie_word_embeddings else found


def _bits(quantization: Quantization, matrix: str, columns: int, modules: Iterable[str], head: int) -> Bits:
    method, types = quantization.method, dict(quantization.tensor_types)
    if method == "gguf":
        stored = [BLOCK_TYPES.get(types.get(module.removesuffix(".0"), "")) for module in modules]
        found: Bits = tuple(None if kind is None else kind.loaded_bits for kind in stored)
    elif quantization.is_float or matrix in _KEPT.get(method, ("embedding", "head", "router")):
        return NUMBERS
    else:
        group = quantization.group_of(columns, head if matrix == "output" else 0)
        is_vocabulary = method == "rounding" and matrix in ("embedding", "head")
        bits = 8 if is_vocabulary else max(quantization.bits, 5 if method == "mxfp4" else 4)
        beside = 24 if quantization.has_zeros or method in ("gptq", "awq") else 16
        each = None if group is None else bits + beside / group
        if is_vocabulary and quantization.bits == 4 and columns % 256 == 0:
            each = BLOCK_TYPES["Q6_K"].loaded_bits
        found = tuple(None if quantization.leaves_alone(module) else each for module in modules)
    return NUMBERS if None in found else found  # blocks are packed together, or none is
