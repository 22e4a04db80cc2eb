"""HostDecoding: host sequences decode where their KV is, in two sub-batches of a step or beside
several steps."""

import dataclasses

from msgspec.structs import replace

from nanoserve.request import PlannedRow, Sequence
from nanoserve.scheduler.cpu_attention.cohorts import HostCohorts
from nanoserve.scheduler.extension import Extension
from nanoserve.scheduler.host_tier.host_tier import HostTier
from nanoserve.scheduler.load import Load
from nanoserve.scheduler.optional import HostRow
from nanoserve.scheduler.plan import Answer, Row, StepPlan, StepResult
from nanoserve.scheduler.plan_builder import PlanBuilder
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.scheduler.sequence_table import in_order
from nanoserve.scheduler.work import Strategy

MOST_LOSSES = 3
"""After this many losses of attention on the CPU, sequences live on the device alone."""


class HostDecoding(Extension):
    """Rows on the host, and the cohorts of host sequences whose token is under way."""

    def __init__(self, host: HostTier) -> None:
        self.cohorts = HostCohorts()
        self.losses = 0
        """How often attention on the CPU died or hung."""
        self._host = host
        self._rows: list[Row] = []
        # strategy of the plan that is being made, if a host row begins
        self._decided: Strategy = "device"

    def attach(self, scheduler: Scheduler) -> None:
        self._table = scheduler.table
        self._in_flight = scheduler.plans_in_flight

    # ---- a plan is made --------------------------------------------------------------------------

    def survey(self, load: Load) -> None:
        if self.cohorts:
            load.host = dataclasses.replace(
                load.host, cohorts=tuple(self.cohorts.under_way.values())
            )

    def after_decodes(self, builder: PlanBuilder) -> None:
        decision = builder.decision.host
        self._decided = decision.strategy
        if decision.strategy == "overlap":
            for sequence in self._host.ready[: decision.decodes[0]]:
                self._add_row(builder, sequence, 0)
        elif decision.strategy == "asymmetric":
            self._finish_tokens(builder)

    def _finish_tokens(self, builder: PlanBuilder) -> None:
        """Add two sub-batches of host sequences, which have their token when the step ends: first
        the sequences under way."""
        first, second = builder.decision.host.decodes
        for sequence in self._under_way()[: first + second]:
            row = Row(
                sequence=sequence.sequence_id,
                start=sequence.computed,
                tokens=(),
                sample=True,
                host=HostRow(0 if len(self._rows) < first else 1),
            )
            self._rows.append(row)
            builder.acts = True
        for sequence in self._host.ready[: first + second - len(self._rows)]:
            self._add_row(builder, sequence, 0 if len(self._rows) < first else 1)

    def _under_way(self) -> list[Sequence]:
        """Host sequences under way that a plan may finish, the most advanced first."""
        # A plan in flight may finish the tokens under way: none of them can be named again before
        # it ends.
        if any(plan.host.strategy == "overlap" for plan in self._in_flight.values()):
            return []
        return self.cohorts.most_advanced

    def _add_row(self, builder: PlanBuilder, sequence: Sequence, sub_batch: int) -> None:
        """The next token of a ready host sequence; skipped if no room can be made for it."""
        if sequence.sequence_id in builder.skipped or not self._make_room(builder, sequence):
            return
        start, length = sequence.computed, len(sequence.tokens)
        new_blocks = self._host.blocks.reserve(sequence, length)
        if not sequence.begun:
            builder.begin(sequence)
            new_blocks = sequence.host_table or []
        row = Row(
            sequence=sequence.sequence_id,
            start=start,
            tokens=tuple(sequence.tokens[start:]),
            sample=True,
            new_blocks=tuple(new_blocks),
            host=HostRow(sub_batch),
        )
        self._rows.append(row)
        sequence.in_flight.append(row)
        sequence.computed = length
        builder.acts = True

    def _make_room(self, builder: PlanBuilder, sequence: Sequence) -> bool:
        """Preempt host sequences behind it, the last first, as on the device."""
        host = self._host
        while not host.blocks.can_reserve(sequence, len(sequence.tokens)):
            victim = host.on_host.last
            if victim is None or in_order(victim) <= in_order(sequence) or victim.in_flight:
                return False
            if host.swaps.leaving("in"):
                return False
            builder.skipped.add(victim.sequence_id)
            self._table.preempt(victim)
        return True

    def goes_on(self) -> bool:
        """A plan without rows lets the host sequences under way go on."""
        return bool(self.cohorts)

    def complete(self, plan: StepPlan) -> StepPlan:
        """Add the host rows. The strategy is the decided one if a host row begins; otherwise host
        sequences under way go on, as they cannot come back before."""
        if self._rows:
            rows, self._rows = self._rows, []
            beginning = [row for row in rows if row.tokens]
            return replace(
                plan,
                rows=(*plan.rows, *rows),
                host=replace(plan.host, strategy=self._decided),
                decodes=plan.decodes + len(beginning),
            )
        holds_nothing = not plan.rows and not plan.host.swaps and plan.layouts.transition is None
        if holds_nothing or (plan.rows and self.cohorts):
            return replace(plan, host=replace(plan.host, strategy="overlap"))
        return plan

    def planned(self, plan: StepPlan) -> None:
        if self.cohorts or plan.host.strategy != "device":
            self.cohorts.follow(plan, self._table.sequences)

    # ---- results ---------------------------------------------------------------------------------

    def answered(self, sequence: Sequence, row: PlannedRow, answer: Answer) -> None:
        if self.cohorts:
            self.cohorts.leave(sequence.sequence_id)

    def take_in(self, result: StepResult, gained: int) -> None:
        for progress in result.host.cohorts:
            self.cohorts.advance(progress.step, progress.layers)
        if result.host.lost is not None:
            # Host rows in flight, of asymmetric plans too, will not be answered; their plans end
            # all the same.
            self.losses += 1
            self._host.lose(for_good=self.losses >= MOST_LOSSES)
            self.cohorts.clear()

    def abandon(self, *, all_is_lost: bool) -> None:
        self.cohorts.clear()
