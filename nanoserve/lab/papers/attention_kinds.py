"""One shape with four kinds of attention, from multi-head to latent, with equal parameters and
different caches (the lecture, sections 2.1.1 and 2.1.2).

The shape is the bundled storyteller's. What a smaller key and value part saves, the feed-forward
part gets, so that the models have as many parameters each.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

VOCABULARY, HIDDEN, LAYERS, HEADS, HEAD_DIM = 4096, 256, 4, 8, 32
FEED_FORWARD = 768
"""Width of the feed-forward part beside multi-head attention."""
LATENT, ROTATED = 64, 16
"""Sizes of the latent vector and of the rotated key of multi-head latent attention."""
CACHED_BYTES = 2
"""Bytes of a cached number, bfloat16."""

KV_HEADS: Mapping[str, int] = MappingProxyType({"MHA": 8, "GQA": 2, "MQA": 1})
"""Key and value heads of the kinds that cache keys and values."""
KINDS = (*KV_HEADS, "MLA")


def attention_parameters(kind: str) -> int:
    """Count the parameters of a layer's attention."""
    heads = HEADS * HEAD_DIM
    if kind != "MLA":
        return HIDDEN * (2 * heads + 2 * KV_HEADS[kind] * HEAD_DIM)
    query = HIDDEN * HEADS * (HEAD_DIM + ROTATED)
    down = HIDDEN * (LATENT + ROTATED) + LATENT
    up = LATENT * 2 * heads
    return query + down + up + heads * HIDDEN


def feed_forward_size(kind: str) -> int:
    """Compute the width at which a layer has as many parameters as with multi-head attention."""
    spare = attention_parameters("MHA") - attention_parameters(kind)
    return FEED_FORWARD + round(spare / (3 * HIDDEN))


def bytes_of_token(kind: str) -> int:
    """Count the bytes that a token takes in the cache, in all layers together."""
    numbers = LATENT + ROTATED
    if kind != "MLA":
        numbers = 2 * KV_HEADS[kind] * HEAD_DIM
    return LAYERS * numbers * CACHED_BYTES


def checkpoint_config(kind: str) -> dict[str, Any]:
    """Make the config.json of a kind: of Llama, or of DeepSeek V3 without experts."""
    shared = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": feed_forward_size(kind),
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": [0, 1],
        "torch_dtype": "float32",
    }
    if kind != "MLA":
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_key_value_heads": KV_HEADS[kind],
            "head_dim": HEAD_DIM,
            **shared,
        }
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": HEADS,
        "q_lora_rank": None,
        "kv_lora_rank": LATENT,
        "qk_nope_head_dim": HEAD_DIM,
        "qk_rope_head_dim": ROTATED,
        "v_head_dim": HEAD_DIM,
        # no layer has experts; their sizes are needed all the same
        "first_k_dense_replace": LAYERS,
        "n_routed_experts": 1,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": HIDDEN,
        **shared,
    }
