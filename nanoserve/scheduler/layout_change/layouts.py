"""Layouts: the parallel layouts, and when the running one is left for another."""

from collections.abc import Sequence as SequenceOf

from msgspec.structs import replace

from nanoserve.scheduler.extension import Extension
from nanoserve.scheduler.host_tier.host_tier import HostTier
from nanoserve.scheduler.load import Load
from nanoserve.scheduler.optional import LayoutCapacity, LayoutsLoad
from nanoserve.scheduler.plan import StepPlan, StepResult
from nanoserve.scheduler.plan_builder import PlanBuilder
from nanoserve.scheduler.scheduler import Scheduler


class Layouts(Extension):
    """The parallel layouts 0, 1, 2, ...: which of them runs, and when it may be left.

    A transition needs an idle, empty device. Draining costs recomputation or two swaps for each
    sequence, so a policy that keeps changing its mind must not spend all time on it: at least one
    token is answered between two drains. Answers are finite, so everything finishes.
    """

    def __init__(self, others: SequenceOf[LayoutCapacity], host: HostTier | None) -> None:
        self._others = others
        self._host = host
        self.current = 0
        """The layout that runs."""
        self.transitions = 0
        self._target: int | None = None  # of the transition in flight
        self._next: int | None = None  # of the transition in the plan that is being made
        self._has_answered = True  # whether a token was answered since the last drain began
        self._is_draining = False

    def attach(self, scheduler: Scheduler) -> None:
        self._scheduler, self._table = scheduler, scheduler.table
        self._capacities = (
            LayoutCapacity(scheduler.pool.num_blocks, scheduler.pipeline_depth),
            *self._others,
        )
        deepest = max([capacity.pipeline_depth for capacity in self._capacities])
        if scheduler.async_scheduling and deepest > 1:
            raise ValueError(
                "asynchronous scheduling needs one stage: pipeline_depth must be 1 in every layout"
            )
        self._table.fewest_blocks = min([capacity.num_blocks for capacity in self._capacities])

    @property
    def changing(self) -> bool:
        """Whether the device is being drained, or a transition is in flight."""
        return self._is_draining or self._target is not None

    def holds_back(self) -> bool:
        """Nothing is planned while a transition is in flight."""
        return self._target is not None

    def survey(self, load: Load) -> None:
        load.layouts = LayoutsLoad(self.current, len(self._capacities))
        if self._scheduler.predictors:
            load.predictor = self._scheduler.predictors[self.current]

    def take_over(self, builder: PlanBuilder) -> bool:
        """Drain the device if the policy wants another layout, and change to it once the device is
        empty."""
        wanted = builder.decision.layout
        if not self._drains_for(wanted):
            return False
        self._drain(builder)
        scheduler = self._scheduler
        if not (scheduler.running or scheduler.awaits_results or scheduler.goes_on):
            self._next = wanted
            builder.acts = True
        return True

    def _drains_for(self, wanted: int) -> bool:
        """Whether to drain the device now that the policy wants this layout; an unknown one is
        ignored."""
        if wanted == self.current or not 0 <= wanted < len(self._capacities):
            self._is_draining = False
        elif not self._is_draining and self._has_answered:
            self._is_draining, self._has_answered = True, False
        return self._is_draining

    def _drain(self, builder: PlanBuilder) -> None:
        """Empty the device, as soon as nothing on it is in flight: decodes move to the host if it
        has room."""
        running = self._table.running
        if any(sequence.in_flight for sequence in running):
            return
        for sequence in list(running):
            if self._host is None or not self._host.move_out(builder, sequence):
                self._table.preempt(sequence)

    def complete(self, plan: StepPlan) -> StepPlan:
        if self.current == 0 and self._next is None:
            return plan
        transition, self._next = self._next, None
        return replace(
            plan, layouts=replace(plan.layouts, current=self.current, transition=transition)
        )

    def planned(self, plan: StepPlan) -> None:
        self._target = plan.layouts.transition

    def take_in(self, result: StepResult, gained: int) -> None:
        if gained:
            self._has_answered = True

    def plan_ended(self, plan: StepPlan, result: StepResult) -> None:
        """After a transition, the blocks are those of the new layout."""
        if plan.layouts.transition is None:
            return
        self.transitions += 1
        self.current = plan.layouts.transition
        self._target, self._is_draining = None, False
        capacity = self._capacities[self.current]
        self._scheduler.pool.replace_blocks(capacity.num_blocks)
        self._scheduler.pipeline_depth = capacity.pipeline_depth

    def abandon(self, *, all_is_lost: bool) -> None:
        """The transition, if there is one, failed: the layout stays."""
        self._target, self._is_draining = None, False
        if all_is_lost:
            self._has_answered = True  # nothing is left on the device, so another drain is free
