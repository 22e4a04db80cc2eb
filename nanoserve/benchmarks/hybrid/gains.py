"""What attention on the CPU adds without prompts, against the most that the closed forms allow (APEX). No torch."""

from collections.abc import Iterable, Sequence
from statistics import median

import msgspec

from nanoserve.benchmarks.hybrid.steps import DecodeStep
from nanoserve.costs.closed_forms import overlap_gain_bound, pipelining_speedup_bound
from nanoserve.costs.predictor import Predictor
from nanoserve.scheduler.plan import HostWork


class GainFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Of the steps of one strategy that hold decodes on the device and no prompts."""

    steps: int
    """How many."""
    gain: float
    """Tokens per second over those of the device alone with the same rows, less 1; the mean over time."""
    bound: float
    """The most that is possible, by the closed form; the mean over time."""
    reached: float | None
    """The gain over the bound; None where the bound is a loss."""


class Gains(msgspec.Struct, frozen=True, kw_only=True):
    """By strategy; None where there are no such steps."""

    asymmetric: GainFigures | None
    overlap: GainFigures | None


def device_slowness(steps: Iterable[DecodeStep], predictor: Predictor) -> float | None:
    """What steps on the device alone take over what is predicted of them, in the median; None of no steps."""
    ratios = [step.seconds / _alone(step, predictor) for step in steps if step.strategy == "device"]
    return median(ratios) if ratios else None


def host_rate(work: Iterable[HostWork]) -> float | None:
    """NC, sequences whose attention in a layer the CPU computes per second; None if it computed nothing."""
    done = list(work)
    seconds = sum(one.seconds for one in done)
    return sum(one.sequences for one in done) / seconds if seconds > 0 else None


def gains(steps: Sequence[DecodeStep], predictor: Predictor, *, slowness: float, rate: float | None) -> Gains:
    """Hold the steps of a run against the device alone, and against the bounds.

    Args:
        slowness: by how much steps on the device alone take longer than predicted, in the same minutes.
        rate: NC, as it was in this run; without one there is nothing to hold.
    """

    def figures(strategy: str) -> GainFigures | None:
        found = [step for step in steps if step.strategy == strategy]
        return None if rate is None or not found else _figures(found, predictor, slowness, rate)

    return Gains(asymmetric=figures("asymmetric"), overlap=figures("overlap"))


def _figures(steps: Sequence[DecodeStep], predictor: Predictor, slowness: float, rate: float) -> GainFigures:
    """Means over time: what holds for each step then holds for the means too."""
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
    """Of the step's strategy, for as many host sequences as there were."""
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
