"""The table of families: the meaning of each model_type beyond its config.json. No torch here.

A family that is left as `Family()` is read as Llama is, but for its `mlp_bias`. Every row says how its family differs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from nanoserve.config.config_fields import ConfigFields
from nanoserve.config.experts import (
    deepseek_v2_experts,
    deepseek_v3_experts,
    gpt_oss_experts,
    mixtral_experts,
    qwen3_experts,
)
from nanoserve.config.model_config import MoeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Rules for reading the config.json of a model_type."""

    defaults: dict[str, Any] = field(default_factory=dict)
    """Values that Hugging Face assumes for keys which a checkpoint may leave out."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of ModelConfig that all its models have."""

    # Attention
    biased: tuple[str, ...] = ("qkv_bias", "output_bias")
    """The fields that its attention_bias sets."""
    latent: bool = False
    """Whether attention is over latents (MlaConfig)."""
    caps_attention_scores: bool = False
    """Whether attn_logit_softcapping bounds the scores of attention."""
    has_layer_shapes: bool = False
    """Whether layers without a window have heads of their own, and the last layers share keys and values (Gemma 4)."""

    # Windows
    windows: Literal["none", "all", "listed"] = "none"
    """Layers with a window: none, all, or the layers that layer_types lists."""
    windows_are_switched: bool = False
    """Whether windows are used only if use_sliding_window is true."""
    unlisted_windows: Literal["periodic", "upper", "unrotated"] = "periodic"
    """Layers with a window where layer_types is missing: all but every `full_every`th (periodic), the layers from
    max_window_layers on (upper), or the layers that do not rotate (unrotated)."""
    full_every: int = 0
    """The period of layers without a window; 0: every layer has one."""
    last_layer_is_full: bool = False
    """Whether the last layer never has a window unless layer_types says so."""

    # Rotary position embedding
    rope: dict[str, Any] = field(default_factory=dict)
    """The rope_parameters of a checkpoint that has none. A checkpoint that has some takes nothing from here."""
    ropes_differ: bool = False
    """Whether layers with a window and those without have their own rope."""
    interleaved: bool = False
    """Whether neighbouring dimensions rotate together (RopeConfig.interleaved)."""
    rotary_share: float | None = None
    """The share of a head that rotates where partial_rotary_factor is missing; None: whole heads, whatever it says."""
    unrotated: Literal["none", "full", "listed"] = "none"
    """Layers that do not rotate: none, the layers without a window (full), or a layer where no_rope_layers has a 0."""
    grows_queries: bool = False
    """Whether llama_4_scaling_beta makes queries grow with their position."""

    # Norms, embedding, feed-forward part
    norm_eps_key: str = "rms_norm_eps"
    scales_embedding: bool = False
    """Whether embedded tokens are multiplied by the root of hidden_size."""
    has_mlp_bias: bool = False
    """Whether its mlp_bias is read."""
    experts: Callable[[ConfigFields, int], MoeConfig] | None = None
    """Reads its mixture of experts, given the number of layers."""


_GLM = Family(
    defaults={
        "rms_norm_eps": 1.5625e-7,
        "max_position_embeddings": 131072,
        "head_dim": 128,
        "attention_bias": True,
        "num_key_value_heads": 2,
    },
    biased=("qkv_bias",),
    interleaved=True,
    rotary_share=0.5,
)

_MISTRAL = Family(
    defaults={"max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8},
    biased=(),
    windows="all",
)
_MINISTRAL3 = Family(
    defaults={
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "num_key_value_heads": 8,
    },
    rope={
        "type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "rope_theta": 1e6,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
    biased=(),
    windows="all",
    grows_queries=True,
)
_MIXTRAL = Family(
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "num_key_value_heads": 8,
    },
    biased=(),
    windows="all",
    experts=mixtral_experts,
)

_QWEN2 = Family(
    defaults={"max_position_embeddings": 32768, "sliding_window": 4096, "num_key_value_heads": 32},
    fields={"qkv_bias": True},
    biased=(),
    windows="listed",
    windows_are_switched=True,
    unlisted_windows="upper",
)
_QWEN3 = Family(
    defaults={**_QWEN2.defaults, "head_dim": 128},
    fields={"qk_norm": True},
    windows="listed",
    windows_are_switched=True,
    unlisted_windows="upper",
)
_QWEN3_MOE = Family(
    defaults={**_QWEN2.defaults, "moe_intermediate_size": 768, "num_key_value_heads": 4},
    fields={"qk_norm": True},
    windows="all",
    windows_are_switched=True,
    experts=qwen3_experts,
)

_GPT_OSS = Family(
    defaults={
        "rms_norm_eps": 1e-5,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "sliding_window": 128,
        "num_key_value_heads": 8,
        "attention_bias": True,
        "rope_theta": 150000.0,
    },
    rope={"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
    fields={"attention_sinks": True},
    windows="listed",
    full_every=2,
    experts=gpt_oss_experts,
)

_DEEPSEEK2 = Family(
    defaults={
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "max_position_embeddings": 2048,
    },
    interleaved=True,
    latent=True,
    experts=deepseek_v2_experts,
)
"""Latent attention, and experts in groups beside shared ones."""
_DEEPSEEK3 = replace(
    _DEEPSEEK2,
    defaults={
        **_DEEPSEEK2.defaults,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 4096,
    },
    experts=deepseek_v3_experts,
)
_GLM4_LITE = replace(
    _DEEPSEEK2,
    defaults={
        **_DEEPSEEK2.defaults,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.8,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
    },
    experts=deepseek_v3_experts,
)

_GEMMA2 = Family(
    defaults={
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    fields={"norm": "rms_plus_one", "norms": "around", "activation": "gelu_tanh"},
    caps_attention_scores=True,
    windows="listed",
    full_every=2,
    scales_embedding=True,
)
_GEMMA3 = replace(
    _GEMMA2,
    defaults={
        **_GEMMA2.defaults,
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "max_position_embeddings": 131072,
        "final_logit_softcapping": 0.0,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    fields={**_GEMMA2.fields, "qk_norm": True},
    caps_attention_scores=False,
    full_every=6,
    ropes_differ=True,
)
_GEMMA4 = replace(
    _GEMMA3,
    defaults={
        **_GEMMA3.defaults,
        "vocab_size": 262144,
        "sliding_window": 512,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 256,
    },
    rope={
        "sliding_attention": {"rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
    fields={
        **_GEMMA3.fields,
        "norm": "rms_exact",
        "value_norm": True,
        "layer_scale": True,
        "attention_scale": 1.0,
    },
    has_layer_shapes=True,
    last_layer_is_full=True,
)

_OLMO3 = Family(
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "sliding_window": 4096,
        "rope_theta": 5e5,
    },
    fields={"norms": "after", "qk_norm": True, "qk_norm_spans_heads": True},
    windows="listed",
    full_every=4,
    ropes_differ=True,
)
_SMOLLM3 = Family(
    defaults={
        "max_position_embeddings": 32768,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
        "num_key_value_heads": 4,
    },
    windows="listed",
    windows_are_switched=True,
    unlisted_windows="unrotated",
    unrotated="listed",
    has_mlp_bias=True,
)
_COHERE2 = Family(
    defaults={
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "logit_scale": 0.0625,
        "tie_word_embeddings": True,
        "layer_norm_eps": 1e-5,
    },
    fields={"norm": "layer", "norms": "shared"},
    windows="listed",
    full_every=4,
    interleaved=True,
    unrotated="full",
    norm_eps_key="layer_norm_eps",
)

FAMILIES: Mapping[str, Family] = {
    "llama": Family(defaults={"max_position_embeddings": 2048}, has_mlp_bias=True),
    "mistral": _MISTRAL,
    "ministral": replace(_MISTRAL, windows="listed"),
    "ministral3": _MINISTRAL3,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "glm": _GLM,
    "glm4": replace(_GLM, fields={"norms": "around"}),
    "mixtral": _MIXTRAL,
    "qwen3_moe": _QWEN3_MOE,
    "gpt_oss": _GPT_OSS,
    "deepseek_v2": _DEEPSEEK2,
    "deepseek_v3": _DEEPSEEK3,
    "glm4_moe_lite": _GLM4_LITE,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "gemma4_text": _GEMMA4,
    "olmo3": _OLMO3,
    "smollm3": _SMOLLM3,
    "cohere2": _COHERE2,
}
"""Each model_type's family."""
