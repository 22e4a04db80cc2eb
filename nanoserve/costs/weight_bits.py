"""Bits that a weight takes in memory, with its share of scales, in each matrix of a quantized
model.

Codes of 3 bits take 4, those of MXFP4 5; a scale takes 16, a zero point 8. Matrices of fp8 are
loaded as numbers.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from nanoserve.config.checkpoint_names import LayerNames, checkpoint_names
from nanoserve.config.mixers import MambaConfig
from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import RecurrentConfig
from nanoserve.config.quantization import BLOCK_TYPES, Quantization

Bits = tuple[float | None, ...]
"""For each block of rows of a matrix; one may stand for all. None means numbers in the model's own
format."""
NUMBERS: Bits = (None,)
ROWS = 16
"""Rows that are packed together, the last ones padded."""
_KEPT = {"rounding": ("router", "selection", "time_step"), "compressed-tensors": ("embedding",)}
"""Matrices that a method leaves as numbers; others leave these three: embedding, head, router."""
_MIXING = frozenset({"qkv", "query_up", "output", "output_gate", "inputs"})
"""Matrices of attention, and of mixers; all others of a layer are of its feed-forward part."""


@lru_cache(maxsize=4096)
def matrix_bits(model: ModelConfig, layer: int | None) -> Mapping[str, Bits]:
    """The bits of every matrix of a layer by name. Without a layer, the bits of the embedding and
    of the head, which may be one matrix. Empty if the model is not quantized."""
    quantization = model.quantization
    if quantization is None:
        return {}
    if layer is None:
        found = _vocabulary_bits(model, quantization)
        if model.tie_word_embeddings:
            found["head"] = found["embedding"]
        return found
    prefix, feed_forward_prefix = checkpoint_names(model).layer_prefixes(model, layer)
    shaped = model.of_layer(layer)
    found = {}
    for matrix, (columns, names) in _layer_matrices(shaped, layer).items():
        of_part = prefix if matrix in _MIXING else feed_forward_prefix
        modules = [of_part + name for name in names]
        found[matrix] = _bits(quantization, matrix, columns, modules, _head(shaped, layer))
    return found


def _head(model: ModelConfig, layer: int) -> int:
    """Columns of a layer's output matrix that belong to a head; 0 where there are no heads."""
    if model.recurrent is None or not model.is_recurrent(layer):
        return model.head_dim
    return model.recurrent.mixer.head_dim


def _vocabulary_bits(model: ModelConfig, quantization: Quantization) -> dict[str, Bits]:
    names = checkpoint_names(model)
    found = {}
    for matrix, tensor in (("embedding", names.embedding), ("head", names.lm_head)):
        modules = [tensor.removesuffix(".weight")]
        found[matrix] = _bits(quantization, matrix, model.hidden_size, modules, model.head_dim)
    return found


def _layer_matrices(model: ModelConfig, layer: int) -> dict[str, tuple[int, Sequence[str]]]:
    """The columns of each matrix of a layer, and the modules of its blocks of rows."""
    names, moe = checkpoint_names(model).layer, model.moe
    query_key_value = names.qkv
    if model.attention.mla is None:  # a layer may share keys and values, or have its keys as values
        query_key_value = names.qkv[: len(model.qkv_sizes)]
    matrices: dict[str, tuple[int, Sequence[str]]] = {
        "qkv": (model.hidden_size, query_key_value),
        "output": (model.num_heads * model.head_dim, [names.output]),
    }
    mla = model.attention.mla
    if mla is not None and mla.q_lora_rank:
        matrices["query_up"] = mla.q_lora_rank, [names.latent_query_up]
    if model.attention.output_gate:
        matrices["output_gate"] = model.hidden_size, names.qkv[:1]
    if model.recurrent is not None and model.is_recurrent(layer):
        matrices = _recurrent_matrices(model.hidden_size, model.recurrent, names)
    if not model.has_feed_forward(layer):
        return matrices
    if moe is None or not model.is_sparse(layer):
        matrices["gate_up"] = model.hidden_size, names.gate_up
        matrices["down"] = model.intermediate_size, [names.down]
    else:
        matrices["router"] = model.hidden_size, [names.router]
        matrices["expert_gate_up"] = (
            model.hidden_size,
            [name.format(0) for name in names.expert_gate_up],
        )
        matrices["expert_down"] = moe.intermediate_size, [names.expert_down.format(0)]
        if moe.shared_size:
            matrices["shared_gate_up"] = model.hidden_size, names.shared_gate_up
            matrices["shared_down"] = moe.shared_size, [names.shared_down]
    return matrices


def _recurrent_matrices(
    hidden: int, recurrent: RecurrentConfig, names: LayerNames
) -> dict[str, tuple[int, Sequence[str]]]:
    """Matrices of a layer with a state that may be quantized, up to its output."""
    mixer = recurrent.mixer
    output = mixer.output_size, [names.mixer_output]
    found: dict[str, tuple[int, Sequence[str]]] = {
        "inputs": (hidden, names.mixer_inputs),
        "output": output,
    }
    if isinstance(mixer, MambaConfig):
        found["selection"] = mixer.channels, [names.mixer_selection]
        found["time_step"] = mixer.time_step_rank, [names.mixer_time_step]
    return found


def _bits(
    quantization: Quantization, matrix: str, columns: int, modules: Sequence[str], head: int
) -> Bits:
    """The bits of each block of a matrix. Its blocks are packed together, or none is."""
    found: list[float | None] = []
    if quantization.method == "gguf":
        types = dict(quantization.tensor_types)
        for module in modules:
            kind = BLOCK_TYPES.get(types.get(module.removesuffix(".0"), ""))
            found.append(None if kind is None else kind.loaded_bits)
    elif quantization.is_float or matrix in _KEPT.get(
        quantization.method, ("embedding", "head", "router")
    ):
        return NUMBERS
    else:
        packed = _packed_bits(quantization, matrix, columns, head)
        for module in modules:
            found.append(None if quantization.leaves_alone(module) else packed)
    if None in found:
        return NUMBERS
    return tuple(found)


def _packed_bits(quantization: Quantization, matrix: str, columns: int, head: int) -> float | None:
    """Bits of a weight and its share of scales and zero points; None if no group divides the
    columns."""
    method, bits = quantization.method, max(quantization.bits, 4)
    if method == "mxfp4":
        bits = 5
    if method == "rounding" and matrix in ("embedding", "head"):
        if quantization.bits == 4 and columns % 256 == 0:
            return BLOCK_TYPES["Q6_K"].loaded_bits
        bits = 8
    group = quantization.group_of(columns, head if matrix == "output" else 0)
    if group is None:
        return None
    has_zeros = quantization.has_zeros or method in ("gptq", "awq")
    return bits + (24 if has_zeros else 16) / group
