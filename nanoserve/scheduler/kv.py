"""Block accounting of the KV cache, without torch: the owners of blocks, and what blocks hold."""

from collections import OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

import msgspec

from nanoserve.request import Fork, Sequence

if TYPE_CHECKING:  # most models have no recurrent state
    from nanoserve.scheduler.recurrent_state.state_pool import StatePool

NO_BLOCK = -1
"""Stands in a block table for a block that the sequence has given back, or never had: no query will
read it."""


class CachedColumn(msgspec.Struct, eq=False, gc=False):
    """A block's worth of tokens behind a prefix: one block of every cache group, for the same
    positions.

    Its address is the column before it (the salt, for a first one) and its own tokens. Columns are
    compared by identity and their tokens are compared as they are, so equal addresses mean equal
    prefixes, and a hash collision can never serve another prompt's cache. They are never in a
    cycle, so the garbage collector skips them.
    """

    address: "Address"
    blocks: list[int]
    """The block of each group, or NO_BLOCK if it was used for something else."""
    followers: int = 0
    """Known columns that come after it."""
    is_known: bool = True


Address = tuple[CachedColumn | str, tuple[int, ...]]


class BlockPool:
    """Hands out blocks ``0..num_blocks-1``, and finds the cached blocks that hold a prompt's next
    tokens.

    A block is *owned* while its reference count is positive. Free blocks without cached content are
    reused first, then cached ones, least recently used first.

    A block of each of the ``groups`` of a model's caches, for the same positions, is a column; with
    one group a column is a block. A full column, with owners or without, is known as long as one of
    its blocks is cached, or a column after it is known: where queries see only close positions, the
    beginning of a prefix may be gone and its end is of use.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, prefix_caching: bool = True, groups: int = 1
    ) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.groups = groups
        self._fill(num_blocks)

    def _fill(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._blank: deque[int] = deque(range(num_blocks))
        self._reusable: OrderedDict[int, None] = OrderedDict()
        self._known: dict[Address, CachedColumn] = {}
        self._cached: list[CachedColumn | None] = [None] * num_blocks  # by block

    def replace_blocks(self, num_blocks: int) -> None:
        """Replace the blocks by those of another parallel layout; nothing is kept. Raises
        RuntimeError if one of these has an owner."""
        if self.free_blocks != self.num_blocks:
            raise RuntimeError(f"{self.num_blocks - self.free_blocks} blocks still have an owner")
        self._fill(num_blocks)

    @property
    def free_blocks(self) -> int:
        """Blocks without an owner, cached or not."""
        return len(self._blank) + len(self._reusable)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that this many tokens fill, rounded up."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks; their content is lost to the prefix cache. Raises RuntimeError if
        fewer are free; callers look at ``free_blocks`` first."""
        if count > self.free_blocks:
            raise RuntimeError(f"{count} blocks asked for, {self.free_blocks} free")
        blocks = []
        for _ in range(count):
            if self._blank:
                block = self._blank.popleft()
            else:
                block, _ = self._reusable.popitem(last=False)
                self.forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add an owner to each block; a free cached block is then no longer free."""
        for block in blocks:
            if block == NO_BLOCK:
                continue
            if self._references[block] == 0:
                del self._reusable[block]
            self._references[block] += 1

    def release(self, blocks: SequenceOf[int]) -> None:
        """Drop one owner of each block, the last block of a sequence first, so that it is reused
        first."""
        for block in reversed(blocks):
            if block == NO_BLOCK:
                continue
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._cached[block] is not None:
                    self._reusable[block] = None
                else:
                    self._blank.append(block)

    def owned_once(self, block: int) -> bool:
        """Whether it has exactly one owner."""
        return self._references[block] == 1

    def match(self, tokens: SequenceOf[int], salt: str) -> list[CachedColumn]:
        """The longest known chain of columns for ``tokens``; some of their blocks may be missing.
        At least one token is left out."""
        found: list[CachedColumn] = []
        previous: CachedColumn | str = salt
        size = self.block_size
        for start in range(0, (len(tokens) - 1) // size * size, size):
            column = self._known.get((previous, tuple(tokens[start : start + size])))
            if column is None:
                break
            found.append(column)
            previous = column
        return found

    def insert(
        self, blocks: list[int], previous: CachedColumn | str, tokens: tuple[int, ...]
    ) -> CachedColumn:
        """Record that the ``blocks``, one of each group, hold these tokens after that column, or
        salt; returns the column of this content. If another block of a group holds the same content
        already, that one stays the shared one."""
        address = (previous, tokens)
        new = CachedColumn(address, blocks)
        column = self._known.setdefault(address, new)
        if column is new:
            if isinstance(previous, CachedColumn):
                previous.followers += 1
            for block in blocks:
                if block != NO_BLOCK:
                    self._cached[block] = column
            return column
        for group, block in enumerate(blocks):
            if column.blocks[group] == NO_BLOCK != block:
                column.blocks[group] = block
                self._cached[block] = column
        return column

    def forget(self, block: int) -> None:
        """The block is about to be overwritten; nothing happens if it is not cached."""
        column = self._cached[block]
        if column is None:
            return
        self._cached[block] = None
        column.blocks[column.blocks.index(block)] = NO_BLOCK
        while column.is_known and column.followers == 0 and max(column.blocks) == NO_BLOCK:
            del self._known[column.address]
            column.is_known = False
            previous, _ = column.address
            if isinstance(previous, str):
                break
            previous.followers -= 1
            column = previous

    def forget_cache(self) -> None:
        """No block may be found by its content any longer; owners keep theirs."""
        for column in self._known.values():
            column.is_known = False
        self._known.clear()
        self._cached = [None] * self.num_blocks
        self._blank.extend(self._reusable)
        self._reusable.clear()


class SequenceBlocks:
    """The block tables of all sequences: prefix hits, growth, forks, release.

    A table is a list of columns, each a block of every cache group: block ``i`` of group ``g`` is
    at ``i * groups + g``. So all groups grow together, and with one group it is the plain list of
    blocks.
    """

    slides = False
    """Whether blocks are given back that queries no longer see."""
    states: "StatePool | None" = None
    """The slots of recurrent states, of which each sequence takes one; None without such layers."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.groups = pool.groups
        self._block_size = pool.block_size

    def most_held(self, tokens: int, chunk: int | None = None) -> int:
        """Blocks that a sequence of this many tokens, computed in such chunks, holds at most at any
        time."""
        return self.pool.blocks_for(tokens) * self.groups

    def first_columns(self, position: int) -> list[int]:
        """For each group, the first column that a query at this position sees."""
        return [0] * self.groups

    def take_prefix(self, sequence: Sequence) -> None:
        """Begin the table with the cached blocks of the sequence's prefix; those positions need no
        computing."""
        assert not sequence.block_table, "a waiting sequence holds no blocks"
        for column in self.usable_prefix(sequence):
            sequence.cached_columns.append(column)
            sequence.block_table += column.blocks
        sequence.computed = sequence.capacity = len(sequence.cached_columns) * self._block_size
        self.pool.share(sequence.block_table)

    def usable_prefix(self, sequence: Sequence) -> list[CachedColumn]:
        """The cached columns of the sequence's prefix, up to the first one that lacks a block."""
        columns = list[CachedColumn]()
        for column in self.pool.match(sequence.tokens, sequence.request.cache_salt):
            if NO_BLOCK in column.blocks:
                break
            columns.append(column)
        return columns

    def cut(self, prompt: Sequence, count: int, budget: int) -> int:
        """How many of a prompt's next ``count`` positions a chunk computes, in a plan that has a
        ``budget`` of prompt tokens."""
        return count

    def slide(self, sequence: Sequence, position: int) -> None:
        """Give back the blocks that no query from this position on sees."""

    def capacity(self, sequence: Sequence) -> int:
        """Positions to compute that fit into the sequence's blocks and all free ones."""
        blocks = len(sequence.block_table) + self.pool.free_blocks
        if sequence.fork is not None:
            blocks += sum(map(self.pool.owned_once, sequence.fork.copy_source))
        return blocks // self.groups * self._block_size - sequence.computed

    def fits(self, sequence: Sequence, count: int) -> bool:
        """Whether ``count`` more positions fit; usually the last block has room, and the pool need
        not be asked."""
        return sequence.computed + count <= sequence.capacity or count <= self.capacity(sequence)

    def grow(self, sequence: Sequence, count: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Append the blocks that ``count`` more positions need; they must be free. Returns them,
        and the (source, target) of blocks to copy before the first of them is written. This is
        copy-on-write: at its first write a fork copies the blocks in which its prompt ends, but for
        those that nobody else owns."""
        end = sequence.computed + count
        if end <= sequence.capacity:  # a fork that has not written yet misses one column at least
            return [], []
        missing = self.pool.blocks_for(end - sequence.capacity) * self.groups
        copies: list[tuple[int, int]] = []
        if sequence.fork is not None and sequence.fork.copy_source:
            # The sources are not in the block table, so `missing` counts them. Only those that
            # others own are copied.
            sources, sequence.fork = sequence.fork.copy_source, None
            shared = [source for source in sources if not self.pool.owned_once(source)]
            assert missing >= len(sources), "a fork's first write is in the column that it copies"
            fresh = iter(self.pool.allocate(missing - len(sources) + len(shared)))
            moved = {source: next(fresh) for source in shared}
            copies = list(moved.items())
            for source in sources:
                if source not in moved:
                    self.pool.forget(source)  # it may still be cached as a full block of the parent
            self.pool.release(shared)
            new_blocks = [moved.get(source, source) for source in sources]
            new_blocks += fresh
        else:
            new_blocks = self.pool.allocate(missing)
        sequence.block_table += new_blocks
        sequence.capacity += missing // self.groups * self._block_size
        return new_blocks, copies

    def trim(self, sequence: Sequence) -> None:
        """Give blocks behind the computed positions back."""
        assert sequence.computed <= sequence.capacity, "each computed position has a block"
        columns = self.pool.blocks_for(sequence.computed)
        kept, sequence.capacity = columns * self.groups, columns * self._block_size
        self.pool.release(sequence.block_table[kept:])
        del sequence.block_table[kept:]

    def share_full(self, sequence: Sequence, computed: int) -> None:
        """Let other sequences find every full block of the first ``computed`` tokens, which are
        known."""
        columns, size = sequence.cached_columns, self._block_size
        shared, full = len(columns), computed // size
        if shared == full or not self.pool.prefix_caching:  # nothing new, as for most decodes
            return
        groups, table = self.groups, sequence.block_table
        previous = columns[-1] if columns else sequence.request.cache_salt
        for index in range(shared, full):
            tokens = tuple(sequence.tokens[index * size : (index + 1) * size])
            previous = self.pool.insert(
                table[index * groups : (index + 1) * groups], previous, tokens
            )
            columns.append(previous)

    def may_fork(self, parent: Sequence) -> bool:
        """Whether all that siblings share with a parent is there, whose prompt is computed."""
        return True

    def forked_at(self, parent: Sequence) -> int:
        """The position up to which siblings share the parent's prompt: they compute its last token
        themselves, to sample from its logits."""
        return parent.prompt_length - 1

    def fork(self, parent: Sequence, sibling: Sequence) -> None:
        """Share the parent's prompt, as far as siblings do."""
        assert not sibling.block_table, "a sibling that waits for its prompt holds no blocks"
        sibling.computed = self.forked_at(parent)
        full, partial = divmod(sibling.computed, self._block_size)
        end = full * self.groups
        sibling.block_table, sibling.capacity = parent.block_table[:end], full * self._block_size
        sibling.cached_columns = parent.cached_columns[:full]
        self.pool.share(sibling.block_table)
        if partial:
            # `grow` copies them when the sibling first writes. Until then the parent may write to
            # them: only after the prompt, where the sibling does not read.
            sibling.fork = Fork(copy_source=tuple(parent.block_table[end : end + self.groups]))
            self.pool.share(sibling.fork.copy_source)

    def release(self, sequence: Sequence) -> None:
        """Give the device blocks back."""
        if sequence.fork is not None:
            self.pool.release(sequence.fork.copy_source)
            sequence.fork.copy_source = ()
        self.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.capacity = 0
        sequence.cached_columns = []
