"""How the config.json of each family is read into a ModelConfig. No torch here.

A family is a row of `_FAMILIES`: values that its config.json may leave out, and fields that all its models share.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from nanoserve.config.model_config import (
    LayerShape,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    RopeConfig,
    RopeKind,
    SamplingDefaults,
)
from nanoserve.config.quantization import Quantization
from nanoserve.errors import LONGEST_VALUE, ModelError, one_line, shown

_MAX_LAYERS = 10_000  # more than any real model, few enough to be refused before memory runs out
_MAX_INTEGER = 2**31 - 1
_MAX_NUMBER = 1e30
_LEAST_ROPE_NUMBER = 1e-6
_PLAIN_ROPE = RopeConfig(0)
_ROPE_KINDS = tuple(kind for kind in get_args(RopeKind) if kind != "none")
_NULLABLE: tuple[str, ...] = ("q_lora_rank", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
_NULLABLE += ("num_key_value_heads", "n_group", "topk_group", "per_layer_config")
"""Keys whose explicit null switches off what the family has by default."""
_MULTIMODAL = ("gemma3", "gemma4", "mistral3")
"""Models whose text_config is one of the families; what they have for images and sound is left alone."""
_WINDOWS = {"sliding_attention": True, "full_attention": False}
"""The kinds of layers that are known, and whether they have a window."""
_ROPE_NUMBERS = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


class _Family(NamedTuple):
    """What a model_type means beyond its config.json."""

    defaults: Mapping[str, Any] = {}
    """Values that Hugging Face assumes for keys which a checkpoint may leave out."""
    rope: Mapping[str, Any] = {}
    """The rope_parameters that are assumed without any; a checkpoint that has some leaves nothing of these."""
    fields: Mapping[str, Any] = {}
    """Fields of ModelConfig that all its models have."""
    biased: tuple[str, ...] = ("qkv_bias", "output_bias")
    """The fields that its attention_bias sets."""
    windows: Literal["none", "all", "switched", "listed"] = "none"
    """Which layers have windows: all, those that layer_types lists, or those only if use_sliding_window is true."""
    full_every: int = 0
    """Without layer_types, every which layer has no window; 0: all have one."""
    ropes_differ: bool = False
    """Whether layers with a window and those without have their own rope."""
    interleaved: bool = False
    """As in RopeConfig."""
    latent: bool = False
    """Whether attention is over latents (MlaConfig)."""


_GLM = _Family(
    {"rms_norm_eps": 1.5625e-7, "max_position_embeddings": 131072, "head_dim": 128, "attention_bias": True}
    | {"num_key_value_heads": 2},
    biased=("qkv_bias",),
    interleaved=True,
)
_MISTRAL_DEFAULTS = {"max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8}
_QWEN_DEFAULTS = {"max_position_embeddings": 32768, "sliding_window": 4096, "num_key_value_heads": 32}
_QWEN2 = _Family(_QWEN_DEFAULTS, fields={"qkv_bias": True}, biased=(), windows="switched")
_QWEN3 = _Family({**_QWEN_DEFAULTS, "head_dim": 128}, fields={"qk_norm": True}, windows="switched")
_GEMMA = {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096, "tie_word_embeddings": True}
_GEMMA2 = _Family(
    {**_GEMMA, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "num_key_value_heads": 4}
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    fields={"norm": "rms_plus_one", "norms": "around", "activation": "gelu_tanh"},
    windows="listed",
    full_every=2,
)
_GEMMA3 = _Family(
    {**_GEMMA2.defaults, "vocab_size": 262208, "num_attention_heads": 8}
    | {"max_position_embeddings": 131072, "final_logit_softcapping": 0.0}
    | {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
    fields={**_GEMMA2.fields, "qk_norm": True},
    windows="listed",
    full_every=6,
    ropes_differ=True,
)
_GEMMA4_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
_GEMMA4 = _GEMMA3._replace(
    defaults={**_GEMMA3.defaults, "vocab_size": 262144, "sliding_window": 512, "global_head_dim": 512}
    | {"hidden_size_per_layer_input": 256},
    rope={"sliding_attention": {"rope_theta": 1e4}, "full_attention": _GEMMA4_ROPE},
    fields={**_GEMMA3.fields} | {"norm": "rms_exact", "value_norm": True, "layer_scale": True, "attention_scale": 1.0},
)
_MINISTRAL3_ROPE = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384, "rope_theta": 1e6}
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}

_DEEPSEEK2 = _Family(
    {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    | {"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407, "max_position_embeddings": 2048},
    interleaved=True,
    latent=True,
)
"""Latent attention, and experts in groups beside shared ones."""
_DEEPSEEK3 = _DEEPSEEK2._replace(
    defaults={**_DEEPSEEK2.defaults, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8}
    | {"moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3}
    | {"routed_scaling_factor": 2.5, "max_position_embeddings": 4096}
)
_GLM4_LITE = _DEEPSEEK2._replace(
    defaults={**_DEEPSEEK2.defaults, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256}
    | {"n_shared_experts": 1, "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "first_k_dense_replace": 1}
    | {"routed_scaling_factor": 1.8, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5}
)

_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family({"max_position_embeddings": 2048}),
    "mistral": _Family(_MISTRAL_DEFAULTS, biased=(), windows="all"),
    "ministral": _Family(_MISTRAL_DEFAULTS, biased=(), windows="listed"),
    "ministral3": _Family(
        {"rms_norm_eps": 1e-5, "head_dim": 128, "max_position_embeddings": 262144, "num_key_value_heads": 8},
        {**_MINISTRAL3_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        biased=(),
        windows="all",
    ),
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "glm": _GLM,
    "glm4": _GLM._replace(fields={"norms": "around"}),
    "mixtral": _Family(
        {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 1e6, "num_key_value_heads": 8},
        biased=(),
        windows="all",
    ),
    "qwen3_moe": _Family(
        {**_QWEN_DEFAULTS, "moe_intermediate_size": 768, "num_key_value_heads": 4},
        fields={"qk_norm": True},
        windows="switched",
    ),
    "gpt_oss": _Family(
        {"rms_norm_eps": 1e-5, "head_dim": 64, "max_position_embeddings": 131072, "sliding_window": 128}
        | {"num_key_value_heads": 8, "attention_bias": True, "rope_theta": 150000.0},
        _GPT_OSS_ROPE,
        fields={"attention_sinks": True},
        windows="listed",
        full_every=2,
    ),
    "deepseek_v2": _DEEPSEEK2,
    "deepseek_v3": _DEEPSEEK3,
    "glm4_moe_lite": _GLM4_LITE,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "gemma4_text": _GEMMA4,
    "olmo3": _Family(
        {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "sliding_window": 4096, "rope_theta": 5e5},
        fields={"norms": "after", "qk_norm": True, "qk_norm_spans_heads": True},
        windows="listed",
        full_every=4,
        ropes_differ=True,
    ),
    "smollm3": _Family(
        {"max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True, "no_rope_layer_interval": 4}
        | {"num_key_value_heads": 4},
        windows="switched",
    ),
    "cohere2": _Family(
        {"max_position_embeddings": 8192, "sliding_window": 4096, "logit_scale": 0.0625, "tie_word_embeddings": True}
        | {"layer_norm_eps": 1e-5},
        fields={"norm": "layer", "norms": "shared"},
        windows="listed",
        full_every=4,
        interleaved=True,
    ),
}

# The older GLM checkpoints (`chatglm`) are `glm` under other names: their key -> the key of `glm`.
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


def read_config(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None, source: str) -> ModelConfig:
    """`ModelConfig.from_hf`."""
    config = _text_config(config, source)
    values, family = _normalize(config, source)
    fields, known = _Fields(values, source), _FAMILIES[family]
    generation = _Fields(generation_config or {}, str(Path(source).with_name("generation_config.json")))
    num_layers = fields.positive("num_hidden_layers", most=_MAX_LAYERS)
    mla = _mla(fields) if known.latent else None
    num_heads, num_kv_heads, head_dim = _heads(fields, mla)
    windows = _sliding_windows(fields, family, num_layers)
    hidden_size = fields.positive("hidden_size")
    layers = _gemma4_layers(fields, windows, num_layers, num_kv_heads) if known is _GEMMA4 else {}
    sliding_dim = full_dim = head_dim if mla is None else mla.qk_rope_head_dim
    for window, shape in zip(windows, layers.get("shapes", ()), strict=False):
        if window:
            sliding_dim = shape.head_dim
        else:
            full_dim = shape.head_dim
    rope, ropes = _ropes(fields, family, sliding_dim, full_dim, windows)
    scale = _attention_scale(fields) if mla is None else _latent_scale(mla, rope)
    shared: dict[str, Any] = {"attention_scale": scale, **layers, **known.fields}
    shared |= dict.fromkeys(known.biased, fields.flag("attention_bias", default=False))
    if family in ("llama", "smollm3"):
        shared["mlp_bias"] = fields.flag("mlp_bias", default=False)
    norm_eps = "layer_norm_eps" if known.fields.get("norm") == "layer" else "rms_norm_eps"
    return ModelConfig(
        family=family,
        vocab_size=fields.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.positive("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.positive("max_position_embeddings"),
        rms_norm_eps=fields.number(norm_eps, 1e-6, least=0.0),
        rope=rope,
        ropes=ropes,
        attention_soft_cap=fields.number("attn_logit_softcapping", 0.0, least=0.0) if family == "gemma2" else 0.0,
        embedding_scale=hidden_size**0.5 if family.startswith("gemma") else 1.0,
        logit_scale=fields.number("logit_scale", 1.0),
        logit_soft_cap=fields.number("final_logit_softcapping", 0.0, least=0.0),
        sliding_windows=windows,
        mla=mla,
        moe=_moe(fields, family, num_layers),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        dtype=str(fields.get("dtype") or fields.get("torch_dtype") or "float32").removeprefix("torch."),
        bos_token_id=next(iter(generation.integers("bos_token_id") or fields.integers("bos_token_id")), None),
        eos_token_ids=generation.integers("eos_token_id") or fields.integers("eos_token_id"),
        sampling_defaults=_sampling_defaults(generation),
        tensor_names=next(
            (name for name in ("chatglm", "gguf", "multimodal") if fields.get("tensor_names") == name), None
        ),
        quantization=_quantization(fields, mla),
        **shared,
    )


def _attention_scale(fields: "_Fields") -> float | None:
    """Gemma scales scores as if heads had another size."""
    as_if = fields.number("query_pre_attn_scalar", 0.0, least=0.0)
    return as_if**-0.5 if as_if else None


def _gemma4_layers(fields: "_Fields", windows: tuple[int, ...], num_layers: int, num_kv_heads: int) -> dict[str, Any]:
    """The fields of Gemma 4 that say what its layers are: those without a window have other heads, and the last ones
    share keys and values, each those of the last layer before them with the same window."""
    source, shared = fields.source, int(fields.number("num_kv_shared_layers", 0.0, least=0.0))
    if not windows or windows[-1]:
        raise ModelError(f"{source}: layer_types must end in full_attention, and some layer must have a sliding_window")
    if fields.flag("enable_moe_block", default=False):
        raise ModelError(f"{source}: gemma4 with a mixture of experts (enable_moe_block) is not supported yet")
    first = max(0, num_layers - shared)
    last = {window: layer for layer, window in enumerate(windows[:first])}
    if {*windows} - last.keys():
        raise ModelError(f"{source}: num_kv_shared_layers {shared} leaves no layer of each kind with keys and values")
    equal, doubled = (fields.flag(key, default=False) for key in ("attention_k_eq_v", "use_double_wide_mlp"))
    inner, shapes = fields.positive("intermediate_size"), []
    for layer, sizes in enumerate(_own_sizes(fields, windows, num_kv_heads, equal=equal)):
        head_dim = sizes.positive("head_dim", fields.positive("head_dim"))
        kv_heads = _kv_heads(sizes, num_kv_heads, fields.positive("num_attention_heads"))
        wide = 2 if doubled and layer >= first else 1
        shapes.append(LayerShape(head_dim, kv_heads, inner * wide, equal and not windows[layer], layer < first))
    if len({(window, shape[:2]) for window, shape in zip(windows, shapes, strict=True)}) > len(last):
        raise ModelError(f"{source}: per_layer_config must give all layers of a kind the same heads")
    return {
        "shapes": tuple(shapes),
        "kv_sources": tuple(layer if layer < first else last[window] for layer, window in enumerate(windows)),
        "per_layer_input_size": int(fields.number("hidden_size_per_layer_input", 0.0, least=0.0)),
    }


def _own_sizes(fields: "_Fields", windows: tuple[int, ...], num_kv_heads: int, *, equal: bool) -> Iterator["_Fields"]:
    """For each layer of Gemma 4, the sizes in which it differs from the rest of config.json. The keys of
    `per_layer_config` are numbers of layers, written with as many digits as the last one has."""
    source, own = fields.source, dict[int, _Fields]()
    if "per_layer_config" not in fields.values:
        full = {"head_dim": fields.positive("global_head_dim")}
        if equal:
            full["num_key_value_heads"] = fields.positive("num_global_key_value_heads", num_kv_heads)
        own = {layer: _Fields(full, source) for layer, window in enumerate(windows) if not window}
    for key, sizes in (fields.section("per_layer_config") or {}).items():
        layer = int(key) if re.fullmatch("[0-9]{1,5}", key) else len(windows)
        if layer >= len(windows) or layer in own:
            raise ModelError(f"{source}: per_layer_config must have layers below {len(windows)} as keys, each once")
        if not isinstance(sizes, dict) or not sizes.keys() <= {"head_dim", "num_key_value_heads"}:
            wanted = "head_dim and num_key_value_heads alone"
            raise ModelError(f"{source}: per_layer_config of layer {layer} must have {wanted}, found {shown(sizes)}")
        own[layer] = _Fields(sizes, source)
    return (own.get(layer, _Fields({}, source)) for layer in range(len(windows)))


def _mla(fields: "_Fields") -> MlaConfig:
    query_rank = 0 if fields.get("q_lora_rank") is None else fields.positive("q_lora_rank")
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return MlaConfig(query_rank, *map(fields.positive, names))


def _latent_scale(mla: MlaConfig, rope: RopeConfig) -> float:
    """That of heads before they are absorbed; a stretched context sharpens scores by YaRN's magnitude, squared."""
    stretched = rope.kind != "default" and rope.factor > 1
    magnitude = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1 if stretched else 1.0
    return magnitude**2 / math.sqrt(mla.query_size(1))


def _heads(fields: "_Fields", mla: MlaConfig | None) -> tuple[int, int, int]:
    """Query heads, key-value heads and the size of a head, which must fit each other."""
    hidden_size, num_heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    if mla is not None:
        return num_heads, 1, mla.kv_lora_rank + mla.qk_rope_head_dim
    num_kv_heads = _kv_heads(fields, num_heads, num_heads)
    if fields.get("head_dim") is None and hidden_size % num_heads:
        heads = f"num_attention_heads {num_heads}"
        raise ModelError(f"{fields.source}: hidden_size {hidden_size} is not a multiple of {heads}")
    return num_heads, num_kv_heads, fields.positive("head_dim", hidden_size // num_heads)


def _kv_heads(fields: "_Fields", default: int, num_heads: int) -> int:
    found = fields.positive("num_key_value_heads", default)
    if num_heads % found:
        heads = f"num_attention_heads {num_heads}"
        raise ModelError(f"{fields.source}: {heads} is not a multiple of num_key_value_heads {found}")
    return found


class _Fields:
    """Typed access to a JSON object; every complaint names the file and the key."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def get(self, key: str, default: Any = None) -> Any:
        """Its value, or the default where it is missing or null."""
        value = self.values.get(key)
        return default if value is None else value

    def _fail(self, key: str, wanted: str) -> ModelError:
        return ModelError(f"{self.source}: {key} must be {wanted}, found {shown(self.values.get(key))}")

    def section(self, key: str) -> dict[str, Any] | None:
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self._fail(key, "an object")
        return value

    def positive(self, key: str, default: int | None = None, *, most: int = _MAX_INTEGER) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self._fail(key, "a positive integer")
        if value > most:
            raise self._fail(key, f"at most {most}")
        return value

    def number(self, key: str, default: float, *, least: float = -_MAX_NUMBER) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MAX_NUMBER:
            raise self._fail(key, "a number")
        if value < least:
            raise self._fail(key, f"at least {least:g}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key, 0.0)

    def positive_numbers(self, key: str, *, count: int) -> tuple[float, ...]:
        value = self.get(key, [])
        if not isinstance(value, list) or len(value) not in (0, count):
            raise self._fail(key, f"a list of {count} numbers")
        return tuple(_Fields({key: one}, self.source).number(key, 1.0, least=_LEAST_ROPE_NUMBER) for one in value)

    def whole(self, key: str) -> int | None:
        value = self.optional_number(key)
        if value is not None and not value.is_integer():
            raise self._fail(key, "a whole number")
        return None if value is None else int(value)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self._fail(key, "true or false")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
            raise self._fail(key, "an integer from 0 on or a list of them")
        return tuple(ids)


def _normalize(config: Mapping[str, Any], source: str) -> tuple[dict[str, Any], str]:
    """Fill in the family's defaults and translate `chatglm` keys: (values, family)."""
    model_type = config.get("model_type")
    architectures = config.get("architectures") or []
    is_chatglm = model_type == "chatglm"
    family = "glm" if is_chatglm else model_type
    named = ", ".join(str(name) for name in architectures) if isinstance(architectures, list) else ""
    listed = one_line(named, LONGEST_VALUE)
    if not isinstance(family, str) or family not in _FAMILIES:
        supported = ", ".join((*_FAMILIES, "chatglm"))
        raise ModelError(
            f"{source}: architecture {listed or 'unnamed'} (model_type {shown(model_type)}) is not supported;"
            f" supported model types: {supported}"
        )
    if named and not is_chatglm and "ForCausalLM" not in named:
        raise ModelError(f"{source}: {listed} is not a text generation model (...ForCausalLM)")
    known = _FAMILIES[family]
    values = {**known.defaults, **{key: value for key, value in config.items() if value is not None}}
    values |= {key: config[key] for key in _NULLABLE if key in config}
    if is_chatglm:
        _translate_chatglm(values, config, source)
        values["tensor_names"] = "chatglm"
    if config.get("rope_parameters") is None and not config.get("rope_scaling") and known.rope:
        values["rope_parameters"] = known.rope
    key, accepted = "hidden_act", ["silu", "swish"]
    if known.fields.get("activation") == "gelu_tanh":
        key, accepted = "hidden_activation", ["gelu_pytorch_tanh"]
    if (found := values.get(key, "silu")) not in accepted:
        raise ModelError(f"{source}: hidden_act {shown(found)} is not supported; only {accepted[0]} is")
    if config.get("per_layer_config") and known is not _GEMMA4:
        raise ModelError(f"{source}: per_layer_config is not supported for {family}: its layers must be alike")
    if values.get("use_bidirectional_attention") not in (None, False, "vision"):  # that of images, which are not read
        raise ModelError(
            f"{source}: use_bidirectional_attention is not supported: a text is written from left to right"
        )
    return values, family


def _text_config(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The config of the text model alone, where it is a part of another."""
    if config.get("model_type") not in _MULTIMODAL:
        return config
    text = _Fields(config, source).section("text_config") or {}
    text = {key: value for key, value in text.items() if value is not None or key in _NULLABLE}
    tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}  # the whole model decides
    return {**config, "architectures": None, "model_type": None, **text, **tied, "tensor_names": "multimodal"}


def _translate_chatglm(values: dict[str, Any], config: Mapping[str, Any], source: str) -> None:
    values.update({new: config[old] for old, new in _CHATGLM_KEYS.items() if config.get(old) is not None})
    if not config.get("multi_query_attention", True):
        values["num_key_value_heads"] = config.get("num_attention_heads")
    if config.get("add_bias_linear") or not config.get("rmsnorm", True):
        raise ModelError(f"{source}: this chatglm variant (add_bias_linear or layer norm) is not supported")
    values["rope_theta"] = 10000.0 * _Fields(config, source).number("rope_ratio", 1.0)


def _ropes(
    fields: _Fields, family: str, sliding_dim: int, full_dim: int, windows: tuple[int, ...]
) -> tuple[RopeConfig, tuple[RopeConfig, ...]]:
    """How most layers rotate, and how each does, where they differ."""
    num_layers = fields.positive("num_hidden_layers")
    if _FAMILIES[family].ropes_differ:
        full = _rope(fields, family, full_dim, "full_attention")
        sliding = _rope(fields, family, sliding_dim, "sliding_attention")
        return full, tuple(sliding if window else full for window in windows or (0,) * num_layers)
    rope = _rope(fields, family, full_dim)
    rotated: list[int] = [1] * num_layers
    if family == "cohere2":
        rotated = list(windows) or [0] * num_layers
    elif family == "smollm3":
        rotated = _rotated_layers(fields, num_layers)
    still = RopeConfig(rope.rotary_dim, kind="none", interleaved=rope.interleaved)
    return rope, () if all(rotated) else tuple(rope if turns else still for turns in rotated)


def _rotated_layers(fields: _Fields, num_layers: int) -> list[int]:
    """For each layer of SmolLM3, whether it rotates: `no_rope_layers` has a 0 for one that does not."""
    interval = fields.positive("no_rope_layer_interval")
    rotated = fields.get("no_rope_layers", [int((layer + 1) % interval != 0) for layer in range(num_layers)])
    if not isinstance(rotated, list) or len(rotated) != num_layers or not all(one in (0, 1) for one in rotated):
        raise ModelError(f"{fields.source}: no_rope_layers must have a 0 or a 1 for each of {num_layers} layers")
    return rotated


def _rope_section(fields: _Fields, kind: str | None) -> dict[str, Any]:
    """`rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (before), over the rest of config.json;
    those for one kind of layers, where each has its own. Of the two, `rope_scaling` wins, as in transformers."""
    merged = dict(fields.values)
    given = {key: fields.section(key) or {} for key in ("rope_parameters", "rope_scaling")}
    nested = {key for key, section in given.items() if any(isinstance(one, dict) for one in section.values())}
    if kind is None:
        if nested:
            raise ModelError(f"{fields.source}: {min(nested)} must be the same for all layers of this model")
        return merged | (given["rope_scaling"] or given["rope_parameters"])
    if kind == "sliding_attention":
        merged["rope_theta"] = fields.get("rope_local_base_freq", merged.get("rope_theta"))
    for key, section in given.items():
        if key in nested:
            own = section.get(kind)
            if not isinstance(own, dict):
                raise ModelError(f"{fields.source}: {key} must have an object for {kind}")
            merged |= own
        elif kind != "sliding_attention":  # before transformers 5, only layers without a window were stretched
            merged |= section
    return merged


def _rope(fields: _Fields, family: str, head_dim: int, layer_kind: str | None = None) -> RopeConfig:
    """How layers rotate, or those of one kind."""
    merged = _rope_section(fields, layer_kind)
    rope = _Fields(merged, fields.source)
    kind: Any = merged.get("rope_type") or merged.get("type") or "default"
    if kind not in _ROPE_KINDS:
        supported = ", ".join(_ROPE_KINDS)
        raise ModelError(f"{fields.source}: rope type {shown(kind)} is not supported; supported: {supported}")
    is_glm = family in ("glm", "glm4")
    # Other families rotate whole heads, whatever the key says.
    rotary_dim = int(head_dim * (rope.number("partial_rotary_factor", 0.5) if is_glm else 1.0))
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ModelError(f"{fields.source}: head_dim {head_dim} gives an impossible rotary size of {rotary_dim}")
    max_position = fields.positive("max_position_embeddings")
    original = rope.positive("original_max_position_embeddings", max_position)
    # Only YaRN may leave its factor to be inferred from the two lengths.
    if kind not in ("default", "yarn", "proportional") and rope.get("factor") is None:
        raise ModelError(f"{fields.source}: the rope factor is missing, without which rope type {kind} means nothing")
    inferred = 1.0 if kind == "proportional" else max_position / original
    factor = 1.0 if kind == "default" else rope.number("factor", inferred)
    theta = rope.number("rope_theta", 10000.0)
    if min(factor, theta) < _LEAST_ROPE_NUMBER:
        raise ModelError(f"{fields.source}: rope factor and rope_theta must be positive, found {factor} and {theta}")
    rope_config = RopeConfig(
        rotary_dim=rotary_dim,
        theta=theta,
        kind=kind,
        interleaved=_FAMILIES[family].interleaved and rope.flag("rope_interleave", default=True),
        factor=factor,
        original_max_position_embeddings=original,
        truncate=rope.flag("truncate", default=True),
        attention_factor=rope.optional_number("attention_factor"),
        frequency_factors=rope.positive_numbers("frequency_factors", count=rotary_dim // 2),
        proportion=rope.number("partial_rotary_factor", 1.0, least=0.0) if kind == "proportional" else 1.0,
        query_growth=rope.number("llama_4_scaling_beta", 0.0) if family == "ministral3" else 0.0,
        **{name: rope.number(name, getattr(_PLAIN_ROPE, name)) for name in _ROPE_NUMBERS},
    )
    # The rules that blend kept and stretched frequencies need two different borders between them.
    if kind == "llama3" and not 0 < rope_config.low_freq_factor < rope_config.high_freq_factor:
        raise ModelError(f"{fields.source}: rope type llama3 needs 0 < low_freq_factor < high_freq_factor")
    if kind == "yarn" and not (0 < rope_config.beta_slow < rope_config.beta_fast and theta > 1):
        raise ModelError(f"{fields.source}: rope type yarn needs 0 < beta_slow < beta_fast and rope_theta above 1")
    return rope_config


def _sliding_windows(fields: _Fields, family: str, num_layers: int) -> tuple[int, ...]:
    """Each layer's window; empty if there are none."""
    known, types = _FAMILIES[family], _layer_types(fields, num_layers)
    if known.windows == "none" or fields.get("sliding_window") is None:
        return ()
    if known.windows == "switched" and not fields.flag("use_sliding_window", default=False):
        return ()
    window, context = fields.positive("sliding_window"), fields.positive("max_position_embeddings")
    if window > context and window != known.defaults.get("sliding_window"):  # Olmo 3's own default is beyond
        raise ModelError(f"{fields.source}: sliding_window {window} is beyond max_position_embeddings {context}")
    if known.windows == "all" or family == "qwen3_moe":
        return (window,) * num_layers
    if types is None and family in ("qwen2", "qwen3"):
        first_sliding = int(fields.number("max_window_layers", 28))
        types = [layer >= first_sliding for layer in range(num_layers)]
    elif types is None and family == "smollm3":
        types = [not turns for turns in _rotated_layers(fields, num_layers)]
    elif types is None:
        every = known.full_every and fields.positive("sliding_window_pattern", known.full_every)
        types = [not every or (layer + 1) % every != 0 for layer in range(num_layers)]
        if known is _GEMMA4:
            types[-1] = False  # its last layer always sees everything
    return tuple(window if slides else 0 for slides in types)


def _layer_types(fields: _Fields, num_layers: int) -> list[bool] | None:
    """For each layer, whether `layer_types` gives it a window; None if it is not there."""
    layer_types = fields.get("layer_types")
    if layer_types is None:
        return None
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        found = len(layer_types) if isinstance(layer_types, list) else shown(layer_types)
        raise ModelError(
            f"{fields.source}: layer_types must name a kind for each of {num_layers} layers, found {found}"
        )
    for kind in layer_types:
        if not isinstance(kind, str) or kind not in _WINDOWS:
            raise ModelError(f"{fields.source}: layer_types names {shown(kind)}; known are {' and '.join(_WINDOWS)}")
    return [_WINDOWS[kind] for kind in layer_types]


def _moe(fields: _Fields, family: str, num_layers: int) -> MoeConfig | None:
    if _FAMILIES[family].latent:
        moe = _deepseek_experts(fields, family, num_layers)
    elif family in ("mixtral", "gpt_oss", "qwen3_moe"):
        is_qwen, is_gpt_oss = family == "qwen3_moe", family == "gpt_oss"
        if is_gpt_oss and (fields.number("swiglu_limit", 7.0), fields.number("swiglu_alpha", 1.702)) != (7.0, 1.702):
            raise ModelError(f"{fields.source}: gpt-oss with another swiglu_limit or swiglu_alpha is not supported")
        name, other = ("num_experts", "num_local_experts")[:: 1 if is_qwen else -1]
        step, dense = fields.positive("decoder_sparse_step", 1), fields.integers("mlp_only_layers")
        sparse = (layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)
        moe = MoeConfig(
            num_experts=fields.positive(name, fields.positive(other, 8 if family == "mixtral" else 128)),
            experts_per_token=fields.positive("num_experts_per_tok", 8 if is_qwen else 4 if is_gpt_oss else 2),
            intermediate_size=fields.positive("moe_intermediate_size" if is_qwen else "intermediate_size"),
            normalize_weights=fields.flag("norm_topk_prob", default=False) if is_qwen else True,
            sparse_layers=frozenset(sparse),
            style="gpt_oss" if is_gpt_oss else "swiglu",
        )
    else:
        return None
    if moe.experts_per_token > moe.num_experts:
        raise ModelError(
            f"{fields.source}: num_experts_per_tok is {moe.experts_per_token}, more than the {moe.num_experts} experts"
        )
    return moe


def _deepseek_experts(fields: _Fields, family: str, num_layers: int) -> MoeConfig:
    """Those of DeepSeek and of models built like it: shared experts, and experts in groups."""
    num_experts, inner = fields.positive("n_routed_experts"), fields.positive("moe_intermediate_size")
    groups, chosen = fields.positive("n_group", 1), fields.positive("topk_group", 1)
    if family == "deepseek_v2":
        method = fields.get("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise ModelError(f"{fields.source}: topk_method {shown(method)} is not supported")
        if method == "greedy":
            groups = chosen = 1
    if num_experts % groups or not chosen <= groups:
        raise ModelError(
            f"{fields.source}: {num_experts} experts cannot be in {groups} groups, {chosen} of them chosen"
        )
    dense = int(fields.number("first_k_dense_replace", 0.0, least=0.0))
    kinds = fields.get("mlp_layer_types", ["dense"] * dense + ["sparse"] * (num_layers - dense))
    if not isinstance(kinds, list) or len(kinds) < num_layers or not {"dense", "sparse"}.issuperset(map(str, kinds)):
        raise ModelError(f"{fields.source}: mlp_layer_types must have dense or sparse for each of {num_layers} layers")
    is_v2 = family == "deepseek_v2"  # transformers leaves its weights as they are, whatever norm_topk_prob says
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=fields.positive("num_experts_per_tok"),
        intermediate_size=inner,
        normalize_weights=not is_v2 and fields.flag("norm_topk_prob", default=True),
        sparse_layers=frozenset(layer for layer, kind in enumerate(kinds[:num_layers]) if kind == "sparse"),
        shared_size=inner * int(fields.number("n_shared_experts", 0.0, least=0.0)),
        scores="softmax" if is_v2 else "sigmoid",
        num_groups=groups,
        groups_per_token=chosen,
        weight_scale=fields.number("routed_scaling_factor", 1.0),
    )


def _quantization(fields: _Fields, mla: MlaConfig | None) -> Quantization | None:
    section = fields.section("quantization_config") or fields.section("compression_config")
    if section is None or (section.get("kv_cache_scheme") and not section.get("config_groups")):
        return None  # where only the cache was quantized, the weights are as in any other file
    if mla is not None:
        raise ModelError(
            f"{fields.source}: quantized weights of latent attention are not supported; take a 16-bit model"
        )
    return Quantization.from_hf(section, fields.source)


def _sampling_defaults(generation: _Fields) -> SamplingDefaults:
    """What generation_config.json recommends; without do_sample, temperature, top_p and top_k are not meant."""
    penalty = generation.optional_number("repetition_penalty")
    if not generation.flag("do_sample", default=False):
        return SamplingDefaults(repetition_penalty=penalty)
    temperature, top_p, min_p = map(generation.optional_number, ("temperature", "top_p", "min_p"))
    return SamplingDefaults(temperature, top_p, generation.whole("top_k"), min_p, penalty)
