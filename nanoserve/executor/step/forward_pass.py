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


class BlockTables:
    """The block tables of many sequences in one array, which grows by doubling: the tables of a
    step are found there with one look. Where a sequence has no block, as a window has left it
    behind, stands some block: it is not read."""

    def __init__(self) -> None:
        self.blocks = np.zeros((16, 16), np.int32)
        """A row for each sequence, 0 behind its last block."""
        self.lengths = np.zeros(16, np.int32)
        self._free = list(range(16))

    def open(self) -> "BlockTable":
        """Begin the table of a sequence."""
        if not self._free:
            known = len(self.blocks)
            self._free.extend(range(known, 2 * known))
            self.blocks = np.concatenate((self.blocks, np.zeros_like(self.blocks)))
            self.lengths = np.concatenate((self.lengths, np.zeros_like(self.lengths)))
        return BlockTable(self, self._free.pop())

    def close(self, table: "BlockTable") -> None:
        """Give up the table of a sequence."""
        self.blocks[table.place, : self.lengths[table.place]] = 0
        self.lengths[table.place] = 0
        self._free.append(table.place)

    def extend(self, place: int, blocks: Sequence[int]) -> None:
        known = int(self.lengths[place])
        length, width = known + len(blocks), self.blocks.shape[1]
        if length > width:
            more = np.zeros((len(self.blocks), max(length - width, width)), np.int32)
            self.blocks = np.concatenate((self.blocks, more), axis=1)
        self.blocks[place, known:length] = np.maximum(blocks, 0)
        self.lengths[place] = length


class BlockTable:
    """The blocks of one sequence in order of position: its place in BlockTables."""

    def __init__(self, tables: BlockTables, place: int) -> None:
        self.tables, self.place = tables, place

    @property
    def blocks(self) -> np.ndarray:
        return self.tables.blocks[self.place, : self.tables.lengths[self.place]]

    def extend(self, blocks: Sequence[int]) -> None:
        self.tables.extend(self.place, blocks)

    def slot(self, position: int, block_size: int) -> int:
        """Where in the cache that position is."""
        return int(self.blocks[position // block_size]) * block_size + position % block_size


def row_ends(rows: Sequence[Row]) -> np.ndarray:
    """Where the tokens of each row end among those of the step, one row after the other: int64
    [R]."""
    lengths = np.fromiter(map(len, [row.tokens for row in rows]), np.int64, len(rows))
    return lengths.cumsum()


def row_lengths(ends: np.ndarray) -> np.ndarray:
    """Tokens of each row that ends as `row_ends` says: int64 [R]. np.diff takes several times as
    long for few rows."""
    lengths = ends.copy()
    lengths[1:] -= ends[:-1]
    return lengths


class InputBuilder:
    """Lays the rows of a step end to end, in arrays of their own."""

    def __init__(self, block_size: int, shares: tuple[int, ...] = (1,)) -> None:
        """shares: those of the cache groups, whose blocks take turns in a BlockTable. Where layers
        share a tensor, each block counts as so many."""
        self.block_size, self.groups, self._shares = block_size, len(shares), shares

    def build(
        self,
        rows: Sequence[Row],
        ends: np.ndarray,
        tables: Sequence[BlockTable],
        add: Callable[[np.ndarray], Tensor],
        add_batch: Callable[[np.ndarray], Tensor] | None = None,
    ) -> StepInputs:
        """Make the inputs of rows that end as `row_ends` says; their tables are of one
        BlockTables. `add` has an array moved to the device before the next step is built, and
        `add_batch` those of the AttentionBatch, which may be needed elsewhere. Raises RuntimeError
        if a row's block table is too short for its last position."""
        assert len(rows) == len(tables) == len(ends), "each row has a block table and an end"
        add_batch = add_batch or add
        num_rows, num_tokens = len(rows), int(ends[-1])
        starts = np.fromiter([row.start for row in rows], np.int64, num_rows)
        lengths = row_lengths(ends)
        contexts, longest = starts + lengths, int(lengths.max())
        block_tables, num_blocks = _gathered(tables)
        self._check_capacity(rows, contexts, num_blocks // self.groups)
        row_of_token, positions = np.arange(num_rows), starts
        if longest > 1 or num_tokens < num_rows:
            row_of_token = row_of_token.repeat(lengths)
            positions = np.arange(num_tokens) + (contexts - ends)[row_of_token]
        tables_of_groups = [block_tables]
        if self.groups > 1:
            shares = enumerate(self._shares)
            tables_of_groups = [block_tables[:, group :: self.groups] * n for group, n in shares]
        query_starts = np.zeros(num_rows + 1, np.int32)
        query_starts[1:] = ends
        tokens = chain.from_iterable([row.tokens for row in rows])
        token_ids = np.fromiter(tokens, np.int64, num_tokens)
        first_table, *other_tables = tables_of_groups
        batch = AttentionBatch(
            add_batch(first_table),
            add_batch(query_starts),
            add_batch(contexts.astype(np.int32)),
            add_batch(self._slots(first_table, row_of_token, positions)),
        )
        more = list[AttentionBatch]()
        for table in other_tables:
            slots = add(self._slots(table, row_of_token, positions))
            more.append(
                AttentionBatch(add(table), batch.query_starts, batch.context_lengths, slots)
            )
        return StepInputs(add(token_ids), add(positions), batch, longest, more=tuple(more))

    def _slots(
        self, tables: np.ndarray, row_of_token: np.ndarray, positions: np.ndarray
    ) -> np.ndarray:
        columns, offsets = np.divmod(positions, self.block_size)
        blocks = tables[row_of_token, columns].astype(np.int64)
        slots: np.ndarray = blocks * self.block_size + offsets
        return slots

    def _check_capacity(
        self, rows: Sequence[Row], ends: np.ndarray, num_blocks: np.ndarray
    ) -> None:
        short = ends > num_blocks * self.block_size
        if short.any():
            place = int(short.argmax())
            raise RuntimeError(
                f"sequence {rows[place].sequence}: {num_blocks[place]} blocks of {self.block_size} "
                "slots"
                f" do not reach position {ends[place] - 1}"
            )


def _gathered(tables: Sequence[BlockTable]) -> tuple[np.ndarray, np.ndarray]:
    """The tables of rows as one array, int32 [R, most blocks], 0 behind the last block of each,
    and their numbers of blocks."""
    every = tables[0].tables
    places = np.fromiter([table.place for table in tables], np.int64, len(tables))
    num_blocks = every.lengths[places]
    return every.blocks[places, : num_blocks.max()], num_blocks
