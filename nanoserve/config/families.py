"""The table of families: the meaning of each model_type beyond its config.json. No torch here.

A family that is left as `Family()` is read as Llama is, but for its `mlp_bias`. Every entry says
how its family differs from Llama, part by part; where it is made by `replace`, how it differs from
the family that is named there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from nanoserve.config.canvases import diffusion_gemma_canvas, sdar_canvas
from nanoserve.config.config_fields import ConfigFields
from nanoserve.config.experts import (
    deepseek_v2_experts,
    deepseek_v3_experts,
    gemma4_experts,
    gpt_oss_experts,
    granite_experts,
    granite_hybrid_experts,
    jamba_experts,
    lfm2_experts,
    mixtral_experts,
    nemotron_experts,
    qwen3_5_experts,
    qwen3_experts,
    qwen3_next_experts,
)
from nanoserve.config.layer_blocks import StoredLayer, nemotron_layers
from nanoserve.config.model_parts import (
    AttentionConfig,
    CanvasConfig,
    FeedForwardConfig,
    MoeConfig,
    NormConfig,
    RecurrentConfig,
)
from nanoserve.config.recurrent_layers import (
    gated_delta_net,
    granite_hybrid_layers,
    jamba_layers,
    lfm2_recurrent,
    mamba2_layers,
    mamba_layers,
    nemotron_mixers,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRules:
    """Rules for reading which layers have a sliding window."""

    layers: Literal["none", "all", "listed"] = "none"
    """Layers with a window: none, all, or the layers that layer_types lists."""
    are_switched: bool = False
    """Whether windows are used only if use_sliding_window is true."""
    unlisted: Literal["periodic", "upper", "unrotated"] = "periodic"
    """Layers with a window where layer_types is missing: all but every `full_every`th (periodic),
    the layers from max_window_layers on (upper), or the layers that do not rotate (unrotated)."""
    full_every: int = 0
    """The period of layers without a window; 0: every layer has one."""
    last_layer_is_full: bool = False
    """Whether the last layer never has a window unless layer_types says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeRules:
    """Rules for reading the rotary position embedding."""

    parameters: dict[str, Any] = field(default_factory=dict)
    """The rope_parameters of a checkpoint that has none. A checkpoint that has some takes nothing
    from here."""
    differ: bool = False
    """Whether layers with a window and those without have their own rope."""
    interleaved: bool = False
    """Whether neighbouring dimensions rotate together (RopeConfig.interleaved)."""
    rotary_share: float | None = None
    """The share of a head that rotates where partial_rotary_factor is missing; None: whole heads,
    whatever it says."""
    unrotated: Literal["none", "full", "listed", "all", "unless_rope"] = "none"
    """Layers that do not rotate: none, the layers without a window (full), a layer where
    no_rope_layers has a 0 (listed), all, or all unless position_embedding_type is rope."""
    grows_queries: bool = False
    """Whether llama_4_scaling_beta makes queries grow with their position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Rules for reading the config.json of a model_type."""

    defaults: dict[str, Any] = field(default_factory=dict)
    """Values that Hugging Face assumes for keys which a checkpoint may leave out."""

    # The parts that all its models have, before config.json adds to them.
    attention: AttentionConfig = AttentionConfig()
    norms: NormConfig = NormConfig()
    feed_forward: FeedForwardConfig = FeedForwardConfig()

    # What is read of config.json, and how.
    windows: WindowRules = WindowRules()
    rope: RopeRules = RopeRules()
    experts: Callable[[ConfigFields, int], MoeConfig | None] | None = None
    """Reads its mixture of experts, given the number of layers; None if there is none."""
    recurrent: Callable[[ConfigFields, int], RecurrentConfig] | None = None
    """Reads its layers with a state, given the number of layers."""
    blocks: Callable[[ConfigFields], list[StoredLayer]] | None = None
    """Reads its layers, if a checkpoint stores their parts in blocks of their own."""
    attends: bool = True
    """Whether it has attention. Without, all layers have a state, and none has a feed-forward
    part."""
    canvas: Callable[[ConfigFields, ConfigFields], CanvasConfig] | None = None
    """Reads the blocks that it writes as a whole, if it does, of config.json and
    generation_config.json."""
    attention_bias: Literal["none", "qkv", "all"] = "all"
    """Matrices of attention that have a bias if the key attention_bias is true."""
    is_latent: bool = False
    """Whether attention is over latents (MlaConfig)."""
    caps_attention_scores: bool = False
    """Whether attn_logit_softcapping bounds the scores of attention."""
    has_layer_shapes: bool = False
    """Whether layers without a window have heads of their own, and the last layers share keys and
    values (Gemma 4)."""
    norm_eps_key: str = "rms_norm_eps"
    scales_embedding: bool = False
    """Whether embedded tokens are multiplied by the root of hidden_size."""
    has_multipliers: bool = False
    """Whether embeddings, the scores of attention, what a part of a layer adds, and logits have
    factors of their own (Granite)."""
    intermediate_size_key: str = "intermediate_size"
    """The key of the inner size of feed-forward parts without experts."""
    has_mlp_bias: bool = False
    """Whether its mlp_bias is read."""
    adjusts_inner_size: bool = False
    """Whether block_auto_adjust_ff_dim makes another feed-forward size of intermediate_size."""
    older_keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of older checkpoints, which count before those that they stand for."""


_GLM = Family(
    defaults={
        "rms_norm_eps": 1.5625e-7,
        "max_position_embeddings": 131072,
        "head_dim": 128,
        "attention_bias": True,
        "num_key_value_heads": 2,
    },
    attention_bias="qkv",
    rope=RopeRules(interleaved=True, rotary_share=0.5),
)

_MISTRAL = Family(
    defaults={"max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8},
    attention_bias="none",
    windows=WindowRules(layers="all"),
)
_MINISTRAL3 = Family(
    defaults={
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "num_key_value_heads": 8,
    },
    attention_bias="none",
    windows=WindowRules(layers="all"),
    rope=RopeRules(
        parameters={
            "type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "rope_theta": 1e6,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        grows_queries=True,
    ),
)
_MIXTRAL = Family(
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "num_key_value_heads": 8,
    },
    attention_bias="none",
    windows=WindowRules(layers="all"),
    experts=mixtral_experts,
)

_QWEN2 = Family(
    defaults={"max_position_embeddings": 32768, "sliding_window": 4096, "num_key_value_heads": 32},
    attention=AttentionConfig(qkv_bias=True),
    attention_bias="none",
    windows=WindowRules(layers="listed", are_switched=True, unlisted="upper"),
)
_QWEN3 = Family(
    defaults={**_QWEN2.defaults, "head_dim": 128},
    attention=AttentionConfig(qk_norm=True),
    windows=_QWEN2.windows,
)
_SDAR = replace(_QWEN3, canvas=sdar_canvas)
_QWEN3_MOE = Family(
    defaults={**_QWEN2.defaults, "moe_intermediate_size": 768, "num_key_value_heads": 4},
    attention=AttentionConfig(qk_norm=True),
    windows=WindowRules(layers="all", are_switched=True),
    experts=qwen3_experts,
)

_QWEN3_5 = Family(
    defaults={
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    attention=AttentionConfig(qk_norm=True, output_gate=True),
    norms=NormConfig(kind="rms_plus_one"),
    rope=RopeRules(rotary_share=0.25),
    recurrent=gated_delta_net,
)
"""The rope of images (mrope_section) turns text as the usual one does: all three of its positions
are the token's."""
_QWEN3_NEXT = replace(
    _QWEN3_5,
    defaults={
        **_QWEN3_5.defaults,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
    },
    experts=qwen3_next_experts,
)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    defaults={
        **_QWEN3_NEXT.defaults,
        "intermediate_size": 512,  # of layers without experts, which it has not
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    experts=qwen3_5_experts,
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
    attention=AttentionConfig(sinks=True),
    windows=WindowRules(layers="listed", full_every=2),
    rope=RopeRules(
        parameters={
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        }
    ),
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
    is_latent=True,
    rope=RopeRules(interleaved=True),
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
    norms=NormConfig(kind="rms_plus_one", places="around"),
    feed_forward=FeedForwardConfig(activation="gelu_tanh"),
    windows=WindowRules(layers="listed", full_every=2),
    caps_attention_scores=True,
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
    attention=AttentionConfig(qk_norm=True),
    windows=WindowRules(layers="listed", full_every=6),
    rope=RopeRules(differ=True),
    caps_attention_scores=False,
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
    attention=AttentionConfig(qk_norm=True, value_norm=True, scale=1.0),
    norms=NormConfig(kind="rms_exact", places="around", layer_scale=True),
    windows=WindowRules(layers="listed", full_every=6, last_layer_is_full=True),
    rope=RopeRules(
        parameters={
            "sliding_attention": {"rope_theta": 1e4},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            },
        },
        differ=True,
    ),
    experts=gemma4_experts,
    has_layer_shapes=True,
)
_DIFFUSION_GEMMA = replace(
    _GEMMA4,
    defaults={
        **_GEMMA4.defaults,
        "enable_moe_block": True,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
    },
    canvas=diffusion_gemma_canvas,
)

_OLMO3 = Family(
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "sliding_window": 4096,
        "rope_theta": 5e5,
    },
    attention=AttentionConfig(qk_norm=True, qk_norm_spans_heads=True),
    norms=NormConfig(places="after"),
    windows=WindowRules(layers="listed", full_every=4),
    rope=RopeRules(differ=True),
)
_SMOLLM3 = Family(
    defaults={
        "max_position_embeddings": 32768,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
        "num_key_value_heads": 4,
    },
    windows=WindowRules(layers="listed", are_switched=True, unlisted="unrotated"),
    rope=RopeRules(unrotated="listed"),
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
    norms=NormConfig(kind="layer", places="shared"),
    windows=WindowRules(layers="listed", full_every=4),
    rope=RopeRules(interleaved=True, unrotated="full"),
    norm_eps_key="layer_norm_eps",
)

_LFM2 = Family(
    defaults={
        "norm_eps": 1e-5,
        "max_position_embeddings": 128000,
        "num_key_value_heads": 8,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "conv_L_cache": 3,
        "block_ffn_dim_multiplier": 1.0,
    },
    attention=AttentionConfig(qk_norm=True),
    attention_bias="none",
    recurrent=lfm2_recurrent,
    norm_eps_key="norm_eps",
    adjusts_inner_size=True,
    older_keys={"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"},
)
"""Short convolutions between two gates, and attention in some layers."""
_LFM2_MOE = replace(
    _LFM2,
    experts=lfm2_experts,
    adjusts_inner_size=False,
    older_keys={"tie_embedding": "tie_word_embeddings"},
)

_MAMBA = Family(
    defaults={
        "state_size": 16,
        "expand": 2,
        "conv_kernel": 4,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 1048576,
        "tie_word_embeddings": True,
    },
    recurrent=mamba_layers,
    attends=False,
    norm_eps_key="layer_norm_epsilon",
)
"""Nothing in such a model knows a position, and its state is of one size, so it names no longest
sequence. The number is llama.cpp's."""
_MAMBA2 = replace(
    _MAMBA,
    defaults={
        **_MAMBA.defaults,
        "num_heads": 128,
        "head_dim": 64,
        "n_groups": 8,
        "state_size": 128,
        "tie_word_embeddings": False,
    },
    recurrent=mamba2_layers,
)

_NEMOTRON_H = Family(
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "mlp_hidden_act": "relu2",
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "conv_kernel": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "layer_norm_epsilon": 1e-5,
    },
    feed_forward=FeedForwardConfig(activation="relu2", is_gated=False),
    rope=RopeRules(unrotated="full"),
    recurrent=nemotron_mixers,
    experts=nemotron_experts,
    blocks=nemotron_layers,
    attention_bias="none",
    norm_eps_key="layer_norm_epsilon",
    has_mlp_bias=True,
    older_keys={"attention_head_dim": "head_dim", "rms_norm_eps": "layer_norm_epsilon"},
)
"""Each block of a checkpoint is one part of a layer. Attention does not rotate."""
_JAMBA = Family(
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    attention_bias="none",
    rope=RopeRules(unrotated="all"),
    experts=jamba_experts,
    recurrent=jamba_layers,
    older_keys={"layers_block_type": "layer_types"},
)
_GRANITE = Family(
    defaults={"max_position_embeddings": 2048},
    has_multipliers=True,
    has_mlp_bias=True,
)
_GRANITE_MOE = replace(_GRANITE, experts=granite_experts, has_mlp_bias=False)
_GRANITE_HYBRID = replace(
    _GRANITE_MOE,
    defaults={
        **_GRANITE.defaults,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    rope=RopeRules(unrotated="unless_rope"),
    experts=granite_hybrid_experts,
    recurrent=granite_hybrid_layers,
    intermediate_size_key="shared_intermediate_size",
    older_keys={"layers_block_type": "layer_types"},
)

FAMILIES: Mapping[str, Family] = {
    "llama": Family(defaults={"max_position_embeddings": 2048}, has_mlp_bias=True),
    "mistral": _MISTRAL,
    "ministral": replace(_MISTRAL, windows=WindowRules(layers="listed")),
    "ministral3": _MINISTRAL3,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "glm": _GLM,
    "glm4": replace(_GLM, norms=NormConfig(places="around")),
    "mixtral": _MIXTRAL,
    "qwen3_moe": _QWEN3_MOE,
    "sdar": _SDAR,
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "gpt_oss": _GPT_OSS,
    "deepseek_v2": _DEEPSEEK2,
    "deepseek_v3": _DEEPSEEK3,
    "glm4_moe_lite": _GLM4_LITE,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "gemma4_text": _GEMMA4,
    "diffusion_gemma_text": _DIFFUSION_GEMMA,
    "olmo3": _OLMO3,
    "smollm3": _SMOLLM3,
    "cohere2": _COHERE2,
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2_MOE,
    "mamba": _MAMBA,
    "mamba2": _MAMBA2,
    "nemotron_h": _NEMOTRON_H,
    "jamba": _JAMBA,
    "granite": _GRANITE,
    "granitemoe": _GRANITE_MOE,
    "granitemoehybrid": _GRANITE_HYBRID,
}
"""Each model_type's family."""
