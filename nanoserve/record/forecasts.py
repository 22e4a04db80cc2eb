"""Forecasts: what was predicted of each plan, and what predictors learn when its result comes.

Only results are learned from, in their order, so the same run decides the same.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from nanoserve.record.events import Corrected, Event, Forecast
from nanoserve.scheduler.load import Decision, Load
from nanoserve.scheduler.optional import Cohort, HostRow
from nanoserve.scheduler.plan import Row, StepPlan, StepResult
from nanoserve.scheduler.predictor import LearningPredictor, Predictor
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.scheduler.work import HostBatch, StepFeatures, work_of

if TYPE_CHECKING:  # most engines have no cohorts
    from nanoserve.scheduler.cpu_attention.cohorts import HostCohorts

_MANY, _ONE_IN = 256, 17
"""The predictor learns from the first _MANY results, then from one in _ONE_IN, to save time on the
CPU. Every second or fourth would always pick the same one of micro-batches that take turns."""


def learn_from_results(scheduler: Scheduler) -> None:
    """Have a scheduler's predictors learn from its results, if there are any that do and they are
    not learning yet."""
    if any(isinstance(observer, Forecasts) for observer in scheduler.observers):
        return
    if not any(isinstance(predictor, LearningPredictor) for predictor in scheduler.predictors):
        return
    cohorts = None
    if scheduler.extensions.cpu_attention is not None:
        cohorts = scheduler.extensions.cpu_attention.cohorts
    scheduler.observers.append(Forecasts(scheduler.predictors, cohorts=cohorts))


class _PlanInFlight(NamedTuple):
    """A plan whose result is learned from, or shown, or both."""

    work: StepFeatures
    learner: LearningPredictor | None
    forecast: Forecast | None


class Forecasts:
    """A SchedulerObserver with a predictor for each layout; only predictors that learn get
    forecasts.

    ``emit``, which a recorder sets, is called with each forecast when its step is planned, and
    again when it was measured and learned from; and with the predictor's corrections when they may
    have changed. Without it nothing is predicted here: a prediction takes as long as what is
    learned from it. ``cohorts`` are those of the scheduler, if host sequences decode.
    """

    def __init__(
        self,
        predictors: Sequence[Predictor],
        emit: Callable[[Event], object] | None = None,
        cohorts: "HostCohorts | None" = None,
    ) -> None:
        self._learning = {
            layout: predictor
            for layout, predictor in enumerate(predictors)
            if isinstance(predictor, LearningPredictor)
        }
        self._cohorts = cohorts
        # whether every plan is predicted, as a trace wants it; else only those learned from
        self.of_all = False
        self._in_flight: dict[int, _PlanInFlight] = {}
        self._newest: LearningPredictor | None = None  # predictor of the newest plan
        self.emit = emit
        self._plans, self._host_results = _lessons(), _lessons()

    def on_plan(self, plan: StepPlan, load: Load | None, decision: Decision) -> None:
        """Predict a plan with rows; the cohorts do not follow it yet."""
        predictor = self._learning.get(plan.layouts.current)
        if predictor is None or not plan.rows:
            return
        if predictor is not self._newest:
            self._newest = predictor
            self._emit_corrections(predictor)
        is_lesson = next(self._plans)
        if not is_lesson and not self.of_all:
            return
        work = features_of(plan, self._cohorts)
        learner = None
        if is_lesson:
            learner = predictor
        forecast = None
        if self.emit is not None:
            forecast = Forecast(plan.step, decision, work, predictor.step_seconds(work))
            self.emit(forecast)
        self._in_flight[plan.step] = _PlanInFlight(work, learner, forecast)

    def on_result(self, result: StepResult) -> None:
        """Learn from a result; the cohorts do not advance by it yet."""
        if self._newest is not None and result.host.work and next(self._host_results):
            # An asymmetric step attends for the same sequences in layer after layer: together they
            # are one number.
            by_size: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
            for one in result.host.work:
                by_size[one.sequences, one.context_tokens].append(one.seconds)
            for (sequences, context_tokens), seconds in by_size.items():
                self._newest.observe_host(sequences, context_tokens, median(seconds))
            self._emit_corrections(self._newest)
        if result.step not in self._in_flight:
            return
        planned = self._in_flight.pop(result.step)
        if result.host.lost is not None:
            return  # what it waited for never came
        work = planned.work
        if work.strategy == "overlap":
            joined = _joined(work, result, result.step, self._cohorts)
            work = msgspec.structs.replace(work, host=joined)
        if planned.learner is not None:
            planned.learner.observe(work, result.seconds)
            self._emit_corrections(planned.learner)
        if self.emit is not None and planned.forecast is not None:
            self.emit(replace(planned.forecast, work=work, measured=result.seconds))

    def on_reset(self) -> None:
        self._in_flight.clear()

    def _emit_corrections(self, predictor: LearningPredictor) -> None:
        if self.emit is not None:
            self.emit(Corrected(predictor.corrections))


def _lessons() -> Iterator[bool]:
    return (number <= _MANY or number % _ONE_IN == 0 for number in count(1))


def features_of(plan: StepPlan, cohorts: "HostCohorts | None" = None) -> StepFeatures:
    """Sum a plan up, as if all cohorts under way, before they follow it, join an overlapped
    step."""
    if cohorts is None:
        return StepFeatures(strategy=plan.host.strategy, device=work_of(plan.rows))
    device = work_of(row for row in plan.rows if row.host is None)
    on_host = [row for row in plan.rows if row.host is not None]
    if plan.host.strategy == "overlap":
        batches = [_passing(cohort) for cohort in cohorts.under_way.values()]
        if on_host:
            batches.insert(0, _batch(on_host, 0))
        return StepFeatures(strategy="overlap", device=device, host=tuple(batches))
    first = _batches([row for row in on_host if row.host == HostRow(0)], cohorts)
    second = _batches([row for row in on_host if row.host == HostRow(1)], cohorts)
    return StepFeatures(strategy=plan.host.strategy, device=device, host=first, host_second=second)


def _batches(rows: Iterable[Row], cohorts: "HostCohorts") -> tuple[HostBatch, ...]:
    """Rows of an asymmetric step, by how far they are; a row of no tokens is under way, and leaves
    its cohort."""
    equally_far: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows:
        attended = 0
        if not row.tokens:
            attended = cohorts.layers_behind(row.sequence) + 1
        equally_far[attended].append(row)
    return tuple(_batch(several, attended) for attended, several in equally_far.items())


def _batch(rows: Sequence[Row], attended: int) -> HostBatch:
    keys = sum([row.start + len(row.tokens) for row in rows])
    return HostBatch(len(rows), keys, attended)


def _passing(cohort: Cohort) -> HostBatch:
    """A cohort that joins a step: the CPU has its attention in the layer that it is at."""
    return HostBatch(cohort.sequences, cohort.context_tokens, cohort.layers + 1)


def _joined(
    work: StepFeatures, result: StepResult, step: int, cohorts: "HostCohorts | None"
) -> tuple[HostBatch, ...]:
    """Host batches that took part in an overlapped step: they began in it, or their cohort advanced
    or finished."""
    assert cohorts is not None, "only host sequences make a step overlap"
    joined = [batch for batch in work.host if batch.attended == 0]
    layers = {progress.step: progress.layers for progress in result.host.cohorts}
    for begun, cohort in cohorts.under_way.items():
        has_advanced = begun not in layers or layers[begun] > cohort.layers
        if begun < step and has_advanced:
            joined.append(_passing(cohort))
    return tuple(joined)
