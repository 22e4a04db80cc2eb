"""From the rows of a plan to the tensors of a forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from torch import Tensor

from nanoserve.runtime.moves.layer_marks import LayerComputed
from nanoserve.runtime.step.staging import Staged, Staging
from nanoserve.scheduler.plan import Row


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


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What one forward pass over T tokens in R rows is given. Its tensors are views, valid until the next step."""

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    """int64 [T]."""
    block_tables: Tensor
    """int32 [R, most blocks of a row]."""
    query_starts: Tensor
    """int32 [R + 1]."""
    context_lengths: Tensor
    """int32 [R], tokens in the cache once this step has written."""
    entering: Tensor | None = None
    """[T, hidden_size], hidden states from the stage before; None in the first stage."""
    computed: LayerComputed | None = None
    """Told of each layer, while later ones are still computed; None if nobody waits for that."""

    @property
    def first(self) -> Tensor:
        """What the decoder takes first: the hidden states from the stage before, or the token ids."""
        return self.token_ids if self.entering is None else self.entering


@dataclass(frozen=True, slots=True)
class StagedInputs:
    """The same on their way to the device."""

    token_ids: Staged
    positions: Staged
    slot_mapping: Staged
    block_tables: Staged
    query_starts: Staged
    context_lengths: Staged

    def tensors(self) -> StepInputs:
        """As tensors, once they are transferred."""
        return StepInputs(
            token_ids=self.token_ids.tensor,
            positions=self.positions.tensor,
            slot_mapping=self.slot_mapping.tensor,
            block_tables=self.block_tables.tensor,
            query_starts=self.query_starts.tensor,
            context_lengths=self.context_lengths.tensor,
        )


def row_ends(rows: Sequence[Row]) -> np.ndarray:
    """Where the tokens of each row end among those of the step, one row after the other: int64 [R]."""
    return np.cumsum([len(row.tokens) for row in rows])


class InputBuilder:
    """Fills numpy buffers that are kept between steps."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._token_columns = np.zeros((3, 256), np.int64)
        self._row_columns = np.zeros(256, np.int32)

    def stage(
        self, rows: Sequence[Row], ends: np.ndarray, tables: Sequence[BlockTable], staging: Staging
    ) -> StagedInputs:
        """Have the inputs of a step moved to the device; transfer them before the next step is staged.

        Args:
            ends: of each row's tokens in the step, as by `row_ends`.
            tables: each row's block table, long enough for its last position.

        Raises:
            RuntimeError: if a table is too short, which is a mistake of whoever made the plan.
        """
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
        arrays = (token_ids, positions, slots, block_tables, query_starts, contexts)
        return StagedInputs(*(staging.add(array) for array in arrays))

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
