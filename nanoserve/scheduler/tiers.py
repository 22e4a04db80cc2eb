"""Tiers: sequences on their way between device and host memory.

A swap is begun here, rides in the next plan, and is over when a result names it. Until then the sequence is in
flight and its blocks on both tiers are its own.
"""

from typing import Literal

from nanoserve.request import Place, Sequence, Status
from nanoserve.scheduler.lifecycle import Lifecycle
from nanoserve.scheduler.plan import Swap


class Tiers:
    """Begins swaps and ends them.

    Args:
        lifecycle: the sequences, and their blocks on both tiers.

    Attributes:
        blocks_leaving_device, blocks_leaving_host: what swaps under way will give back there at most; of device blocks,
            those that others share stay.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.blocks_leaving_device = self.blocks_leaving_host = 0
        self._lifecycle = lifecycle
        self._blocks = lifecycle.blocks
        self._host = lifecycle.host_tier
        self._to_park: list[Sequence] = []
        self._begun: list[Swap] = []
        self._under_way: dict[int, tuple[Swap, Sequence]] = {}
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
        return self._host.can_reserve(sequence, len(sequence.tokens) + 1)

    def reserve(self, sequence: Sequence) -> None:
        """A prompt will move to the host when it is computed, if there is room for it now."""
        if not sequence.host_table and self.has_room_to_park(sequence):
            self._host.reserve(sequence, len(sequence.tokens) + 1)

    def cancel_reservation(self, sequence: Sequence) -> None:
        """The prompt will stay on the device."""
        if sequence.host_table:
            self._host.release(sequence)

    def prompt_computed(self, sequence: Sequence) -> None:
        """It has its first token; one with a reservation moves in the next plan."""
        if sequence.host_table:
            self._to_park.append(sequence)

    def move_parked(self) -> None:
        """Send off the prompts that were computed since the last plan and are to live on the host."""
        for sequence in self._to_park:
            if sequence.host_table and sequence.status is Status.DECODE:  # neither ended nor preempted meanwhile
                self.move_out(sequence)
        self._to_park.clear()

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
        if not self._host.can_reserve(sequence, sequence.computed):
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

    def _begin(self, sequence: Sequence, direction: Literal["out", "in"]) -> None:
        blocks = len(sequence.block_table)  # the host may have reserved more
        swap = Swap(
            swap=self._next_swap,
            sequence=sequence.sequence_id,
            direction=direction,
            device_blocks=tuple(sequence.block_table),
            host_blocks=tuple(sequence.host_table[:blocks]),
        )
        self._next_swap += 1
        self._begun.append(swap)
        self._under_way[swap.swap] = swap, sequence
        self._lifecycle.depart(sequence)

    def answered(self, swap_id: int) -> None:
        """A swap is done: what it came from is free."""
        swap, sequence = self._under_way.pop(swap_id)
        if swap.direction == "out":
            self.blocks_leaving_device -= len(sequence.block_table)
            self._lifecycle.arrive(sequence, Place.HOST)
        else:
            self.blocks_leaving_host -= len(sequence.host_table)
            self._lifecycle.arrive(sequence, Place.DEVICE)

    def abandon(self) -> None:
        """Swaps under way will never be answered; the caller has ended their sequences, or has them recomputed."""
        self._begun.clear()
        for swap_id in list(self._under_way):
            self.answered(swap_id)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless exactly the sequences under way are in MOVING."""
        under_way = sorted(sequence.sequence_id for _, sequence in self._under_way.values())
        if under_way != [sequence.sequence_id for sequence in self._lifecycle.moving]:
            raise RuntimeError("swaps under way and moving sequences differ")
