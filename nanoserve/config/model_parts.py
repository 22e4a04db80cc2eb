"""The parts of a ModelConfig, whose defaults are those of a plain family. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, NamedTuple

from nanoserve.config.mixers import MixerConfig
from nanoserve.errors import UsageError

RopeKind = Literal["default", "linear", "llama3", "yarn", "proportional", "none"]
NormKind = Literal["rms", "rms_plus_one", "rms_exact", "layer"]
NormPlaces = Literal["before", "around", "after", "shared"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: which frequencies, how stretched, how many dimensions of a head
    rotate.

    `kind` is the scaling rule: linear (position interpolation), llama3 (Llama 3.1's piecewise rule)
    or yarn (arXiv 2309.00071); proportional turns only a share of the pairs, those of the highest
    frequencies; none turns by no angle (NoPE). `interleaved` rotates neighbouring pairs (GLM)
    instead of the two halves of the head.
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
    """Queries at position p are multiplied by 1 + query_growth * ln(1 + floor(p /
    original_max_position_embeddings)), as in Llama 4; 0 leaves them."""
    proportion: float = 1.0
    """The share of the pairs that turns, if the kind is proportional."""


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): a token's keys and
    values of all heads are products of one latent, which is cached beside one rotated key. Names as
    in config.json."""

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


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Attention of a layer: its matrices, and its scores. Numbers and sizes of heads are fields of
    ModelConfig."""

    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys are normalized, each head by itself."""
    qk_norm_spans_heads: bool = False
    """Whether the norms of queries and keys are over all heads together, not over each."""
    value_norm: bool = False
    """Whether values are scaled to unit root mean square."""
    values_are_keys: bool = False
    """Whether one matrix makes both: values are keys without their norm and rotation."""
    has_kv: bool = True
    """Whether a layer makes keys and values; without, it attends to those of its source
    (`LayerDifferences`)."""
    scale: float | None = None
    """Factor of the products of queries and keys; None: head_dim ** -0.5."""
    soft_cap: float = 0.0
    """See `triton_ops.paged_attention`; 0 = none."""
    output_gate: bool = False
    """Whether the output of attention is multiplied by the sigmoid of a gate, which a matrix of its
    own makes. Checkpoints store it in the query matrix: a head's query, then its gate."""
    sinks: bool = False
    """Whether each head has a score that takes weight and has no value."""
    mla: MlaConfig | None = None
    """With it, heads are as attention over the cache sees them: `head_dim` is the width of what is
    cached, for all heads together, so there is one key-value head, and values are its first
    columns."""


@dataclass(frozen=True, slots=True)
class NormConfig:
    """Norms of hidden states."""

    eps: float = 1e-6
    kind: NormKind = "rms"
    """RMSNorm, the same with weights that are stored less 1 (Gemma), or multiplied before rounding
    (Gemma 4), or LayerNorm without bias (Cohere)."""
    places: NormPlaces = "before"
    """Places of a layer's norms: before attention and feed-forward part, around both, after both,
    or one before both, which then are parallel: they read the same hidden states, and both results
    are added."""
    before_attention: bool = True
    """Whether layers normalize what enters attention; those of EAGLE heads do not."""
    layer_scale: bool = False
    """Whether the output of a layer is multiplied by a number of its own."""


@dataclass(frozen=True, slots=True)
class FeedForwardConfig:
    """The feed-forward part of a layer. Its inner size is a field of ModelConfig."""

    activation: Literal["silu", "gelu_tanh", "relu2"] = "silu"
    """The function of the gate: SiLU, GELU by its usual approximation, or the square of what is
    positive (arXiv 2109.08668)."""
    is_gated: bool = True
    """Whether a second product is multiplied with the first one's activations. Without, there is
    only one."""
    bias: bool = False


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Mixture of experts: a sparse layer sends each token to `experts_per_token` of its
    `num_experts`."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize_weights: bool
    sparse_layers: frozenset[int]
    style: Literal["swiglu", "geglu", "gpt_oss", "relu2"] = "swiglu"
    """geglu: the gate's activation is GELU. gpt_oss: experts have biases, a clamped activation, and
    the rows of gate and up in turn. relu2: they have no gate, and square what is positive."""
    shared_size: int = 0
    """Inner size of the experts that every token goes through, together."""
    gates_shared: bool = False
    """Whether the output of these is multiplied by the sigmoid of a number that a token's hidden
    state gives."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """The function of a router's logits."""
    corrects_choice: bool = False
    """Whether a bias of each expert is added to its score for the choice alone (DeepSeek-V3, arXiv
    2412.19437, section 2.1.2)."""
    num_groups: int = 1
    groups_per_token: int = 1
    """Experts are in equal groups; a token chooses among those of its best groups."""
    sum_eps: float = 0.0
    """Added to the sum that weights are divided by."""
    weight_scale: float = 1.0
    """Factor of the weights of a token's experts."""
    norms_apart: bool = False
    """Whether the shared experts and the others are two parts side by side, with norms of their own
    (Gemma 4). The others, and the router, then read the hidden states before the norm of the shared
    ones; the router normalizes and scales what it reads, and each expert's weight has a factor."""

    @property
    def is_gated(self) -> bool:
        """Whether experts have gates, whose rows are in their first matrix too."""
        return self.style != "relu2"


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """Layers with a state in place of keys and values: the last inputs of a short causal
    convolution, and perhaps a recurrent state. The mixer says what there is."""

    recurrent_layers: frozenset[int]
    mixer: MixerConfig
    kernel_size: int
    """Positions that the convolution sees."""
    bias: bool = False
    """Whether the matrices of inputs and output have biases."""
    kernel_bias: bool = False
    """Whether the convolution has biases."""

    def layer_bytes(self, number_bytes: float) -> float:
        """Bytes of a sequence's state in one layer. The convolution's inputs have numbers of this
        size, the recurrent state is float32."""
        found = self.mixer.channels * (self.kernel_size - 1) * number_bytes
        if self.mixer.matrix_shape is not None:
            found += 4 * prod(self.mixer.matrix_shape)
        return found

    def part(self, layers: range, degree: int) -> "RecurrentConfig":
        """The part of one of `degree` ranks, with these layers, counted from 0."""
        chosen = [layer - layers.start for layer in self.recurrent_layers if layer in layers]
        return replace(self, recurrent_layers=frozenset(chosen), mixer=self.mixer.part(degree))


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """The embedding of tokens."""

    scale: float = 1.0
    """Factor of embedded tokens."""
    per_layer_size: int = 0
    """Size of a layer's own embedding of a token (per-layer embeddings, Gemma 4); 0: layers have
    none."""


@dataclass(frozen=True, slots=True)
class LogitConfig:
    """Logits are multiplied by the scale, then bounded: cap * tanh(logit / cap); a cap of 0 leaves
    them."""

    scale: float = 1.0
    soft_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class RenoisingConfig:
    """How a canvas of random tokens is denoised. Names and defaults are those of transformers'
    generation_config.json."""

    max_denoising_steps: int = 48
    entropy_bound: float = 0.1
    """The sum of the entropies of the tokens that a step accepts, less the largest of them, is at
    most this (arXiv 2505.24857)."""
    t_min: float = 0.4
    t_max: float = 0.8
    """The temperature with n of N steps left is t_min + (t_max - t_min) * n / N; the first step has
    n = N."""
    stability_threshold: int = 1
    """Steps before a step that must have had the same most probable tokens for it to be the
    last."""
    confidence_threshold: float = 0.005
    """The last step's mean entropy is below this, unless it is the last of all steps."""

    def changed(self, settings: Mapping[str, float]) -> "RenoisingConfig":
        """Return these settings with some replaced, by name. Raises UsageError if they contradict
        each other."""
        typed: dict[str, Any] = {}
        for name, value in settings.items():
            typed[name] = type(getattr(self, name))(value)
        chosen = replace(self, **typed)
        if chosen.t_max <= chosen.t_min:
            raise UsageError(f"t_max {chosen.t_max:g} must be above t_min {chosen.t_min:g}")
        return chosen


@dataclass(frozen=True, slots=True)
class CanvasConfig:
    """A model that writes a block of tokens at a time (block diffusion, arXiv 2503.09573), which is
    a canvas while it is being written. There are two kinds.

    With a mask token, positions are divided into blocks, and a query sees to the end of its block.
    A canvas begins as masks, and denoising steps put tokens in their place (SDAR).

    Without, known tokens are causal, and the canvas begins directly behind them: a free canvas. It
    sees itself whole, and begins as random tokens, of which each step accepts some and draws the
    others anew. A step also reads what the step before it expected: soft embeddings
    (DiffusionGemma).
    """

    length: int
    """Tokens of a block."""
    mask_token: int | None
    """The id that stands where no token is settled; None: canvases are free."""
    renoising: RenoisingConfig | None = None
    """The model's own settings for denoising free canvases; None for others."""

    @property
    def is_free(self) -> bool:
        """Whether a canvas begins wherever the known tokens end, as random tokens."""
        return self.mask_token is None


class LayerShape(NamedTuple):
    """A layer's own values of these fields of ModelConfig and AttentionConfig, where layers
    differ."""

    head_dim: int
    num_kv_heads: int
    intermediate_size: int
    values_are_keys: bool
    has_kv: bool


@dataclass(frozen=True, slots=True)
class LayerDifferences:
    """The fields in which layers may differ. Each has an entry for every layer, or is empty: all
    layers are alike."""

    sliding_windows: tuple[int, ...] = ()
    """The number of last positions that a query sees, itself included; 0 = all. Empty: all see
    all."""
    kv_sources: tuple[int, ...] = ()
    """The layer whose keys and values it attends to, itself or an earlier one that has its own.
    Empty: each has its own."""
    ropes: tuple[RopeConfig, ...] = ()
    """The layer's rope. Empty: `ModelConfig.rope` for all."""
    shapes: tuple[LayerShape, ...] = ()
    """The layer's shape. Empty: all are as the fields of ModelConfig say. See
    `ModelConfig.of_layer`."""
    feed_forwards: tuple[bool, ...] = ()
    """Whether the layer has a feed-forward part. Empty: all have one, if there is any."""
    stored_blocks: tuple[int, ...] = ()
    """The number of the checkpoint's block that has the layer's attention or mixer; its
    feed-forward part is the next block. Empty: layers are stored whole."""
