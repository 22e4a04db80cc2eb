"""Host blocks: the block tables in host memory. A sequence holds them before it moves if it is a
prompt to be parked, and on both tiers while it moves. Each host block has one owner."""

from nanoserve.request import Sequence
from nanoserve.scheduler.kv import NO_BLOCK, BlockPool, SequenceBlocks


class HostBlocks:
    """The blocks of host memory, beside the device's blocks."""

    def __init__(self, num_blocks: int, device: SequenceBlocks) -> None:
        self.pool = BlockPool(
            num_blocks, device.pool.block_size, prefix_caching=False, groups=device.groups
        )
        self.is_closed = False
        """Whether nothing more may be reserved."""
        self._device = device
        self._groups = device.groups

    def _columns(self, sequence: Sequence, tokens: int) -> list[int]:
        """Entries to append to the host table for this many tokens: NO_BLOCK for what the last one
        does not see, and where the device's table has none."""
        end, table = self.pool.blocks_for(tokens) * self._groups, sequence.block_table
        held = len(sequence.host_table or ())
        if end <= held:  # its last block has room, as for most decodes
            return []
        firsts = [
            first * self._groups + group
            for group, first in enumerate(self._device.first_columns(tokens - 1))
        ]
        entries = []
        for place in range(held, end):
            is_unseen = place < firsts[place % self._groups]
            is_missing = place < len(table) and table[place] == NO_BLOCK
            entries.append(NO_BLOCK if is_unseen or is_missing else 0)
        return entries

    def can_reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Whether the sequence's host blocks and the free ones hold this many of its tokens."""
        return (
            not self.is_closed and self._columns(sequence, tokens).count(0) <= self.pool.free_blocks
        )

    def reserve(self, sequence: Sequence, tokens: int) -> list[int]:
        """Grow the host table to hold this many tokens; returns what is new there, for which blocks
        must be free."""
        new_blocks = _filled(self.pool, self._columns(sequence, tokens))
        if sequence.host_table is None:
            sequence.host_table = []
        sequence.host_table += new_blocks
        return new_blocks

    def blocks_to_return(self, sequence: Sequence) -> int:
        """Device blocks that a host sequence needs to come back."""
        return sum(block != NO_BLOCK for block in self._coming(sequence))

    def take_back(self, sequence: Sequence) -> None:
        """Give a host sequence a table on the device, whose blocks must be free."""
        pool = self._device.pool
        sequence.block_table = _filled(pool, self._coming(sequence))
        sequence.capacity = pool.blocks_for(sequence.computed) * pool.block_size

    def _coming(self, sequence: Sequence) -> list[int]:
        assert sequence.host_table is not None, "its KV is in host memory"
        return sequence.host_table[: self.pool.blocks_for(sequence.computed) * self._groups]

    def release(self, sequence: Sequence) -> None:
        """Give the host blocks back."""
        if sequence.host_table is not None:
            self.pool.release(sequence.host_table)
            sequence.host_table = None


def _filled(pool: BlockPool, entries: list[int]) -> list[int]:
    """New blocks of a pool, where the entries are not NO_BLOCK."""
    fresh = iter(pool.allocate(len(entries) - entries.count(NO_BLOCK)))
    return [NO_BLOCK if entry == NO_BLOCK else next(fresh) for entry in entries]
