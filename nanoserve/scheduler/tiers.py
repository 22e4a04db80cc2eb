"""Tiers: sequences on their way between device and host memory.

A swap is begun here, rides in the next plan, and is over when a result names it. Until then the sequence is on its way
and its blocks on both tiers are its own. A prompt that is parked leaves with the row that computes the last of it: the
swap rides in the same plan, and the sequence has arrived when both are answered, in whatever order.
"""

from typing import Literal

from nanoserve.request import Place, Sequence
from nanoserve.scheduler.lifecycle import Lifecycle
from nanoserve.scheduler.plan import Swap


class Tiers:
    """Begins swaps and ends them.

    Args:
        lifecycle: the sequences, and their blocks on both tiers.

    Attributes:
        blocks_leaving_device, blocks_leaving_host: what swaps under way will give back there at most; of device blocks,
            those that others share stay.
        host_given_up: whether nothing moves to the host any more.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.blocks_leaving_device = self.blocks_leaving_host = 0
        self.host_given_up = False
        self._lifecycle = lifecycle
        self._blocks = lifecycle.blocks
        self._host = lifecycle.host_tier
        self._begun: list[Swap] = []
        self._under_way: dict[int, tuple[Swap, Sequence]] = {}
        self._before_their_rows: dict[int, int] = {}  # by sequence: swaps that were answered sooner
        self._next_swap = 0

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def has_news(self) -> bool:
        """Whether swaps have begun that no plan holds yet."""
        return bool(self._begun)

    def take_begun(self) -> tuple[Swap, ...]:
        """Swaps for the next plan, each told once."""
        begun = tuple(self._begun)
        self._begun.clear()
        return begun

    # ---- parking ----------------------------------------------------------------------------------------------

    def has_room_to_park(self, sequence: Sequence) -> bool:
        """Whether the host can hold the prompt and its first token."""
        return not self.host_given_up and self._host.can_reserve(sequence, len(sequence.tokens) + 1)

    def reserve(self, sequence: Sequence) -> None:
        """A prompt will move to the host when it is computed, if there is room for it now."""
        if not sequence.host_table and self.has_room_to_park(sequence):
            self._host.reserve(sequence, len(sequence.tokens) + 1)

    def cancel_reservation(self, sequence: Sequence) -> None:
        """The prompt will stay on the device."""
        if sequence.host_table:
            self._host.release(sequence)

    def park_behind_row(self, sequence: Sequence) -> None:
        """The last of its prompt is in the plan: one with a reservation moves in it too, but for one that will end with
        the token of that row."""
        if sequence.host_table and len(sequence.tokens) + 1 < sequence.max_length:
            self.blocks_leaving_device += len(sequence.block_table)
            self._begin(sequence, "out", after_row=True)

    # ---- swaps ------------------------------------------------------------------------------------------------

    def swap_out(self, decodes: list[Sequence], count: int) -> list[Sequence]:
        """Move so many ready decodes to the host, newest first, as far as it has room.

        One that has come from there and not computed a token since stays, or it could go to and fro for ever.

        Returns:
            those that may enter the plan: one that waits for a token can move when it has it, and no sooner.
        """
        chosen = [sequence for sequence in reversed(decodes) if sequence.begun][:count]
        for sequence in chosen:
            if not sequence.in_flight and not self.move_out(sequence):
                break
        waiting = {sequence.sequence_id for sequence in chosen if sequence.place is Place.DEVICE and sequence.in_flight}
        return [sequence for sequence in decodes if sequence.sequence_id not in waiting] if waiting else decodes

    def swap_in(self, ready_host: list[Sequence], count: int) -> None:
        """Move so many host sequences to the device, oldest first, as far as it has room for them.

        A block stays free for each decode to grow into, so that nothing has to come back at once.
        """
        pool = self._blocks.pool
        growing = len(self._lifecycle.running) + len(self._lifecycle.moving)
        for sequence in ready_host[:count]:
            needed = pool.blocks_for(sequence.computed)
            if self._lifecycle.free_slots <= 0 or needed + growing > pool.free_blocks:
                return
            self.move_in(sequence)
            growing += 1

    def move_out(self, sequence: Sequence) -> bool:
        """Begin to move a decode to the host, with nothing of it in flight; False if there is no room for it."""
        if self.host_given_up or not self._host.can_reserve(sequence, sequence.computed):
            return False
        self._host.reserve(sequence, sequence.computed)
        self.blocks_leaving_device += len(sequence.block_table)
        self._begin(sequence, "out")
        return True

    def move_in(self, sequence: Sequence) -> None:
        """Begin to move a host sequence to the device, with nothing of it in flight; the blocks it needs are free."""
        self._blocks.restore(sequence)
        self.blocks_leaving_host += len(sequence.host_table)
        self._begin(sequence, "in")

    def _begin(self, sequence: Sequence, direction: Literal["out", "in"], *, after_row: bool = False) -> None:
        blocks = len(sequence.block_table)  # the host may have reserved more
        swap = Swap(
            swap=self._next_swap,
            sequence=sequence.sequence_id,
            direction=direction,
            device_blocks=tuple(sequence.block_table),
            host_blocks=tuple(sequence.host_table[:blocks]),
            after_row=after_row,
        )
        self._next_swap += 1
        self._begun.append(swap)
        self._under_way[swap.swap] = swap, sequence
        self._lifecycle.depart(sequence)

    def answered(self, swap_id: int) -> None:
        """A swap is done: what it came from is free, unless the row that it followed is not answered yet."""
        _, sequence = self._under_way[swap_id]
        if sequence.in_flight:
            self._before_their_rows[sequence.sequence_id] = swap_id
        else:
            self._arrive(swap_id)

    def row_answered(self, sequence: Sequence) -> None:
        """A row of one that moves is: it has arrived if that was the last, and its swap is done."""
        if not sequence.in_flight and sequence.sequence_id in self._before_their_rows:
            self._arrive(self._before_their_rows.pop(sequence.sequence_id))

    def _arrive(self, swap_id: int) -> None:
        swap, sequence = self._under_way.pop(swap_id)
        if swap.direction == "out":
            self.blocks_leaving_device -= len(sequence.block_table)
            self._lifecycle.arrive(sequence, Place.HOST)
            if self.host_given_up and not sequence.finished:
                self._lifecycle.preempt(sequence)  # nobody would decode it there, or fetch it
        else:
            self.blocks_leaving_host -= len(sequence.host_table)
            self._lifecycle.arrive(sequence, Place.DEVICE)

    def give_host_up(self) -> None:
        """Nothing is on the host and nothing shall be: who had a place reserved there stays on the device."""
        self.host_given_up = True
        for sequence in self._lifecycle.running:
            self.cancel_reservation(sequence)

    def abandon(self) -> None:
        """Swaps under way will never be answered; the caller has ended their sequences, or has them recomputed."""
        self._begun.clear()
        self._before_their_rows.clear()
        for swap_id in list(self._under_way):
            self._arrive(swap_id)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless exactly the sequences under way are in MOVING."""
        under_way = sorted(sequence.sequence_id for _, sequence in self._under_way.values())
        if under_way != [sequence.sequence_id for sequence in self._lifecycle.moving]:
            raise RuntimeError("swaps under way and moving sequences differ")
