"""GGUF files of Gemma 2, 3 and 4 and of gpt-oss as llama.cpp's converter writes them: keys, and the
names and values of tensors."""

from collections.abc import Iterator
from typing import Any

import gguf
import torch
from torch import Tensor

ARCHITECTURES = {
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "gpt_oss": "gpt-oss",
}
_AROUND = {
    "model.embed_tokens": "token_embd",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.router": "ffn_gate_inp",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
_WHOLE_NAMES = {
    "self_attn.sinks": "attn_sinks.weight",
    "layer_scalar": "layer_output_scale.weight",
    "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
}


def add_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    """Add the keys behind those that all architectures have."""
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma4_text":
        _add_gemma4(writer, config)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if config.model_type == "gpt_oss":
        _add_gpt_oss(writer, config)
        return
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        return
    ropes = config.rope_parameters
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    if ropes["full_attention"]["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(ropes["full_attention"]["factor"])


def _add_gemma4(writer: gguf.GGUFWriter, config: Any) -> None:
    sizes = config.to_dict()
    own = {int(layer): found for layer, found in sizes["per_layer_config"].items()}
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    full = own[slides.index(False)]
    sharing = config.num_kv_shared_layers
    inner = config.intermediate_size
    if config.use_double_wide_mlp:
        first_sharing = len(slides) - sharing
        writer.add_feed_forward_length([inner] * first_sharing + [2 * inner] * sharing)
    else:
        writer.add_feed_forward_length(inner)
    counts = sizes["num_key_value_heads"]
    if "num_key_value_heads" in full:
        kinds = {True: counts, False: full["num_key_value_heads"]}
        counts = [kinds[has_window] for has_window in slides]
    writer.add_head_count_kv(counts)
    writer.add_shared_kv_layers(sharing)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_sliding_window_pattern(slides)
    head_dim = full["head_dim"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_key_length_swa(sizes["head_dim"])
    writer.add_value_length_swa(sizes["head_dim"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_dimension_count_swa(sizes["head_dim"])
    turning = config.rope_parameters["full_attention"]["partial_rotary_factor"]
    factors = torch.full((head_dim // 2,), 1e30)
    factors[: int(head_dim * turning / 2)] = 1.0
    writer.add_tensor("rope_freqs.weight", factors.numpy())


def _add_gpt_oss(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.intermediate_size)


def stored_tensors(name: str, parameter: Tensor, config: Any) -> Iterator[tuple[str, Tensor, int]]:
    """The tensors that a parameter makes: their names and values, which are views of it where they
    may be quantized. The heads of all are in order. Gate and up of gpt-oss's experts are apart."""
    stem, _, ending = name.rpartition(".")
    values = parameter
    if stem.endswith("norm") and config.model_type in ("gemma2", "gemma3_text"):
        values = parameter + 1.0
    if not name.startswith("model.layers."):
        yield f"{_AROUND[stem]}.{ending}", values, 0
        return
    _, _, layer, rest = name.split(".", 3)
    prefix = f"blk.{layer}."
    if rest in _WHOLE_NAMES:
        yield prefix + _WHOLE_NAMES[rest], parameter, 0
    elif rest == "mlp.experts.down_proj":
        yield f"{prefix}ffn_down_exps.weight", parameter.mT, 0
    elif rest == "mlp.experts.gate_up_proj":
        yield f"{prefix}ffn_gate_exps.weight", parameter.mT[:, ::2], 0
        yield f"{prefix}ffn_up_exps.weight", parameter.mT[:, 1::2], 0
    elif rest == "mlp.experts.gate_up_proj_bias":
        yield f"{prefix}ffn_gate_exps.bias", parameter[:, ::2], 0
        yield f"{prefix}ffn_up_exps.bias", parameter[:, 1::2], 0
    else:
        yield f"{prefix}{_IN_LAYER[rest.removesuffix(f'.{ending}')]}.{ending}", values, 0
