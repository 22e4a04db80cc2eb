"""GGUF files of small random models, written with the gguf library, in the order of llama.cpp's
converter."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from transformers import PreTrainedModel

from tests.oracle import gguf_hybrids, gguf_layers

ARCHITECTURES = (
    gguf_hybrids.ARCHITECTURES
    | gguf_layers.ARCHITECTURES
    | {
        "llama": "llama",
        "mistral": "llama",
        "mixtral": "llama",
        "qwen3_moe": "qwen3moe",
        "lfm2_moe": "lfm2moe",
        "qwen3_next": "qwen3next",
        "qwen3_5_text": "qwen35",
        "qwen3_5_moe_text": "qwen35moe",
    }
)
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "model.embedding_norm": "token_embd_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert_bias": "exp_probs_b",
    "feed_forward.experts.gate_proj": "ffn_gate_exps",
    "feed_forward.experts.up_proj": "ffn_up_exps",
    "feed_forward.experts.down_proj": "ffn_down_exps",
}
_DELTA_NET_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_MIXER_NAMES = {
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "conv1d.weight": "ssm_conv1d.weight",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
    "in_proj_ba.weight": "ssm_ba.weight",
}
_MAMBA_NAMES = {
    "backbone.embeddings": "token_embd",
    "backbone.norm_f": "output_norm",
    "lm_head": "output",
    "norm": "attn_norm",
    "mixer.in_proj": "ssm_in",
    "mixer.conv1d": "ssm_conv1d",
    "mixer.x_proj": "ssm_x",
    "mixer.dt_proj": "ssm_dt",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.norm": "ssm_norm",
    "mixer.out_proj": "ssm_out",
}
_FLOATS = ("ffn_gate_inp", "shortconv.conv", "ssm_conv1d", "ssm_norm", "ssm_a", "ssm_d")
"""Matrices that the converter leaves in float32."""
TOKENS = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "ab"]


BYTES = [f"<0x{number:02X}>" for number in range(256)]


def write_vocabulary(
    path: Path,
    tokens: Sequence[str],
    *,
    model: str = "llama",
    types: Sequence[int] | None = None,
    scores: Sequence[float] | None = None,
    words: str | None = None,
    merges: Sequence[str] = (),
    template: str | None = None,
    **ids: int,
) -> Path:
    """A Llama of one layer and this vocabulary, of which None leaves a key out; ids are keys such
    as eot_token_id."""
    writer = gguf.GGUFWriter(path, "llama")
    for add, size in (
        (writer.add_block_count, 1),
        (writer.add_context_length, 64),
        (writer.add_embedding_length, 32),
        (writer.add_feed_forward_length, 32),
        (writer.add_head_count, 2),
    ):
        add(size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(model)
    writer.add_token_list(list(tokens))
    if types is not None:
        writer.add_token_types(list(types))
    if scores is not None:
        writer.add_token_scores(list(scores))
    if words is not None:
        writer.add_tokenizer_pre(words)
    if model == "gpt2":
        writer.add_token_merges(list(merges) or ["a b"])
    if template is not None:
        writer.add_chat_template(template)
    for key, value in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{key}", value)
    shapes = {"attn_norm": (32,), "ffn_norm": (32,)}
    shapes |= dict.fromkeys(
        ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"), (32, 32)
    )
    writer.add_tensor("token_embd.weight", np.ones((len(tokens), 32), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    for name, shape in shapes.items():
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_gguf(model: PreTrainedModel, path: Path, block_type: str, split: int = 0) -> None:
    """Write the model, and give it the values that its quantized matrices have in the file; in
    several files of `split` tensors, if that is given."""
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(getattr(config, "max_position_embeddings", 2**20))
    writer.add_embedding_length(config.hidden_size)
    if config.model_type in ("mamba", "mamba2"):
        _add_mamba(writer, config)
        _finish(writer, model, block_type)
        return
    if config.model_type in gguf_hybrids.ARCHITECTURES:
        gguf_hybrids.add_hybrid(writer, config)
        _finish(writer, model, block_type)
        return
    if config.model_type in gguf_layers.ARCHITECTURES:
        gguf_layers.add_layers(writer, config)
        _finish(writer, model, block_type)
        return
    writer.add_head_count(config.num_attention_heads)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    if config.model_type in ("lfm2", "lfm2_moe"):
        _add_short_convolutions(writer, model)
    else:
        writer.add_feed_forward_length(getattr(config, "intermediate_size", 5632))
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if hasattr(config, "linear_num_key_heads"):
        _add_gated_delta_net(writer, config)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope.get("original_max_position_embeddings", 512))
    if rope["rope_type"] == "llama3":
        plain = rope["rope_theta"] ** (-torch.arange(0, head_dim, 2).float() / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    if window := getattr(config, "sliding_window", None):
        writer.add_sliding_window(window)
    if experts := getattr(config, "num_experts", getattr(config, "num_local_experts", 0)):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(
            getattr(config, "moe_intermediate_size", config.intermediate_size)
        )
    _finish(writer, model, block_type)


def _finish(writer: gguf.GGUFWriter, model: PreTrainedModel, block_type: str) -> None:
    """Add the tokenizer and the tensors, and write the file."""
    config = model.config
    _add_tokenizer(writer, config.vocab_size)
    with torch.no_grad():
        biases = [(name, bias) for name, bias in model.named_buffers() if name.endswith("_bias")]
        for name, parameter in (*model.named_parameters(), *biases):
            _add_parameter(writer, name, parameter, config, block_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_mamba(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.state_size)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    if config.model_type == "mamba":
        writer.add_ssm_inner_size(config.intermediate_size)
        writer.add_ssm_time_step_rank(config.time_step_rank)
        writer.add_ssm_dt_b_c_rms(False)
    else:
        writer.add_ssm_inner_size(config.num_heads * config.head_dim)
        writer.add_ssm_time_step_rank(config.num_heads)
        writer.add_ssm_group_count(config.n_groups)


def _add_mamba_parameter(
    writer: gguf.GGUFWriter, name: str, parameter: torch.Tensor, config: Any, block_type: str
) -> None:
    """Add a parameter of Mamba under the name and in the shape of the converter. Values of
    Mamba-2's heads are columns of one number, and its norm has a row for each group."""
    prefix, stem = "", name
    if name.startswith("backbone.layers."):
        _, _, layer, stem = name.split(".", 3)
        prefix = f"blk.{layer}."
    if stem.endswith((".A_log", ".D")):
        values = parameter
        if stem.endswith("A_log"):
            values = -parameter.exp()
        if config.model_type == "mamba2":
            values = values[:, None]
        writer.add_tensor(prefix + _MAMBA_NAMES[stem], values.numpy())
        return
    if stem.endswith(".dt_bias"):
        writer.add_tensor(prefix + _MAMBA_NAMES[stem], parameter.numpy())
        return
    stem, _, ending = stem.rpartition(".")
    stored = f"{prefix}{_MAMBA_NAMES[stem]}.{ending}"
    if stem == "mixer.norm":
        parameter = parameter.view(config.n_groups, -1)
    elif stem == "mixer.conv1d" and ending == "weight":
        parameter = parameter.squeeze()
    elif stem == "mixer.dt_proj" and ending == "weight":
        block_type = "F16"  # few columns, which are not whole blocks
    _add(writer, stored, parameter, 0, block_type)


def _add_short_convolutions(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    config = model.config
    heads = {"conv": 0, "full_attention": config.num_key_value_heads}
    writer.add_head_count_kv([heads[kind] for kind in config.layer_types])
    writer.add_feed_forward_length(model.model.layers[0].feed_forward.w1.out_features)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_shortconv_l_cache(config.conv_L_cache)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "lfm2_moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _add_gated_delta_net(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    prefix = ARCHITECTURES[config.model_type]
    recurrent = [kind == "linear_attention" for kind in config.layer_types]
    writer.add_array(f"{prefix}.attention.recurrent_layers", recurrent)
    if config.model_type != "qwen3_next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _add_mixer(
    writer: gguf.GGUFWriter, name: str, parameter: torch.Tensor, config: Any, block_type: str
) -> None:
    """Add a parameter of Gated DeltaNet under the names and in the order of the converter."""
    _, _, layer, _, rest = name.split(".", 4)
    if rest == "A_log":
        writer.add_tensor(f"blk.{layer}.ssm_a", -parameter.exp()[_tiled(config, 1)].numpy())
        return
    places = torch.arange(parameter.numel()).view(parameter.shape)
    for stored_name, taken in _stored_places(rest, places, config):
        values = parameter.flatten()[taken]
        _add(writer, f"blk.{layer}.{stored_name}", values, 0, block_type)
        parameter.view(-1)[taken.flatten()] = values.flatten()


def _stored_places(rest: str, places: torch.Tensor, config: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors of the file that a parameter makes, as places in it."""
    size = config.linear_value_head_dim
    key_size = config.linear_num_key_heads * config.linear_key_head_dim
    if rest == "in_proj_qkvz.weight":
        by_head = places.view(config.linear_num_key_heads, -1, places.shape[1])
        value_rows = config.linear_num_value_heads // config.linear_num_key_heads * size
        key_rows = config.linear_key_head_dim
        parts = by_head.split((key_rows, key_rows, value_rows, value_rows), dim=1)
        query, key, value, gate = (part.flatten(0, 1) for part in parts)
        return [("attn_qkv.weight", torch.cat((query, key, value))), ("attn_gate.weight", gate)]
    if rest in ("in_proj_qkv.weight", "conv1d.weight"):
        places = places.flatten(1)
        heads = places[2 * key_size :][_tiled(config, size)]
        places = torch.cat((places[: 2 * key_size], heads))
    elif rest == "in_proj_z.weight":
        places = places[_tiled(config, size)]
    elif rest in ("in_proj_b.weight", "in_proj_a.weight", "dt_bias"):
        places = places[_tiled(config, 1)]
    elif rest == "out_proj.weight":
        places = places[:, _tiled(config, size)]
    return [(_MIXER_NAMES[rest], places)]


def _tiled(config: Any, size: int) -> torch.Tensor:
    """The rows of value heads in the order of the file: in Qwen3.5 the first of each key head, then
    the second of each."""
    rows = torch.arange(config.linear_num_value_heads * size)
    if config.model_type == "qwen3_next":
        return rows
    return rows.view(config.linear_num_key_heads, -1, size).swapaxes(0, 1).flatten()


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    more = range(vocab_size - len(TOKENS))
    byte_tokens = [f"<0x{number:02X}>" for number in more if number < 256 <= len(more)]
    tokens = TOKENS + byte_tokens + [f"▁t{number}" for number in more][len(byte_tokens) :]
    types = [2, 3, 3, 1, 1, 1, 1, 1] + [6] * len(byte_tokens)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(number) for number in range(vocab_size)])
    writer.add_token_types(types + [1] * (vocab_size - len(types)))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _add_parameter(
    writer: gguf.GGUFWriter, name: str, parameter: torch.Tensor, config, block_type: str
) -> None:
    if config.model_type in ("mamba", "mamba2"):
        _add_mamba_parameter(writer, name, parameter, config, block_type)
        return
    if config.model_type in gguf_hybrids.ARCHITECTURES:
        for stored_name, values, heads in gguf_hybrids.stored_tensors(name, parameter, config):
            few_columns = values.shape[-1] % 32 != 0  # not whole blocks
            _add(writer, stored_name, values, heads, "F16" if few_columns else block_type)
        return
    if config.model_type in gguf_layers.ARCHITECTURES:
        for stored_name, values, heads in gguf_layers.stored_tensors(name, parameter, config):
            _add(writer, stored_name, values, heads, block_type)
        return
    if ".linear_attn." in name:
        _add_mixer(writer, name, parameter, config, block_type)
        return
    stem, _, ending = name.rpartition(".")
    if hasattr(config, "linear_num_key_heads") and "norm" in name:
        parameter = parameter + 1.0
    if stem.endswith("experts"):
        halves = parameter.chunk(2, dim=1) if ending == "gate_up_proj" else (parameter,)
        endings = ("gate_proj", "up_proj") if len(halves) == 2 else ("down_proj",)
        for half, matrix in zip(halves, endings, strict=True):
            _add(writer, f"{_gguf_name(f'{stem}.{matrix}', config)}.weight", half, 0, block_type)
        return
    if ending == "expert_bias":
        stem, ending = name, "bias"
    permuted = 0
    if ARCHITECTURES.get(config.model_type) == "llama" and stem.endswith(("q_proj", "k_proj")):
        permuted = (
            config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
        )
    _add(writer, f"{_gguf_name(stem, config)}.{ending}", parameter, permuted, block_type)


def _gguf_name(stem: str, config: Any) -> str:
    if not stem.startswith("model.layers."):
        return _NAMES[stem]
    _, _, index, rest = stem.split(".", 3)
    if hasattr(config, "linear_num_key_heads") and rest in _DELTA_NET_NAMES:
        return f"blk.{index}.{_DELTA_NET_NAMES[rest]}"
    return f"blk.{index}.{_NAMES[rest]}"


def _add(
    writer: gguf.GGUFWriter, name: str, parameter: torch.Tensor, heads: int, block_type: str
) -> None:
    """Add a tensor; `heads` is how many heads the rows have, if the converter permutes them."""
    values = parameter.detach()
    if "shortconv.conv" in name:
        values = values.squeeze(1)
    if heads:
        values = (
            values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        )
    if values.dim() == 1 or any(part in name for part in _FLOATS):
        writer.add_tensor(name, values.numpy().astype(np.float32))
        return
    kind = GGMLQuantizationType[block_type]
    data = _quantized(values.numpy(), kind)
    writer.add_tensor(name, data, raw_dtype=kind)
    stored = torch.from_numpy(gguf.quants.dequantize(data, kind)).view(values.shape)
    if heads:
        stored = (
            stored.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        )
    parameter.copy_(stored)


def _quantized(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    try:
        return gguf.quants.quantize(values, kind)
    # the library only reads K-quants: any bytes with sane scales are a matrix
    except NotImplementedError:
        size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        generator = np.random.default_rng(values.shape[0])
        shape = (*values.shape[:-1], values.shape[-1] // size, num_bytes)
        blocks = generator.integers(0, 256, shape, dtype=np.uint8)
        places = (208,) if kind == GGMLQuantizationType.Q6_K else (0, 2)
        for place, scale in zip(places, (3e-4, 3e-3), strict=False):
            numbers = (generator.random((*shape[:-1], 1)) * scale).astype(np.float16)
            blocks[..., place : place + 2] = numbers.view(np.uint8)
        return blocks.reshape(*values.shape[:-1], -1)
