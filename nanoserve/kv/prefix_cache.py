"""Which cached block holds which prompt prefix.

A full block is addressed by the chain that leads to it: the entry of the block before it (the salt, for a first
block) and its own tokens. An entry's number is never used again, so equal addresses mean equal prefixes. Looking an
address up hashes it and then compares parent and tokens, so a collision of hashes can never serve the cache of
another prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

ChainLink = int | str
"""The entry of the preceding block, or the salt in front of a first block."""


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A full block that may be shared.

    Attributes:
        entry: its number in the chain, unique over the cache's life.
        address: preceding link and the block's tokens.
    """

    block: int
    entry: int
    address: tuple[ChainLink, tuple[int, ...]]


class PrefixCache:
    """Finds blocks by content. It does not own them: BlockPool tells it when one is written over."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._by_address: dict[tuple[ChainLink, tuple[int, ...]], CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self._entries = count()

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def __len__(self) -> int:
        return len(self._by_block)

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
        """Say that ``block`` holds these tokens after that chain; returns the entry that stands for the content.

        If the content is cached in another block already, that one stays the shared one.
        """
        address = (previous, tokens)
        cached = self._by_address.get(address)
        if cached is None:
            cached = CachedBlock(block, next(self._entries), address)
            self._by_address[address] = cached
            self._by_block[block] = cached
        return cached.entry

    def forget(self, block: int) -> None:
        """The block is about to be written over."""
        cached = self._by_block.pop(block)
        del self._by_address[cached.address]

    def clear(self) -> None:
        """Forget every block; the numbers of entries go on."""
        self._by_block.clear()
        self._by_address.clear()
