"""What attention on the CPU adds in steps without prompts, against the bounds of the closed forms (APEX). No torch."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

import msgspec

from nanoserve.costs.closed_forms import overlap_gain_bound, pipelining_speedup_bound
from nanoserve.costs.predictor import Predictor
from nanoserve.costs.work import Strategy
from nanoserve.record.run_record import RunRecord
from nanoserve.scheduler.plan import HostWork, Row, StepPlan, StepResult

HYBRID: tuple[Strategy, ...] = ("asymmetric", "overlap")
"""Strategies of steps in which the CPU computes attention."""


class GainFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Gain of one strategy's steps that hold decodes on the device and no prompts."""

    steps: int
    """Number of such steps."""
    gain: float
    """Tokens per second over those of the device alone with the same rows, less 1; the mean over time."""
    bound: float
    """The most that is possible, by the closed form; the mean over time."""
    reached: float | None
    """The gain over the bound; None where the bound is a loss."""


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step without prompts."""

    strategy: Strategy
    seconds: float
    """Time on the device, in seconds."""
    decodes: int
    keys: int
    """Device rows, and the keys that they read in one layer."""
    host_sequences: int
    """Sequences whose KV was in host memory, or on its way there."""
    host_tokens: float
    """Tokens that these sequences gained: each of the L + 1 passes of a token counts as an equal part, even if the
    token is not finished yet."""


@dataclass(slots=True)
class _HostFollower:
    """Follows the sequences in host memory and the progress of their tokens under way."""

    layers: int
    """Number of layers in the model."""
    resident: set[int] = field(default_factory=set)
    """Sequences in host memory or on their way there."""
    passed: dict[int, dict[int, int]] = field(default_factory=dict)
    """Layers that each token under way has passed, by the plan that it began in and then by sequence."""

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
        """Take in a result; returns passes of sequences whose tokens are under way, or end with it."""
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


def device_slowness(steps: Iterable[DecodeStep], predictor: Predictor) -> float | None:
    """Median ratio of measured to predicted seconds of steps on the device alone; None without such steps."""
    ratios = [step.seconds / _alone(step, predictor) for step in steps if step.strategy == "device"]
    return median(ratios) if ratios else None


def host_rate(work: Iterable[HostWork]) -> float | None:
    """NC, sequences whose attention in a layer the CPU computes per second; None if it computed nothing."""
    done = list(work)
    seconds = sum(one.seconds for one in done)
    return sum(one.sequences for one in done) / seconds if seconds > 0 else None


def gains(
    steps: Sequence[DecodeStep], predictor: Predictor, *, slowness: float, rate: float | None
) -> dict[Strategy, GainFigures | None]:
    """Gains over the device alone, by hybrid strategy; None for a strategy without such steps.

    Args:
        slowness: by how much steps on the device alone take longer than predicted, in the same minutes.
        rate: NC, as it was in this run; None gives no gains.
    """
    found = {strategy: [step for step in steps if step.strategy == strategy] for strategy in HYBRID}
    return {
        strategy: None if rate is None or not some else _figures(some, predictor, slowness, rate)
        for strategy, some in found.items()
    }


def gains_of_run(
    record: RunRecord, alone: RunRecord, predictor: Predictor
) -> dict[Strategy, GainFigures | None] | None:
    """Gains of a run over that of the device alone in the same round; None if that run had no decodes alone."""
    slowness = device_slowness(decode_steps(alone, predictor.num_layers), predictor)
    if slowness is None:
        return None
    rate = host_rate(work for result in record.results for work in result.host_work)
    return gains(list(decode_steps(record, predictor.num_layers)), predictor, slowness=slowness, rate=rate)


def _figures(steps: Sequence[DecodeStep], predictor: Predictor, slowness: float, rate: float) -> GainFigures:
    """Means over time: a bound of each step is then a bound of the mean, too."""
    seconds = sum(step.seconds for step in steps)
    alone = sum((1 + step.host_tokens / step.decodes) * slowness * _alone(step, predictor) for step in steps)
    gain = alone / seconds - 1
    bound = sum(step.seconds * _bound(step, predictor, slowness, rate) for step in steps) / seconds
    return GainFigures(steps=len(steps), gain=gain, bound=bound, reached=gain / bound if bound > 0 else None)


def _alone(step: DecodeStep, predictor: Predictor) -> float:
    """Predicted seconds of the step's device rows alone."""
    return predictor.num_layers * sum(_layer(step, predictor))


def _layer(step: DecodeStep, predictor: Predictor) -> tuple[float, float]:
    """Tlin and Tgatt; what a step takes beside its layers is divided over them, so that the sum is the whole."""
    beside = predictor.step_overhead_seconds() / predictor.num_layers
    return predictor.linear_seconds(step.decodes) + beside, predictor.attention_seconds(step.keys)


def _bound(step: DecodeStep, predictor: Predictor, slowness: float, rate: float) -> float:
    """Largest possible gain of the step's strategy, for its number of host sequences."""
    linear, attention = (slowness * part for part in _layer(step, predictor))
    speed_ratio = rate * attention / step.decodes
    if step.strategy == "overlap":
        return overlap_gain_bound(
            linear,
            attention,
            speed_ratio=speed_ratio,
            decodes=step.decodes,
            host_sequences=step.host_sequences,
            layers=predictor.num_layers,
        )
    speedup = pipelining_speedup_bound(
        linear, attention, speed_ratio=speed_ratio, decodes=step.decodes, host_sequences=step.host_sequences
    )
    return speedup - 1
