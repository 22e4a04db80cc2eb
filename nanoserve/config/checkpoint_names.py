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
    shared_gate_up: tuple[str, str] = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    shared_down: str = "mlp.shared_experts.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    expert_down: str = "mlp.experts.{}.down_proj"
    expert_biases: tuple[str, str] = ("mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias")
    convolution_inputs: str = "conv.in_proj"
    convolution_kernel: str = "conv.conv"
    convolution_output: str = "conv.out_proj"
    delta_net: str = "linear_attn"
    delta_net_inputs: tuple[str, ...] = ("in_proj_qkv", "in_proj_z")
    """Matrices of Gated DeltaNet that make queries, keys, values and gates of the output: apart, or
    a single one with those of a key head side by side."""
    delta_net_rates: tuple[str, ...] = ("in_proj_b", "in_proj_a")
    """Its matrices that make learning rates and decays: apart, or a single one by key head."""


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


_AFTER = LayerNames(
    attention_output_norm="post_attention_layernorm",
    feed_forward_output_norm="post_feedforward_layernorm",
)
"""Norms behind both parts of a layer, as Gemma and Olmo call them."""
_GEMMA = CheckpointNames(layer=replace(_AFTER, feed_forward_norm="pre_feedforward_layernorm"))
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
        delta_net_inputs=("in_proj_qkvz",),
        delta_net_rates=("in_proj_ba",),
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
    ),
    final_norm="model.embedding_norm.weight",
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
        convolution_inputs="shortconv.in_proj",
        convolution_kernel="shortconv.conv",
        convolution_output="shortconv.out_proj",
    ),
    layer_prefix="blk.{}.",
    embedding="token_embd.weight",
    final_norm="output_norm.weight",
    lm_head="output.weight",
)
"""All experts of a layer are one tensor of the file; the name of each ends in its number."""
_GGUF_GLM = replace(_GGUF, layer=replace(_GGUF.layer, gate_up=("ffn_up",)))
_GGUF_LFM2 = replace(_GGUF, final_norm="token_embd_norm.weight")


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
    "gemma4_text": _GEMMA,
    "olmo3": CheckpointNames(layer=_AFTER),
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
}


def checkpoint_names(config: ModelConfig) -> CheckpointNames:
    """The names that this checkpoint uses."""
    if config.tensor_names == "chatglm":
        return _CHATGLM
    if config.tensor_names == "gguf":
        if config.family == "glm4":
            return _GGUF_GLM
        if config.family in ("lfm2", "lfm2_moe"):
            return _GGUF_LFM2
        return _GGUF
    mla = config.attention.mla
    if mla is not None:
        query = "self_attn.q_proj"
        if mla.q_lora_rank:
            query = "self_attn.q_a_proj"
        return CheckpointNames(layer=LayerNames(qkv=(query, "self_attn.kv_a_proj_with_mqa")))
    return _FAMILIES.get(config.family, CheckpointNames())
