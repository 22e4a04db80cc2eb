"""ModelConfig: a model's shape, read from a Hugging Face config.json. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nanoserve.config.cache_groups import CacheGroups
from nanoserve.config.quantization import Quantization
from nanoserve.errors import ModelError, UsageError
from nanoserve.utils.files import read_json_object, read_optional_json_object

RopeKind = Literal["default", "linear", "llama3", "yarn", "proportional", "none"]
TensorNames = Literal["chatglm", "gguf", "multimodal"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: which frequencies, how stretched, how many dimensions of a head rotate.

    `kind` is the scaling rule: linear (position interpolation), llama3 (Llama 3.1's piecewise rule) or yarn
    (arXiv 2309.00071); proportional turns only a share of the pairs, those of the highest frequencies; none turns by no
    angle (NoPE). `interleaved` rotates neighbouring pairs (GLM) instead of the two halves of the head.
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
    query_growth: float = 0.0
    """Queries at position p are multiplied by 1 + query_growth * ln(1 + floor(p / original_max_position_embeddings)),
    as in Llama 4; 0 leaves them."""
    proportion: float = 1.0
    """The share of the pairs that turns, if the kind is proportional."""


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Mixture of experts: a sparse layer sends each token to `experts_per_token` of its `num_experts`."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize_weights: bool
    sparse_layers: frozenset[int]
    style: Literal["swiglu", "gpt_oss"] = "swiglu"
    """gpt_oss: experts have biases, a clamped activation, and the rows of gate and up in turn."""
    shared_size: int = 0
    """Inner size of the experts that every token goes through, together."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """The function of a router's logits. With sigmoid, a bias of each expert is added for the choice alone
    (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""
    num_groups: int = 1
    groups_per_token: int = 1
    """Experts are in equal groups; a token chooses among those of its best groups."""
    weight_scale: float = 1.0
    """Factor of the weights of a token's experts."""


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): a token's keys and values of all heads
    are products of one latent, which is cached beside one rotated key. Names as in config.json."""

    q_lora_rank: int
    """0: queries are a product of the hidden state, not of a latent of their own."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def query_size(self, num_heads: int) -> int:
        """Rows of the matrix that makes queries."""
        return num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)

    def expanded_size(self, num_heads: int) -> int:
        """Rows of the matrix that makes keys and values of latents."""
        return num_heads * (self.qk_nope_head_dim + self.v_head_dim)


class LayerShape(NamedTuple):
    """A layer's values of the fields of ModelConfig with these names, where layers differ."""

    head_dim: int
    num_kv_heads: int
    intermediate_size: int
    values_are_keys: bool
    has_kv: bool


_QUANTIZER_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Settings that AutoGPTQ and AutoAWQ wrote to files of their own, before config.json had a section for them; and the
methods of files that name none."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Settings that generation_config.json recommends; None where it says nothing."""

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
    ropes: tuple[RopeConfig, ...] = ()
    """Each layer's rope, where they differ; empty: `rope` for all."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_spans_heads: bool = False
    """Whether the norms of queries and keys are over all heads together, not over each."""
    attention_norm: bool = True
    """Whether layers normalize what enters attention; those of EAGLE heads do not."""
    norm: Literal["rms", "rms_plus_one", "rms_exact", "layer"] = "rms"
    """RMSNorm, the same with weights that are stored less 1 (Gemma), or multiplied before rounding (Gemma 4), or
    LayerNorm without bias (Cohere)."""
    norms: Literal["before", "around", "after", "shared"] = "before"
    """Places of a layer's norms: before attention and feed-forward part, around both, after both, or one before both,
    which then are parallel: they read the same hidden states, and both results are added."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embedding_scale: float = 1.0
    """Factor of embedded tokens."""
    logit_scale: float = 1.0
    logit_soft_cap: float = 0.0
    """Logits are multiplied by the scale, then bounded: cap * tanh(logit / cap); a cap of 0 leaves them."""
    sliding_windows: tuple[int, ...] = ()
    """Per layer: how many of the last positions a query sees, itself included; 0 or an empty tuple = all."""
    kv_sources: tuple[int, ...] = ()
    """Per layer: the layer whose keys and values it attends to, itself or an earlier one that has its own; an empty
    tuple = each has its own."""
    shapes: tuple[LayerShape, ...] = ()
    """Each layer's shape, where they differ; empty: all are as the fields here say. See `of_layer`."""
    values_are_keys: bool = False
    """Whether one matrix makes both: values are keys without their norm and rotation."""
    has_kv: bool = True
    """Whether a layer makes keys and values; without, it attends to those of its kv_source."""
    value_norm: bool = False
    """Whether values are scaled to unit root mean square."""
    layer_scale: bool = False
    """Whether what a layer returns is multiplied by a number of its own."""
    per_layer_input_size: int = 0
    """Size of a layer's own embedding of a token (per-layer embeddings, Gemma 4); 0: layers have none."""
    groups: CacheGroups | None = None
    """The cache groups of the whole model, for a shard, or groups that `CacheGroups.cut` would not make."""
    attention_scale: float | None = None
    """Factor of the products of queries and keys; None: head_dim ** -0.5."""
    attention_sinks: bool = False
    """Whether each head has a score that takes weight and has no value."""
    attention_soft_cap: float = 0.0
    """See `triton_ops.paged_attention`; 0 = none."""
    mla: MlaConfig | None = None
    """With it, heads are as attention over the cache sees them: `head_dim` is the width of what is cached, for all
    heads together, so there is one key-value head, and values are its first columns."""
    moe: MoeConfig | None = None
    tie_word_embeddings: bool = False
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    tensor_names: TensorNames | None = None
    """The convention of the checkpoint's tensor names: the older GLM releases, GGUF, or transformers (None).
    "multimodal" is transformers' beside the names of other parts of the model, for images, say."""
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        for layer, source in enumerate(self.kv_sources):
            shares = f"{self.family}: layer {layer} is to share the keys and values of layer {source}, which"
            if not 0 <= source <= layer or self.kv_sources[source] != source:
                raise ModelError(f"{shares} has none before it")
            if self.sliding_window(source) != self.sliding_window(layer):
                raise ModelError(f"{shares} has another window")
            if self.shapes and self.shapes[source][:2] != self.shapes[layer][:2]:
                raise ModelError(f"{shares} has other heads")

    @property
    def group_size(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def value_dim(self) -> int:
        """Width of the values that attention over the cache adds up."""
        if self.mla is None:
            return self.head_dim
        return self.mla.kv_lora_rank

    @property
    def kv_numbers(self) -> int:
        """Numbers that a layer caches of a token: keys and values, or a latent, which is both."""
        return self.num_kv_heads * self.head_dim * self._cached_tensors

    @property
    def _cached_tensors(self) -> int:
        """Keys and values are two tensors, latents one."""
        return 2 if self.mla is None else 1

    def layer_kv_numbers(self, degree: int = 1) -> tuple[int, ...]:
        """Numbers that each layer caches of a token, on one of ``degree`` ranks. A layer that shares keys and values
        reports the numbers that it reads."""
        numbers = []
        for layer in range(self.num_layers):
            shape = self.shapes[layer] if self.shapes else self
            heads = max(1, shape.num_kv_heads // degree)
            numbers.append(heads * shape.head_dim * self._cached_tensors)
        return tuple(numbers)

    @property
    def tensor_widths(self) -> tuple[int, int]:
        """Widths of a cache's key and value tensors, which have num_kv_heads heads."""
        width = self.cache_groups.tensor_numbers // self.num_kv_heads
        if self.mla is None:
            return width // 2, width // 2
        return width, 0

    @property
    def qkv_sizes(self) -> tuple[int, ...]:
        """Rows of the matrices that make queries, keys and values, as far as a layer has them. Not of latents."""
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        if not self.has_kv:
            return (query,)
        if self.values_are_keys:
            return query, key
        return query, key, key

    @property
    def output_size(self) -> int:
        """Columns of the output matrix: the values of all heads."""
        if self.mla is None:
            return self.num_heads * self.head_dim
        return self.num_heads * self.mla.v_head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor of the products of queries and keys."""
        if self.attention_scale is None:
            return float(self.head_dim**-0.5)
        return self.attention_scale

    def sliding_window(self, layer: int) -> int:
        """Positions a query of this layer sees, itself included; 0 means all."""
        if not self.sliding_windows:
            return 0
        return self.sliding_windows[layer]

    def of_shape(self, shape: LayerShape | None) -> "ModelConfig":
        """The model as if all layers had this shape; None leaves it."""
        if shape is None:
            return self
        return replace(self, shapes=(), **shape._asdict())

    def of_layer(self, layer: int) -> "ModelConfig":
        """The model as if all layers had the shape and the rope of this one."""
        if not self.shapes:
            return self
        return replace(self.of_shape(self.shapes[layer]), rope=self.rope_of(layer))

    def rope_of(self, layer: int) -> RopeConfig:
        """The rotation of this layer's queries and keys."""
        if not self.ropes:
            return self.rope
        return self.ropes[layer]

    @property
    def rope_kinds(self) -> tuple[RopeConfig, ...]:
        """The different ropes of the layers, in the order of the layers."""
        return tuple(dict.fromkeys(self.ropes)) or (self.rope,)

    @property
    def cache_groups(self) -> CacheGroups:
        """The groups of layers that share a block table, and each layer's place in its group."""
        if self.groups is None:
            return self.cut((0,))
        return self.groups

    def cut(self, starts: tuple[int, ...]) -> CacheGroups:
        """The groups of a model whose pipelines have stages that begin at these layers."""
        windows = self.sliding_windows or (0,) * self.num_layers
        numbers = self.layer_kv_numbers()
        return CacheGroups.cut(windows, self.kv_sources, self.max_position_embeddings, numbers, starts)

    def in_one_group(self) -> "ModelConfig":
        """The model with all positions of all layers kept: windows only hide them."""
        windows = (0,) * self.num_layers
        return replace(self, groups=CacheGroups.cut(windows, self.kv_sources, 1, self.layer_kv_numbers()))

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer's feed-forward part is a mixture of experts."""
        return self.moe is not None and layer in self.moe.sparse_layers

    def rounded(self, quantization: str | None, *, on_gpu: bool = False) -> "ModelConfig":
        """The model as `--quantization` rounds it on a device. Raises UsageError if it is quantized already."""
        if quantization is None:
            return self
        if self.quantization is not None:
            raise UsageError(f"--quantization {quantization}: the model is quantized already; leave it out")
        if self.mla is not None:
            raise UsageError(f"--quantization {quantization}: latent attention is not rounded; leave it out")
        return replace(self, quantization=Quantization.rounding(quantization, on_gpu=on_gpu))

    def inner_part(self, size: int, degree: int) -> int:
        """One of `degree` parts of an inner size, as equal as whole groups of columns allow; the last is padded."""
        unit = 1 if self.quantization is None else self.quantization.unit(size)
        units = -(-size // (degree * unit))
        return units * unit

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
        config = _with_quantizer_settings(read_json_object(path), directory)
        return cls.from_hf(config, generation_config, source=str(path))

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        generation_config: Mapping[str, Any] | None = None,
        *,
        source: str = "config.json",
    ) -> "ModelConfig":
        """Translate a parsed config.json. Raises ModelError, one line that begins with `source`."""
        from nanoserve.config.config_reader import read_config  # it makes a ModelConfig, so it imports this module

        return read_config(config, generation_config, source)


def _with_quantizer_settings(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    """A config.json with the quantizer's settings, if these are in a file of their own."""
    if config.get("quantization_config") or config.get("compression_config"):
        return config
    for name, method in _QUANTIZER_FILES.items():
        settings = read_optional_json_object(directory / name)
        if settings:
            return config | {"quantization_config": {"quant_method": method, **settings}}
    return config


def is_eagle3(directory: Path) -> bool:
    """Whether an EAGLE head is one of EAGLE-3, by its config.json. Raises ModelError if that cannot be read."""
    return "Eagle3" in str(read_json_object(directory / "config.json").get("architectures"))
