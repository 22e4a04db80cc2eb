"""ModelConfig: a model's shape, and how a Hugging Face config.json is read into it. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from nanoserve.errors import ModelError, UsageError
from nanoserve.processes.files import read_json_object, read_optional_json_object
from nanoserve.quantization import CPU_GROUP, Quantization, Rounding

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: which frequencies, how stretched, how many dimensions of a head rotate.

    `kind` is the scaling rule: linear (position interpolation), llama3 (Llama 3.1's piecewise rule) or yarn
    (arXiv 2309.00071). `interleaved` rotates neighbouring pairs (GLM) instead of the two halves of the head.
    """

    rotary_dim: int
    theta: float = 10000.0
    kind: RopeKind = "default"
    interleaved: bool = False
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    frequency_factors: tuple[float, ...] = ()
    """Further divisors of the frequencies, from a GGUF file: rotary_dim / 2 numbers, or none."""


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Mixture of experts: a sparse layer sends each token to `experts_per_token` of its `num_experts`."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize_weights: bool
    sparse_layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What generation_config.json recommends; None where it says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """All that tells one decoder family from another; the Decoder is built from this and nothing else."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norms_per_layer: Literal[2, 4] = 2
    sliding_windows: tuple[int, ...] = ()
    """Per layer: how many of the last positions a query sees, itself included; 0 or an empty tuple = all."""
    moe: MoeConfig | None = None
    tie_word_embeddings: bool = False
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    tensor_names: Literal["chatglm", "gguf"] | None = None
    """Whose tensor names the checkpoint uses: those of the older GLM releases, of GGUF, or of transformers (None)."""
    quantization: Quantization | None = None

    @property
    def group_size(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads

    def sliding_window(self, layer: int) -> int:
        """Positions a query of this layer sees, itself included; 0 means all."""
        return self.sliding_windows[layer] if self.sliding_windows else 0

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer's feed-forward part is a mixture of experts."""
        return self.moe is not None and layer in self.moe.sparse_layers

    def rounded(self, quantization: str | None) -> "ModelConfig":
        """The model as `--quantization` rounds it. Raises UsageError if it is quantized already."""
        if quantization is None:
            return self
        if self.quantization is not None:
            raise UsageError(f"--quantization {quantization}: the model is quantized already; leave it out")
        rounding = Rounding.parse(quantization)
        return replace(self, quantization=Quantization("rounding", rounding.bits, rounding.group or CPU_GROUP))

    @classmethod
    def from_directory(cls, directory: str | Path) -> "ModelConfig":
        """Read config.json and generation_config.json, if there is one. Raises ModelError naming the file."""
        directory = Path(directory)
        path = directory / "config.json"
        if not directory.is_dir():
            raise ModelError(f"{directory}: no such model directory")
        if not path.is_file():
            raise ModelError(f"{directory}: no config.json; this is not a Hugging Face model directory")
        generation_config = read_optional_json_object(directory / "generation_config.json")
        return cls.from_hf(read_json_object(path), generation_config, source=str(path))

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        generation_config: Mapping[str, Any] | None = None,
        *,
        source: str = "config.json",
    ) -> "ModelConfig":
        """Translate a parsed config.json. Raises ModelError, one line that begins with `source`."""
        values, family = _normalize(config, source)
        fields = _Fields(values, source)
        generation = _Fields(generation_config or {}, str(Path(source).with_name("generation_config.json")))
        num_layers = fields.positive("num_hidden_layers", most=_MAX_LAYERS)
        num_heads, num_kv_heads, head_dim = _heads(fields)
        attention_bias = fields.flag("attention_bias", default=False)
        return cls(
            family=family,
            vocab_size=fields.positive("vocab_size"),
            hidden_size=fields.positive("hidden_size"),
            intermediate_size=fields.positive("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=fields.positive("max_position_embeddings"),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6, least=0.0),
            rope=_rope(fields, family, head_dim),
            qkv_bias=family == "qwen2" or (family not in ("mistral", "mixtral") and attention_bias),
            output_bias=family in ("llama", "qwen3", "qwen3_moe") and attention_bias,
            mlp_bias=family == "llama" and fields.flag("mlp_bias", default=False),
            qk_norm=family in ("qwen3", "qwen3_moe"),
            norms_per_layer=4 if family == "glm4" else 2,
            sliding_windows=_sliding_windows(fields, family, num_layers),
            moe=_moe(fields, family, num_layers),
            tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
            dtype=str(fields.get("dtype") or fields.get("torch_dtype") or "float32").removeprefix("torch."),
            bos_token_id=next(iter(generation.integers("bos_token_id") or fields.integers("bos_token_id")), None),
            eos_token_ids=generation.integers("eos_token_id") or fields.integers("eos_token_id"),
            sampling_defaults=_sampling_defaults(generation),
            tensor_names=next((name for name in ("chatglm", "gguf") if fields.get("tensor_names") == name), None),
            quantization=_quantization(fields),
        )


# ------------------------------------------------------------------------------------ Reading config.json

_MAX_LAYERS = 10_000  # more than any real model, few enough to be refused before memory runs out
_MAX_INTEGER = 2**31 - 1
_MAX_NUMBER = 1e30
_LEAST_ROPE_NUMBER = 1e-6
_PLAIN_ROPE = RopeConfig(0)
_ROPE_NUMBERS = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")

_GLM_DEFAULTS: Mapping[str, Any] = {
    "rms_norm_eps": 1.5625e-7,
    "max_position_embeddings": 131072,
    "head_dim": 128,
    "attention_bias": True,
}

# Values that Hugging Face assumes for keys which a checkpoint of the family may leave out.
_FAMILY_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32768, "sliding_window": 4096, "head_dim": 128},
    "glm": _GLM_DEFAULTS,
    "glm4": _GLM_DEFAULTS,
    "mixtral": {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 1e6},
    "qwen3_moe": {"max_position_embeddings": 32768, "sliding_window": 4096},
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


def _heads(fields: "_Fields") -> tuple[int, int, int]:
    """Query heads, key-value heads and the size of a head, which must fit each other."""
    hidden_size, num_heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    num_kv_heads = fields.positive("num_key_value_heads", num_heads)
    heads = f"num_attention_heads {num_heads}"
    if num_heads % num_kv_heads:
        raise ModelError(f"{fields.source}: {heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise ModelError(f"{fields.source}: hidden_size {hidden_size} is not a multiple of {heads}")
    return num_heads, num_kv_heads, fields.positive("head_dim", hidden_size // num_heads)


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
        return ModelError(f"{self.source}: {key} must be {wanted}, found {self.values.get(key)!r}")

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
    if not isinstance(family, str) or family not in _FAMILY_DEFAULTS:
        supported = ", ".join((*_FAMILY_DEFAULTS, "chatglm"))
        raise ModelError(
            f"{source}: architecture {named or 'unnamed'} (model_type {model_type!r}) is not supported;"
            f" supported model types: {supported}"
        )
    if named and not is_chatglm and "ForCausalLM" not in named:
        raise ModelError(f"{source}: {named} is not a text generation model (...ForCausalLM)")
    values = {**_FAMILY_DEFAULTS[family], **{key: value for key, value in config.items() if value is not None}}
    if family in ("mistral", "mixtral") and "sliding_window" in config:
        values["sliding_window"] = config["sliding_window"]  # an explicit null switches the window off
    if is_chatglm:
        _translate_chatglm(values, config, source)
        values["tensor_names"] = "chatglm"
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(f"{source}: hidden_act {values['hidden_act']!r} is not supported; only silu is")
    return values, family


def _translate_chatglm(values: dict[str, Any], config: Mapping[str, Any], source: str) -> None:
    values.update({new: config[old] for old, new in _CHATGLM_KEYS.items() if config.get(old) is not None})
    if not config.get("multi_query_attention", True):
        values["num_key_value_heads"] = config.get("num_attention_heads")
    if config.get("add_bias_linear") or not config.get("rmsnorm", True):
        raise ModelError(f"{source}: this chatglm variant (add_bias_linear or layer norm) is not supported")
    values["rope_theta"] = 10000.0 * _Fields(config, source).number("rope_ratio", 1.0)


def _rope(fields: _Fields, family: str, head_dim: int) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    merged = dict(fields.values)
    for key in ("rope_scaling", "rope_parameters"):
        section = fields.get(key)
        if section is not None and not isinstance(section, dict):
            raise ModelError(f"{fields.source}: {key} must be an object, found {section!r}")
        merged.update(section or {})
    rope = _Fields(merged, fields.source)
    kind: Any = merged.get("rope_type") or merged.get("type") or "default"
    if kind not in get_args(RopeKind):
        supported = ", ".join(get_args(RopeKind))
        raise ModelError(f"{fields.source}: rope type {kind!r} is not supported; supported: {supported}")
    is_glm = family in ("glm", "glm4")
    # Other families rotate whole heads, whatever the key says.
    rotary_dim = int(head_dim * (rope.number("partial_rotary_factor", 0.5) if is_glm else 1.0))
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ModelError(f"{fields.source}: head_dim {head_dim} gives an impossible rotary size of {rotary_dim}")
    max_position = rope.positive("max_position_embeddings")
    original = rope.positive("original_max_position_embeddings", max_position)
    # Only YaRN may leave its factor to be inferred from the two lengths.
    if kind not in ("default", "yarn") and rope.get("factor") is None:
        raise ModelError(f"{fields.source}: the rope factor is missing, without which rope type {kind} means nothing")
    factor = 1.0 if kind == "default" else rope.number("factor", max_position / original)
    theta = rope.number("rope_theta", 10000.0)
    if min(factor, theta) < _LEAST_ROPE_NUMBER:
        raise ModelError(f"{fields.source}: rope factor and rope_theta must be positive, found {factor} and {theta}")
    rope_config = RopeConfig(
        rotary_dim=rotary_dim,
        theta=theta,
        kind=kind,
        interleaved=is_glm,
        factor=factor,
        original_max_position_embeddings=original,
        truncate=rope.flag("truncate", default=True),
        attention_factor=rope.optional_number("attention_factor"),
        frequency_factors=rope.positive_numbers("frequency_factors", count=rotary_dim // 2),
        **{name: rope.number(name, getattr(_PLAIN_ROPE, name)) for name in _ROPE_NUMBERS},
    )
    # The rules that blend kept and stretched frequencies need two different borders between them.
    if kind == "llama3" and not 0 < rope_config.low_freq_factor < rope_config.high_freq_factor:
        raise ModelError(f"{fields.source}: rope type llama3 needs 0 < low_freq_factor < high_freq_factor")
    if kind == "yarn" and not (0 < rope_config.beta_slow < rope_config.beta_fast and theta > 1):
        raise ModelError(f"{fields.source}: rope type yarn needs 0 < beta_slow < beta_fast and rope_theta above 1")
    return rope_config


def _sliding_windows(fields: _Fields, family: str, num_layers: int) -> tuple[int, ...]:
    """Each layer's window. Qwen has a switch, and says which layers slide (`layer_types`, `max_window_layers`)."""
    if family not in ("mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe") or fields.get("sliding_window") is None:
        return ()
    if family.startswith("qwen") and not fields.flag("use_sliding_window", default=False):
        return ()
    window = fields.positive("sliding_window")
    if family not in ("qwen2", "qwen3"):
        return (window,) * num_layers
    layer_types = fields.get("layer_types")
    if layer_types is None:
        first_sliding = int(fields.number("max_window_layers", 28))
        return tuple(window if layer >= first_sliding else 0 for layer in range(num_layers))
    known = {"sliding_attention": window, "full_attention": 0}
    if (
        not isinstance(layer_types, list)
        or len(layer_types) != num_layers
        or not all(isinstance(layer_type, str) and layer_type in known for layer_type in layer_types)
    ):
        raise ModelError(f"{fields.source}: layer_types must name {' or '.join(known)} once for every layer")
    return tuple(known[layer_type] for layer_type in layer_types)


def _moe(fields: _Fields, family: str, num_layers: int) -> MoeConfig | None:
    if family == "mixtral":
        moe = MoeConfig(
            num_experts=fields.positive("num_local_experts", 8),
            experts_per_token=fields.positive("num_experts_per_tok", 2),
            intermediate_size=fields.positive("intermediate_size"),
            normalize_weights=True,
            sparse_layers=frozenset(range(num_layers)),
        )
    elif family == "qwen3_moe":
        step, dense = fields.positive("decoder_sparse_step", 1), fields.integers("mlp_only_layers")
        sparse = (layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)
        moe = MoeConfig(
            num_experts=fields.positive("num_experts", fields.positive("num_local_experts", 128)),
            experts_per_token=fields.positive("num_experts_per_tok", 8),
            intermediate_size=fields.positive("moe_intermediate_size", 768),
            normalize_weights=fields.flag("norm_topk_prob", default=False),
            sparse_layers=frozenset(sparse),
        )
    else:
        return None
    if moe.experts_per_token > moe.num_experts:
        raise ModelError(
            f"{fields.source}: num_experts_per_tok is {moe.experts_per_token}, more than the {moe.num_experts} experts"
        )
    return moe


def _quantization(fields: _Fields) -> Quantization | None:
    section = fields.get("quantization_config") or fields.get("compression_config")
    if section is None:
        return None
    if not isinstance(section, dict):
        raise ModelError(f"{fields.source}: quantization_config must be an object, found {section!r:.80}")
    return Quantization.from_hf(section, fields.source)


def _sampling_defaults(generation: _Fields) -> SamplingDefaults:
    """What generation_config.json recommends; without do_sample, temperature, top_p and top_k are not meant."""
    penalty = generation.optional_number("repetition_penalty")
    if not generation.flag("do_sample", default=False):
        return SamplingDefaults(repetition_penalty=penalty)
    temperature, top_p, min_p = map(generation.optional_number, ("temperature", "top_p", "min_p"))
    return SamplingDefaults(temperature, top_p, generation.whole("top_k"), min_p, penalty)
