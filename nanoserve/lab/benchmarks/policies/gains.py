"""Gains by attention on the CPU in steps without prompts, against the bounds of the closed forms
(APEX). No torch."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from nanoserve.costs.closed_forms import overlap_gain_bound, pipelining_speedup_bound
from nanoserve.record.run_record import RunRecord
from nanoserve.scheduler.optional import HostWork
from nanoserve.scheduler.predictor import Predictor
from nanoserve.scheduler.work import Strategy

# strategies of steps in which the CPU computes attention
HYBRID: tuple[Strategy, ...] = ("asymmetric", "overlap")
Gains = dict[Strategy, dict[str, float | None] | None]
"""Gains in the steps of each hybrid strategy that hold decodes on the device and no prompts; None
without such steps.

"steps" is their number, "gain" the tokens per second over those of the device alone with the same
rows, less 1, and "bound" the closed form's limit, both as means over time. "reached" is their
ratio, None where the bound is a loss."""


@dataclass(frozen=True, slots=True)
class DecodeStep:
    strategy: Strategy
    seconds: float  # time on the device, in seconds
    decodes: int
    keys: int  # of the device rows: keys that they read in one layer
    host_sequences: int  # sequences whose KV was in host memory, or on its way there
    host_tokens: float
    """Tokens that these sequences gained; each of the L + 1 passes of a token counts as an equal
    part of it."""


def decode_steps(record: RunRecord, layers: int) -> Iterator[DecodeStep]:
    """All steps of a run that hold device rows, but no prompts, of a model with this number of
    layers."""
    resident: set[int] = set()  # sequences in host memory or on their way there
    # for each token under way: the step that it began in, and layers passed
    passed: dict[int, tuple[int, int]] = {}
    for plan in record.plans:
        passes = 0
        for row in plan.rows:
            if row.host is None:
                resident.discard(row.sequence)
                continue
            resident.add(row.sequence)
            if plan.host.strategy == "overlap":
                passed[row.sequence] = plan.step, 0
                passes += 1
            elif row.tokens:
                passes += layers + 1
            elif row.sequence in passed:
                passes += layers - passed.pop(row.sequence)[1]
        for swap in plan.host.swaps:
            if swap.direction == "out":
                resident.add(swap.sequence)
            else:
                resident.discard(swap.sequence)
        resident.difference_update(plan.end)
        if (result := record.result_of.get(plan.step)) is None:
            continue
        for answer in result.answers:
            if answer.sequence in passed:
                passes += layers - passed.pop(answer.sequence)[1]
        for progress in result.host.cohorts:
            for sequence, (began, before) in passed.items():
                if began == progress.step:
                    passes += progress.layers - before
                    passed[sequence] = began, progress.layers
        device = [row for row in plan.rows if row.host is None]
        if device and all(len(row.tokens) == 1 for row in device):
            keys = sum(row.start + 1 for row in device)
            tokens = passes / (layers + 1)
            yield DecodeStep(
                plan.host.strategy, result.seconds, len(device), keys, len(resident), tokens
            )


def device_slowness(steps: Iterable[DecodeStep], predictor: Predictor) -> float | None:
    """Median ratio of measured to predicted seconds of steps on the device alone; None without such
    steps."""
    ratios = [step.seconds / _alone(step, predictor) for step in steps if step.strategy == "device"]
    if not ratios:
        return None
    return median(ratios)


def host_rate(work: Sequence[HostWork]) -> float | None:
    """NC, sequences whose attention in a layer the CPU computes per second; None if it computed
    nothing."""
    seconds = sum(one.seconds for one in work)
    if seconds == 0:
        return None
    return sum(one.sequences for one in work) / seconds


def gains(
    steps: Sequence[DecodeStep], predictor: Predictor, *, slowness: float, rate: float | None
) -> Gains:
    """Gains over the device alone, which takes longer than predicted by ``slowness`` in the same
    minutes. ``rate`` is NC in this run; None gives no gains. Means over time keep the bound of each
    step a bound of the mean."""
    found: Gains = dict.fromkeys(HYBRID)
    if rate is None:
        return found
    for strategy in HYBRID:
        some = [step for step in steps if step.strategy == strategy]
        if not some:
            continue
        seconds = sum(step.seconds for step in some)
        alone = sum(
            (1 + step.host_tokens / step.decodes) * slowness * _alone(step, predictor)
            for step in some
        )
        gain = alone / seconds - 1
        bound = (
            sum(step.seconds * _bound(step, predictor, slowness, rate) for step in some) / seconds
        )
        figures: dict[str, float | None] = {
            "steps": len(some),
            "gain": gain,
            "bound": bound,
            "reached": None,
        }
        if bound > 0:
            figures["reached"] = gain / bound
        found[strategy] = figures
    return found


def decode_only(steps: Sequence[DecodeStep]) -> dict[str, float] | None:
    """Tokens per second of the steps without prompts, device's and host's, and host sequences for
    each decode, both as means over time; None without such steps."""
    if not (seconds := sum(step.seconds for step in steps)):
        return None
    return {
        "tokens_per_s": sum(step.decodes + step.host_tokens for step in steps) / seconds,
        "residents": sum(step.seconds * step.host_sequences / step.decodes for step in steps)
        / seconds,
    }


def gains_of_run(record: RunRecord, alone: RunRecord, predictor: Predictor) -> Gains | None:
    """Gains of a run over that of the device alone in the same round; None if that run had no
    decodes alone."""
    slowness = device_slowness(decode_steps(alone, predictor.num_layers), predictor)
    if slowness is None:
        return None
    rate = host_rate([work for result in record.results for work in result.host.work])
    return gains(
        list(decode_steps(record, predictor.num_layers)), predictor, slowness=slowness, rate=rate
    )


def _alone(step: DecodeStep, predictor: Predictor) -> float:
    return predictor.num_layers * sum(_layer(step, predictor))


def _layer(step: DecodeStep, predictor: Predictor) -> tuple[float, float, float]:
    """Tlin, Tgatt, and what a step takes beside its layers, divided over them, so that the sum is
    the whole."""
    beside = predictor.step_overhead_seconds(step.decodes) / predictor.num_layers
    return predictor.linear_seconds(step.decodes), predictor.attention_seconds(step.keys), beside


def _bound(step: DecodeStep, predictor: Predictor, slowness: float, rate: float) -> float:
    """Largest possible gain of the step's strategy, for its number of host sequences."""
    linear, attention, beside = (slowness * part for part in _layer(step, predictor))
    sizes = {"decodes": step.decodes, "host_sequences": step.host_sequences, "beside": beside}
    speed_ratio = rate * attention / step.decodes
    if step.strategy == "overlap":
        layers = predictor.num_layers
        return overlap_gain_bound(
            linear, attention, speed_ratio=speed_ratio, layers=layers, **sizes
        )
    return pipelining_speedup_bound(linear, attention, speed_ratio=speed_ratio, **sizes) - 1
