"""The KV blocks of one tier: reference counts, the order in which free ones are reused, and which hold which prefix."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

ChainLink = int | str
"""The entry of the preceding block, or the salt in front of a first block."""


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A full block that may be shared."""

    block: int
    entry: int
    """Its number in the chain, unique over the cache's life."""
    address: tuple[ChainLink, tuple[int, ...]]
    """The preceding link and the block's tokens."""


class PrefixCache:
    """Finds the cached block that holds a prompt's next tokens. It does not own blocks.

    A full block is addressed by the chain that leads to it: the entry of the block before it (the salt, for a first
    block) and its own tokens. An entry's number is never used again, so equal addresses mean equal prefixes. Looking an
    address up compares parent and tokens, so a hash collision can never serve another prompt's cache.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._by_address: dict[tuple[ChainLink, tuple[int, ...]], CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self._entries = count()

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def match(self, tokens: Sequence[int], salt: str) -> list[CachedBlock]:
        """The longest cached chain for ``tokens``, leaving at least one token to compute."""
        found: list[CachedBlock] = []
        link: ChainLink = salt
        size = self._block_size
        for start in range(0, (len(tokens) - 1) // size * size, size):
            cached = self._by_address.get((link, tuple(tokens[start : start + size])))
            if cached is None:
                break
            found.append(cached)
            link = cached.entry
        return found

    def insert(self, block: int, previous: ChainLink, tokens: tuple[int, ...]) -> int:
        """Record that ``block`` holds these tokens after that chain; returns the entry of this content.

        If another block holds the same content already, that one stays the shared one.
        """
        address = (previous, tokens)
        cached = self._by_address.get(address)
        if cached is None:
            cached = CachedBlock(block, next(self._entries), address)
            self._by_address[address] = cached
            self._by_block[block] = cached
        return cached.entry

    def forget(self, block: int) -> None:
        """The block is about to be overwritten; nothing happens if it is not cached."""
        if (cached := self._by_block.pop(block, None)) is not None:
            del self._by_address[cached.address]

    def clear(self) -> None:
        """Forget every block; the numbers of entries go on."""
        self._by_block.clear()
        self._by_address.clear()


class BlockPool:
    """Hands out blocks ``0..num_blocks-1``.

    A block is *owned* while its reference count is positive. Free blocks without cached content are reused first, then
    cached ones, least recently used first.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._cache = PrefixCache(block_size)  # stays empty without prefix caching
        self._fill(num_blocks)

    def _fill(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._blank: deque[int] = deque(range(num_blocks))
        self._reusable: OrderedDict[int, None] = OrderedDict()

    def replace_blocks(self, num_blocks: int) -> None:
        """Replace the blocks by those of another parallel layout; nothing is kept.

        Raises:
            RuntimeError: if one of these has an owner.
        """
        if self.free_blocks != self.num_blocks:
            raise RuntimeError(f"{self.num_blocks - self.free_blocks} blocks still have an owner")
        self._cache.clear()
        self._fill(num_blocks)

    @property
    def free_blocks(self) -> int:
        """Blocks without an owner, cached or not."""
        return len(self._blank) + len(self._reusable)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that this many tokens fill, rounded up."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks; their content is lost to the prefix cache.

        Raises:
            RuntimeError: if fewer are free; callers look at ``free_blocks`` first.
        """
        if count > self.free_blocks:
            raise RuntimeError(f"{count} blocks asked for, {self.free_blocks} free")
        return [self._take_free_block() for _ in range(count)]

    def _take_free_block(self) -> int:
        if self._blank:
            block = self._blank.popleft()
        else:
            block, _ = self._reusable.popitem(last=False)
            self._cache.forget(block)
        self._references[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Add an owner to each block; a free cached block is then no longer free."""
        for block in blocks:
            if self._references[block] == 0:
                del self._reusable[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one owner of each block, the last block of a sequence first, so that it is reused first."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._cache:
                    self._reusable[block] = None
                else:
                    self._blank.append(block)

    def owned_once(self, block: int) -> bool:
        """Whether it has exactly one owner."""
        return self._references[block] == 1

    def uncache(self, block: int) -> None:
        """The only owner of a block is about to overwrite it, so it must not be found by its old content."""
        self._cache.forget(block)

    def forget_cache(self) -> None:
        """No block may be found by its content any longer; owners keep theirs."""
        self._cache.clear()
        self._blank.extend(self._reusable)
        self._reusable.clear()

    def match_prefix(self, tokens: Sequence[int], salt: str) -> list[CachedBlock]:
        """Cached blocks that begin ``tokens``; at least one token is left to compute. They are not owned yet."""
        return self._cache.match(tokens, salt) if self.prefix_caching else []

    def cache_block(self, block: int, previous: ChainLink, tokens: Sequence[int]) -> int:
        """Let a full block be shared; returns its link in the chain. Only with prefix caching."""
        return self._cache.insert(block, previous, tuple(tokens))
