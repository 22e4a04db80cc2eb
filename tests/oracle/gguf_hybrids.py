"""What llama.cpp's converter writes to GGUF files of Jamba and Granite: keys, and the names and
values of tensors."""

from collections.abc import Iterator
from typing import Any

import gguf
from torch import Tensor

ARCHITECTURES = {
    "jamba": "jamba",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "granitemoehybrid": "granitehybrid",
}
_AROUND = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.final_layernorm": "output_norm",
    "lm_head": "output",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_ff_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
    "feed_forward.router": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.x_proj": "ssm_x",
    "mamba.dt_proj": "ssm_dt",
    "mamba.dt_layernorm": "ssm_dt_norm",
    "mamba.b_layernorm": "ssm_b_norm",
    "mamba.c_layernorm": "ssm_c_norm",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
}
_WITHOUT_ENDING = {"mamba.A_log": "ssm_a", "mamba.D": "ssm_d", "mamba.dt_bias": "ssm_dt.bias"}


def add_hybrid(writer: gguf.GGUFWriter, config: Any) -> None:
    """Add the keys behind those that all architectures have."""
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    experts = getattr(config, "num_experts", getattr(config, "num_local_experts", None))
    if experts is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type in ("jamba", "granitemoehybrid"):
        attending = [kind == "full_attention" for kind in config.layer_types]
        writer.add_head_count_kv([config.num_key_value_heads * attends for attends in attending])
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
    if config.model_type == "jamba":
        writer.add_ssm_time_step_rank(config.mamba_dt_rank)
        return
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    if config.model_type == "granitemoehybrid":
        writer.add_ssm_time_step_rank(config.mamba_n_heads)
        writer.add_ssm_group_count(config.mamba_n_groups)
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")


def stored_tensors(name: str, parameter: Tensor, config: Any) -> Iterator[tuple[str, Tensor, int]]:
    """The tensors that a parameter makes: their names, their values, which are views of it where
    they may be quantized, and how many heads their rows have, if the halves of each are stored in
    turn. Experts are one tensor; gate and up are two."""
    stem, _, ending = name.rpartition(".")
    if not name.startswith("model.layers."):
        yield f"{_AROUND[stem]}.{ending}", parameter, 0
        return
    _, _, layer, rest = name.split(".", 3)
    prefix = f"blk.{layer}."
    if rest in _WITHOUT_ENDING:
        values = parameter
        if rest.endswith("A_log"):
            values = -parameter.exp()
        if config.model_type != "jamba" and not rest.endswith("dt_bias"):
            values = values[:, None]
        yield prefix + _WITHOUT_ENDING[rest], values, 0
        return
    kind = "_exps"
    if "shared_mlp" in rest:
        kind = "_shexp" if config.num_local_experts else ""
    if rest.endswith(("experts.gate_up_proj", "shared_mlp.input_linear.weight")):
        gate, up = parameter.chunk(2, dim=-2)
        yield f"{prefix}ffn_gate{kind}.weight", gate, 0
        yield f"{prefix}ffn_up{kind}.weight", up, 0
        return
    if rest.endswith(("experts.down_proj", "shared_mlp.output_linear.weight")):
        yield f"{prefix}ffn_down{kind}.weight", parameter, 0
        return
    stem = rest.removesuffix(f".{ending}")
    values, heads = parameter, 0
    if stem == "mamba.norm":
        values = parameter.view(config.mamba_n_groups, -1)
    elif rest == "mamba.conv1d.weight":
        values = parameter.squeeze(1)
    elif config.model_type != "jamba" and stem.endswith("q_proj"):
        heads = config.num_attention_heads
    elif config.model_type != "jamba" and stem.endswith("k_proj"):
        heads = config.num_key_value_heads
    yield f"{prefix}{_IN_LAYER[stem]}.{ending}", values, heads
