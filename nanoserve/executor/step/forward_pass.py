"""The forward pass of a step: from the rows of a plan to tensors, and over the paged cache to
hidden states."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nanoserve.config.model_config import ModelConfig
from nanoserve.models.attention import AttentionBatch, CanvasInputs, PagedAttention
from nanoserve.models.decoder import Decoder, DecoderLayer, LayerFunction
from nanoserve.models.packed import num_weights
from nanoserve.scheduler.plan import Row
from triton_ops.cpu import cpu_operators

if TYPE_CHECKING:  # for models with such layers
    from nanoserve.models.mixer import RecurrentStates

LayerComputed = Callable[[int], None]
"""Called with each layer of a stage, once its keys and values are written or the work that writes
them is issued."""


@dataclass(slots=True)
class StepInputs:
    """Inputs of one forward pass over T tokens in R rows. The tensors are views, valid until the
    next step."""

    token_ids: Tensor
    positions: Tensor
    """int64 [T]."""
    batch: AttentionBatch
    longest: int
    """Most tokens of a row."""
    intermediate_hidden_states: Tensor | None = None
    """[T, hidden_size], from the stage before, or the pairs that an EAGLE head takes; None in the
    first stage."""
    computed: LayerComputed | None = None
    """Called after each layer, while later ones are still computed; None if nothing waits for
    that."""
    more: tuple[AttentionBatch, ...] = ()
    """Where the rows are in the other cache groups, if the model has several; `batch` is for the
    first one."""
    states: "Sequence[RecurrentStates | None]" = ()
    """The recurrent states of each layer that has them, if some have."""
    canvas: CanvasInputs | None = None
    """The free canvases of the step; None if it has none."""

    @property
    def batches(self) -> tuple[AttentionBatch, ...]:
        """Inputs of attention for all cache groups."""
        return (self.batch, *self.more)

    @property
    def first(self) -> Tensor:
        """The decoder's inputs: the hidden states from the stage before, or the token ids."""
        return (
            self.token_ids
            if self.intermediate_hidden_states is None
            else self.intermediate_hidden_states
        )


MOST_WORK_OF_ONE_THREAD = 1 << 26
"""Multiplications in a layer, up to which one thread computes a step on a CPU: a third of a
millisecond. Other threads sleep between two steps and between the operators of compiled layers, and
to wake them again and again takes as long."""
READING_A_NUMBER = 32
"""Multiplications that a core does in the time in which it reads a number from memory."""


class SmallSteps:
    """Has steps of little work computed by one thread. Without the C++ operators nothing
    changes."""

    def __init__(self, decoder: Decoder) -> None:
        self._on_cpu = decoder.device.type == "cpu"
        # the output matrix counts as one more layer
        self._weights_of_layer = num_weights(decoder) // (len(decoder.layers) + 1)
        self._kv_of_token = max(decoder.config.layer_kv_numbers())

    @contextmanager
    def on_one_thread(self, num_tokens: int, context_tokens: int) -> Iterator[None]:
        """Compute alone, in the calling thread, a step of so many tokens that reads the keys and
        values of so many, if that is little work."""
        read = self._weights_of_layer + self._kv_of_token * context_tokens
        work = READING_A_NUMBER * read + self._weights_of_layer * num_tokens
        if work > MOST_WORK_OF_ONE_THREAD or not self._on_cpu or not cpu_operators().loaded:
            yield
            return
        before = torch.ops.nanoserve.set_parallel(levels=0, threads=1)
        try:
            yield
        finally:
            torch.ops.nanoserve.set_parallel(*before)


ForwardFunction = Callable[[StepInputs], Tensor]
"""Hidden states of all tokens of a step, one row after another: [T, hidden_size], valid until the
next call."""


_NO_CACHE = torch.empty(0)
"""Stands for the keys and values of a layer that has a state instead."""


@dataclass(frozen=True, slots=True)
class Caches:
    """Keys and values: [num_blocks, num_kv_heads, block_size, head_dim]. There is one tensor for
    each layer of a cache group. The groups share it: each has its own blocks. With one group that
    is one tensor per layer. Latents are keys; their values have a width of 0. Where layers differ,
    a tensor is as wide as `of_layer` needs it."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]

    def of_layer(self, config: ModelConfig, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of one layer: whole tensors, or one of several equal parts of
        each block. To be contiguous, such a view begins at the layer's first part and counts its
        blocks in parts: see `InputBuilder`."""
        groups, own = config.cache_groups, config.of_layer(layer)
        if config.is_recurrent(layer):
            return _NO_CACHE, _NO_CACHE
        tensor, part = groups.tensor_of(layer)
        shares = groups.shares[groups.places[layer][0]]
        if shares == 1 and own is config:
            return self.keys[tensor], self.values[tensor]
        blocks, _, block_size, _ = self.keys[tensor].shape
        shape = (blocks * shares - part, own.num_kv_heads, block_size, own.head_dim)
        first = part * math.prod(shape[1:])
        keys = self.keys[tensor].view(-1)[first:].view(shape)
        values = self.values[tensor].view(-1)[first:].view(shape)
        return keys, values


def make_caches(
    config: ModelConfig,
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    storage: Tensor | None = None,
) -> Caches:
    """A KV cache with any content: memory that is never touched costs no time. Its tensors are laid
    out one after another in the storage, uint8 on that device, which several caches may share in
    turn; None takes new memory."""
    keys, values = list[Tensor](), list[Tensor]()
    end = 0  # of what is taken of the storage
    with torch.inference_mode():  # as steps run: compiled code is made for tensors of one mode
        for _ in range(config.cache_groups.num_tensors):
            for tensors, width in zip((keys, values), config.tensor_widths, strict=True):
                shape = (num_blocks, config.num_kv_heads, block_size, width)
                if storage is None:
                    tensors.append(torch.empty(shape, dtype=dtype, device=device))
                else:
                    start, end = end, end + math.prod(shape) * dtype.itemsize
                    tensors.append(storage[start:end].view(dtype).view(shape))
    return Caches(keys, values)


class ForwardPass:
    """A ForwardFunction: the decoder over its caches, each layer by `run_layer`."""

    def __init__(
        self, decoder: Decoder, caches: Caches, run_layer: LayerFunction = DecoderLayer.__call__
    ) -> None:
        self._decoder = decoder
        groups = decoder.config.cache_groups
        layers = [
            caches.of_layer(decoder.config, layer) for layer in range(decoder.config.num_layers)
        ]
        self._keys, self._values = zip(*layers, strict=True)
        self._groups = [group for group, _ in groups.places] if len(groups.windows) > 1 else []
        self._run_layer = run_layer

    def __call__(self, inputs: StepInputs) -> Tensor:
        of_layers = None
        if self._groups:
            batches = inputs.batches
            of_layers = [batches[group] for group in self._groups]
        attention = PagedAttention(
            self._decoder.config,
            self._keys,
            self._values,
            inputs.batch,
            of_layers,
            inputs.states,
        )
        run_layer = self._run_layer
        if inputs.computed is not None:
            run_layer = _followed(run_layer, inputs.computed)
        hidden: Tensor = self._decoder(
            inputs.first, inputs.positions, attention, run_layer, inputs.canvas
        )
        return hidden


def _followed(run_layer: LayerFunction, computed: LayerComputed) -> LayerFunction:
    """Have each layer followed by a call of `computed`."""

    def run(layer: DecoderLayer, *arguments: Any) -> Tensor:
        output = run_layer(layer, *arguments)
        computed(layer.index)
        return output

    return run


# ---- from rows to tensors ------------------------------------------------------------------------


class BlockTable:
    """The blocks of one sequence in order of position, as an array that grows by doubling. Where
    the sequence has no block, as a window has left it behind, stands some block: it is not read."""

    def __init__(self) -> None:
        self._memory = np.zeros(16, np.int32)
        self.blocks = self._memory[:0]

    def extend(self, blocks: Sequence[int]) -> None:
        known, length = len(self.blocks), len(self.blocks) + len(blocks)
        if length > len(self._memory):
            more = np.zeros(max(length, len(self._memory)), np.int32)
            self._memory = np.concatenate((self._memory, more))
        self.blocks = self._memory[:length]
        self.blocks[known:] = np.maximum(blocks, 0)

    def slot(self, position: int, block_size: int) -> int:
        """Where in the cache that position is."""
        return int(self.blocks[position // block_size]) * block_size + position % block_size


def row_ends(rows: Sequence[Row]) -> np.ndarray:
    """Where the tokens of each row end among those of the step, one row after the other: int64
    [R]."""
    return np.cumsum([len(row.tokens) for row in rows])


class InputBuilder:
    """Fills numpy buffers that are kept between steps."""

    def __init__(self, block_size: int, shares: tuple[int, ...] = (1,)) -> None:
        """shares: those of the cache groups, whose blocks take turns in a BlockTable. Where layers
        share a tensor, each block counts as so many."""
        self.block_size, self.groups, self._shares = block_size, len(shares), shares
        self._token_columns = np.zeros((3, 256), np.int64)
        self._row_columns = np.zeros(256, np.int32)

    def build(
        self,
        rows: Sequence[Row],
        ends: np.ndarray,
        tables: Sequence[BlockTable],
        add: Callable[[np.ndarray], Tensor],
        add_batch: Callable[[np.ndarray], Tensor] | None = None,
    ) -> StepInputs:
        """Lay the rows of a step end to end, as `row_ends` says. `add` has an array moved to the
        device before the next step is built, and `add_batch` those of the AttentionBatch, which may
        be needed elsewhere. Raises RuntimeError if a row's block table is too short for its last
        position."""
        assert len(rows) == len(tables) == len(ends), "each row has a block table and an end"
        add_batch = add_batch or add
        starts = np.array([row.start for row in rows], np.int32)
        blocks = [table.blocks for table in tables]
        num_blocks = np.array([len(each) for each in blocks])
        num_tokens, width = int(ends[-1]), int(num_blocks.max())
        block_tables, query_starts, contexts = self._row_buffers(len(rows), width)
        query_starts[0] = 0
        query_starts[1:] = ends
        lengths = query_starts[1:] - query_starts[:-1]
        np.add(starts, lengths, out=contexts)
        self._check_capacity(rows, contexts, num_blocks // self.groups)
        block_tables[:] = 0
        block_tables[np.arange(width) < num_blocks[:, None]] = np.concatenate(blocks)
        tables_of_groups = [block_tables]
        if self.groups > 1:
            shares = enumerate(self._shares)
            tables_of_groups = [block_tables[:, group :: self.groups] * n for group, n in shares]

        token_ids, positions, slots = self._token_buffers(num_tokens)
        tokens = chain.from_iterable(row.tokens for row in rows)
        token_ids[:] = np.fromiter(tokens, np.int64, num_tokens)
        row_of_token = np.repeat(np.arange(len(rows)), lengths)
        positions[:] = np.arange(num_tokens) - query_starts[row_of_token] + starts[row_of_token]
        first_table = tables_of_groups[0]
        self._fill_slots(slots, first_table, row_of_token, positions)
        batch = AttentionBatch(
            add_batch(first_table), add_batch(query_starts), add_batch(contexts), add_batch(slots)
        )
        more = list[AttentionBatch]()
        for table in tables_of_groups[1:]:
            group_slots = np.empty_like(slots)
            self._fill_slots(group_slots, table, row_of_token, positions)
            of_group = (add(table), batch.query_starts, batch.context_lengths, add(group_slots))
            more.append(AttentionBatch(*of_group))
        longest = int(lengths.max())
        return StepInputs(add(token_ids), add(positions), batch, longest, more=tuple(more))

    def _fill_slots(
        self, slots: np.ndarray, tables: np.ndarray, row_of_token: np.ndarray, positions: np.ndarray
    ) -> None:
        slots[:] = tables[row_of_token, positions // self.block_size]
        slots *= self.block_size
        slots += positions % self.block_size

    def _check_capacity(
        self, rows: Sequence[Row], ends: np.ndarray, num_blocks: np.ndarray
    ) -> None:
        short = np.flatnonzero(ends > num_blocks * self.block_size)
        if len(short):
            place = short[0]
            raise RuntimeError(
                f"sequence {rows[place].sequence}: {num_blocks[place]} blocks of {self.block_size} "
                "slots"
                f" do not reach position {ends[place] - 1}"
            )

    def _token_buffers(self, num_tokens: int) -> np.ndarray:
        """[3, num_tokens]: token ids, positions, slots."""
        if num_tokens > self._token_columns.shape[1]:
            self._token_columns = np.zeros((3, 2 * num_tokens), np.int64)
        return self._token_columns[:, :num_tokens]

    def _row_buffers(self, num_rows: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Block tables [num_rows, width], query starts [num_rows + 1] and context lengths
        [num_rows] of one buffer."""
        size = num_rows * (width + 2) + 1
        if size > len(self._row_columns):
            self._row_columns = np.zeros(2 * size, np.int32)
        tables, rest = (
            self._row_columns[: num_rows * width],
            self._row_columns[num_rows * width : size],
        )
        return tables.reshape(num_rows, width), rest[: num_rows + 1], rest[num_rows + 1 :]
