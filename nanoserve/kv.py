"""Block accounting of the KV cache, without torch: the owners of blocks, and what blocks hold."""

from collections import OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from itertools import count

from nanoserve.request import Sequence

ChainLink = int | str
"""The entry of the preceding block, or the salt in front of a first block."""


class BlockPool:
    """Hands out blocks ``0..num_blocks-1``, and finds the cached block that holds a prompt's next tokens.

    A block is *owned* while its reference count is positive. Free blocks without cached content are reused first, then
    cached ones, least recently used first.

    A full block, owned or free, is addressed by the entry of the block before it (the salt, for a first block) and its
    own tokens. An entry's number is never used again, so equal addresses mean equal prefixes. Looking an address up
    compares parent and tokens, so a hash collision can never serve another prompt's cache.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._entries = count()
        self._fill(num_blocks)

    def _fill(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._blank: deque[int] = deque(range(num_blocks))
        self._reusable: OrderedDict[int, None] = OrderedDict()
        self._cached: dict[tuple[ChainLink, tuple[int, ...]], tuple[int, int]] = {}  # block and entry, by address
        self._addresses: dict[int, tuple[ChainLink, tuple[int, ...]]] = {}  # by cached block

    def replace_blocks(self, num_blocks: int) -> None:
        """Replace the blocks by those of another parallel layout; nothing is kept. Raises RuntimeError if one of these
        has an owner."""
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
        """Take ``count`` blocks; their content is lost to the prefix cache. Raises RuntimeError if fewer are free;
        callers look at ``free_blocks`` first."""
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
            if self._references[block] == 0:
                del self._reusable[block]
            self._references[block] += 1

    def release(self, blocks: SequenceOf[int]) -> None:
        """Drop one owner of each block, the last block of a sequence first, so that it is reused first."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._addresses:
                    self._reusable[block] = None
                else:
                    self._blank.append(block)

    def owned_once(self, block: int) -> bool:
        """Whether it has exactly one owner."""
        return self._references[block] == 1

    def match(self, tokens: SequenceOf[int], salt: str) -> list[tuple[int, int]]:
        """The blocks of the longest cached chain for ``tokens`` and their entries; at least one token is left out."""
        found: list[tuple[int, int]] = []
        link: ChainLink = salt
        size = self.block_size
        for start in range(0, (len(tokens) - 1) // size * size, size):
            cached = self._cached.get((link, tuple(tokens[start : start + size])))
            if cached is None:
                break
            found.append(cached)
            _, link = cached
        return found

    def insert(self, block: int, previous: ChainLink, tokens: tuple[int, ...]) -> int:
        """Record that ``block`` holds these tokens after that chain; returns the entry of this content. If another
        block holds the same content already, that one stays the shared one."""
        address = (previous, tokens)
        if address not in self._cached:
            self._cached[address] = block, next(self._entries)
            self._addresses[block] = address
        _, entry = self._cached[address]
        return entry

    def forget(self, block: int) -> None:
        """The block is about to be overwritten; nothing happens if it is not cached."""
        if (address := self._addresses.pop(block, None)) is not None:
            del self._cached[address]

    def forget_cache(self) -> None:
        """No block may be found by its content any longer; owners keep theirs."""
        self._addresses.clear()
        self._cached.clear()
        self._blank.extend(self._reusable)
        self._reusable.clear()


class SequenceBlocks:
    """The block tables of all sequences: prefix hits, growth, forks, release. A sequence holds host blocks before it
    moves if it is a prompt to be parked, and both tables while it moves. Each host block has one owner."""

    def __init__(self, pool: BlockPool, host_pool: BlockPool) -> None:
        self.pool = pool
        self.host_pool = host_pool
        self._block_size = pool.block_size

    def take_prefix(self, sequence: Sequence) -> None:
        """Begin the table with the cached blocks of the sequence's prefix; those positions need no computing."""
        cached = self.pool.match(sequence.tokens, sequence.request.cache_salt)
        sequence.block_table = [block for block, _ in cached]
        sequence.chain = [entry for _, entry in cached]
        sequence.computed = len(cached) * self._block_size
        self.pool.share(sequence.block_table)

    def capacity(self, sequence: Sequence) -> int:
        """Positions to compute that fit into the sequence's blocks and all free ones."""
        adopted = sequence.copy_source is not None and self.pool.owned_once(sequence.copy_source)
        blocks = len(sequence.block_table) + self.pool.free_blocks + adopted
        return blocks * self._block_size - sequence.computed

    def fits(self, sequence: Sequence, count: int) -> bool:
        """Whether ``count`` more positions fit; usually the last block has room, and the pool need not be asked."""
        held = len(sequence.block_table) * self._block_size
        return sequence.computed + count <= held or count <= self.capacity(sequence)

    def grow(self, sequence: Sequence, count: int) -> tuple[list[int], tuple[int, int] | None]:
        """Append the blocks that ``count`` more positions need; they must be free. Returns them, and the (source,
        target) of a block to copy before the first of them is written. This is copy-on-write: at its first write a fork
        copies the block in which its prompt ends, unless it is the only owner."""
        held, end = len(sequence.block_table), sequence.computed + count
        if end <= held * self._block_size:  # a fork that has not written yet misses one block at least
            return [], None
        missing = self.pool.blocks_for(end) - held
        source, sequence.copy_source = sequence.copy_source, None
        copy = None
        if source is not None and self.pool.owned_once(source):
            self.pool.forget(source)  # it may still be cached as a full block of the parent
            new_blocks = [source, *self.pool.allocate(missing - 1)]
        else:
            new_blocks = self.pool.allocate(missing)
            if source is not None:
                copy = (source, new_blocks[0])
                self.pool.release([source])
        sequence.block_table += new_blocks
        return new_blocks, copy

    def share_full(self, sequence: Sequence, computed: int) -> None:
        """Let other sequences find every full block of the first ``computed`` tokens, which are known."""
        size = self._block_size
        shared, full = len(sequence.chain), computed // size
        if shared == full or not self.pool.prefix_caching:  # nothing new, as for most decodes
            return
        for index in range(shared, full):
            previous = sequence.chain[-1] if sequence.chain else sequence.request.cache_salt
            tokens = tuple(sequence.tokens[index * size : (index + 1) * size])
            sequence.chain.append(self.pool.insert(sequence.block_table[index], previous, tokens))

    def fork(self, parent: Sequence, sibling: Sequence) -> None:
        """Share all of the parent's prompt but its last token, whose logits the sibling samples for itself."""
        sibling.computed = parent.prompt_length - 1
        full, partial = divmod(sibling.computed, self._block_size)
        sibling.block_table = parent.block_table[:full]
        sibling.chain = parent.chain[:full]
        self.pool.share(sibling.block_table)
        if partial:
            # `grow` copies it when the sibling first writes. Until then the parent may write to the block: only after
            # the prompt, where the sibling does not read.
            sibling.copy_source = parent.block_table[full]
            self.pool.share([sibling.copy_source])

    def release(self, sequence: Sequence) -> None:
        """Give the device blocks back."""
        if sequence.copy_source is not None:
            self.pool.release([sequence.copy_source])
        self.pool.release(sequence.block_table)
        sequence.copy_source = None
        sequence.block_table = []
        sequence.chain = []

    def can_reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Whether the sequence's host blocks and the free ones hold this many of its tokens."""
        return self.host_pool.blocks_for(tokens) - len(sequence.host_table) <= self.host_pool.free_blocks

    def reserve(self, sequence: Sequence, tokens: int) -> list[int]:
        """Grow the host table to hold this many tokens; returns the new blocks, which must be free."""
        missing = self.host_pool.blocks_for(tokens) - len(sequence.host_table)
        new_blocks = self.host_pool.allocate(max(0, missing))
        sequence.host_table += new_blocks
        return new_blocks

    def release_host(self, sequence: Sequence) -> None:
        """Give the host blocks back."""
        self.host_pool.release(sequence.host_table)
        sequence.host_table = []
