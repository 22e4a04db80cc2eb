"""The host tier: sequences that move between device and host memory or decode there, and the plans that hold them.

A swap is begun here, is sent with the next plan, and ends when a result names it. Until then its sequence is moving and
holds blocks on both tiers. A prompt that is parked leaves with the row that computes the last of it: the swap is in the
same plan, and the sequence has arrived when both are answered, in any order.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import msgspec

from nanoserve.costs.step_features import Strategy
from nanoserve.request import Place, Sequence, Status
from nanoserve.scheduler.load import Cohort
from nanoserve.scheduler.plan import Row, StepPlan, Swap
from nanoserve.scheduler.plan_builder import PlanBuilder
from nanoserve.scheduler.sequence_table import SequenceTable


@dataclass(slots=True)
class _Move:
    """A swap in flight and its sequence."""

    swap: Swap
    sequence: Sequence
    answered: bool = False


class Tiers:
    """Begins swaps and ends them."""

    def __init__(self, table: SequenceTable) -> None:
        self.cohorts = HostCohorts()
        self.host_disabled = False  # nothing moves to the host any longer
        self._table = table
        self._blocks = table.blocks
        self._host = table.host_tier
        self._begun: list[Swap] = []  # not in a plan yet
        self._moves: dict[int, _Move] = {}  # by swap
        self._next_swap = 0

    @property
    def any_moving(self) -> bool:
        return bool(self._moves)

    @property
    def has_begun_swaps(self) -> bool:
        """Whether there are swaps that no plan holds yet."""
        return bool(self._begun)

    def take_begun(self) -> tuple[Swap, ...]:
        """Swaps for the next plan, each once."""
        begun = tuple(self._begun)
        self._begun.clear()
        return begun

    @property
    def ready(self) -> list[Sequence]:
        """Host sequences that may enter the next plan, or move to the device."""
        return [sequence for sequence in self._table.on_host if not sequence.in_flight]

    @property
    def blocks_leaving_device(self) -> int:
        """An upper bound: shared blocks stay."""
        return sum(len(move.swap.device_blocks) for move in self._moves.values() if move.swap.direction == "out")

    @property
    def any_leaving_host(self) -> bool:
        return any(move.swap.direction == "in" for move in self._moves.values())

    def load_fields(self) -> dict[str, Any]:
        """The fields of Load that describe host memory."""
        on_host, pool = self._table.on_host, self._host.pool
        return {
            "host_decodes": len(on_host),
            "ready_host": len(self.ready),
            "host_context_tokens": sum([sequence.computed for sequence in on_host]),
            "moving": len(self._table.moving),
            "host_free_blocks": 0 if self.host_disabled else pool.free_blocks,
            "host_blocks": 0 if self.host_disabled else pool.num_blocks,
            "cohorts": tuple(self.cohorts.under_way.values()),
        }

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
            self._begin(sequence, "out", after_row=True)

    # ---- swaps ------------------------------------------------------------------------------------------------

    def swap_out(self, decodes: list[Sequence], count: int) -> list[Sequence]:
        """Move up to ``count`` ready decodes to the host, newest first, as far as it has room.

        A decode that came from there and has computed no token since stays, or it could go to and fro for ever.

        Returns:
            those that may enter the plan. A chosen decode in flight cannot move before its token, but stays out too.
        """
        chosen = [sequence for sequence in reversed(decodes) if sequence.begun][:count]
        for sequence in chosen:
            if not sequence.in_flight and not self.move_out(sequence):
                break
        leaving = {one.sequence_id for one in chosen if one.in_flight or one.place is Place.MOVING}
        return [sequence for sequence in decodes if sequence.sequence_id not in leaving]

    def swap_in(self, count: int) -> None:
        """Move up to ``count`` ready host sequences to the device, oldest first, as far as it has room for them.

        A block stays free for each decode to grow into, so that nothing has to come back at once.
        """
        pool = self._blocks.pool
        growing = len(self._table.running) + len(self._table.moving)
        for sequence in self.ready[:count]:
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
        self._begin(sequence, "out")
        return True

    def move_in(self, sequence: Sequence) -> None:
        """Begin to move a host sequence to the device, with nothing of it in flight; the blocks it needs are free."""
        self._blocks.restore(sequence)
        self._begin(sequence, "in")

    def _begin(self, sequence: Sequence, direction: Literal["out", "in"], *, after_row: bool = False) -> None:
        swap = Swap(
            swap=self._next_swap,
            sequence=sequence.sequence_id,
            direction=direction,
            device_blocks=tuple(sequence.block_table),
            host_blocks=tuple(sequence.host_table[: len(sequence.block_table)]),  # it may have reserved more
            after_row=after_row,
        )
        self._next_swap += 1
        self._begun.append(swap)
        self._moves[swap.swap] = _Move(swap, sequence)
        self._table.depart(sequence)

    def answered(self, swap_id: int) -> None:
        """A swap is done. Its source blocks are freed, unless the row that it followed is not answered yet."""
        move = self._moves[swap_id]
        move.answered = True
        if not move.sequence.in_flight:
            self._arrive(move)

    def row_answered(self, sequence: Sequence) -> None:
        """A row is answered. If it was the last of a sequence whose swap is done, the sequence arrives."""
        self.cohorts.leave(sequence.sequence_id)
        if sequence.place is Place.MOVING and not sequence.in_flight:
            for move in [one for one in self._moves.values() if one.sequence is sequence and one.answered]:
                self._arrive(move)

    def _arrive(self, move: _Move) -> None:
        del self._moves[move.swap.swap]
        sequence = move.sequence
        self._table.arrive(sequence, Place.HOST if move.swap.direction == "out" else Place.DEVICE)
        if self.host_disabled and sequence.place is Place.HOST and not sequence.finished:
            self._table.preempt(sequence)  # no plan would decode it there, or fetch it

    # ---- losses -----------------------------------------------------------------------------------------------

    def lose_host(self, *, for_good: bool) -> None:
        """Attention on the CPU was lost: host sequences are recomputed, whether a token of theirs is under way or not.

        Their rows in plans in flight, asymmetric ones too, will not be answered; the plans end all the same.

        Args:
            for_good: nothing moves to the host any longer; prompts with a reservation stay on the device.
        """
        self._table.lose_host()
        self.cohorts.clear()
        self.host_disabled = for_good
        if for_good:
            for sequence in self._table.running:
                self.cancel_reservation(sequence)

    def abandon(self) -> None:
        """No swap will be answered any longer; the caller ends or requeues their sequences."""
        self._begun.clear()
        for move in list(self._moves.values()):
            self._arrive(move)


@dataclass(slots=True)
class _HostCohort:
    """Host sequences that began a token in the same overlapped plan, and the layers that are behind them."""

    members: dict[int, Sequence]
    layers: int = 0


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
        if plan.strategy != "overlap":
            for sequence in on_host:
                self.leave(sequence)
        elif on_host:
            self._by_step[plan.step] = _HostCohort({sequence: sequences[sequence] for sequence in on_host})

    def advance(self, step: int, layers: int) -> None:
        """The cohort that began in that plan has passed this many layers; all of it may have been answered before."""
        if step in self._by_step:
            self._by_step[step].layers = layers

    def leave(self, sequence: int) -> None:
        """It is answered, or a plan finishes it; it need not have been under way."""
        for step, cohort in self._by_step.items():
            if cohort.members.pop(sequence, None) is not None:
                if not cohort.members:
                    del self._by_step[step]
                return

    def clear(self) -> None:
        """None is under way any longer."""
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
        return {
            step: Cohort(cohort.layers, len(cohort.members), sum(one.computed for one in cohort.members.values()))
            for step, cohort in self._by_progress()
        }


@dataclass(kw_only=True)
class TieredPlanBuilder(PlanBuilder):
    """A plan whose sequences may move to the host, come back or decode there."""

    tiers: Tiers
    """Begins the swaps."""
    in_flight: Collection[StepPlan]
    """The plans that have not ended."""
    _host_rows: dict[int, Row] = field(default_factory=dict)
    _kept_free: int = 0

    @property
    def does_something(self) -> bool:
        return super().does_something or bool(self._host_rows) or self.tiers.has_begun_swaps

    def build(self, decodes: list[Sequence], prefills: list[Sequence]) -> None:
        """Swaps first, then decodes on the device and on the host, then prompts."""
        decision, tiers = self.decision, self.tiers
        if decision.swap_out:
            decodes = tiers.swap_out(decodes, decision.swap_out)
        tiers.swap_in(decision.swap_in)
        if decision.park:
            self._keep_room_for_prompts(prefills)
        ready_host = tiers.ready
        self._add_decodes(decodes)
        if decision.strategy == "overlap":
            for sequence in ready_host[: decision.host_decodes[0]]:
                self._add_host_row(sequence, 0)
        elif decision.strategy == "asymmetric":
            # A plan in flight may finish the tokens under way: none of them can be named again before it ends.
            overlapping = any(plan.strategy == "overlap" for plan in self.in_flight)
            self._finish_host_tokens(() if overlapping else tiers.cohorts.most_advanced(), ready_host)
        self._add_prefills(prefills)

    def plan(self, step: int, layout: int) -> StepPlan:
        strategy, plan = self._strategy(), super().plan(step, layout)
        rows = (*plan.rows, *self._host_rows.values())
        return msgspec.structs.replace(plan, rows=rows, swaps=self.tiers.take_begun(), strategy=strategy)

    def _strategy(self) -> Strategy:
        """The decided one if a host row begins; otherwise host sequences under way go on, even on an idle device.

        A policy that lets no sequence begin does not want those under way to stand still: they cannot come back.
        """
        if not self.does_something:
            return "overlap"
        if self._host_rows:
            return self.decision.strategy
        return "overlap" if self.rows and len(self.tiers.cohorts) else "device"

    # ---- on the device ----------------------------------------------------------------------------------------

    def _keep_room_for_prompts(self, partial: list[Sequence]) -> None:
        """Where prompts only pass through the device, its decodes must not grow into the room for the next one."""
        prompt = partial[0] if partial else self.table.waiting.oldest
        if prompt is None or self.decision.prefill_tokens <= 0:
            return
        may_begin = self.admits and self.table.free_slots > 0
        if partial or (may_begin and self.tiers.has_room_to_park(prompt)):
            self._kept_free = self._blocks.pool.blocks_for(len(prompt.tokens)) - len(prompt.block_table)

    def _add_decodes(self, ready: Iterable[Sequence]) -> None:
        if self._kept_free > 0:  # asked one by one: each may take the last block that is not kept
            ready = (one for one in islice(ready, self.decision.decodes) if self._leaves_room_for_prompts(one))
        super()._add_decodes(ready)

    def _leaves_room_for_prompts(self, sequence: Sequence) -> bool:
        """Whether it may grow. The oldest always may, so that the device empties some day."""
        pool = self._blocks.pool
        return (
            sequence.computed < len(sequence.block_table) * pool.block_size
            or sequence is self.table.running.oldest
            or pool.free_blocks > self._kept_free
        )

    def _may_begin(self, prompt: Sequence) -> bool:
        return not self.decision.park or self.tiers.has_room_to_park(prompt)

    def _fits_beside_decodes(self, prompt: Sequence) -> bool:
        """Decodes keep room already for a prompt that only passes through to the host."""
        return self.decision.park or super()._fits_beside_decodes(prompt)

    def _add_row(self, sequence: Sequence, count: int) -> None:
        if sequence.status is Status.PREFILL:
            (self.tiers.reserve if self.decision.park else self.tiers.cancel_reservation)(sequence)
        super()._add_row(sequence, count)
        if sequence.status is Status.PREFILL and sequence.remaining == 0:
            self.tiers.park_after_row(sequence)

    def force_oldest(self) -> None:
        oldest = self.table.oldest
        if oldest is not None and oldest.place is Place.HOST:
            self.tiers.move_in(oldest)  # nothing runs, so the device is empty
        else:
            super().force_oldest()

    def _blocks_leaving(self) -> int:
        return self.tiers.blocks_leaving_device

    def _preempt(self, victim: Sequence, *, to_host: bool) -> None:
        """Take its blocks; it moves to the host if it decodes and there is room, else it is recomputed."""
        moves = to_host and victim.status is Status.DECODE and victim.place is Place.DEVICE
        if moves and self.tiers.move_out(victim):
            self._skipped.add(victim.sequence_id)
        else:
            super()._preempt(victim, to_host=False)

    # ---- on the host ------------------------------------------------------------------------------------------

    def _finish_host_tokens(self, under_way: Iterable[Sequence], ready: list[Sequence]) -> None:
        """Two sub-batches of host sequences, which have their token when the step ends: first those under way."""
        first, second = self.decision.host_decodes
        for sequence in islice(under_way, first + second):
            sub_batch = int(len(self._host_rows) >= first)
            row = Row(sequence.sequence_id, sequence.computed, (), sample=True, tier="host", sub_batch=sub_batch)
            self._host_rows[sequence.sequence_id] = row
        for sequence in ready[: first + second - len(self._host_rows)]:
            self._add_host_row(sequence, int(len(self._host_rows) >= first))

    def _add_host_row(self, sequence: Sequence, sub_batch: int) -> None:
        """The next token of a ready host sequence; skipped if no room can be made for it."""
        if sequence.sequence_id in self._skipped or not self._make_host_room(sequence):
            return
        start, length = sequence.computed, len(sequence.tokens)
        new_blocks = self.table.host_tier.reserve(sequence, length)
        if not sequence.begun:
            self._begin_sequence(sequence)
            new_blocks = sequence.host_table
        row = Row(
            sequence.sequence_id,
            start,
            tuple(sequence.tokens[start:]),
            sample=True,
            new_blocks=tuple(new_blocks),
            tier="host",
            sub_batch=sub_batch,
        )
        self._host_rows[sequence.sequence_id] = row
        sequence.in_flight.append(row)
        sequence.computed = length

    def _make_host_room(self, sequence: Sequence) -> bool:
        """As on the device: preempt newer host sequences, newest first."""
        while not self.table.host_tier.can_reserve(sequence, len(sequence.tokens)):
            victim = self.table.on_host.newest
            if self.tiers.any_leaving_host or victim is None or victim.sequence_id <= sequence.sequence_id:
                return False
            if victim.in_flight:
                victim.preempt_when_answered = True
                return False
            self._preempt(victim, to_host=False)
        return True
