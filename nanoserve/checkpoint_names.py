"""The names of a family's tensors in a Hugging Face checkpoint. No torch here."""

from dataclasses import dataclass

from nanoserve.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerNames:
    """A family's names for the tensors of a layer, relative to the layer. Fused matrices have one name."""

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    attention_norm: str = "input_layernorm"
    feed_forward_norm: str = "post_attention_layernorm"
    attention_output_norm: str = "post_self_attn_layernorm"
    feed_forward_output_norm: str = "post_mlp_layernorm"
    router: str = "mlp.gate"
    expert: str = "mlp.experts.{}"
    expert_gate_up: tuple[str, str] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"


@dataclass(frozen=True, slots=True)
class CheckpointNames:
    """A family's names for the tensors around its layers."""

    layer: LayerNames = LayerNames()
    layer_prefix: str = "model.layers.{}."
    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    lm_head: str = "lm_head.weight"


_GLM = CheckpointNames(layer=LayerNames(gate_up=("mlp.gate_up_proj",)))
_MIXTRAL = CheckpointNames(
    layer=LayerNames(
        router="block_sparse_moe.gate",
        expert="block_sparse_moe.experts.{}",
        expert_gate_up=("w1", "w3"),
        expert_down="w2",
    )
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


def checkpoint_names(config: ModelConfig) -> CheckpointNames:
    """The names that this checkpoint uses."""
    if config.renamed_as_chatglm:
        return _CHATGLM
    return {"glm": _GLM, "glm4": _GLM, "mixtral": _MIXTRAL}.get(config.family, CheckpointNames())
