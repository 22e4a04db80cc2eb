"""What steps were predicted to take and why they were decided on, and the CPU's part of them, in a trace. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count

from nanoserve.measures.chrome_trace import ChromeTraceFile, Track
from nanoserve.record.forecasts import Forecast
from nanoserve.scheduler.load import Alternative
from nanoserve.scheduler.plan import HostWork, StepPlan, StepResult

_MILLI = 1e3


def facts_of(plan: StepPlan, result: StepResult, forecast: Forecast | None) -> dict[str, object]:
    """Of a step that has ended, for its bar: how it was run, what it took, and what was thought before.

    Cohorts are host sequences that began a token together, named by the step in which they did.
    """
    facts: dict[str, object] = {"strategy": plan.strategy, "measured_ms": round(result.seconds * _MILLI, 3)}
    if result.cohorts:
        facts["layers_of_cohorts"] = {f"step {cohort.step}": cohort.layers for cohort in result.cohorts}
    if forecast is None:
        return facts
    decision = forecast.decision
    facts["predicted_ms"] = round(forecast.predicted * _MILLI, 3)
    facts["decided"] = {
        "prefill_tokens": decision.prefill_tokens,
        "decodes": decision.decodes,
        "host_decodes": decision.host_decodes,
        "swap_out": decision.swap_out,
        "swap_in": decision.swap_in,
        "park": decision.park,
    }
    facts["alternatives"] = {one.strategy: _in_words(one) for one in decision.alternatives}
    return facts


def _in_words(alternative: Alternative) -> str:
    return f"{alternative.seconds * _MILLI:.3f} ms, {alternative.per_second:.4g} sequences/s"


@dataclass(slots=True)
class _Cohort:
    """Host sequences that began a token in this step, in a track since then; some of them still wait for it."""

    step: int
    track: int
    since: float
    size: int
    waiting: set[int]


class HostTrace:
    """Writes what the CPU attends for, how long cohorts are under way, and by how much predictions are corrected.

    An executor says how long the CPU took and not when. The CPU takes one piece of work after the other, so they are
    drawn one behind the other, the last one up to the moment at which the executor told of it.

    Args:
        file: to write into; it is not closed.
        began: the moment that becomes 0, on the clock of all others.
        scheduler, workers: what the tracks stand under.
    """

    def __init__(self, file: ChromeTraceFile, began: float, *, scheduler: str, workers: str) -> None:
        self._file, self._began = file, began
        self._scheduler, self._processor = scheduler, Track(workers, "attention on the CPU")
        self._free = began
        self._cohorts: list[_Cohort] = []
        self._corrections: Mapping[str, float] = {}

    def on_submit(self, plan: StepPlan, now: float) -> None:
        """Host sequences that begin a token in an overlapped step are a cohort."""
        beginning = {row.sequence for row in plan.rows if row.tier == "host"}
        if plan.strategy == "overlap" and beginning:
            taken = {cohort.track for cohort in self._cohorts}
            track = next(track for track in count() if track not in taken)
            self._cohorts.append(_Cohort(plan.step, track, now, len(beginning), beginning))

    def on_result(self, result: StepResult, now: float) -> None:
        """Something became known."""
        self._write_works(result.host_work, now)
        if result.host_lost is not None:
            self._file.bar(self._processor, result.host_lost, now - self._began, now - self._began)
        answered = {answer.sequence for answer in result.answers}
        all_lost = result.lost is not None or result.host_lost is not None
        for cohort in list(self._cohorts):
            cohort.waiting -= answered
            if all_lost or not cohort.waiting:
                self._end(cohort, now)

    def on_corrections(self, corrections: Mapping[str, float], now: float) -> None:
        """A step that was predicted has ended; these factors have been learned from those before it."""
        if corrections != self._corrections:
            self._corrections = corrections
            factors = {name: round(factor, 3) for name, factor in corrections.items()}
            self._file.counter(self._scheduler, "corrections of the prediction", now - self._began, factors)

    def forget_plans(self) -> None:
        """Nothing that is in flight will be answered."""
        self._cohorts.clear()

    def _end(self, cohort: "_Cohort", now: float) -> None:
        """All of it is answered, or lost."""
        self._cohorts.remove(cohort)
        place, span = Track(self._scheduler, f"cohort {cohort.track}"), (cohort.since - self._began, now - self._began)
        self._file.bar(place, f"{cohort.size} host sequences", *span, {"step": cohort.step})

    def _write_works(self, works: tuple[HostWork, ...], now: float) -> None:
        start = max(self._free, now - sum(work.seconds for work in works))
        for work in works:
            end = min(start + work.seconds, now)
            arguments = {
                "sequences": work.sequences,
                "keys": work.context_tokens,
                "ms": round(work.seconds * _MILLI, 3),
            }
            name = f"{work.sequences} sequences, {work.context_tokens} keys"
            self._file.bar(self._processor, name, start - self._began, end - self._began, arguments)
            start = end
        if works:
            self._free = start
