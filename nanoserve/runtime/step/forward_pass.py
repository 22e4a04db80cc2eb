"""The forward pass of a step: from the rows of a plan to tensors, and over the paged cache to hidden states."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from nanoserve.config import ModelConfig
from nanoserve.models.attention import AttentionBatch, AttentionFunction, PagedAttention
from nanoserve.models.decoder import Decoder, DecoderLayer, LayerFunction
from nanoserve.scheduler.plan import Row

LayerComputed = Callable[[int], None]
"""Called with each layer of a stage, once its keys and values are written or the work that writes them is issued."""


@dataclass(slots=True)
class StepInputs:
    """What one forward pass over T tokens in R rows is given. Its tensors are views, valid until the next step."""

    token_ids: Tensor
    positions: Tensor
    """int64 [T]."""
    batch: AttentionBatch
    entering: Tensor | None = None
    """[T, hidden_size], hidden states from the stage before; None in the first stage."""
    computed: LayerComputed | None = None
    """Called after each layer, while later ones are still computed; None if nothing waits for that."""

    @property
    def first(self) -> Tensor:
        """What the decoder takes first: the hidden states from the stage before, or the token ids."""
        return self.token_ids if self.entering is None else self.entering


ForwardFunction = Callable[[StepInputs], Tensor]
"""Hidden states of all tokens of a step, one row after another: [T, hidden_size], valid until the next call."""


@dataclass(frozen=True, slots=True)
class Caches:
    """Keys and values, one tensor per layer: [num_blocks, num_kv_heads, block_size, head_dim]."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]


def make_caches(
    config: ModelConfig,
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    storage: Tensor | None = None,
) -> Caches:
    """A KV cache with any content: memory that is never touched costs no time. Its tensors are laid out one after
    another in the storage, uint8 on that device, which several caches may share in turn; None takes new memory."""
    shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
    with torch.inference_mode():  # as steps run: compiled code is made for tensors of one mode
        if storage is None:
            tensors = [torch.empty(shape, dtype=dtype, device=device) for _ in range(2 * config.num_layers)]
        else:
            size = math.prod(shape) * dtype.itemsize
            places = [storage[number * size : (number + 1) * size] for number in range(2 * config.num_layers)]
            tensors = [place.view(dtype).view(shape) for place in places]
    return Caches(tensors[::2], tensors[1::2])


class ForwardPass:
    """A ForwardFunction: the decoder over its caches, each layer by `run_layer`."""

    def __init__(self, decoder: Decoder, caches: Caches, run_layer: LayerFunction = DecoderLayer.__call__) -> None:
        self._decoder = decoder
        self._caches = caches
        self._run_layer = run_layer

    def __call__(self, inputs: StepInputs) -> Tensor:
        attention = PagedAttention(self._decoder.config, self._caches.keys, self._caches.values, inputs.batch)
        run_layer = self._run_layer if inputs.computed is None else _marking(self._run_layer, inputs.computed)
        hidden: Tensor = self._decoder(inputs.first, inputs.positions, attention, run_layer)
        return hidden


def _marking(run_layer: LayerFunction, computed: LayerComputed) -> LayerFunction:
    def run(layer: DecoderLayer, hidden: Tensor, cos: Tensor, sin: Tensor, attention: AttentionFunction) -> Tensor:
        output = run_layer(layer, hidden, cos, sin, attention)
        computed(layer.index)
        return output

    return run


# ---- from rows to tensors ------------------------------------------------------------------------------------


class BlockTable:
    """The blocks of one sequence in order of position, as an array that grows by doubling."""

    def __init__(self) -> None:
        self._blocks = np.zeros(16, np.int32)
        self._length = 0

    def extend(self, blocks: Sequence[int]) -> None:
        length = self._length + len(blocks)
        if length > len(self._blocks):
            self._blocks = np.concatenate((self._blocks, np.zeros(max(length, len(self._blocks)), np.int32)))
        self._blocks[self._length : length] = blocks
        self._length = length

    @property
    def blocks(self) -> np.ndarray:
        return self._blocks[: self._length]


def row_ends(rows: Sequence[Row]) -> np.ndarray:
    """Where the tokens of each row end among those of the step, one row after the other: int64 [R]."""
    return np.cumsum([len(row.tokens) for row in rows])


class InputBuilder:
    """Fills numpy buffers that are kept between steps."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
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
        """The inputs of a step, whose rows end as `row_ends` says. `add` has an array moved to the device before the
        next step is built, and `add_batch` those of the AttentionBatch, which may be needed elsewhere. Raises
        RuntimeError if a row's block table is too short for its last position."""
        starts = np.array([row.start for row in rows], np.int32)
        blocks = [table.blocks for table in tables]
        num_blocks = np.array([len(each) for each in blocks])
        num_tokens, width = int(ends[-1]), int(num_blocks.max())
        block_tables, query_starts, contexts = self._row_buffers(len(rows), width)
        query_starts[0] = 0
        query_starts[1:] = ends
        lengths = query_starts[1:] - query_starts[:-1]
        np.add(starts, lengths, out=contexts)
        self._check_capacity(rows, contexts, num_blocks)
        token_ids, positions, slots = self._token_buffers(num_tokens)
        token_ids[:] = np.fromiter(chain.from_iterable(row.tokens for row in rows), np.int64, num_tokens)
        block_tables[:] = 0
        block_tables[np.arange(width) < num_blocks[:, None]] = np.concatenate(blocks)
        row_of_token = np.repeat(np.arange(len(rows)), lengths)
        positions[:] = np.arange(num_tokens) - query_starts[row_of_token] + starts[row_of_token]
        slots[:] = block_tables[row_of_token, positions // self.block_size]
        slots *= self.block_size
        slots += positions % self.block_size
        batch = AttentionBatch(*map(add_batch or add, (block_tables, query_starts, contexts, slots)))
        return StepInputs(add(token_ids), add(positions), batch)

    def _check_capacity(self, rows: Sequence[Row], ends: np.ndarray, num_blocks: np.ndarray) -> None:
        short = np.flatnonzero(ends > num_blocks * self.block_size)
        if len(short):
            place = short[0]
            raise RuntimeError(
                f"sequence {rows[place].sequence}: {num_blocks[place]} blocks of {self.block_size} slots"
                f" do not reach position {ends[place] - 1}"
            )

    def _token_buffers(self, num_tokens: int) -> np.ndarray:
        """[3, num_tokens]: token ids, positions, slots."""
        if num_tokens > self._token_columns.shape[1]:
            self._token_columns = np.zeros((3, 2 * num_tokens), np.int64)
        return self._token_columns[:, :num_tokens]

    def _row_buffers(self, num_rows: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Block tables [num_rows, width], query starts [num_rows + 1] and context lengths [num_rows] of one buffer."""
        size = num_rows * (width + 2) + 1
        if size > len(self._row_columns):
            self._row_columns = np.zeros(2 * size, np.int32)
        tables, rest = self._row_columns[: num_rows * width], self._row_columns[num_rows * width : size]
        return tables.reshape(num_rows, width), rest[: num_rows + 1], rest[num_rows + 1 :]
