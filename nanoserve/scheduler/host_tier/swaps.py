"""Swaps: sequences that move between the device and host memory."""

from itertools import count
from typing import Literal

from nanoserve.request import Place, Sequence, Status
from nanoserve.scheduler.host_tier.host_blocks import HostBlocks
from nanoserve.scheduler.kv import NO_BLOCK
from nanoserve.scheduler.optional import Swap
from nanoserve.scheduler.sequence_table import SequenceTable

Direction = Literal["out", "in"]


class Swaps:
    """The swaps in flight.

    A swap begins with the plan that holds it, and ends when a result names it. Until then its
    sequence is moving and holds blocks on both tiers. A parked prompt leaves with the row that
    computes the last of it: the swap is in the same plan, and the sequence has arrived when both
    are answered, in any order.
    """

    def __init__(self, table: SequenceTable, blocks: HostBlocks) -> None:
        self._table = table
        self._blocks = blocks
        self._ids = count()
        self.in_flight: dict[int, Swap] = {}  # by id
        self._done: dict[int, Swap] = {}  # done before the row that they follow, by sequence

    def leaving(self, direction: Direction) -> list[Swap]:
        """The swaps of that direction in flight."""
        return [swap for swap in self.in_flight.values() if swap.direction == direction]

    def begin(self, sequence: Sequence, direction: Direction, *, after_row: bool = False) -> Swap:
        """Begin to move a sequence that has blocks on both tiers, with nothing in flight or with
        its last row. The executor forgets it, after that row if there is one, and it begins again
        on arrival."""
        assert sequence.host_table is not None, "it has blocks on both tiers"
        device_blocks, host_blocks = [], []
        # It may have reserved more on the host. A window of 1 keeps nothing.
        for device_block, host_block in zip(
            sequence.block_table, sequence.host_table, strict=False
        ):
            if NO_BLOCK not in (device_block, host_block):
                device_blocks.append(device_block)
                host_blocks.append(host_block)
        swap = Swap(
            swap=next(self._ids),
            sequence=sequence.sequence_id,
            direction=direction,
            device_blocks=tuple(device_blocks),
            host_blocks=tuple(host_blocks),
            after_row=after_row,
        )
        self.in_flight[swap.swap] = swap
        self._table.enter(sequence, Place.MOVING)
        if not sequence.in_flight:
            self._table.end_for_executor(sequence)
        return swap

    def answered(self, swap_id: int) -> None:
        """A swap is done. Its source blocks are freed, unless the row that it followed is not
        answered yet."""
        swap = self.in_flight[swap_id]
        if self._table.sequences[swap.sequence].in_flight:
            self._done[swap.sequence] = swap
        else:
            self._arrive(swap)

    def row_answered(self, sequence: Sequence) -> None:
        """The last row of a moving sequence is answered; it has arrived if its swap is done too."""
        swap = self._done.get(sequence.sequence_id)
        if swap is not None:
            self._arrive(swap)

    def abandon(self) -> None:
        """No swap in flight will be answered any longer; the caller ends or requeues the
        sequences."""
        for swap in list(self.in_flight.values()):
            self._arrive(swap)

    def _arrive(self, swap: Swap) -> None:
        """All KV of a sequence is there; its blocks on the other tier are freed. It may have ended
        on the way."""
        table, sequence = self._table, self._table.sequences[swap.sequence]
        del self.in_flight[swap.swap]
        self._done.pop(swap.sequence, None)
        table.end_for_executor(sequence)
        if swap.direction == "out":
            table.blocks.release(sequence)
        else:
            self._blocks.release(sequence)
        if sequence.status is Status.FINISHED:
            table.busy.remove(sequence)
            table.retire(sequence)
        elif swap.direction == "in":
            table.enter(sequence, Place.DEVICE)
        else:
            table.enter(sequence, Place.HOST)
            if self._blocks.is_closed:
                table.preempt(sequence)  # no plan would decode it there, or fetch it
