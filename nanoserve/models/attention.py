"""The attention functions a Decoder is given: dense over whole sequences, or over a paged cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeGuard

import torch
from torch import Tensor

from nanoserve.config.model_config import ModelConfig
from triton_ops import cache_write, dense_attention, paged_attention, rotate_and_write

if TYPE_CHECKING:  # for models with such layers
    from nanoserve.models.mixer import RecurrentStates


class AttentionFunction(Protocol):
    """Attention of one layer, which stands between the two halves of a DecoderLayer."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """query [T, num_heads, head_dim], key [T, num_kv_heads, head_dim], value [T, num_kv_heads,
        value_dim] -> [T, num_heads * value_dim]. Query and key are already rotated to their
        positions. sinks: float32 [num_heads]. Key and value of a layer that shares those of another
        have no heads."""


class DenseCausalAttention:
    """Causal attention over `batch` sequences of equal `length`, flattened to batch * length
    tokens. In a model whose canvases begin as masks, queries see to the end of their block.

    For training and as the plain reference: keeps no cache, differentiable, torch.compile sees
    through it.
    """

    def __init__(self, config: ModelConfig, batch: int, length: int) -> None:
        self.config = config
        self.batch = batch
        self.length = length
        # keys and values that later layers share, by layer
        self._shared = dict[int, tuple[Tensor, Tensor]]()

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        config = self.config
        if config.layers.kv_sources:
            source = config.layers.kv_sources[layer]
            if source < layer:
                key, value = self._shared[source]
            else:
                self._shared[layer] = key, value
        window = config.sliding_window(layer)
        mask = None
        if 0 < window < self.length:
            mask = self._window_mask(window, query.device)
        if config.canvas is not None and not config.canvas.is_free:
            block = torch.arange(self.length, device=query.device) // config.canvas.length
            mask = block[None, :] <= block[:, None]
        if sinks is not None:
            sinks = sinks[:, None]
        attended = dense_attention(
            self._sequences(query),
            self._sequences(key),
            self._sequences(value),
            mask,
            scale=config.softmax_scale,
            soft_cap=config.attention.soft_cap,
            sinks=sinks,
        )
        return attended.transpose(1, 2).reshape(self.batch * self.length, -1)

    def states_of(self, layer: int) -> "RecurrentStates":
        """States of a layer before the first position, one for each sequence."""
        from nanoserve.models.mixer import make_states  # for models that have such layers

        states = make_states(self.config, self.batch, torch.get_default_dtype())
        states.segments = torch.tensor(
            [
                [index * self.length, (index + 1) * self.length, -1, index, 0]
                for index in range(self.batch)
            ],
            dtype=torch.int32,
        )
        return states

    def _sequences(self, heads: Tensor) -> Tensor:
        """[batch * length, H, D] -> [batch, H, length, D]"""
        _, num_heads, head_dim = heads.shape
        by_sequence = heads.view(self.batch, self.length, num_heads, head_dim)
        return by_sequence.transpose(1, 2)

    def _window_mask(self, window: int, device: torch.device) -> Tensor:
        position = torch.arange(self.length, device=device)
        distance = position[:, None] - position[None, :]
        return (distance >= 0) & (distance < window)


@dataclass(slots=True)
class CanvasInputs:
    """The free canvases of a step with T tokens, for the decoder: K of the tokens belong to
    canvases, whole ones."""

    is_canvas: Tensor
    """bool [T], whether a token belongs to a canvas."""
    places: Tensor
    """int64 [K], which of the T tokens do, ascending."""
    soft_embeddings: Tensor
    """[K, hidden_size], what the canvas's last step expected at each of these places
    (`Decoder.soft_embeddings`); zeros in a canvas's first step."""


# Not frozen, neither of these two: within a compiled layer torch 2.11 finds no fields in a frozen
# dataclass.
@dataclass(slots=True)
class AttentionBatch:
    """Where R rows with T new tokens have their context in a paged cache; see
    `triton_ops.paged_attention`."""

    block_tables: Tensor
    """int32 [R, most blocks of a row]."""
    query_starts: Tensor
    """int32 [R + 1], where the new tokens of each row begin and end."""
    context_lengths: Tensor
    """int32 [R], tokens of each row in the cache once the new ones are written."""
    slot_mapping: Tensor
    """int64 [T], the slots that the new tokens are written to."""
    spans: Tensor | None = None
    """int32 [R, 2], the length of the spans to whose ends the queries of a row see, and where one
    begins; None: attention is causal."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The tensors that every batch has, in order."""
        return self.block_tables, self.query_starts, self.context_lengths, self.slot_mapping

    def pick(self, rows: Tensor) -> "AttentionBatch":
        """Some rows, int64 [n], of a batch whose rows have one new token each."""
        return AttentionBatch(
            block_tables=self.block_tables[rows],
            query_starts=self.query_starts[: len(rows) + 1],
            context_lengths=self.context_lengths[rows],
            slot_mapping=self.slot_mapping[rows],
        )


@dataclass(slots=True)
class PagedAttention:
    """Attention of one step over the paged cache: writes the new keys and values, then attends over
    the whole context. The caches are one tensor per layer, by the layer's index: [num_blocks,
    num_kv_heads, block_size, head_dim]; that of values has a width of 0 for latents. A layer
    without keys and values of its own has those that it shares."""

    config: ModelConfig
    key_caches: Sequence[Tensor]
    value_caches: Sequence[Tensor]
    batch: AttentionBatch
    of_layers: Sequence[AttentionBatch] | None = None
    """The batch of each layer, where they are in several cache groups: tables and slots differ."""
    states: "Sequence[RecurrentStates | None]" = ()
    """The states of each layer that has them, if some have."""

    def states_of(self, layer: int) -> "RecurrentStates":
        """The states of a layer that has them."""
        states = self.states[layer]
        assert states is not None, "the layer has a state"
        return states

    def batch_of(self, layer: int) -> AttentionBatch:
        if self.of_layers is None:
            return self.batch
        return self.of_layers[layer]

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        key_cache = self.key_caches[layer]
        value_cache = self.value_caches[layer]
        # without, the layer whose keys and values these are has written them
        makes_kv = key.shape[1] > 0
        if makes_kv:
            if self.config.attention.mla is not None:
                value = value[..., :0]  # the first columns of the keys
            slots = self.batch_of(layer).slot_mapping
            cache_write(key, value, key_cache, value_cache, slots)
        return self.attend(layer, query, sinks)

    def rotate_and_write(
        self,
        layer: int,
        config: ModelConfig,
        projected: Tensor,
        norms: tuple[Tensor | None, Tensor | None],
        angles: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Write the keys and values of a layer's product [T, sum of qkv_sizes], whose config is
        given, and return its queries, rotated, [T, num_heads, head_dim]. norms: weights of queries
        and keys."""
        query = projected.new_empty(len(projected), config.num_heads, config.head_dim)
        rotate_and_write(
            query,
            projected,
            *norms,
            *angles,
            self.key_caches[layer],
            self.value_caches[layer],
            self.batch_of(layer).slot_mapping,
            eps=config.norms.eps,
            norm_adds_one=config.norms.kind == "rms_plus_one",
            interleaved=config.rope.interleaved,
        )
        return query

    def attend(self, layer: int, query: Tensor, sinks: Tensor | None) -> Tensor:
        """Attend over the cache, in which the new keys and values are."""
        config = self.config
        batch = self.batch_of(layer)
        key_cache = self.key_caches[layer]
        value_cache = self.value_caches[layer]
        if config.attention.mla is not None:  # the cache of values is empty
            value_cache = key_cache[..., : config.value_dim]
        num_tokens, num_heads, _ = query.shape
        out = query.new_empty(num_tokens, num_heads * value_cache.shape[-1])
        paged_attention(
            out,
            query,
            key_cache,
            value_cache,
            batch.block_tables,
            batch.query_starts,
            batch.context_lengths,
            scale=config.softmax_scale,
            sliding_window=config.sliding_window(layer),
            soft_cap=config.attention.soft_cap,
            sinks=sinks,
            spans=batch.spans,
        )
        return out


def takes_projected(
    attention: AttentionFunction, config: ModelConfig, device: torch.device
) -> TypeGuard[PagedAttention]:
    """Whether one operator makes queries of the product of a layer with this config, and writes its
    keys and values (`PagedAttention.rotate_and_write`). On a GPU it is one launch in the place of
    three or four. On a CPU there are no launches to save, and the compiled layer stays as it is."""
    on_gpu = device.type == "cuda"
    return on_gpu and isinstance(attention, PagedAttention) and fits_rotation(config)


def fits_rotation(config: ModelConfig) -> bool:
    """Whether `PagedAttention.rotate_and_write` does all that a layer with this config does between
    its first product and attention."""
    parts = config.attention
    has_own_columns = parts.mla is None and parts.has_kv and not parts.values_are_keys
    norms_fit = not parts.value_norm and not parts.qk_norm_spans_heads
    if parts.qk_norm:
        norms_fit = norms_fit and config.norms.kind in ("rms", "rms_plus_one")
    return has_own_columns and norms_fit and not config.rope.query_growth
