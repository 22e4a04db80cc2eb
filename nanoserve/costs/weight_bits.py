"""Bits that a weight takes in memory, with its share of scales, in each matrix of a quantized model.

Codes of 3 bits take 4, those of MXFP4 5; a scale takes 16, a zero point 8. Matrices of fp8 are loaded as numbers.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache

from nanoserve.checkpoint_names import checkpoint_names
from nanoserve.config import ModelConfig
from nanoserve.quantization import Quantization

Bits = tuple[float | None, ...]
"""For each block of rows of a matrix; one may stand for all. None means numbers in the model's own format."""
NUMBERS: Bits = (None,)
ROWS = 16
"""Rows that are packed together, the last ones padded."""
GGUF_BITS = {"Q8_0": 8.5, "Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 5.5, "Q4_K": 4.625, "Q5_K": 5.625, "Q6_K": 6.5625}
_KEPT = {"rounding": ("router",), "compressed-tensors": ("embedding",)}
"""Matrices that a method leaves as numbers; others leave these three: embedding, head, router."""


@lru_cache(maxsize=4096)
def matrix_bits(model: ModelConfig, layer: int | None) -> Mapping[str, Bits]:
    """The bits of every matrix of a layer by name, or those of the embedding and the head, which may be one matrix;
    empty if the model is not quantized."""
    quantization, hidden, moe, names = model.quantization, model.hidden_size, model.moe, checkpoint_names(model)
    if quantization is None:
        return {}
    before = ("", "") if layer is None else (names.layer_prefix.format(layer), f"blk.{layer}.")

    def bits(matrix: str, columns: int, modules: Iterable[str], tensors: Iterable[str]) -> dict[str, Bits]:
        """By the names of its blocks in a Hugging Face checkpoint, and in a GGUF file."""
        stored = [(before[0] + module, before[1] + name) for module, name in zip(modules, tensors, strict=False)]
        return {matrix: _bits(quantization, matrix, columns, stored)}

    if layer is None:
        found = bits("embedding", hidden, [names.embedding.removesuffix(".weight")], ["token_embd"])
        head = bits("head", hidden, [names.lm_head.removesuffix(".weight")], ["output"])
        return found | ({"head": found["embedding"]} if model.tie_word_embeddings else head)
    own = names.layer
    found = bits("qkv", hidden, own.qkv, ("attn_q", "attn_k", "attn_v"))
    found |= bits("output", model.num_heads * model.head_dim, [own.output], ["attn_output"])
    if moe is None or not model.is_sparse(layer):
        found |= bits("gate_up", hidden, own.gate_up, ("ffn_gate", "ffn_up")[-len(own.gate_up) :])
        return found | bits("down", model.intermediate_size, [own.down], ["ffn_down"])
    gate, up, down = (f"{own.expert.format(0)}.{name}" for name in (*own.expert_gate_up, own.expert_down))
    found |= bits("router", hidden, [own.router], ["ffn_gate_inp"])
    found |= bits("expert_gate_up", hidden, (gate, up), ("ffn_gate_exps", "ffn_up_exps"))
    return found | bits("expert_down", moe.intermediate_size, [down], ["ffn_down_exps"])


def _bits(quantization: Quantization, matrix: str, columns: int, stored: Iterable[tuple[str, str]]) -> Bits:
    method, types = quantization.method, dict(quantization.tensor_types)
    if method == "gguf":
        found: Bits = tuple(GGUF_BITS.get(types.get(tensor, "")) for _, tensor in stored)
    elif quantization.is_float or matrix in _KEPT.get(method, ("embedding", "head", "router")):
        return NUMBERS
    else:
        group = quantization.group if quantization.group > 0 else columns
        is_vocabulary = method == "rounding" and matrix in ("embedding", "head")
        bits = 8 if is_vocabulary else max(quantization.bits, 5 if method == "mxfp4" else 4)
        beside = 24 if quantization.has_zeros or method in ("gptq", "awq") else 16
        each = bits + beside / group if columns % group == 0 else None
        if is_vocabulary and quantization.bits == 4 and columns % 256 == 0:
            each = GGUF_BITS["Q6_K"]
        found = tuple(None if quantization.leaves_alone(module) else each for module, _ in stored)
    return NUMBERS if None in found else found  # blocks are packed together, or none is
