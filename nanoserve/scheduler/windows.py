"""Sliding windows: how many blocks a sequence needs where queries see only the positions close
before them."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from nanoserve.request import Sequence
from nanoserve.scheduler.kv import NO_BLOCK, BlockPool, SequenceBlocks

_EMPTY_BLOCKS = 1 << 16
"""Blocks of a model without attention, at least; each takes some tens of bytes here."""


def first_seen(position: int, window: int) -> int:
    """The first position that a query sees through a window; a window of 0 shows all positions."""
    if window == 0:
        return 0
    return max(0, position + 1 - window)


def most_blocks(
    windows: Iterable[int], tokens: int, block_size: int, chunk: int | None = None
) -> int:
    """Blocks that a sequence of this many tokens holds at most, at any time, in groups with these
    windows. It is computed in chunks of at most ``chunk`` tokens; None stands for a block's worth,
    with which every sequence ends."""
    if chunk is None:
        chunk = block_size
    columns = -(-tokens // block_size)
    # A chunk's queries see W - 1 positions before it, and all of these begin anywhere in a block.
    beside_window = chunk - 1 + block_size - 1
    blocks = 0
    for window in windows:
        held = columns
        if window:
            held = min(columns, (window + beside_window - 1) // block_size + 1)
        blocks += held
    return blocks


def empty_blocks(longest: int, block_size: int) -> int:
    """Blocks of a model without attention. They hold nothing, but they name the positions whose
    states the prefix cache finds: enough for the longest sequence, and for many others."""
    return max(most_blocks((0,), longest, block_size), _EMPTY_BLOCKS)


def most_tokens(
    windows: tuple[int, ...],
    num_blocks: int,
    block_size: int,
    longest: int,
    chunk: int | None = None,
) -> int:
    """Tokens, at most ``longest``, of a sequence that never holds more than this many blocks. It is
    computed in chunks as of `most_blocks`."""
    in_windows = most_blocks([window for window in windows if window], longest, block_size, chunk)
    full = windows.count(0)
    columns = num_blocks // len(windows)  # if no window has been left behind
    if in_windows <= num_blocks:
        if full == 0:
            return longest
        columns = max(columns, (num_blocks - in_windows) // full)
    return min(longest, columns * block_size)


def computed_at_once(length: int, block_size: int) -> int:
    """Count the positions that a sequence with free canvases of this length computes together, in
    the shortest steps: a canvas, and one that siblings still read."""
    return max(length, block_size) + 1


def longest_sequence(
    windows: tuple[int, ...], num_blocks: int, block_size: int, length: int, most: int
) -> int:
    """Count the tokens of the longest sequence with free canvases that fits these blocks. Its last
    canvas begins before its last token, and ends within the ``most`` positions that there may
    be."""
    at_once = computed_at_once(length, block_size)
    return most_tokens(windows, num_blocks, block_size, most, at_once) - length + 1


class WindowedBlocks(SequenceBlocks):
    """Block tables of a model with sliding windows: blocks that no query sees any longer are given
    back.

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
                if index < first:
                    block = NO_BLOCK
                sequence.block_table.append(block)
        sequence.computed = sequence.window_start = sequence.capacity = end
        self.pool.share(sequence.block_table)

    def _usable(self, columns: SequenceOf[list[int]]) -> int:
        """How many of these columns are the longest prefix of which every group has what the next
        query sees: all, or what is in its window. One pass finds it: whether a prefix will do hangs
        on no other."""
        usable = 0
        runs = [0] * self.groups  # of each group, its newest columns without a gap
        for length, blocks in enumerate(columns, 1):
            for group, block in enumerate(blocks):
                if block == NO_BLOCK:
                    runs[group] = 0
                else:
                    runs[group] += 1
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
            first = self._first_column(sequence.window_start or 0, window)
            end = self._first_column(position, window)
            if first < end:
                passed = slice(first * groups + group, end * groups, groups)
                self.pool.release(table[passed])
                table[passed] = [NO_BLOCK] * (end - first)
        sequence.window_start = position

    def share_full(self, sequence: Sequence, computed: int) -> None:
        # A sequence that was away has no blocks that it will not read: such columns serve only
        # those after them.
        shared, full = len(sequence.cached_columns), computed // self._block_size
        while (
            shared < full
            and max(sequence.block_table[(full - 1) * self.groups : full * self.groups]) == NO_BLOCK
        ):
            full -= 1
        super().share_full(sequence, full * self._block_size)

    def fork(self, parent: Sequence, sibling: Sequence) -> None:
        super().fork(parent, sibling)
        sibling.window_start = parent.window_start

    def release(self, sequence: Sequence) -> None:
        super().release(sequence)
        sequence.window_start = None
