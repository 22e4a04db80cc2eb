"""The names of a family's tensors in a Hugging Face checkpoint, and in a GGUF file. No torch
here."""

from dataclasses import dataclass, replace

from nanoserve.config.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerNames:
    """A family's names for the tensors of a layer, relative to the layer. Fused matrices have one
    name."""

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    attention_norm: str = "input_layernorm"
    feed_forward_norm: str = "post_attention_layernorm"
    attention_output_norm: str = "post_self_attn_layernorm"
    feed_forward_output_norm: str = "post_mlp_layernorm"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    router: str = "mlp.gate"
    sinks: str = "self_attn.sinks"
    scale: str = "layer_scalar"
    input_gate: str = "per_layer_input_gate"
    input_up: str = "per_layer_projection"
    input_norm: str = "post_per_layer_input_norm"
    latent_query_norm: str = "self_attn.q_a_layernorm"
    latent_query_up: str = "self_attn.q_b_proj"
    latent_norm: str = "self_attn.kv_a_layernorm"
    latent_up: str = "self_attn.kv_b_proj"
    correction_bias: str = "mlp.gate.e_score_correction_bias"
    shared_gate_up: tuple[str, ...] = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    shared_down: str = "mlp.shared_experts.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    expert_down: str = "mlp.experts.{}.down_proj"
    router_scale: str = "router.scale"
    expert_scale: str = "router.per_expert_scale"
    expert_input_norm: str = "pre_feedforward_layernorm_2"
    shared_output_norm: str = "post_feedforward_layernorm_1"
    expert_output_norm: str = "post_feedforward_layernorm_2"
    expert_biases: tuple[str, str] = ("mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias")
    mixer_inputs: tuple[str, ...] = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")
    """Matrices of a mixer's first product. Those of Gated DeltaNet make queries, keys, values and
    gates of the output: apart, or a single one with those of a key head side by side."""
    mixer_rates: tuple[str, ...] = ("linear_attn.in_proj_b", "linear_attn.in_proj_a")
    """Matrices of Gated DeltaNet that make learning rates and decays: apart, or a single one by key
    head."""
    mixer_kernel: str = "linear_attn.conv1d"
    mixer_decay: str = "linear_attn.A_log"
    mixer_step_bias: str = "linear_attn.dt_bias"
    mixer_norm: str = "linear_attn.norm"
    mixer_output: str = "linear_attn.out_proj"
    mixer_skip: str = "mixer.D"
    mixer_selection: str = "mixer.x_proj"
    mixer_time_step: str = "mixer.dt_proj"
    mixer_selection_norms: tuple[str, str, str] = (
        "mamba.dt_layernorm",
        "mamba.b_layernorm",
        "mamba.c_layernorm",
    )

    @property
    def shared_parts(self) -> tuple[str, ...]:
        """Parts that a layer which shares the keys and values of another does not need."""
        return (*self.qkv[1:], self.key_norm)


@dataclass(frozen=True, slots=True)
class CheckpointNames:
    """A family's names for the tensors around its layers."""

    layer: LayerNames = LayerNames()
    layer_prefix: str = "model.layers.{}."
    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    lm_head: str = "lm_head.weight"
    per_layer_embeddings: tuple[str, str, str] = (
        "model.embed_tokens_per_layer.weight",
        "model.per_layer_model_projection.weight",
        "model.per_layer_projection_norm.weight",
    )

    encoder_scale: str = "model.encoder.language_model.layers.{}.layer_scalar"
    """The number that scales a layer's output for known tokens, where canvases have another."""
    self_conditioning: str = "model.decoder.self_conditioning."

    def layer_prefixes(self, config: ModelConfig, layer: int) -> tuple[str, str]:
        """The beginnings of the names of a layer's attention or mixer, and of its feed-forward
        part."""
        if not config.layers.stored_blocks:
            prefix = self.layer_prefix.format(layer)
            return prefix, prefix
        block = config.layers.stored_blocks[layer]
        return self.layer_prefix.format(block), self.layer_prefix.format(block + 1)


_AFTER = LayerNames(
    attention_output_norm="post_attention_layernorm",
    feed_forward_output_norm="post_feedforward_layernorm",
)
"""Norms behind both parts of a layer, as Gemma and Olmo call them."""
_GEMMA = CheckpointNames(layer=replace(_AFTER, feed_forward_norm="pre_feedforward_layernorm"))
_GEMMA4 = replace(
    _GEMMA,
    layer=replace(
        _GEMMA.layer,
        router="router.proj",
        shared_gate_up=("mlp.gate_proj", "mlp.up_proj"),
        shared_down="mlp.down_proj",
        expert_gate_up=("experts.{}.gate_up_proj",),
        expert_down="experts.{}.down_proj",
    ),
)
_DIFFUSION_GEMMA = replace(
    _GEMMA4,
    layer_prefix="model.decoder.layers.{}.",
    embedding="model.decoder.embed_tokens.weight",
    final_norm="model.decoder.norm.weight",
)
"""The encoder's layers are those of the decoder, but for one number of each layer."""
_GLM = CheckpointNames(layer=LayerNames(gate_up=("mlp.gate_up_proj",)))
_MIXTRAL = CheckpointNames(
    layer=LayerNames(
        router="block_sparse_moe.gate",
        expert_gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        expert_down="block_sparse_moe.experts.{}.w2",
    )
)
_QWEN3_5 = CheckpointNames(
    layer=LayerNames(
        shared_gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        shared_down="mlp.shared_expert.down_proj",
    )
)
_QWEN3_NEXT = CheckpointNames(
    layer=replace(
        _QWEN3_5.layer,
        mixer_inputs=("linear_attn.in_proj_qkvz",),
        mixer_rates=("linear_attn.in_proj_ba",),
    )
)
_GPT_OSS = CheckpointNames(
    layer=LayerNames(router="mlp.router", expert_gate_up=("mlp.experts.{}.gate_up_proj",))
)
"""All experts of a layer are one tensor, whose name is without the number."""
_LFM2 = CheckpointNames(
    layer=LayerNames(
        output="self_attn.out_proj",
        gate_up=("feed_forward.w1", "feed_forward.w3"),
        down="feed_forward.w2",
        attention_norm="operator_norm",
        feed_forward_norm="ffn_norm",
        query_norm="self_attn.q_layernorm",
        key_norm="self_attn.k_layernorm",
        router="feed_forward.gate",
        correction_bias="feed_forward.expert_bias",
        expert_gate_up=("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3"),
        expert_down="feed_forward.experts.{}.w2",
        mixer_inputs=("conv.in_proj",),
        mixer_kernel="conv.conv",
        mixer_output="conv.out_proj",
    ),
    final_norm="model.embedding_norm.weight",
)
_JAMBA = CheckpointNames(
    layer=LayerNames(
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        feed_forward_norm="pre_ff_layernorm",
        router="feed_forward.router",
        expert_gate_up=(
            "feed_forward.experts.{}.gate_proj",
            "feed_forward.experts.{}.up_proj",
        ),
        expert_down="feed_forward.experts.{}.down_proj",
        mixer_inputs=("mamba.in_proj",),
        mixer_kernel="mamba.conv1d",
        mixer_decay="mamba.A_log",
        mixer_output="mamba.out_proj",
        mixer_skip="mamba.D",
        mixer_selection="mamba.x_proj",
        mixer_time_step="mamba.dt_proj",
    ),
    final_norm="model.final_layernorm.weight",
)
_GRANITE_MOE = CheckpointNames(
    layer=LayerNames(
        router="block_sparse_moe.router.layer",
        expert_gate_up=("block_sparse_moe.input_linear.{}",),
        expert_down="block_sparse_moe.output_linear.{}",
    )
)
_GRANITE_HYBRID = CheckpointNames(
    layer=replace(
        _GRANITE_MOE.layer,
        gate_up=("shared_mlp.input_linear",),
        down="shared_mlp.output_linear",
        shared_gate_up=("shared_mlp.input_linear",),
        shared_down="shared_mlp.output_linear",
        mixer_inputs=("mamba.in_proj",),
        mixer_kernel="mamba.conv1d",
        mixer_decay="mamba.A_log",
        mixer_step_bias="mamba.dt_bias",
        mixer_norm="mamba.norm",
        mixer_output="mamba.out_proj",
        mixer_skip="mamba.D",
    )
)
_MAMBA = CheckpointNames(
    layer=LayerNames(
        attention_norm="norm",
        mixer_inputs=("mixer.in_proj",),
        mixer_kernel="mixer.conv1d",
        mixer_decay="mixer.A_log",
        mixer_step_bias="mixer.dt_bias",
        mixer_norm="mixer.norm",
        mixer_output="mixer.out_proj",
    ),
    layer_prefix="backbone.layers.{}.",
    embedding="backbone.embeddings.weight",
    final_norm="backbone.norm_f.weight",
)
_NEMOTRON_H = replace(
    _MAMBA,
    layer=replace(
        _MAMBA.layer,
        qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        output="mixer.o_proj",
        feed_forward_norm="norm",
        gate_up=("mixer.up_proj",),
        down="mixer.down_proj",
        router="mixer.gate",
        correction_bias="mixer.gate.e_score_correction_bias",
        shared_gate_up=("mixer.shared_experts.up_proj",),
        shared_down="mixer.shared_experts.down_proj",
        expert_gate_up=("mixer.experts.{}.up_proj",),
        expert_down="mixer.experts.{}.down_proj",
    ),
)
_CHATGLM = CheckpointNames(
    layer=LayerNames(
        qkv=("self_attention.query_key_value",),
        output="self_attention.dense",
        gate_up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
    ),
    layer_prefix="transformer.encoder.layers.{}.",
    embedding="transformer.embedding.word_embeddings.weight",
    final_norm="transformer.encoder.final_layernorm.weight",
    lm_head="transformer.output_layer.weight",
)
_GGUF = CheckpointNames(
    layer=LayerNames(
        qkv=("attn_q", "attn_k", "attn_v"),
        output="attn_output",
        gate_up=("ffn_gate", "ffn_up"),
        down="ffn_down",
        attention_norm="attn_norm",
        feed_forward_norm="ffn_norm",
        attention_output_norm="post_attention_norm",
        feed_forward_output_norm="post_ffw_norm",
        query_norm="attn_q_norm",
        key_norm="attn_k_norm",
        router="ffn_gate_inp",
        expert_gate_up=("ffn_gate_exps.{}", "ffn_up_exps.{}"),
        expert_down="ffn_down_exps.{}",
        correction_bias="exp_probs_b.bias",
    ),
    layer_prefix="blk.{}.",
    embedding="token_embd.weight",
    final_norm="output_norm.weight",
    lm_head="output.weight",
)
"""All experts of a layer are one tensor of the file; the name of each ends in its number."""
_GGUF_GLM = replace(_GGUF, layer=replace(_GGUF.layer, gate_up=("ffn_up",)))
_GGUF_QWEN3_5 = replace(
    _GGUF,
    layer=replace(
        _GGUF.layer,
        feed_forward_norm="post_attention_norm",
        shared_gate_up=("ffn_gate_shexp", "ffn_up_shexp"),
        shared_down="ffn_down_shexp",
        shared_gate="ffn_gate_inp_shexp",
        mixer_inputs=("attn_qkv", "attn_gate"),
        mixer_rates=("ssm_beta", "ssm_alpha"),
        mixer_kernel="ssm_conv1d",
        mixer_decay="ssm_a",
        mixer_step_bias="ssm_dt.bias",
        mixer_norm="ssm_norm",
        mixer_output="ssm_out",
    ),
)
_GGUF_QWEN3_NEXT = replace(
    _GGUF_QWEN3_5, layer=replace(_GGUF_QWEN3_5.layer, mixer_rates=("ssm_ba",))
)
_GGUF_JAMBA = replace(
    _GGUF,
    layer=replace(
        _GGUF.layer,
        mixer_inputs=("ssm_in",),
        mixer_kernel="ssm_conv1d",
        mixer_decay="ssm_a",
        mixer_output="ssm_out",
        mixer_skip="ssm_d",
        mixer_selection="ssm_x",
        mixer_time_step="ssm_dt",
        mixer_selection_norms=("ssm_dt_norm", "ssm_b_norm", "ssm_c_norm"),
    ),
)
_GGUF_GRANITE_HYBRID = replace(
    _GGUF,
    layer=replace(
        _GGUF.layer,
        shared_gate_up=("ffn_gate_shexp", "ffn_up_shexp"),
        shared_down="ffn_down_shexp",
        mixer_inputs=("ssm_in",),
        mixer_kernel="ssm_conv1d",
        mixer_decay="ssm_a",
        mixer_step_bias="ssm_dt.bias",
        mixer_norm="ssm_norm",
        mixer_output="ssm_out",
        mixer_skip="ssm_d",
    ),
)
_GGUF_LFM2 = replace(
    _GGUF,
    layer=replace(
        _GGUF.layer,
        mixer_inputs=("shortconv.in_proj",),
        mixer_kernel="shortconv.conv",
        mixer_output="shortconv.out_proj",
    ),
    final_norm="token_embd_norm.weight",
)
_GGUF_MAMBA = replace(
    _GGUF,
    layer=replace(
        _GGUF.layer,
        mixer_inputs=("ssm_in",),
        mixer_kernel="ssm_conv1d",
        mixer_decay="ssm_a",
        mixer_step_bias="ssm_dt.bias",
        mixer_norm="ssm_norm",
        mixer_output="ssm_out",
        mixer_skip="ssm_d",
        mixer_selection="ssm_x",
        mixer_time_step="ssm_dt",
    ),
)
_GGUF_NEMOTRON_H = replace(
    _GGUF_MAMBA,
    layer=replace(
        _GGUF_MAMBA.layer,
        feed_forward_norm="attn_norm",
        gate_up=("ffn_up",),
        shared_gate_up=("ffn_up_shexp",),
        shared_down="ffn_down_shexp",
        expert_gate_up=("ffn_up_exps.{}",),
    ),
)
"""The norm of each block, of whatever kind, has the name of that of attention."""
_GGUF_LATENT = replace(
    _GGUF,
    layer=replace(
        _GGUF.layer,
        qkv=("attn_q_a", "attn_kv_a_mqa"),
        latent_query_norm="attn_q_a_norm",
        latent_query_up="attn_q_b",
        latent_norm="attn_kv_a_norm",
        latent_up="attn_kv_b",
        shared_gate_up=("ffn_gate_shexp", "ffn_up_shexp"),
        shared_down="ffn_down_shexp",
    ),
)
"""A file has the matrix `latent_up` in two parts, which `GgufCheckpoint` puts together."""

_GGUF_GEMMA4 = replace(
    _GGUF,
    layer=replace(
        _GGUF.layer,
        scale="layer_output_scale.weight",
        input_gate="inp_gate",
        input_up="proj",
        input_norm="post_norm",
    ),
    per_layer_embeddings=(
        "per_layer_token_embd.weight",
        "per_layer_model_proj.weight",
        "per_layer_proj_norm.weight",
    ),
)
_GGUF_GPT_OSS = replace(
    _GGUF,
    layer=replace(
        _GGUF.layer,
        feed_forward_norm="post_attention_norm",
        sinks="attn_sinks.weight",
        expert_gate_up=("ffn_gate_up_exps.{}",),
        expert_biases=("ffn_gate_up_exps.bias", "ffn_down_exps.bias"),
    ),
)


_FAMILIES = {
    "glm": _GLM,
    "glm4": _GLM,
    "mixtral": _MIXTRAL,
    "gpt_oss": _GPT_OSS,
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gemma4_text": _GEMMA4,
    "diffusion_gemma_text": _DIFFUSION_GEMMA,
    "olmo3": CheckpointNames(layer=_AFTER),
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "mamba": _MAMBA,
    "mamba2": _MAMBA,
    "nemotron_h": _NEMOTRON_H,
    "jamba": _JAMBA,
    "granitemoe": _GRANITE_MOE,
    "granitemoehybrid": _GRANITE_HYBRID,
}

_GGUF_FAMILIES = {
    "glm4": _GGUF_GLM,
    "lfm2": _GGUF_LFM2,
    "lfm2_moe": _GGUF_LFM2,
    "mamba": _GGUF_MAMBA,
    "mamba2": _GGUF_MAMBA,
    "jamba": _GGUF_JAMBA,
    "granitemoehybrid": _GGUF_GRANITE_HYBRID,
    "nemotron_h": _GGUF_NEMOTRON_H,
    "gemma4_text": _GGUF_GEMMA4,
    "gpt_oss": _GGUF_GPT_OSS,
    "qwen3_next": _GGUF_QWEN3_NEXT,
    "qwen3_5_text": _GGUF_QWEN3_5,
    "qwen3_5_moe_text": _GGUF_QWEN3_5,
}


def checkpoint_names(config: ModelConfig) -> CheckpointNames:
    """The names that this checkpoint uses."""
    if config.tensor_names == "chatglm":
        return _CHATGLM
    mla = config.attention.mla
    if config.tensor_names == "gguf":
        if mla is None:
            return _GGUF_FAMILIES.get(config.family, _GGUF)
        if mla.q_lora_rank:
            return _GGUF_LATENT
        return replace(
            _GGUF_LATENT, layer=replace(_GGUF_LATENT.layer, qkv=("attn_q", "attn_kv_a_mqa"))
        )
    if mla is not None:
        query = "self_attn.q_proj"
        if mla.q_lora_rank:
            query = "self_attn.q_a_proj"
        return CheckpointNames(layer=LayerNames(qkv=(query, "self_attn.kv_a_proj_with_mqa")))
    return _FAMILIES.get(config.family, CheckpointNames())
