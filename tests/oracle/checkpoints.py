"""Small random Hugging Face checkpoints of every family, for tests of the model and of the engine.

`make_checkpoint("qwen3", tmp_path)` writes one; `FAMILIES` names them all, variants of rope and
windows included. Weights are drawn wider than at initialization, so that attention, norms and
biases all leave their mark on the logits.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 160
WEIGHT_STANDARD_DEVIATION = 0.15

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


_GROWING = {
    **_YARN,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
_LFM2 = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "hidden_size": 72,
}
_LFM2_MOE = {
    **_LFM2,
    "num_dense_layers": 1,
    "moe_intermediate_size": 40,
    "num_experts": 6,
    "num_experts_per_tok": 3,
}
_DELTA_NET = {
    "num_hidden_layers": 5,
    "head_dim": 24,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    # The norm of a head's output makes noise of an output that is almost zero, if it is less.
    "rms_norm_eps": 1e-2,
}
_SHARED_EXPERT = {
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 3,
}
_NEMOTRON_H = {
    "layers_block_type": [
        "linear_attention",
        "mlp",
        "linear_attention",
        "full_attention",
        "mlp",
        "linear_attention",
    ],
    "head_dim": 24,
    "intermediate_size": 56,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 4,
    "ssm_state_size": 20,
    "layer_norm_epsilon": 1e-2,
    "time_step_min": 1e-9,  # transformers bounds steps of prompts by it
}
_MAMBA = {"num_hidden_layers": 4, "hidden_size": 72}
_MAMBA2 = {
    "num_hidden_layers": 4,
    "hidden_size": 60,
    "num_heads": 12,
    "head_dim": 10,
    "n_groups": 4,
    "state_size": 13,
}
_JAMBA = {
    "num_hidden_layers": 5,
    "hidden_size": 56,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "expert_layer_offset": 0,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "mamba_d_state": 10,
    "mamba_dt_rank": 5,
    # The norms of short vectors make noise of those that are almost zero, if it is less.
    "rms_norm_eps": 1e-2,
}
_MULTIPLIERS = {
    "embedding_multiplier": 0.6,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "logits_scaling": 1.5,
}
_GRANITE_HYBRID = {
    **_MULTIPLIERS,
    "num_hidden_layers": 4,
    "hidden_size": 72,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "intermediate_size": 40,
    "shared_intermediate_size": 24,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "mamba_n_heads": 8,
    "mamba_d_state": 10,
    "mamba_chunk_size": 32,
    "rms_norm_eps": 1e-2,
}
_GEMMA = {
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
_GEMMA4_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 3,
    "moe_intermediate_size": 40,
}


def _config(model_type: str, **settings: Any) -> PreTrainedConfig:
    return transformers.AutoConfig.for_model(model_type, **{**_SHAPE, **settings})


def _mamba(model_type: str, **settings: Any) -> PreTrainedConfig:
    """A config of Mamba, which knows nothing of heads and positions."""
    sizes = {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"}
    shape = {key: value for key, value in _SHAPE.items() if key in sizes}
    return transformers.AutoConfig.for_model(model_type, **{**shape, **settings})


def _llama(**settings: Any) -> PreTrainedConfig:
    return _config("llama", **settings)


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: _llama(),
    "llama-tied-biased": lambda: _llama(
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        head_dim=32,
        num_key_value_heads=4,
    ),
    "llama-linear": lambda: _llama(
        rope_parameters={"rope_type": "linear", "rope_theta": 20000.0, "factor": 3.0}
    ),
    "llama-llama3": lambda: _llama(rope_parameters=_LLAMA3, tie_word_embeddings=True),
    "llama-yarn": lambda: _llama(rope_parameters=_YARN),
    "llama-yarn-mscale": lambda: _llama(
        rope_parameters={
            **_YARN,
            "mscale": 1.5,
            "mscale_all_dim": 0.5,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "truncate": False,
        }
    ),
    "mistral": lambda: _config("mistral", sliding_window=24),
    "mistral-no-window": lambda: _config("mistral", sliding_window=None, head_dim=24),
    "qwen2": lambda: _config("qwen2", tie_word_embeddings=True),
    "qwen2-window": lambda: _config(
        "qwen2", use_sliding_window=True, sliding_window=20, max_window_layers=1
    ),
    "qwen3": lambda: _config("qwen3", head_dim=32, tie_word_embeddings=True),
    "qwen3-layer-types": lambda: _config(
        "qwen3",
        head_dim=16,
        use_sliding_window=True,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "glm": lambda: _config("glm", head_dim=16, attention_bias=True),
    "glm4": lambda: _config("glm4", head_dim=16, attention_bias=False),
    "mixtral": lambda: _config(
        "mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=24
    ),
    "qwen3_moe": lambda: _config(
        "qwen3_moe",
        head_dim=16,
        moe_intermediate_size=40,
        num_experts=6,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "ministral": lambda: _config(
        "ministral",
        head_dim=16,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "ministral3": lambda: _config("ministral3", head_dim=16, rope_parameters=_GROWING),
    "gemma2": lambda: _config(
        "gemma2",
        **_GEMMA | {"layer_types": None},
        attn_logit_softcapping=3.0,
        final_logit_softcapping=5.0,
    ),
    "gemma2-uncapped": lambda: _config(
        "gemma2",
        **_GEMMA,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        attention_bias=True,
    ),
    "gemma3_text": lambda: _config("gemma3_text", **_GEMMA),
    "gemma3_text-scaled": lambda: _config(
        "gemma3_text",
        **_GEMMA
        | {
            "final_logit_softcapping": 8.0,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "tie_word_embeddings": False,
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
            },
        },
    ),
    # Both kinds of layers before those that share their keys and values.
    "gemma4_text": lambda: _config(
        "gemma4_text", **_GEMMA4, num_kv_shared_layers=3, use_double_wide_mlp=True
    ),
    "gemma4_text-equal": lambda: _config(
        "gemma4_text",
        **_GEMMA4 | {"hidden_size_per_layer_input": 0},
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        final_logit_softcapping=5.0,
        use_bidirectional_attention="vision",
    ),
    "gemma4_text-moe": lambda: _config(
        "gemma4_text",
        **_GEMMA4
        | {
            "num_hidden_layers": 3,
            "layer_types": _GEMMA4["layer_types"][:3],
            "hidden_size_per_layer_input": 0,
        },
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        **_GEMMA4_EXPERTS,
    ),
    "olmo3": lambda: _config(
        "olmo3",
        sliding_window=20,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": _YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "smollm3": lambda: _config(
        "smollm3", no_rope_layers=[1, 0, 1], attention_bias=True, mlp_bias=True
    ),
    "smollm3-window": lambda: _config(
        "smollm3",
        use_sliding_window=True,
        sliding_window=20,
        no_rope_layer_interval=2,
        tie_word_embeddings=False,
    ),
    "cohere2": lambda: _config(
        "cohere2",
        sliding_window=20,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        logit_scale=1.0,
    ),
    "cohere2-biased": lambda: _config(
        "cohere2", sliding_window=24, layer_norm_eps=0.01, attention_bias=True, logit_scale=0.5
    ),
    "gpt_oss": lambda: _config(
        "gpt_oss",
        head_dim=32,
        num_local_experts=6,
        num_experts_per_tok=3,
        sliding_window=20,
        rope_parameters={**_YARN, "truncate": False},
    ),
    "deepseek_v2": lambda: _config(
        "deepseek_v2",
        **_LATENT
        | {"num_key_value_heads": 4, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
        n_group=3,
        topk_group=2,
        attention_bias=True,  # queries have none, as they are made of the hidden state itself
        rope_parameters={**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "deepseek_v2-greedy": lambda: _config(
        "deepseek_v2",
        **_LATENT,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
        rms_norm_eps=0.01,
    ),
    "deepseek_v3": lambda: _config(
        "deepseek_v3",
        **_LATENT,
        n_group=3,
        topk_group=2,
        first_k_dense_replace=1,
        rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    ),
    "deepseek_v3-halves": lambda: _config(
        "deepseek_v3",
        **_LATENT | {"q_lora_rank": None},
        n_group=1,
        topk_group=1,
        first_k_dense_replace=2,
        norm_topk_prob=False,
        rope_interleave=False,
    ),
    "glm4_moe_lite": lambda: _config("glm4_moe_lite", **_LATENT, attention_bias=True),
    "lfm2": lambda: _config(
        "lfm2", **_LFM2, intermediate_size=150, block_multiple_of=24, block_ffn_dim_multiplier=1.3
    ),
    "lfm2-biased": lambda: _config(
        "lfm2",
        **_LFM2 | {"layer_types": None, "hidden_size": 64},
        full_attn_idxs=[0, 2],
        conv_bias=True,
        conv_L_cache=5,
        block_auto_adjust_ff_dim=False,
        tie_word_embeddings=False,
        norm_eps=0.01,
    ),
    "lfm2_moe": lambda: _config("lfm2_moe", **_LFM2_MOE),
    "lfm2_moe-uncorrected": lambda: _config(
        "lfm2_moe",
        **_LFM2_MOE | {"num_dense_layers": 3},
        use_expert_bias=False,
        norm_topk_prob=False,
        routed_scaling_factor=1.5,
        conv_bias=True,
    ),
    "qwen3_next": lambda: _config(
        "qwen3_next", **_DELTA_NET, **_SHARED_EXPERT, decoder_sparse_step=2
    ),
    "qwen3_next-biased": lambda: _config(
        "qwen3_next",
        **_DELTA_NET | {"linear_num_value_heads": 4},
        **_SHARED_EXPERT,
        full_attention_interval=2,
        linear_conv_kernel_dim=3,
        mlp_only_layers=[1, 2],
        norm_topk_prob=False,
        attention_bias=True,
        tie_word_embeddings=True,
        partial_rotary_factor=0.5,
    ),
    "qwen3_5_text": lambda: _config("qwen3_5_text", **_DELTA_NET),
    "qwen3_5_text-biased": lambda: _config(
        "qwen3_5_text",
        **_DELTA_NET | {"num_hidden_layers": 3, "rms_norm_eps": 0.01},
        layer_types=["full_attention", "linear_attention", "full_attention"],
        attention_bias=True,
        rope_parameters={**_YARN, "partial_rotary_factor": 0.5, "mrope_section": [2, 2, 2]},
    ),
    "qwen3_5_moe_text": lambda: _config(
        "qwen3_5_moe_text", **_DELTA_NET | {"num_hidden_layers": 4}, **_SHARED_EXPERT
    ),
    "mamba": lambda: _mamba("mamba", **_MAMBA, state_size=10, conv_kernel=3),
    "mamba-biased": lambda: _mamba(
        "mamba",
        **_MAMBA,
        time_step_rank=7,
        expand=3,
        use_bias=True,
        use_conv_bias=False,
        tie_word_embeddings=False,
        layer_norm_epsilon=0.01,
    ),
    "mamba2": lambda: _mamba("mamba2", **_MAMBA2),
    "mamba2-single-group": lambda: _mamba(
        "mamba2",
        **_MAMBA2 | {"n_groups": 1, "num_heads": 8, "head_dim": 15},
        conv_kernel=3,
        use_bias=True,
        use_conv_bias=False,
        tie_word_embeddings=True,
        time_step_limit=[0.3, 0.9],
        layer_norm_epsilon=0.01,
    ),
    "nemotron_h": lambda: _config("nemotron_h", **_NEMOTRON_H),
    "nemotron_h-experts": lambda: _config(
        "nemotron_h",
        **_NEMOTRON_H
        | {
            "layers_block_type": [
                *("linear_attention", "mlp", "linear_attention", "linear_attention"),
                *("moe", "full_attention", "moe"),
            ],
            "n_groups": 1,
        },
        n_routed_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        moe_shared_expert_intermediate_size=24,
        n_group=2,
        topk_group=1,
        routed_scaling_factor=1.5,
        use_bias=True,
        mlp_bias=True,
        use_conv_bias=False,
    ),
    "jamba": lambda: _config("jamba", **_JAMBA),
    "jamba-dense": lambda: _config(
        "jamba",
        **_JAMBA | {"num_experts": 1, "mamba_dt_rank": "auto"},
        mamba_d_conv=3,
        mamba_expand=3,
        mamba_conv_bias=False,
        mamba_proj_bias=True,
        tie_word_embeddings=True,
    ),
    "granitemoehybrid": lambda: _config("granitemoehybrid", **_GRANITE_HYBRID),
    "granitemoehybrid-dense": lambda: _config(
        "granitemoehybrid",
        **_GRANITE_HYBRID | {"num_local_experts": 0, "mamba_n_groups": 4},
        position_embedding_type="rope",
        mamba_d_conv=3,
        mamba_conv_bias=False,
        mamba_proj_bias=True,
        attention_bias=True,
        time_step_limit=(0.2, 0.9),
        tie_word_embeddings=True,
    ),
    "granite": lambda: _config("granite", **_MULTIPLIERS, attention_bias=True, mlp_bias=True),
    "granitemoe": lambda: _config(
        "granitemoe", **_MULTIPLIERS, num_local_experts=5, num_experts_per_tok=2
    ),
    "qwen3_moe-sparse-step": lambda: _config(
        "qwen3_moe",
        head_dim=16,
        moe_intermediate_size=40,
        num_experts=5,
        num_experts_per_tok=2,
        norm_topk_prob=False,
        decoder_sparse_step=2,
    ),
}


_SLOW = (
    "ministral",
    "ministral3",
    "gemma3_text-scaled",
    "olmo3",
    "smollm3",
    "smollm3-window",
    "cohere2",
)
_SLOW += (
    "cohere2-biased",
    "gemma2-uncapped",
    "deepseek_v2",
    "deepseek_v2-greedy",
    "deepseek_v3-halves",
)
_SLOW += ("glm4_moe_lite", "gemma4_text-equal", "qwen3_next-biased", "qwen3_5_text-biased")
_SLOW += ("nemotron_h", "jamba-dense", "granitemoehybrid-dense")


def families(*quick: str) -> list[Any]:
    """All of FAMILIES for a parametrized test; of the later ones, only the `quick` in the quick
    suite."""
    later = [name for name in _SLOW if name not in quick]
    return [
        pytest.param(name, marks=pytest.mark.slow) if name in later else name for name in FAMILIES
    ]


def make_checkpoint(
    family: str,
    directory: Path,
    *,
    shard_size: str = "5GB",
    seed: int = 0,
    num_layers: int | None = None,
) -> PreTrainedModel:
    """Write the family's checkpoint (float32) into the directory and return the model it was
    written from. A family whose layers are of a repeating kind may have another number of
    layers."""
    torch.manual_seed(seed)
    config = FAMILIES[family]()
    if num_layers is not None:
        config = type(config)(
            **config.to_dict() | {"num_hidden_layers": num_layers, "layer_types": None}
        )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model)
    model.save_pretrained(directory, max_shard_size=shard_size)
    return model


def randomize(model: PreTrainedModel) -> None:
    """Weights whose every number leaves its mark."""
    kept = ("correction_bias", "expert_bias", "layer_scalar")
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(kept))
    has_delta_net = model.config.get_text_config().model_type.startswith(("qwen3_next", "qwen3_5"))
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *buffers):
            centre = centre_of(name, has_delta_net=has_delta_net)
            parameter.normal_(centre, WEIGHT_STANDARD_DEVIATION)


def centre_of(name: str, *, has_delta_net: bool) -> float:
    """The mean of a random tensor: 1 for norms and scales. Models with Gated DeltaNet store all
    norms but its own less 1; they round too much if those are twice as large as usual."""
    if has_delta_net and not name.endswith("linear_attn.norm.weight"):
        return 0.0
    if "norm" in name or name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
        return 1.0
    return 0.0


_CHATGLM_NAMES = {
    "model.embed_tokens": "transformer.embedding.word_embeddings",
    "model.norm": "transformer.encoder.final_layernorm",
    "lm_head": "transformer.output_layer",
    "model.layers": "transformer.encoder.layers",
    "self_attn.o_proj": "self_attention.dense",
    "mlp.gate_up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}


def rename_glm_as_chatglm(source: Path, target: Path) -> None:
    """Rewrite a `glm` checkpoint under the names of the older `chatglm` releases."""
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    renamed = {}
    for name, tensor in tensors.items():
        if ".k_proj." in name or ".v_proj." in name:
            continue
        if ".q_proj." in name:
            parts = [
                tensors[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")
            ]
            name, tensor = (
                name.replace("self_attn.q_proj", "self_attention.query_key_value"),
                torch.cat(parts),
            )
        for old, new in _CHATGLM_NAMES.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    renamed["transformer.rotary_pos_emb.inv_freq"] = torch.zeros(4)
    target.mkdir(parents=True, exist_ok=True)
    save_file(renamed, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(_chatglm_config(config)))


def _chatglm_config(glm: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "chatglm",
        "architectures": ["ChatGLMModel"],
        "add_bias_linear": False,
        "add_qkv_bias": glm["attention_bias"],
        "ffn_hidden_size": glm["intermediate_size"],
        "hidden_size": glm["hidden_size"],
        "kv_channels": glm["head_dim"],
        "layernorm_epsilon": glm["rms_norm_eps"],
        "multi_query_attention": True,
        "multi_query_group_num": glm["num_key_value_heads"],
        "num_attention_heads": glm["num_attention_heads"],
        "num_layers": glm["num_hidden_layers"],
        "padded_vocab_size": glm["vocab_size"],
        "rmsnorm": True,
        "rope_ratio": glm["rope_parameters"]["rope_theta"] / 10000.0,
        "seq_length": glm["max_position_embeddings"],
        "eos_token_id": glm["eos_token_id"],
        "torch_dtype": "float32",
    }
