"""Phases of an engine with two parallel layouts: computing in one, draining it, re-sharding to the
other. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from nanoserve.record.events import Blocks, Collected, Event, ExecutorFailed, Finished, Planned
from nanoserve.scheduler.plan import StepResult

_PREFILL = 0  # the layout in which prompts are computed


class PhaseTurn(NamedTuple):
    """Fates of the sequences that were on the device when the layout was to change."""

    finished: int
    """Sequences on the device when the host pool ran empty that decoded to their ends; 0 after a
    prefill phase."""
    through_pool: int  # sequences that went to the host pool, to come back under the other layout
    recomputed: int  # sequences that gave up their blocks


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a run; phases follow each other without gaps."""

    kind: Literal["compute", "drain", "reshard"]
    """A drain lasts from the first result after which no rows are planned, until the device holds
    no sequence."""
    layout: int
    began: float
    ended: float
    plans: int = 0
    """Plans with rows."""
    prompt_tokens: int = 0
    decodes: int = 0
    swaps_out: int = 0
    swaps_in: int = 0
    turn: PhaseTurn | None = None
    """Fates of the sequences on the device; None unless the phase is a drain."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def name(self, layouts: Sequence[str]) -> str:
        """With the layouts' names: "prefill in P2", "draining P2", "re-shard to T2", "decode in
        T2"."""
        layout = layouts[self.layout]
        if self.kind == "drain":
            return f"draining {layout}"
        if self.kind == "reshard":
            return f"re-shard to {layout}"
        if self.layout == _PREFILL:
            return f"prefill in {layout}"
        return f"decode in {layout}"

    def with_plan(self, planned: Planned) -> "Phase":
        plan, plans = planned.plan, self.plans
        if plan.rows:
            plans += 1
        directions = [swap.direction for swap in plan.host.swaps]
        return replace(
            self,
            plans=plans,
            prompt_tokens=self.prompt_tokens + plan.prompt_tokens,
            decodes=self.decodes + plan.decodes,
            swaps_out=self.swaps_out + directions.count("out"),
            swaps_in=self.swaps_in + directions.count("in"),
        )


class PhaseTracker:
    """Divides a run into phases. Only the transition after a drain shows that it was one."""

    def __init__(self) -> None:
        self._phase: Phase | None = None
        # what would be the drain: since a result after which no rows were planned
        self._idle: Phase | None = None
        self._blocks: Blocks | None = None
        self._left = 0  # on the device since the host pool was empty

    def on_event(self, event: Event) -> list[Phase]:
        """Return the phases that an event ends."""
        if isinstance(event, Planned):
            return self._on_plan(event)
        if isinstance(event, Collected):
            return [
                over for result in event.results for over in self._on_result(result, event.time)
            ]
        if isinstance(event, ExecutorFailed | Finished):
            return self._finish(event.time)
        return []

    def _on_plan(self, planned: Planned) -> list[Phase]:
        plan, now, blocks = planned.plan, planned.time, planned.blocks
        phase = self._phase
        if phase is None:
            phase = Phase("compute", plan.layouts.current, now, now)
        if plan.layouts.transition is not None:
            return self._turn(phase, plan.layouts.transition, now, blocks)
        if plan.rows:
            self._idle = None
        elif self._idle is not None:
            self._idle = self._idle.with_plan(planned)
        if self._idle is None:
            if blocks.used_host > 0:
                self._left = 0
            elif self._blocks is not None and self._blocks.used_host > 0:
                self._left = blocks.on_device  # the pool has just run empty
            self._blocks = blocks
        self._phase = phase.with_plan(planned)
        return []

    def _on_result(self, result: StepResult, now: float) -> list[Phase]:
        if result.lost is not None:
            return self._finish(now)
        if result.step is None or self._phase is None:
            return []
        if self._phase.kind == "reshard":
            over = replace(self._phase, ended=now)
            self._phase = Phase("compute", over.layout, now, now)
            return [over]
        if self._idle is None:
            self._idle = Phase("drain", self._phase.layout, now, now)
        return []

    def _finish(self, now: float) -> list[Phase]:
        ended = []
        if self._phase is not None:
            ended.append(replace(self._phase, ended=now))
        self._phase = self._idle = self._blocks = None
        return ended

    def _turn(self, phase: Phase, target: int, now: float, blocks: Blocks) -> list[Phase]:
        """The layout changes: end the phase that computed, and the drain after it."""
        drain = self._idle
        if drain is None:
            drain = Phase("drain", phase.layout, now, now)
        recomputed = left = 0
        if self._blocks is not None:
            recomputed = blocks.preemptions - self._blocks.preemptions
        if drain.layout != _PREFILL:
            left = self._left
        finished = max(0, left - drain.swaps_out - recomputed)
        turn = PhaseTurn(finished, drain.swaps_out, recomputed)
        swaps_out, swaps_in = phase.swaps_out - drain.swaps_out, phase.swaps_in - drain.swaps_in
        computed = replace(phase, ended=drain.began, swaps_out=swaps_out, swaps_in=swaps_in)
        self._phase = Phase("reshard", target, now, now)
        self._idle = self._blocks = None
        self._left = 0
        return [computed, replace(drain, ended=now, turn=turn)]
