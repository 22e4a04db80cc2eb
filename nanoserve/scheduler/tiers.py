"""The host tier: sequences that move between device and host memory, and those whose token is under way there.

A swap is begun here, rides in the next plan, and ends when a result names it. Until then its sequence is moving and
holds blocks on both tiers. A prompt that is parked leaves with the row that computes the last of it: the swap rides in
the same plan, and the sequence has arrived when both are answered, in any order.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from nanoserve.request import Place, Sequence
from nanoserve.scheduler.load import Cohort
from nanoserve.scheduler.plan import StepPlan, Swap
from nanoserve.scheduler.sequence_table import SequenceTable


class Tiers:
    """Begins swaps and ends them."""

    def __init__(self, table: SequenceTable) -> None:
        self.cohorts = HostCohorts()
        self.host_disabled = False  # nothing moves to the host any more
        self.blocks_leaving_device = self.blocks_leaving_host = 0  # upper bounds: shared device blocks stay
        self._table = table
        self._blocks = table.blocks
        self._host = table.host_tier
        self._begun: list[Swap] = []
        self._moving: dict[int, tuple[Swap, Sequence]] = {}
        self._before_their_rows: dict[int, int] = {}  # by sequence: swaps that were answered before its row
        self._next_swap = 0

    @property
    def any_moving(self) -> bool:
        return bool(self._moving)

    @property
    def has_begun_swaps(self) -> bool:
        """Whether swaps have begun that no plan holds yet."""
        return bool(self._begun)

    def take_begun(self) -> tuple[Swap, ...]:
        """Swaps for the next plan, each once."""
        begun = tuple(self._begun)
        self._begun.clear()
        return begun

    # ---- parking ----------------------------------------------------------------------------------------------

    def has_room_to_park(self, sequence: Sequence) -> bool:
        """Whether the host can hold the prompt and its first token."""
        return not self.host_disabled and self._host.can_reserve(sequence, len(sequence.tokens) + 1)

    def reserve(self, sequence: Sequence) -> None:
        """Reserve host blocks for a prompt that will move there, if there is room."""
        if not sequence.host_table and self.has_room_to_park(sequence):
            self._host.reserve(sequence, len(sequence.tokens) + 1)

    def cancel_reservation(self, sequence: Sequence) -> None:
        """The prompt will stay on the device."""
        if sequence.host_table:
            self._host.release(sequence)

    def park_after_row(self, sequence: Sequence) -> None:
        """The plan computes the last of its prompt. With a reservation it moves, unless its next token is its last."""
        if sequence.host_table and len(sequence.tokens) + 1 < sequence.max_length:
            self.blocks_leaving_device += len(sequence.block_table)
            self._begin(sequence, "out", after_row=True)

    # ---- swaps ------------------------------------------------------------------------------------------------

    def swap_out(self, decodes: list[Sequence], count: int) -> list[Sequence]:
        """Move so many ready decodes to the host, newest first, as far as it has room.

        One that came from there and has computed no token since stays, or it could go to and fro for ever.

        Returns:
            those that may enter the plan. A decode in flight cannot move before its token, so it stays out.
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
        growing = len(self._table.running) + len(self._table.moving)
        for sequence in ready_host[:count]:
            needed = pool.blocks_for(sequence.computed)
            if self._table.free_slots <= 0 or needed + growing > pool.free_blocks:
                return
            self.move_in(sequence)
            growing += 1

    def move_out(self, sequence: Sequence) -> bool:
        """Begin to move a decode to the host, with nothing of it in flight; False if there is no room for it."""
        if self.host_disabled or not self._host.can_reserve(sequence, sequence.computed):
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
        self._moving[swap.swap] = swap, sequence
        self._table.depart(sequence)

    def answered(self, swap_id: int) -> None:
        """A swap is done. Its source blocks are freed, unless the row that it followed is not answered yet."""
        _, sequence = self._moving[swap_id]
        if sequence.in_flight:
            self._before_their_rows[sequence.sequence_id] = swap_id
        else:
            self._arrive(swap_id)

    def row_answered(self, sequence: Sequence) -> None:
        """A row of a moving sequence is answered. If it was the last, and its swap is done, the sequence arrives."""
        if not sequence.in_flight and sequence.sequence_id in self._before_their_rows:
            self._arrive(self._before_their_rows.pop(sequence.sequence_id))

    def _arrive(self, swap_id: int) -> None:
        swap, sequence = self._moving.pop(swap_id)
        if swap.direction == "out":
            self.blocks_leaving_device -= len(sequence.block_table)
            self._table.arrive(sequence, Place.HOST)
            if self.host_disabled and not sequence.finished:
                self._table.preempt(sequence)  # no plan would decode it there, or fetch it
        else:
            self.blocks_leaving_host -= len(sequence.host_table)
            self._table.arrive(sequence, Place.DEVICE)

    def disable_host(self) -> None:
        """Nothing is on the host and nothing shall be: sequences with a reservation stay on the device."""
        self.host_disabled = True
        for sequence in self._table.running:
            self.cancel_reservation(sequence)

    def abandon(self) -> None:
        """No swap will be answered any more; the caller ends or requeues their sequences."""
        self._begun.clear()
        self._before_their_rows.clear()
        for swap_id in list(self._moving):
            self._arrive(swap_id)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless exactly the sequences of swaps are moving."""
        moving = sorted(sequence.sequence_id for _, sequence in self._moving.values())
        if moving != [sequence.sequence_id for sequence in self._table.moving]:
            raise RuntimeError("the sequences of swaps and those that move differ")


@dataclass(slots=True)
class _HostCohort:
    """Host sequences that began a token in the same overlapped plan, and how many layers are behind them."""

    members: dict[int, Sequence]
    layers: int = 0

    def snapshot(self) -> Cohort:
        context_tokens = sum(sequence.computed for sequence in self.members.values())
        return Cohort(self.layers, len(self.members), context_tokens)


class HostCohorts:
    """Host sequences whose token is under way, while plans come and go.

    Under asynchronous overlap (APEX) a cohort advances by about one layer with each plan, so that a token takes
    layers + 1 plans.
    """

    def __init__(self) -> None:
        self._by_step: dict[int, _HostCohort] = {}

    def __len__(self) -> int:
        return len(self._by_step)

    def follow(self, plan: StepPlan, sequences: Mapping[int, Sequence]) -> None:
        """Host sequences of an overlapped plan begin their token in it; any other plan finishes those that it names."""
        on_host = [row.sequence for row in plan.rows if row.tier == "host"]
        if plan.strategy == "overlap":
            self._by_step[plan.step] = _HostCohort({sequence: sequences[sequence] for sequence in on_host})
        else:
            for sequence in on_host:
                self.leave(sequence)

    def advance(self, step: int, layers: int) -> None:
        """So many layers are behind the cohort that began in that plan; all of it may have been answered before."""
        if step in self._by_step:
            self._by_step[step].layers = layers

    def leave(self, sequence: int) -> None:
        """It is answered, or a plan was told to finish it; it need not have been under way."""
        for step, cohort in self._by_step.items():
            if cohort.members.pop(sequence, None) is not None:
                if not cohort.members:
                    del self._by_step[step]
                return

    def clear(self) -> None:
        """None is under way any more, and no progress will be told of those that were."""
        self._by_step.clear()

    def _by_progress(self) -> list[tuple[int, _HostCohort]]:
        return sorted(self._by_step.items(), key=lambda item: (-item[1].layers, item[0]))

    def most_advanced(self) -> Iterator[Sequence]:
        """All that are under way, those nearest to their token first."""
        for _, cohort in self._by_progress():
            yield from cohort.members.values()

    def layers_behind(self, sequence: int) -> int:
        """How far a sequence under way is.

        Raises:
            KeyError: if it is not under way.
        """
        for cohort in self._by_step.values():
            if sequence in cohort.members:
                return cohort.layers
        raise KeyError(sequence)

    @property
    def under_way(self) -> dict[int, Cohort]:
        """By the plan in which they began, the most advanced first."""
        return {step: cohort.snapshot() for step, cohort in self._by_progress()}

    def snapshot(self) -> tuple[Cohort, ...]:
        """As the policy sees them, the most advanced first."""
        return tuple(self.under_way.values())
