"""GGUF files of SmolLM3, Olmo 3, Cohere 2, Ministral 3, DeepSeek and GLM-4.7-Flash as llama.cpp's
converter writes them: keys, and the names and values of tensors."""

from collections.abc import Iterator
from typing import Any

import gguf
from torch import Tensor

ARCHITECTURES = {
    "smollm3": "smollm3",
    "olmo3": "olmo2",
    "cohere2": "cohere2",
    "ministral3": "mistral3",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
}
_PERMUTED = ("smollm3", "ministral3")
_GATING = {"deepseek_v2": 1, "deepseek_v3": 2}
"""GLM-4.7-Flash does not say how its router scores."""
_AROUND = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}


def add_layers(writer: gguf.GGUFWriter, config: Any) -> None:
    """Add the keys behind those that all architectures have."""
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    is_latent = hasattr(config, "kv_lora_rank")
    writer.add_head_count_kv(1 if is_latent else config.num_key_value_heads)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    _add_rope(writer, rope)
    if "sliding_attention" in config.rope_parameters:
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if config.model_type == "cohere2":
        writer.add_layer_norm_eps(config.layer_norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if is_latent:
        _add_latents(writer, config)
        return
    if config.model_type != "olmo3":
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    if config.model_type in ("olmo3", "cohere2"):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "olmo3":
        writer.add_sliding_window_pattern(
            [kind == "sliding_attention" for kind in config.layer_types]
        )
    if config.model_type == "cohere2":
        writer.add_logit_scale(config.logit_scale)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if config.model_type == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _add_rope(writer: gguf.GGUFWriter, rope: dict[str, Any]) -> None:
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] != "yarn":
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "attention_factor" in rope:
        writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])


def _add_latents(writer: gguf.GGUFWriter, config: Any) -> None:
    """Add the sizes of latent attention, which llama.cpp computes as if there were one key-value
    head, and those of experts."""
    writer.add_vocab_size(config.vocab_size)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if "mscale_all_dim" in config.rope_parameters:
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])
    num_dense = getattr(config, "first_k_dense_replace", None)
    if num_dense is None:
        num_dense = config.mlp_layer_types.count("dense")
    writer.add_leading_dense_block_count(num_dense)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_group_count(config.n_group or 1)
    writer.add_expert_group_used_count(config.topk_group or 1)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.model_type in _GATING:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType(_GATING[config.model_type]))
    if config.norm_topk_prob and config.model_type != "deepseek_v2":
        writer.add_expert_weights_norm(True)


def stored_tensors(name: str, parameter: Tensor, config: Any) -> Iterator[tuple[str, Tensor, int]]:
    """The tensors that a parameter makes: their names, their values, which are views of it, and how
    many heads their rows have, if the halves of each are stored in turn."""
    stem, _, ending = name.rpartition(".")
    if not name.startswith("model.layers."):
        yield f"{_AROUND[stem]}.{ending}", parameter, 0
        return
    _, _, layer, rest = name.split(".", 3)
    prefix = f"blk.{layer}."
    stem = rest.removesuffix(f".{ending}")
    if rest == "self_attn.kv_b_proj.weight":
        heads = parameter.view(config.num_attention_heads, -1, config.kv_lora_rank)
        keys, values = heads.split((config.qk_nope_head_dim, config.v_head_dim), dim=1)
        yield f"{prefix}attn_k_b.weight", keys.transpose(1, 2), 0
        yield f"{prefix}attn_v_b.weight", values, 0
    elif rest == "mlp.experts.gate_up_proj":
        gate, up = parameter.chunk(2, dim=1)
        yield f"{prefix}ffn_gate_exps.weight", gate, 0
        yield f"{prefix}ffn_up_exps.weight", up, 0
    elif rest == "mlp.experts.down_proj":
        yield f"{prefix}ffn_down_exps.weight", parameter, 0
    elif rest == "mlp.gate.e_score_correction_bias":
        yield f"{prefix}exp_probs_b.bias", parameter, 0
    elif rest == "post_attention_layernorm.weight" and config.model_type == "olmo3":
        yield f"{prefix}post_attention_norm.weight", parameter, 0
    else:
        heads = 0
        if config.model_type in _PERMUTED and stem == "self_attn.q_proj":
            heads = config.num_attention_heads
        elif config.model_type in _PERMUTED and stem == "self_attn.k_proj":
            heads = config.num_key_value_heads
        yield f"{prefix}{_IN_LAYER[stem]}.{ending}", parameter, heads
