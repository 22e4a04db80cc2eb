"""Read a Hugging Face config.json into a ModelConfig, by the table of families. No torch here."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from nanoserve.config.config_fields import ConfigFields
from nanoserve.config.families import FAMILIES, Family
from nanoserve.config.layer_blocks import StoredLayer
from nanoserve.config.layer_kinds import read_kv_heads, read_layer_shapes, read_windows
from nanoserve.config.model_config import ModelConfig, SamplingDefaults, TensorNames
from nanoserve.config.model_parts import (
    AttentionConfig,
    CanvasConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    LayerDifferences,
    LogitConfig,
    MlaConfig,
    MoeConfig,
    NormConfig,
    RecurrentConfig,
    RopeConfig,
)
from nanoserve.config.quantization import Quantization
from nanoserve.config.rope_reader import read_ropes
from nanoserve.errors import LONGEST_VALUE, ModelError, one_line, shown

_MAX_LAYERS = 10_000  # more than any real model, few enough to be refused before memory runs out
_LEAST_MULTIPLIER = 1e-6
_NULLABLE = (
    "q_lora_rank",
    "sliding_window",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "num_key_value_heads",
    "n_group",
    "topk_group",
    "per_layer_config",
    "block_ffn_dim_multiplier",
)
"""Keys whose explicit null switches off what the family has by default."""
_MULTIMODAL = (
    "gemma3",
    "gemma4",
    "diffusion_gemma",
    "mistral3",
    "qwen3_5",
    "qwen3_5_moe",
    "lfm2_vl",
)
"""Models whose text_config is one of the families; what they have for images and sound is left
alone."""
_CHATGLM_KEYS: Mapping[str, str] = {
    "num_layers": "num_hidden_layers",
    "multi_query_group_num": "num_key_value_heads",
    "kv_channels": "head_dim",
    "ffn_hidden_size": "intermediate_size",
    "layernorm_epsilon": "rms_norm_eps",
    "seq_length": "max_position_embeddings",
    "padded_vocab_size": "vocab_size",
    "add_qkv_bias": "attention_bias",
}
"""The key of `glm` for each key of the older GLM checkpoints (`chatglm`), which are `glm` under
other names."""


def read_config(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None, source: str
) -> ModelConfig:
    """`ModelConfig.from_hf`."""
    values, name = _normalize(_text_config(config, source), source)
    fields = ConfigFields(values, source)
    family = FAMILIES[name]
    generation = ConfigFields(
        generation_config or {}, str(Path(source).with_name("generation_config.json"))
    )
    blocks = list[StoredLayer]()
    if family.blocks is not None:
        blocks = family.blocks(fields)
        values["num_hidden_layers"] = len(blocks)
    num_layers = fields.positive("num_hidden_layers", most=_MAX_LAYERS)
    mla = None
    if family.is_latent:
        mla = _mla(fields)
    recurrent = _recurrent(fields, family, num_layers)
    if family.attends:
        num_heads, num_kv_heads, head_dim = _heads(fields, mla)
    else:
        num_heads, num_kv_heads, head_dim = _no_heads(recurrent)
    layers = LayerDifferences(sliding_windows=read_windows(fields, family, num_layers))
    if family.has_layer_shapes:
        layers = read_layer_shapes(fields, layers.sliding_windows, num_kv_heads)
    rope, ropes = RopeConfig(rotary_dim=0, kind="none"), tuple[RopeConfig, ...]()
    if family.attends:
        sliding_dim, full_dim = _rotated_dims(head_dim, mla, layers)
        rope, ropes = read_ropes(fields, family.rope, sliding_dim, full_dim, layers.sliding_windows)
    return ModelConfig(
        family=name,
        vocab_size=fields.positive("vocab_size"),
        hidden_size=fields.positive("hidden_size"),
        intermediate_size=_intermediate_size(fields, family),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.positive("max_position_embeddings"),
        rope=rope,
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        attention=_attention(fields, family, mla, rope),
        residual_multiplier=_multiplier(fields, family, "residual_multiplier"),
        norms=_norms(fields, family),
        feed_forward=_feed_forward(fields, family),
        moe=_moe(fields, family, num_layers),
        recurrent=recurrent,
        canvas=_canvas(fields, generation, family),
        embedding=_embedding(fields, family),
        logits=_logits(fields, family),
        layers=replace(
            layers,
            ropes=ropes,
            feed_forwards=tuple(block.feed_forward != "none" for block in blocks),
            stored_blocks=tuple(block.block for block in blocks),
        ),
        dtype=_dtype(fields),
        quantization=_quantization(fields, mla),
        tensor_names=_tensor_names(fields),
        bos_token_id=_first_token(generation, fields),
        eos_token_ids=generation.integers("eos_token_id") or fields.integers("eos_token_id"),
        sampling_defaults=_sampling_defaults(generation),
    )


def _text_config(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The config of the text model alone, where it is a part of another."""
    if config.get("model_type") not in _MULTIMODAL:
        return config
    text = ConfigFields(config, source).section("text_config") or {}
    merged = {**config, "architectures": None, "model_type": None}
    merged |= {key: value for key, value in text.items() if value is not None or key in _NULLABLE}
    if "tie_word_embeddings" in config:  # the whole model decides
        merged["tie_word_embeddings"] = config["tie_word_embeddings"]
    merged["tensor_names"] = "multimodal"
    return merged


def _normalize(config: Mapping[str, Any], source: str) -> tuple[dict[str, Any], str]:
    """Fill in the family's defaults and translate `chatglm` keys. Return the values and the
    family's name."""
    name = _family_name(config, source)
    family = FAMILIES[name]
    values = family.defaults | {key: value for key, value in config.items() if value is not None}
    values |= {key: config[key] for key in _NULLABLE if key in config}
    _rename(values, config, family.older_keys)
    if config.get("model_type") == "chatglm":
        _translate_chatglm(values, config, source)
        values["tensor_names"] = "chatglm"
    if (
        config.get("rope_parameters") is None
        and not config.get("rope_scaling")
        and family.rope.parameters
    ):
        values["rope_parameters"] = family.rope.parameters
    key = "hidden_act"
    accepted = ["silu", "swish"]
    if family.feed_forward.activation == "relu2":
        key = "mlp_hidden_act"
        accepted = ["relu2"]
    if family.feed_forward.activation == "gelu_tanh":
        key = "hidden_activation"
        accepted = ["gelu_pytorch_tanh"]
    found = values.get(key, "silu")
    if found not in accepted:
        raise ModelError(
            f"{source}: hidden_act {shown(found)} is not supported; only {accepted[0]} is"
        )
    if config.get("per_layer_config") and not family.has_layer_shapes:
        raise ModelError(
            f"{source}: per_layer_config is not supported for {name}: its layers must be alike"
        )
    # "vision" is about images, which are not read.
    if values.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise ModelError(
            f"{source}: use_bidirectional_attention is not supported: a text is written from left "
            "to right"
        )
    return values, name


def _family_name(config: Mapping[str, Any], source: str) -> str:
    """The family of a config.json. Raises ModelError if it is unknown, or the model does not
    generate text."""
    model_type, architectures = config.get("model_type"), config.get("architectures")
    named = ""
    if isinstance(architectures, list):
        named = ", ".join(map(str, architectures))
    listed = one_line(named, LONGEST_VALUE)
    if model_type == "chatglm":
        return "glm"
    if model_type is None and "ssm_cfg" in config:
        raise ModelError(
            f"{source}: this is an original checkpoint of Mamba (ssm_cfg); take one for "
            "transformers, whose name ends in -hf, such as state-spaces/mamba-130m-hf"
        )
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        supported = ", ".join([*FAMILIES, "chatglm"])
        raise ModelError(
            f"{source}: architecture {listed or 'unnamed'} (model_type {shown(model_type)}) is not "
            "supported;"
            f" supported model types: {supported}"
        )
    if named and "ForCausalLM" not in named:
        raise ModelError(f"{source}: {listed} is not a text generation model (...ForCausalLM)")
    return model_type


def _rename(
    values: dict[str, Any], config: Mapping[str, Any], older_keys: Mapping[str, str]
) -> None:
    for old, new in older_keys.items():
        if config.get(old) is not None:
            values[new] = config[old]


def _translate_chatglm(values: dict[str, Any], config: Mapping[str, Any], source: str) -> None:
    _rename(values, config, _CHATGLM_KEYS)
    if not config.get("multi_query_attention", True):
        values["num_key_value_heads"] = config.get("num_attention_heads")
    if config.get("add_bias_linear") or not config.get("rmsnorm", True):
        raise ModelError(
            f"{source}: this chatglm variant (add_bias_linear or layer norm) is not supported"
        )
    values["rope_theta"] = 10000.0 * ConfigFields(config, source).number("rope_ratio", 1.0)


def _mla(fields: ConfigFields) -> MlaConfig:
    query_rank = 0
    if fields.get("q_lora_rank") is not None:
        query_rank = fields.positive("q_lora_rank")
    return MlaConfig(
        q_lora_rank=query_rank,
        kv_lora_rank=fields.positive("kv_lora_rank"),
        qk_nope_head_dim=fields.positive("qk_nope_head_dim"),
        qk_rope_head_dim=fields.positive("qk_rope_head_dim"),
        v_head_dim=fields.positive("v_head_dim"),
    )


def _heads(fields: ConfigFields, mla: MlaConfig | None) -> tuple[int, int, int]:
    """Query heads, key-value heads and the size of a head, which must fit each other."""
    hidden_size, num_heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    if mla is not None:
        return num_heads, 1, mla.kv_lora_rank + mla.qk_rope_head_dim
    num_kv_heads = read_kv_heads(fields, num_heads, num_heads)
    if fields.get("head_dim") is None and hidden_size % num_heads:
        heads = f"num_attention_heads {num_heads}"
        raise ModelError(f"{fields.source}: hidden_size {hidden_size} is not a multiple of {heads}")
    return num_heads, num_kv_heads, fields.positive("head_dim", hidden_size // num_heads)


def _no_heads(recurrent: RecurrentConfig | None) -> tuple[int, int, int]:
    """Heads of a model without attention: as many as ranks can divide, of no size."""
    assert recurrent is not None, "all layers have a state"
    parts = recurrent.mixer.most_parts
    return parts, parts, 0


def _rotated_dims(
    head_dim: int, mla: MlaConfig | None, layers: LayerDifferences
) -> tuple[int, int]:
    """Dimensions of a head that RoPE sees, in layers with a window and in the others."""
    if mla is not None:
        return mla.qk_rope_head_dim, mla.qk_rope_head_dim
    sliding_dim = full_dim = head_dim
    for window, shape in zip(layers.sliding_windows, layers.shapes, strict=False):
        if window:
            sliding_dim = shape.head_dim
        else:
            full_dim = shape.head_dim
    return sliding_dim, full_dim


def _attention(
    fields: ConfigFields, family: Family, mla: MlaConfig | None, rope: RopeConfig
) -> AttentionConfig:
    attention = replace(family.attention, mla=mla)
    scale = _attention_scale(fields, mla, rope)
    if family.has_multipliers:
        scale = _multiplier(fields, family, "attention_multiplier")
    if attention.scale is None:
        attention = replace(attention, scale=scale)
    if family.caps_attention_scores:
        attention = replace(
            attention, soft_cap=fields.number("attn_logit_softcapping", 0.0, least=0.0)
        )
    if fields.flag("attention_bias", default=False):
        if family.attention_bias in ("qkv", "all"):
            attention = replace(attention, qkv_bias=True)
        if family.attention_bias == "all":
            attention = replace(attention, output_bias=True)
    return attention


def _norms(fields: ConfigFields, family: Family) -> NormConfig:
    eps = fields.number(family.norm_eps_key, 1e-6, least=0.0)
    norms = replace(family.norms, eps=eps)
    if norms.kind == "rms_plus_one" and _tensor_names(fields) == "gguf":
        return replace(norms, kind="rms_exact")  # llama.cpp's converter adds the 1
    return norms


def _intermediate_size(fields: ConfigFields, family: Family) -> int:
    """The inner size of feed-forward parts; 0 if there are none. LFM2 makes it of another
    number."""
    if not family.attends:
        return 0
    size = fields.positive(family.intermediate_size_key)
    if not family.adjusts_inner_size or not fields.flag("block_auto_adjust_ff_dim", default=True):
        return size
    size = 2 * size // 3
    if fields.get("block_ffn_dim_multiplier") is not None:
        multiple = fields.positive("block_multiple_of", 256)
        size = int(size * fields.number("block_ffn_dim_multiplier", 1.0))
        size = -(-size // multiple) * multiple
    adjusted = ConfigFields({"intermediate_size": size}, fields.source)
    return adjusted.positive("intermediate_size")


def _feed_forward(fields: ConfigFields, family: Family) -> FeedForwardConfig:
    if not family.has_mlp_bias:
        return family.feed_forward
    return replace(family.feed_forward, bias=fields.flag("mlp_bias", default=False))


def _embedding(fields: ConfigFields, family: Family) -> EmbeddingConfig:
    embedding = EmbeddingConfig(scale=_multiplier(fields, family, "embedding_multiplier"))
    if family.scales_embedding:
        embedding = replace(embedding, scale=fields.positive("hidden_size") ** 0.5)
    if family.has_layer_shapes:
        size = fields.number("hidden_size_per_layer_input", 0.0, least=0.0)
        embedding = replace(embedding, per_layer_size=int(size))
    return embedding


def _logits(fields: ConfigFields, family: Family) -> LogitConfig:
    divisor = _multiplier(fields, family, "logits_scaling")
    return LogitConfig(
        scale=fields.number("logit_scale", 1.0) / divisor,
        soft_cap=fields.number("final_logit_softcapping", 0.0, least=0.0),
    )


def _multiplier(fields: ConfigFields, family: Family, key: str) -> float:
    """A factor of Granite; 1 for other families."""
    if not family.has_multipliers:
        return 1.0
    return fields.number(key, 1.0, least=_LEAST_MULTIPLIER)


def _attention_scale(fields: ConfigFields, mla: MlaConfig | None, rope: RopeConfig) -> float | None:
    """The factor of attention scores; None for the usual one. Gemma scales scores as if heads had
    another size. Latent attention has the scale of heads before they are absorbed; a stretched
    context sharpens its scores by YaRN's magnitude, squared."""
    if mla is not None:
        magnitude = 1.0
        if rope.kind != "default" and rope.factor > 1:
            magnitude = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1
        return magnitude**2 / math.sqrt(mla.query_size(1))
    as_if = fields.number("query_pre_attn_scalar", 0.0, least=0.0)
    if as_if == 0:
        return None
    return float(as_if**-0.5)


def _moe(fields: ConfigFields, family: Family, num_layers: int) -> MoeConfig | None:
    if family.experts is None:
        return None
    moe = family.experts(fields, num_layers)
    if moe is not None and moe.experts_per_token > moe.num_experts:
        raise ModelError(
            f"{fields.source}: num_experts_per_tok is {moe.experts_per_token}, more than the "
            f"{moe.num_experts} experts"
        )
    return moe


def _recurrent(fields: ConfigFields, family: Family, num_layers: int) -> RecurrentConfig | None:
    if family.recurrent is None:
        return None
    recurrent = family.recurrent(fields, num_layers)
    if not recurrent.recurrent_layers:
        return None
    return recurrent


def _canvas(fields: ConfigFields, generation: ConfigFields, family: Family) -> CanvasConfig | None:
    if family.canvas is None:
        return None
    return family.canvas(fields, generation)


def _dtype(fields: ConfigFields) -> str:
    for key in ("dtype", "torch_dtype"):
        if fields.get(key):
            return str(fields.get(key)).removeprefix("torch.")
    return "float32"


def _first_token(generation: ConfigFields, fields: ConfigFields) -> int | None:
    """The token that begins a sequence. Where several are listed, the first counts."""
    for found in (generation, fields):
        tokens = found.integers("bos_token_id")
        if tokens:
            return tokens[0]
    return None


def _tensor_names(fields: ConfigFields) -> TensorNames | None:
    """The convention by which tensors are named, as the code that read the files has noted it;
    None: transformers'."""
    names: tuple[TensorNames, ...] = get_args(TensorNames)
    for name in names:
        if fields.get("tensor_names") == name:
            return name
    return None


def _quantization(fields: ConfigFields, mla: MlaConfig | None) -> Quantization | None:
    section = fields.section("quantization_config") or fields.section("compression_config")
    if section is None or (section.get("kv_cache_scheme") and not section.get("config_groups")):
        return None  # where only the cache was quantized, the weights are as in any other file
    quantization = Quantization.from_hf(section, fields.source)
    if mla is not None and quantization.method != "gguf":
        raise ModelError(
            f"{fields.source}: quantized weights of latent attention are not supported but in "
            "GGUF files; take one, or a 16-bit model"
        )
    return quantization


def _sampling_defaults(generation: ConfigFields) -> SamplingDefaults:
    """Read what generation_config.json recommends. Without do_sample, temperature, top_p, top_k and
    min_p are not meant."""
    penalty = generation.optional_number("repetition_penalty")
    if not generation.flag("do_sample", default=False):
        return SamplingDefaults(repetition_penalty=penalty)
    return SamplingDefaults(
        temperature=generation.optional_number("temperature"),
        top_p=generation.optional_number("top_p"),
        top_k=generation.whole("top_k"),
        min_p=generation.optional_number("min_p"),
        repetition_penalty=penalty,
    )
