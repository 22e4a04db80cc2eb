"""Sliding windows: how many blocks a sequence needs where queries see only the positions close before them."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from nanoserve.request import Sequence
from nanoserve.scheduler.kv import NO_BLOCK, BlockPool, SequenceBlocks


def first_seen(position: int, window: int) -> int:
    """The first position that a query sees through a window; one of 0 shows all."""
    return max(0, position + 1 - window) if window else 0


def most_blocks(windows: Iterable[int], tokens: int, block_size: int, chunk: int | None = None) -> int:
    """Blocks that a sequence of this many tokens holds at most, at any time, in groups with these windows. It is
    computed in chunks of at most ``chunk`` tokens; None stands for a block's worth, with which every sequence ends."""
    columns = -(-tokens // block_size)
    # A chunk's queries see W - 1 positions before it, and all of these begin anywhere in a block.
    before = (block_size if chunk is None else chunk) - 1 + block_size - 1
    return sum(min(columns, (window + before - 1) // block_size + 1) if window else columns for window in windows)


def most_tokens(windows: tuple[int, ...], num_blocks: int, block_size: int, longest: int) -> int:
    """Tokens, at most ``longest``, of a sequence that never holds more than this many blocks."""
    in_windows = most_blocks([window for window in windows if window], longest, block_size)
    full = windows.count(0)
    columns = num_blocks // len(windows)  # if no window has been left behind
    if in_windows <= num_blocks:
        columns = max(columns, (num_blocks - in_windows) // full if full else longest)
    return min(longest, columns * block_size)


class WindowedBlocks(SequenceBlocks):
    """Block tables of a model with sliding windows: blocks that no query sees any longer are given back.

    ``windows`` are those of the cache groups, 0 for one that keeps all.
    """

    slides = True

    def __init__(self, pool: BlockPool, windows: tuple[int, ...]) -> None:
        super().__init__(pool)
        self.windows = windows

    def most_held(self, tokens: int, chunk: int | None = None) -> int:
        return most_blocks(self.windows, tokens, self._block_size, chunk)

    def first_columns(self, position: int) -> list[int]:
        return [self._first_column(position, window) for window in self.windows]

    def take_prefix(self, sequence: Sequence) -> None:
        found = self.pool.match(sequence.tokens, sequence.request.cache_salt)
        hit = self._usable([column.blocks for column in found])
        end = hit * self._block_size
        firsts = self.first_columns(end)
        for index, column in enumerate(found[:hit]):
            sequence.cached_columns.append(column)
            for block, first in zip(column.blocks, firsts, strict=True):
                sequence.block_table.append(block if index >= first else NO_BLOCK)
        sequence.computed = sequence.window_start = sequence.capacity = end
        self.pool.share(sequence.block_table)

    def _usable(self, columns: SequenceOf[list[int]]) -> int:
        """How many of these columns are the longest prefix of which every group has what the next query sees: all, or
        what is in its window. One pass finds it: whether a prefix will do hangs on no other."""
        usable, runs = 0, [0] * self.groups
        for length, blocks in enumerate(columns, 1):
            runs = [0 if block == NO_BLOCK else run + 1 for block, run in zip(blocks, runs, strict=True)]
            firsts = self.first_columns(length * self._block_size)
            if all(run >= length - first for run, first in zip(runs, firsts, strict=True)):
                usable = length
        return usable

    def _first_column(self, position: int, window: int) -> int:
        """The column of the first position that a query sees."""
        return first_seen(position, window) // self._block_size

    def slide(self, sequence: Sequence, position: int) -> None:
        table, groups = sequence.block_table, self.groups
        for group, window in enumerate(self.windows):
            first, end = self._first_column(sequence.window_start or 0, window), self._first_column(position, window)
            if first < end:
                passed = slice(first * groups + group, end * groups, groups)
                self.pool.release(table[passed])
                table[passed] = [NO_BLOCK] * (end - first)
        sequence.window_start = position

    def share_full(self, sequence: Sequence, computed: int) -> None:
        # A sequence that was away has no blocks that it will not read: such columns serve only those after them.
        shared, full = len(sequence.cached_columns), computed // self._block_size
        while shared < full and max(sequence.block_table[(full - 1) * self.groups : full * self.groups]) == NO_BLOCK:
            full -= 1
        super().share_full(sequence, full * self._block_size)

    def fork(self, parent: Sequence, sibling: Sequence) -> None:
        super().fork(parent, sibling)
        sibling.window_start = parent.window_start

    def release(self, sequence: Sequence) -> None:
        super().release(sequence)
        sequence.window_start = None
