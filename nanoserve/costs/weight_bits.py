"""Bits that a weight takes in memory, with its share of scales, in each matrix of a quantized model.

Codes of 3 bits take 4, a scale takes 16 bits, a zero point 8. Matrices of fp8 are loaded as numbers.
"""

from nanoserve.checkpoint_names import checkpoint_names
from nanoserve.config import ModelConfig

Bits = tuple[float | None, ...]
"""For each block of rows of a matrix, or one for all. None means numbers in the model's own format."""

ROWS = 16
"""Rows that are packed together, the last ones padded."""
_NUMBERS: Bits = (None,)
GGUF_BITS = {"Q8_0": 8.5, "Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 5.5, "Q4_K": 4.625, "Q5_K": 5.625, "Q6_K": 6.5625}
_GGUF_NAMES = {
    "embedding": ("token_embd",),
    "head": ("output",),
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "output": ("attn_output",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",),
    "router": ("ffn_gate_inp",),
    "expert_gate_up": ("ffn_gate_exps", "ffn_up_exps"),
    "expert_down": ("ffn_down_exps",),
}
"""Names of a matrix's blocks of rows in a file; glm4 has gate and up in one, `ffn_up`."""
_ENDS = ("embedding", "head")
_KEPT = {
    "rounding": ("router",),
    "compressed-tensors": ("embedding",),
    "gptq": (*_ENDS, "router"),
    "awq": (*_ENDS, "router"),
    "fp8": tuple(_GGUF_NAMES),
}
"""Matrices that a method leaves as numbers."""


def layer_bits(model: ModelConfig, layer: int) -> dict[str, Bits]:
    """The bits of every matrix of a layer, by name; empty if the model is not quantized."""
    if model.quantization is None:
        return {}
    hidden, moe = model.hidden_size, model.moe
    columns = {"qkv": hidden, "output": model.num_heads * model.head_dim}
    if moe is not None and model.is_sparse(layer):
        columns |= {"router": hidden, "expert_gate_up": hidden, "expert_down": moe.intermediate_size}
    else:
        columns |= {"gate_up": hidden, "down": model.intermediate_size}
    return {matrix: _bits(model, matrix, count, layer) for matrix, count in columns.items()}


def vocabulary_bits(model: ModelConfig) -> tuple[Bits, Bits]:
    """The bits of the embedding and of the head, which may be one matrix."""
    embedding = _bits(model, "embedding", model.hidden_size)
    return embedding, embedding if model.tie_word_embeddings else _bits(model, "head", model.hidden_size)


def _bits(model: ModelConfig, matrix: str, columns: int, layer: int | None = None) -> Bits:
    quantization = model.quantization
    if quantization is None or matrix in _KEPT.get(quantization.method, ()):
        return _NUMBERS
    if quantization.method == "gguf":
        types = dict(quantization.tensor_types)
        names = [name if layer is None else f"blk.{layer}.{name}" for name in _GGUF_NAMES[matrix]]
        found: Bits = tuple(GGUF_BITS.get(types[name]) for name in names if name in types)
    else:
        bits, group = max(quantization.bits, 4), quantization.group if quantization.group > 0 else columns
        if quantization.method == "rounding":
            bits = 8 if matrix in _ENDS else bits
        each = bits + (16 if quantization.symmetric else 24) / group
        whole = quantization.method != "rounding" or columns % group == 0
        found = tuple(
            each if whole and not quantization.leaves_alone(module) else None
            for module in _modules(model, matrix, layer)
        )
    # Blocks are packed together, or none is.
    return _NUMBERS if None in found else found or _NUMBERS


def _modules(model: ModelConfig, matrix: str, layer: int | None) -> tuple[str, ...]:
    """The modules of a Hugging Face checkpoint that make a matrix; those of one expert stand for all."""
    names = checkpoint_names(model)
    if layer is None:
        return ((names.embedding if matrix == "embedding" else names.lm_head).removesuffix(".weight"),)
    own, prefix = names.layer, names.layer_prefix.format(layer)
    expert = own.expert.format(0)
    modules = {
        "qkv": own.qkv,
        "output": (own.output,),
        "gate_up": own.gate_up,
        "down": (own.down,),
        "router": (own.router,),
        "expert_gate_up": tuple(f"{expert}.{name}" for name in own.expert_gate_up),
        "expert_down": (f"{expert}.{own.expert_down}",),
    }
    return tuple(prefix + name for name in modules[matrix])
