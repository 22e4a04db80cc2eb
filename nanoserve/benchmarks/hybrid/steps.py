"""What the steps of a run held and took: by strategy, and what host sequences gained in each. No torch."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from nanoserve.costs.step_features import Strategy
from nanoserve.record.run_record import RunRecord
from nanoserve.scheduler.plan import Row, StepPlan, StepResult


class StepCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Steps by strategy."""

    device: int
    asymmetric: int
    overlap: int

    @property
    def hybrid(self) -> int:
        """Those in which the CPU attends."""
        return self.asymmetric + self.overlap

    @classmethod
    def of(cls, plans: Sequence[StepPlan]) -> "StepCounts":
        """Of all plans that are steps; those of nothing but swaps are none."""
        counts = Counter(plan.strategy for plan in plans if plan.ends)
        return cls(device=counts["device"], asymmetric=counts["asymmetric"], overlap=counts["overlap"])


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step without prompts."""

    strategy: Strategy
    seconds: float
    """Of the device."""
    decodes: int
    keys: int
    """Device rows, and what they read in a layer."""
    host_sequences: int
    """Whose KV was in host memory, or on its way there."""
    host_tokens: float
    """What these gained: each of the L + 1 passes that a token takes is as much of it, even where the token is not
    ready yet."""


@dataclass(slots=True)
class _HostFollower:
    """Who is in host memory, and how far the tokens under way there are."""

    layers: int
    """Of the model."""
    resident: set[int] = field(default_factory=set)
    """Sequences in host memory or on their way there."""
    passed: dict[int, dict[int, int]] = field(default_factory=dict)
    """Of each token under way, the layers behind it; by the plan that it began in, then by sequence."""

    def on_plan(self, plan: StepPlan) -> float:
        """The plan's step is computed; returns passes of host sequences that begin or finish a token in it."""
        passes = sum([self._host_row(plan, row) for row in plan.rows if row.tier == "host"])
        self.resident -= {row.sequence for row in plan.rows if row.tier == "device"}
        for swap in plan.swaps:
            (self.resident.add if swap.direction == "out" else self.resident.discard)(swap.sequence)
        self.resident -= set(plan.end)
        return passes

    def _host_row(self, plan: StepPlan, row: Row) -> int:
        self.resident.add(row.sequence)
        if plan.strategy == "overlap":
            self.passed.setdefault(plan.step, {})[row.sequence] = 0
            return 1
        return self.layers + 1 if row.tokens else self._finished(row.sequence)

    def on_result(self, result: StepResult) -> int:
        """Returns passes of those whose tokens are under way, or end with it."""
        passes = sum([self._finished(answer.sequence) for answer in result.answers])
        for progress in result.cohorts:
            members = self.passed.get(progress.step, {})
            for sequence, layers in members.items():
                passes += progress.layers - layers
                members[sequence] = progress.layers
        return passes

    def _finished(self, sequence: int) -> int:
        """Passes until its token was there; 0 if none was under way."""
        for members in self.passed.values():
            if sequence in members:
                return self.layers - members.pop(sequence)
        return 0


def decode_steps(record: RunRecord, layers: int) -> Iterator[DecodeStep]:
    """All steps of a run that hold device rows, but no prompts.

    Args:
        layers: of the model.
    """
    follower = _HostFollower(layers)
    plans = {step: planned.plan for step, planned in record.planned.items()}
    moves = [plan for plan in record.plans if not plan.ends]
    for result in record.results:
        plan = None if result.step is None else plans[result.step]
        passes = 0.0
        if plan is not None:
            while moves and moves[0].step < plan.step:
                follower.on_plan(moves.pop(0))
            passes = follower.on_plan(plan)
        residents = len(follower.resident)
        passes += follower.on_result(result)
        if plan is None:
            continue
        device = [row for row in plan.rows if row.tier == "device"]
        if device and all(len(row.tokens) == 1 for row in device):
            yield DecodeStep(
                strategy=plan.strategy,
                seconds=result.seconds,
                decodes=len(device),
                keys=sum(row.start + 1 for row in device),
                host_sequences=residents,
                host_tokens=passes / (layers + 1),
            )
