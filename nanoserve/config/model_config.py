"""ModelConfig: a model's shape, read from a Hugging Face config.json. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from nanoserve.config.cache_groups import CacheGroups
from nanoserve.config.model_parts import (
    AttentionConfig,
    CanvasConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    LayerDifferences,
    LayerShape,
    LogitConfig,
    MoeConfig,
    NormConfig,
    RecurrentConfig,
    RopeConfig,
)
from nanoserve.config.quantization import Quantization
from nanoserve.errors import ModelError, UsageError
from nanoserve.utils.files import read_json_object, read_optional_json_object

TensorNames = Literal["chatglm", "gguf", "multimodal"]


_QUANTIZER_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Settings that AutoGPTQ and AutoAWQ wrote to files of their own, before config.json had a section
for them; and the methods of files that name none."""


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
    """All that tells one decoder family from another; the Decoder is built from this and nothing
    else."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Inner size of the feed-forward part; 0: layers without experts have none."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool = False

    # The parts in which families differ.
    attention: AttentionConfig = AttentionConfig()
    norms: NormConfig = NormConfig()
    feed_forward: FeedForwardConfig = FeedForwardConfig()
    moe: MoeConfig | None = None
    recurrent: RecurrentConfig | None = None
    """Layers with a state in place of keys and values; None where all layers attend."""
    canvas: CanvasConfig | None = None
    """Blocks that are written as a whole; None where tokens follow each other."""
    embedding: EmbeddingConfig = EmbeddingConfig()
    logits: LogitConfig = LogitConfig()
    residual_multiplier: float = 1.0
    """Factor of what each part of a layer adds to the hidden states."""
    layers: LayerDifferences = LayerDifferences()
    groups: CacheGroups | None = None
    """The cache groups of the whole model, for a shard, or groups that `CacheGroups.cut` would not
    make."""

    # The checkpoint, and the settings for generating that come with it.
    dtype: str = "float32"
    quantization: Quantization | None = None
    tensor_names: TensorNames | None = None
    """The convention of the checkpoint's tensor names: the older GLM releases, GGUF, or
    transformers (None). "multimodal" is transformers' beside the names of other parts of the model,
    for images, say."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: SamplingDefaults = SamplingDefaults()

    def __post_init__(self) -> None:
        sources = self.layers.kv_sources
        shapes = self.layers.shapes
        for layer, source in enumerate(sources):
            shares = (
                f"{self.family}: layer {layer} is to share the keys and values of layer {source}, "
                "which"
            )
            if not 0 <= source <= layer or sources[source] != source:
                raise ModelError(f"{shares} has none before it")
            if self.sliding_window(source) != self.sliding_window(layer):
                raise ModelError(f"{shares} has another window")
            if shapes and shapes[source][:2] != shapes[layer][:2]:
                raise ModelError(f"{shares} has other heads")

    @property
    def group_size(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def value_dim(self) -> int:
        """Width of the values that attention over the cache adds up."""
        if self.attention.mla is None:
            return self.head_dim
        return self.attention.mla.kv_lora_rank

    @property
    def kv_numbers(self) -> int:
        """Numbers that a layer caches of a token: keys and values, or a latent, which is both."""
        return self.num_kv_heads * self.head_dim * self._cached_tensors

    @property
    def _cached_tensors(self) -> int:
        """Keys and values are two tensors, latents one."""
        if self.attention.mla is None:
            return 2
        return 1

    def layer_kv_numbers(self, degree: int = 1) -> tuple[int, ...]:
        """Numbers that each layer caches of a token, on one of ``degree`` ranks: none, where it has
        a state. A layer that shares keys and values reports the numbers that it reads."""
        if not self.layers.shapes:
            number = self._shard_kv_numbers(self.num_kv_heads, self.head_dim, degree)
            return tuple(
                0 if self.is_recurrent(layer) else number for layer in range(self.num_layers)
            )
        numbers = []
        for shape in self.layers.shapes:
            numbers.append(self._shard_kv_numbers(shape.num_kv_heads, shape.head_dim, degree))
        return tuple(numbers)

    def _shard_kv_numbers(self, num_kv_heads: int, head_dim: int, degree: int) -> int:
        heads = max(1, num_kv_heads // degree)
        return heads * head_dim * self._cached_tensors

    @property
    def tensor_widths(self) -> tuple[int, int]:
        """Widths of a cache's key and value tensors, which have num_kv_heads heads."""
        width = self.cache_groups.tensor_numbers // self.num_kv_heads
        if self.attention.mla is None:
            return width // 2, width // 2
        return width, 0

    @property
    def qkv_sizes(self) -> tuple[int, ...]:
        """Rows of the matrices that make queries, keys and values, as far as a layer has them. Not
        of latents."""
        query = self.num_heads * self.head_dim
        key = self.num_kv_heads * self.head_dim
        if not self.attention.has_kv:
            return (query,)
        if self.attention.values_are_keys:
            return query, key
        return query, key, key

    @property
    def output_size(self) -> int:
        """Columns of the output matrix: the values of all heads."""
        if self.attention.mla is None:
            return self.num_heads * self.head_dim
        return self.num_heads * self.attention.mla.v_head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor of the products of queries and keys."""
        if self.attention.scale is None:
            return float(self.head_dim**-0.5)
        return self.attention.scale

    def sliding_window(self, layer: int) -> int:
        """Positions a query of this layer sees, itself included; 0 means all."""
        if not self.layers.sliding_windows:
            return 0
        return self.layers.sliding_windows[layer]

    def of_shape(self, shape: LayerShape | None) -> "ModelConfig":
        """The model as if all layers had this shape; None leaves it."""
        if shape is None:
            return self
        attention = replace(
            self.attention, values_are_keys=shape.values_are_keys, has_kv=shape.has_kv
        )
        return replace(
            self,
            head_dim=shape.head_dim,
            num_kv_heads=shape.num_kv_heads,
            intermediate_size=shape.intermediate_size,
            attention=attention,
            layers=replace(self.layers, shapes=()),
        )

    def of_layer(self, layer: int) -> "ModelConfig":
        """The model as if all layers had the shape and the rope of this one."""
        if not self.layers.shapes:
            return self
        return replace(self.of_shape(self.layers.shapes[layer]), rope=self.rope_of(layer))

    def rope_of(self, layer: int) -> RopeConfig:
        """The rotation of this layer's queries and keys."""
        if not self.layers.ropes:
            return self.rope
        return self.layers.ropes[layer]

    @property
    def rope_kinds(self) -> tuple[RopeConfig, ...]:
        """The different ropes of the layers, in the order of the layers."""
        if not self.layers.ropes:
            return (self.rope,)
        return tuple(dict.fromkeys(self.layers.ropes))

    @property
    def cache_groups(self) -> CacheGroups:
        """The groups of layers that share a block table, and each layer's place in its group."""
        if self.groups is None:
            return self.cut((0,))
        return self.groups

    def cut(self, starts: tuple[int, ...]) -> CacheGroups:
        """The groups of a model whose pipelines have stages that begin at these layers."""
        windows = tuple(self.sliding_window(layer) for layer in range(self.num_layers))
        numbers = self.layer_kv_numbers()
        return CacheGroups.cut(
            windows, self.layers.kv_sources, self.max_position_embeddings, numbers, starts
        )

    def in_one_group(self) -> "ModelConfig":
        """The model with all positions of all layers kept: windows only hide them."""
        windows = (0,) * self.num_layers
        groups = CacheGroups.cut(windows, self.layers.kv_sources, 1, self.layer_kv_numbers())
        return replace(self, groups=groups)

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer's feed-forward part is a mixture of experts."""
        return self.moe is not None and layer in self.moe.sparse_layers

    def has_feed_forward(self, layer: int) -> bool:
        """Whether this layer has a feed-forward part."""
        if self.layers.feed_forwards:
            return self.layers.feed_forwards[layer]
        return self.intermediate_size > 0 or self.is_sparse(layer)

    @property
    def writes_free_canvases(self) -> bool:
        """Whether known tokens are causal, and canvases are behind them (DiffusionGemma)."""
        return self.canvas is not None and self.canvas.is_free

    def is_recurrent(self, layer: int) -> bool:
        """Whether this layer has a state in place of keys and values."""
        return self.recurrent is not None and layer in self.recurrent.recurrent_layers

    def state_bytes(self, dtype_bytes: int) -> int:
        """Bytes of a sequence's states in all layers, where convolutions keep numbers of this
        size; recurrent states are float32."""
        if self.recurrent is None:
            return 0
        layers = len(self.recurrent.recurrent_layers)
        return layers * int(self.recurrent.layer_bytes(dtype_bytes))

    def rounded(self, quantization: str | None, *, on_gpu: bool = False) -> "ModelConfig":
        """The model as `--quantization` rounds it on a device. Raises UsageError if it is quantized
        already."""
        if quantization is None:
            return self
        if self.quantization is not None:
            raise UsageError(
                f"--quantization {quantization}: the model is quantized already; leave it out"
            )
        if self.attention.mla is not None:
            raise UsageError(
                f"--quantization {quantization}: latent attention is not rounded; leave it out"
            )
        return replace(self, quantization=Quantization.rounding(quantization, on_gpu=on_gpu))

    def inner_part(self, size: int, degree: int) -> int:
        """One of `degree` parts of an inner size, as equal as whole groups of columns allow; the
        last is padded."""
        unit = 1
        if self.quantization is not None:
            unit = self.quantization.unit(size)
        units = -(-size // (degree * unit))
        return units * unit

    @classmethod
    def from_directory(cls, directory: str | Path) -> "ModelConfig":
        """Read config.json and generation_config.json, if there is one. Raises ModelError naming
        the file."""
        directory = Path(directory)
        path = directory / "config.json"
        if not directory.is_dir():
            raise ModelError(f"{directory}: no such model directory")
        if not path.is_file():
            raise ModelError(
                f"{directory}: no config.json; this is not a Hugging Face model directory"
            )
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
        # it makes a ModelConfig, so it imports this module
        from nanoserve.config.config_reader import read_config

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
    """Whether an EAGLE head is one of EAGLE-3, by its config.json. Raises ModelError if that cannot
    be read."""
    return "Eagle3" in str(read_json_object(directory / "config.json").get("architectures"))
