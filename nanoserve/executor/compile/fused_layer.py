"""A layer on a GPU for a step of one token, or of few, as six launches.

One token is multiplied with every weight once, so its step should take as long as the weights take
to arrive. Between the launches of a compiled layer a GPU waits for longer than that. So here each
product takes along what stands before and behind it, and each launch loads its first weights while
the launch before it ends.

Each token reads the weights by itself: the first one from memory, the others from the L2 cache. So
few tokens pay as long as that takes no longer than the launches that are saved.
"""

import torch
from torch import Tensor

from nanoserve.executor.compile.aot_build import CompiledKind
from nanoserve.models.attention import AttentionBatch, PagedAttention, fits_rotation
from nanoserve.models.decoder import DecoderLayer
from triton_ops import fused_linear

MOST_TOKENS = 8
MEMORY_BANDWIDTH, CACHE_BANDWIDTH = 4.3e12, 5.5e12
"""Bytes a second: of an H200's memory, as measured, and of its L2 cache, which is a guess."""
SAVED_SECONDS = 20e-6
"""Seconds that a fused layer is ahead of a compiled one, beside its reads of weights: a compiled
layer of Qwen3-0.6B took 62 us, and the four products of a fused one take 14 us for one token
(docs/results, H200, 26 and 27 November 2026). Less than half of the difference is counted on."""
_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu"}


def fuse(kind: CompiledKind, layer: DecoderLayer) -> "FusedLayer | None":
    """Return the fused form of a layer of this kind, if it can have one."""
    if not can_be_fused(kind):
        return None
    return FusedLayer(layer)


def can_be_fused(kind: CompiledKind) -> bool:
    """Whether layers of a kind have the parts that a FusedLayer has, and no others. Those of Llama,
    Qwen2, Qwen3, Mistral and SmolLM3 do, among others."""
    config = kind.config
    attention, norms = config.attention, config.norms
    plain_attention = fits_rotation(config) and not (attention.output_gate or attention.sinks)
    plain_norms = (
        norms.kind != "layer"
        and norms.places == "before"
        and norms.before_attention
        and not norms.layer_scale
    )
    plain_feed_forward = (
        config.moe is None
        and config.has_feed_forward(0)
        and config.feed_forward.is_gated
        and config.feed_forward.activation in _ACTIVATIONS
    )
    plain_layer = (
        kind.part == "layer"
        and not kind.packed
        and config.recurrent is None
        and config.residual_multiplier == 1.0
        and config.embedding.per_layer_size == 0
        and config.canvas is None
    )
    return plain_attention and plain_norms and plain_feed_forward and plain_layer


def most_fused_tokens(weight_bytes: int) -> int:
    """How many tokens a step may have for layers with so many bytes of weights to be fused, 8 at
    most: 4 for those of Qwen3-0.6B, 1 for those of Llama-3.1-8B."""
    worthwhile = weight_bytes / MEMORY_BANDWIDTH + SAVED_SECONDS
    found = int(worthwhile * CACHE_BANDWIDTH / weight_bytes)
    return max(1, min(found, MOST_TOKENS))


class FusedLayer:
    """Runs one kind of layer, of which `can_be_fused` is true, for a step of few tokens. The step's
    tensors and the layer's weights are those of a CompiledPart."""

    def __init__(self, layer: DecoderLayer) -> None:
        self._config = layer.config
        self._names = [name for name, _ in layer.named_parameters()]
        self.most_tokens = most_fused_tokens(sum(one.nbytes for one in layer.parameters()))

    def takes(self, tensors: tuple[Tensor, ...]) -> bool:
        """Whether a step with these tensors is short enough."""
        return len(tensors[0]) <= self.most_tokens

    @torch.inference_mode()
    def __call__(self, tensors: tuple[Tensor, ...], weights: list[Tensor]) -> tuple[Tensor, ...]:
        hidden, cos, sin, key_cache, value_cache, *batch = tensors
        own = dict(zip(self._names, weights, strict=True))
        config = self._config
        eps, adds_one = config.norms.eps, config.norms.kind == "rms_plus_one"

        def product(
            name: str,
            rows: Tensor,
            *,
            norm: str = "",
            residual: Tensor | None = None,
            activation: str = "",
        ) -> Tensor:
            weight, bias = own[f"{name}.weight"], own.get(f"{name}.bias")
            scale = own.get(f"{norm}.weight")
            return fused_linear(
                rows,
                weight,
                bias,
                scale,
                residual,
                eps=eps,
                norm_adds_one=adds_one,
                activation=activation,
            )

        projected = product("qkv", hidden, norm="attention_norm")
        attention = PagedAttention(config, [key_cache], [value_cache], AttentionBatch(*batch))
        norms = own.get("query_norm.weight"), own.get("key_norm.weight")
        query = attention.rotate_and_write(0, config, projected, norms, (cos, sin))
        attended = attention.attend(0, query, sinks=None)
        hidden = product("output", attended, residual=hidden)
        activation = _ACTIVATIONS[config.feed_forward.activation]
        inner = product(
            "feed_forward.gate_up", hidden, norm="feed_forward_norm", activation=activation
        )
        return (product("feed_forward.down", inner, residual=hidden),)
