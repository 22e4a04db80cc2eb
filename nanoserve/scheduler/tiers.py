"""The host tier: sequences that move between device and host memory or decode there, and the plans that hold them.

A swap begins with the plan that holds it, and ends when a result names it. Until then its sequence is moving and
holds blocks on both tiers. A prompt that is parked leaves with the row that computes the last of it: the swap is in the
same plan, and the sequence has arrived when both are answered, in any order.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, Literal

import msgspec

from nanoserve.costs.step_features import Strategy
from nanoserve.request import Place, Sequence, Status
from nanoserve.scheduler.load import Cohort
from nanoserve.scheduler.plan import Row, StepPlan, Swap
from nanoserve.scheduler.plan_builder import PlanBuilder
from nanoserve.scheduler.sequence_table import SequenceTable

Direction = Literal["out", "in"]


@dataclass(slots=True)
class _Move:
    """A swap in flight and its sequence."""

    swap: Swap
    sequence: Sequence
    answered: bool = False


class Tiers:
    """The swaps in flight, and the host sequences whose token is under way."""

    def __init__(self, table: SequenceTable) -> None:
        self.cohorts = HostCohorts()
        self._host_disabled = False  # nothing moves to the host any longer
        self._table = table
        self._moves: dict[int, _Move] = {}  # by swap
        self._swap_ids = count()

    @property
    def ready(self) -> list[Sequence]:
        """Host sequences that may enter the next plan, or move to the device."""
        return [sequence for sequence in self._table.on_host if not sequence.in_flight]

    def leaving(self, direction: Direction) -> Iterator[Swap]:
        """The swaps of that direction in flight."""
        return (move.swap for move in self._moves.values() if move.swap.direction == direction)

    def load_fields(self) -> dict[str, Any]:
        """The fields of Load that describe host memory."""
        on_host, pool = self._table.on_host, self._table.host_tier.pool
        return {
            "host_decodes": len(on_host),
            "ready_host": len(self.ready),
            "host_context_tokens": sum([sequence.computed for sequence in on_host]),
            "moving": len(self._table.moving),
            "host_free_blocks": 0 if self._host_disabled else pool.free_blocks,
            "host_blocks": 0 if self._host_disabled else pool.num_blocks,
            "cohorts": tuple(self.cohorts.under_way.values()),
        }

    def has_room(self, sequence: Sequence, tokens: int) -> bool:
        """Whether this many tokens of the sequence may move to the host."""
        return not self._host_disabled and self._table.host_tier.can_reserve(sequence, tokens)

    def begin(self, sequence: Sequence, direction: Direction, *, after_row: bool = False) -> Swap:
        """Begin to move a sequence that has blocks on both tiers, with nothing in flight or with its last row."""
        swap = Swap(
            swap=next(self._swap_ids),
            sequence=sequence.sequence_id,
            direction=direction,
            device_blocks=tuple(sequence.block_table),
            host_blocks=tuple(sequence.host_table[: len(sequence.block_table)]),  # it may have reserved more
            after_row=after_row,
        )
        self._moves[swap.swap] = _Move(swap, sequence)
        self._table.depart(sequence)
        return swap

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
        if self._host_disabled and sequence.place is Place.HOST and not sequence.finished:
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
        self._host_disabled = for_good
        if for_good:
            for sequence in self._table.running:
                self._table.host_tier.release(sequence)

    def abandon(self) -> None:
        """Nothing in flight will be answered any longer; the caller ends or requeues the sequences."""
        self.cohorts.clear()
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
    """Keeps the swaps until they are answered."""
    in_flight: Collection[StepPlan]
    """The plans that have not ended."""
    _swaps: list[Swap] = field(default_factory=list)
    _host_rows: dict[int, Row] = field(default_factory=dict)
    _kept_free: int = 0

    @property
    def does_something(self) -> bool:
        return super().does_something or bool(self._host_rows or self._swaps)

    def build(self, decodes: list[Sequence], prefills: list[Sequence]) -> None:
        """Swaps first, then decodes on the device and on the host, then prompts."""
        decision, tiers = self.decision, self.tiers
        if decision.swap_out:
            decodes = self._swap_out(decodes)
        self._swap_in()
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
        return msgspec.structs.replace(plan, rows=rows, swaps=tuple(self._swaps), strategy=strategy)

    def _strategy(self) -> Strategy:
        """The decided one if a host row begins; otherwise host sequences under way go on, even on an idle device.

        A policy that lets no sequence begin does not want those under way to stand still: they cannot come back.
        """
        if not self.does_something:
            return "overlap"
        if self._host_rows:
            return self.decision.strategy
        return "overlap" if self.rows and len(self.tiers.cohorts) else "device"

    # ---- swaps ------------------------------------------------------------------------------------------------

    def _swap_out(self, decodes: list[Sequence]) -> list[Sequence]:
        """Move as many ready decodes as decided to the host, newest first, as far as it has room.

        A decode that came from there and has computed no token since stays, or it could go to and fro endlessly.

        Returns:
            those that may enter the plan. A chosen decode in flight cannot move before its token, but stays out too.
        """
        chosen = [sequence for sequence in reversed(decodes) if sequence.begun][: self.decision.swap_out]
        for sequence in chosen:
            if not sequence.in_flight and not self._move_out(sequence):
                break
        leaving = {one.sequence_id for one in chosen if one.in_flight or one.place is Place.MOVING}
        return [sequence for sequence in decodes if sequence.sequence_id not in leaving]

    def _swap_in(self) -> None:
        """Move as many ready host sequences as decided to the device, oldest first, as far as it has room for them.

        A block stays free for each decode to grow into, so that nothing has to come back at once.
        """
        pool, table = self._blocks.pool, self.table
        growing = len(table.running) + len(table.moving)
        for sequence in self.tiers.ready[: self.decision.swap_in]:
            if table.free_slots <= 0 or pool.blocks_for(sequence.computed) + growing > pool.free_blocks:
                return
            self._move_in(sequence)
            growing += 1

    def _move_out(self, decode: Sequence) -> bool:
        """Move a decode with nothing in flight to the host; False if there is no room for it."""
        if not self.tiers.has_room(decode, decode.computed):
            return False
        self.table.host_tier.reserve(decode, decode.computed)
        self._swaps.append(self.tiers.begin(decode, "out"))
        return True

    def _move_in(self, sequence: Sequence) -> None:
        """Move a host sequence with nothing in flight to the device; the blocks it needs are free."""
        pool = self._blocks.pool
        sequence.block_table = pool.allocate(pool.blocks_for(sequence.computed))
        self._swaps.append(self.tiers.begin(sequence, "in"))

    # ---- on the device ----------------------------------------------------------------------------------------

    def _keep_room_for_prompts(self, partial: list[Sequence]) -> None:
        """Where prompts only pass through the device, its decodes must not grow into the room for the next one."""
        prompt = partial[0] if partial else self.table.waiting.oldest
        if prompt is None or self.decision.prefill_tokens <= 0:
            return
        may_begin = self.admits and self.table.free_slots > 0
        if partial or (may_begin and self._can_park(prompt)):
            self._kept_free = self._blocks.pool.blocks_for(len(prompt.tokens)) - len(prompt.block_table)

    def _add_decodes(self, ready: Iterable[Sequence]) -> None:
        if self._kept_free > 0:  # asked one by one: each may take the last block that is not kept
            ready = (one for one in islice(ready, self.decision.decodes) if self._leaves_room_for_prompts(one))
        super()._add_decodes(ready)

    def _leaves_room_for_prompts(self, sequence: Sequence) -> bool:
        """Whether it may grow. The oldest always may, so that the device empties in the end."""
        pool = self._blocks.pool
        return (
            sequence.computed < len(sequence.block_table) * pool.block_size
            or sequence is self.table.running.oldest
            or pool.free_blocks > self._kept_free
        )

    def _can_park(self, prompt: Sequence) -> bool:
        """Whether the host can hold the prompt and its first token."""
        return self.tiers.has_room(prompt, len(prompt.tokens) + 1)

    def _may_begin(self, prompt: Sequence) -> bool:
        return not self.decision.park or self._can_park(prompt)

    def _fits_beside_decodes(self, prompt: Sequence) -> bool:
        """Decodes keep room already for a prompt that only passes through to the host."""
        return self.decision.park or super()._fits_beside_decodes(prompt)

    def _add_row(self, sequence: Sequence, count: int) -> None:
        """A prompt to be parked reserves host blocks, if there are any, and moves after the last row of it.

        It stays if its next token is its last.
        """
        if sequence.status is Status.PREFILL:
            if not self.decision.park:
                self.table.host_tier.release(sequence)
            elif self._can_park(sequence):
                self.table.host_tier.reserve(sequence, len(sequence.tokens) + 1)
        super()._add_row(sequence, count)
        is_parked = sequence.status is Status.PREFILL and sequence.remaining == 0 and sequence.host_table
        if is_parked and len(sequence.tokens) + 1 < sequence.max_length:
            self._swaps.append(self.tiers.begin(sequence, "out", after_row=True))

    def force_oldest(self) -> None:
        oldest = self.table.oldest
        if oldest is not None and oldest.place is Place.HOST:
            self._move_in(oldest)  # nothing runs, so the device is empty
        else:
            super().force_oldest()

    def _blocks_leaving(self) -> int:
        """An upper bound: shared blocks stay."""
        return sum(len(swap.device_blocks) for swap in self.tiers.leaving("out"))

    def _preempt(self, victim: Sequence, *, to_host: bool) -> None:
        """Take its blocks; it moves to the host if it decodes and there is room, else it is recomputed."""
        moves = to_host and victim.status is Status.DECODE and victim.place is Place.DEVICE
        if moves and self._move_out(victim):
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
            if any(self.tiers.leaving("in")) or victim is None or victim.sequence_id <= sequence.sequence_id:
                return False
            if victim.in_flight:
                return False
            self._preempt(victim, to_host=False)
        return True
