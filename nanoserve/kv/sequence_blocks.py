"""Block tables: gives sequences their blocks on the device and in host memory, and takes them back."""

from nanoserve.kv.block_pool import BlockPool
from nanoserve.request import Place, Sequence


class SequenceBlocks:
    """The block tables of all sequences over one pool: prefix hits, growth, forks, release."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._block_size = pool.block_size

    def take_prefix(self, sequence: Sequence) -> None:
        """Begin the table with the cached blocks of the sequence's prefix; those positions need no computing."""
        cached = self.pool.match_prefix(sequence.tokens, sequence.request.cache_salt)
        sequence.block_table = [entry.block for entry in cached]
        sequence.chain = [entry.entry for entry in cached]
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
        """Append the blocks that ``count`` more positions need; they must be free.

        Returns:
            The new blocks, and the (source, target) of a block to copy before the first of them is written: at its
            first write a fork copies the block in which its prompt ends, unless it is the only owner.
        """
        held, end = len(sequence.block_table), sequence.computed + count
        if end <= held * self._block_size:  # a fork that has not written yet misses one block at least
            return [], None
        missing = self.pool.blocks_for(end) - held
        source, sequence.copy_source = sequence.copy_source, None
        copy = None
        if source is None:
            new_blocks = self.pool.allocate(missing)
        elif self.pool.owned_once(source):
            self.pool.uncache(source)  # it may still be cached as a full block of the parent
            new_blocks = [source, *self.pool.allocate(missing - 1)]
        else:
            new_blocks = self.pool.allocate(missing)
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
            tokens = sequence.tokens[index * size : (index + 1) * size]
            sequence.chain.append(self.pool.cache_block(sequence.block_table[index], previous, tokens))

    def fork(self, parent: Sequence, sibling: Sequence) -> None:
        """Share all of the parent's prompt but its last token, whose logits the sibling samples for itself."""
        sibling.computed = parent.prompt_length - 1
        full, partial = divmod(sibling.computed, self._block_size)
        sibling.block_table = parent.block_table[:full]
        sibling.chain = parent.chain[:full]
        self.pool.share(sibling.block_table)
        if partial:
            # Copied when the sibling first writes. Until then the parent may write to the block: only after the
            # prompt, where the sibling does not read.
            sibling.copy_source = parent.block_table[full]
            self.pool.share([sibling.copy_source])

    def restore(self, sequence: Sequence) -> None:
        """Make a new table for a sequence that comes from the host; the blocks must be free."""
        sequence.block_table = self.pool.allocate(self.pool.blocks_for(sequence.computed))

    def release_table(self, sequence: Sequence) -> None:
        """Give the device blocks back; the sequence's KV may be elsewhere."""
        if sequence.copy_source is not None:
            self.pool.release([sequence.copy_source])
        self.pool.release(sequence.block_table)
        sequence.copy_source = None
        sequence.block_table = []
        sequence.chain = []

    def release(self, sequence: Sequence) -> None:
        """Give the device blocks back; the sequence's KV is nowhere."""
        self.release_table(sequence)
        sequence.computed = 0
        sequence.place = Place.NONE


class HostTier:
    """Tables of host blocks over one pool; each block has one owner.

    A sequence holds host blocks before it moves if it is a prompt to be parked, and both tables while it moves.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks, block_size, prefix_caching=False)

    def can_reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Whether the sequence's blocks and the free ones hold this many of its tokens."""
        return self.pool.blocks_for(tokens) - len(sequence.host_table) <= self.pool.free_blocks

    def reserve(self, sequence: Sequence, tokens: int) -> list[int]:
        """Grow the table to hold this many tokens; returns the new blocks, which must be free."""
        missing = self.pool.blocks_for(tokens) - len(sequence.host_table)
        new_blocks = self.pool.allocate(max(0, missing))
        sequence.host_table += new_blocks
        return new_blocks

    def release(self, sequence: Sequence) -> None:
        """Give all of the sequence's host blocks back."""
        self.pool.release(sequence.host_table)
        sequence.host_table = []
