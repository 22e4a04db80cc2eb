"""Phases of an engine with two parallel layouts: computing in one, draining it, re-sharding to the other. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from nanoserve.scheduler.plan import StepPlan, StepResult
from nanoserve.scheduler.scheduler import Scheduler

PhaseKind = Literal["compute", "drain", "reshard"]
_PREFILL = 0
"""The layout in which prompts are computed."""


class EngineState(NamedTuple):
    """What a scheduler shows between two plans."""

    used_device_blocks: int
    device_blocks: int
    """KV blocks of the current layout that have an owner, and all."""
    used_host_blocks: int
    host_blocks: int
    """Of the host pool; a prompt that is still computed may have reserved some."""
    on_device: int
    """Sequences that run there."""
    preemptions: int
    """So far."""

    @classmethod
    def of(cls, scheduler: Scheduler) -> "EngineState":
        device, host = scheduler.pool, scheduler.host_pool
        return cls(
            used_device_blocks=device.num_blocks - device.free_blocks,
            device_blocks=device.num_blocks,
            used_host_blocks=host.num_blocks - host.free_blocks,
            host_blocks=host.num_blocks,
            on_device=len(scheduler.running),
            preemptions=scheduler.preemptions,
        )


class Turn(NamedTuple):
    """What became of sequences that were on the device when the layout was to change."""

    finished: int
    """Decoded to their ends, of those that were on the device when the host pool had run empty: the policy waited for
    them. 0 where it never was empty, and at the end of a prefill phase."""
    through_pool: int
    """Went to the host pool, to come back under the other layout."""
    recomputed: int
    """Gave their blocks up."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a run; phases follow each other without gaps."""

    kind: PhaseKind
    """"compute" in a layout; "drain": from the first result after which no more rows were planned, until nothing was in
    flight or on the device; "reshard" to a layout."""
    layout: int
    """Its number."""
    began: float
    ended: float
    """On the executor's clock."""
    plans: int = 0
    prompt_tokens: int = 0
    decodes: int = 0
    """Planned in it."""
    swaps_out: int = 0
    swaps_in: int = 0
    """Begun in it."""
    turn: Turn | None = None
    """Of a drain."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def with_plan(self, plan: StepPlan) -> "Phase":
        """The same phase with one plan more."""
        decodes, prompt = step_tokens(plan)
        directions = [swap.direction for swap in plan.swaps]
        return replace(
            self,
            plans=self.plans + bool(plan.rows),
            prompt_tokens=self.prompt_tokens + prompt,
            decodes=self.decodes + decodes,
            swaps_out=self.swaps_out + directions.count("out"),
            swaps_in=self.swaps_in + directions.count("in"),
        )


def phase_name(phase: Phase, layouts: Sequence[str]) -> str:
    """With the layouts' names: "prefill in P2", "draining P2", "re-shard to T2", "decode in T2"."""
    layout = layouts[phase.layout]
    if phase.kind == "drain":
        return f"draining {layout}"
    if phase.kind == "reshard":
        return f"re-shard to {layout}"
    return f"{'prefill' if phase.layout == _PREFILL else 'decode'} in {layout}"


class PhaseTracker:
    """Tells phases from what passes between scheduler and executor.

    A drain is known to be one when the transition behind it is planned, so phases are told when they are over.
    """

    def __init__(self) -> None:
        self._phase: Phase | None = None
        self._idle: Phase | None = None  # what would be the drain: since a result after which no rows were planned
        self._state: EngineState | None = None
        self._left = 0  # on the device since the host pool was empty

    def on_submit(self, plan: StepPlan, now: float, state: EngineState) -> list[Phase]:
        """A plan goes to the executor; returns the phases that are thereby over."""
        if self._phase is None:
            self._phase = Phase("compute", plan.layout, now, now)
        if plan.transition is not None:
            return self._turn(plan.transition, now, state)
        if plan.rows:
            self._idle = None
        elif self._idle is not None:
            self._idle = self._idle.with_plan(plan)
        if self._idle is None:
            self._watch_pool(state)
        self._phase = self._phase.with_plan(plan)
        return []

    def on_result(self, result: StepResult, now: float) -> list[Phase]:
        """Something became known; returns the phases that are thereby over."""
        if result.lost is not None:
            return self.finish(now)
        if result.step is None or self._phase is None:
            return []
        if self._phase.kind == "reshard":
            over = replace(self._phase, ended=now)
            self._phase = Phase("compute", over.layout, now, now)
            return [over]
        if self._idle is None:
            self._idle = Phase("drain", self._phase.layout, now, now)
        return []

    def finish(self, now: float) -> list[Phase]:
        """Nothing follows, or all begins anew."""
        over = [] if self._phase is None else [replace(self._phase, ended=now)]
        self._phase = self._idle = self._state = None
        return over

    def _watch_pool(self, state: EngineState) -> None:
        emptied = self._state is not None and self._state.used_host_blocks > 0
        if state.used_host_blocks == 0 and emptied:
            self._left = state.on_device
        elif state.used_host_blocks > 0:
            self._left = 0
        self._state = state

    def _turn(self, target: int, now: float, state: EngineState) -> list[Phase]:
        """The layout changes: what was computing, and draining, are over."""
        assert self._phase is not None, "a plan has been submitted"
        drain = self._idle or Phase("drain", self._phase.layout, now, now)
        before = state.preemptions if self._state is None else self._state.preemptions
        recomputed, through_pool = state.preemptions - before, drain.swaps_out
        left = 0 if drain.layout == _PREFILL else self._left
        turn = Turn(max(0, left - through_pool - recomputed), through_pool, recomputed)
        computed = replace(
            self._phase,
            ended=drain.began,
            swaps_out=self._phase.swaps_out - drain.swaps_out,
            swaps_in=self._phase.swaps_in - drain.swaps_in,
        )
        self._phase, self._idle, self._state, self._left = Phase("reshard", target, now, now), None, None, 0
        return [computed, replace(drain, ended=now, turn=turn)]


def step_tokens(plan: StepPlan) -> tuple[int, int]:
    """Decodes, which are rows of one token, and tokens of longer rows."""
    lengths = [len(row.tokens) for row in plan.rows]
    decodes = lengths.count(1)
    return decodes, sum(lengths) - decodes
