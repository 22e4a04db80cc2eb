"""HostTier: the KV blocks in host memory, and which sequences hold them."""

from collections import Counter
from collections.abc import Iterable

from nanoserve.kv.block_pool import BlockPool
from nanoserve.request import Place, Sequence


class HostTier:
    """Tables of host blocks over one pool. Nothing is shared here: each block has one owner.

    A sequence may hold host blocks before it moves there (a prompt that is to be parked reserves them), and both
    tables while it moves.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks, block_size, prefix_caching=False)

    def can_reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Whether the sequence's blocks and the free ones hold so many of its tokens."""
        return self.pool.blocks_for(tokens) - len(sequence.host_table) <= self.pool.free_blocks

    def reserve(self, sequence: Sequence, tokens: int) -> list[int]:
        """Let the table hold that many tokens; returns the blocks that it gained. They must be free."""
        missing = self.pool.blocks_for(tokens) - len(sequence.host_table)
        new_blocks = self.pool.allocate(max(0, missing))
        sequence.host_table += new_blocks
        return new_blocks

    def release(self, sequence: Sequence) -> None:
        """Give all of the sequence's host blocks back."""
        self.pool.release(sequence.host_table)
        sequence.host_table = []

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise RuntimeError unless the pool's owners are exactly these sequences' tables."""
        owners: Counter[int] = Counter()
        for sequence in sequences:
            owners.update(sequence.host_table)
            if sequence.place is Place.HOST and self.pool.blocks_for(sequence.computed) > len(sequence.host_table):
                raise RuntimeError(f"sequence {sequence.sequence_id} has fewer host blocks than computed tokens")
        self.pool.check_integrity(owners)
        if max(owners.values(), default=0) > 1:
            raise RuntimeError("a host block has two owners")
