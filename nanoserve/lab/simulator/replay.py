"""Recording a run, and running it again in virtual time: the same arrivals and step times must give
the same plans."""

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from math import ceil
from typing import NamedTuple

from nanoserve.engine.engine import Engine
from nanoserve.lab.simulator.executor import SimulatedExecutor
from nanoserve.lab.simulator.fleet import drive
from nanoserve.record.engine_observer import EngineObserver
from nanoserve.record.forecasts import learn_from_results
from nanoserve.record.recorder import recorder_of
from nanoserve.record.run_record import RunRecord
from nanoserve.request import Request
from nanoserve.scheduler.plan import Executor, Row, StepPlan, StepResult
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.scheduler.work import Chunk, StepWork

_ABOUT = 1.25  # numbers of tokens within this factor are about the same
_TICKS_PER_SECOND = 2**20  # sums and differences of whole ticks are exact in floating point


class MeasuredStep(NamedTuple):
    """Times of one plan, in seconds."""

    work: StepWork
    stages: tuple[float, ...]
    """Time that each stage computed."""
    # time that the activations took to the next stage, for each stage but the last
    sends: tuple[float, ...]
    # time from the moment at which the plan could be made until the first stage had its inputs
    host: float


class MeasuredStages:
    """StepTimes, asked about one plan after another: each takes what the plan in its place took in
    the real run.

    Where arrivals fall between other plans than they did in the real run, the scheduler makes other
    micro-batches. Such a one takes what the nearest plan, in their order, took that had about as
    many tokens: what a machine does beside its steps comes and goes with time. Without any steps
    there is one stage.

    The steps are in the order of the plans. A swap takes a mean time per token, a change to this
    layout one from plan to answer, until all stages are done.
    """

    def __init__(
        self,
        steps: Sequence[MeasuredStep],
        *,
        swap_token_seconds: float = 0.0,
        reload_seconds: float = 0.0,
    ) -> None:
        self._swap_token_seconds, self._reload_seconds = swap_token_seconds, reload_seconds
        self.num_stages = 1  # stages of the pipeline
        if steps:
            self.num_stages = len(steps[0].stages)
        self.others = 0  # micro-batches that were not those of the real run
        self._steps = steps
        self._places = count()
        self._step: MeasuredStep  # what is asked about

    def work(
        self,
        decode_contexts: Sequence[int] = (),
        chunks: Iterable[Chunk] = (),
        sampled: int | None = None,
    ) -> StepWork:
        """Sum the next micro-batch up; what is asked from here on is about it."""
        work = StepWork.of(decode_contexts, chunks, sampled)
        place = min(next(self._places), len(self._steps) - 1)
        self._step = self._steps[place]
        if self._step.work != work:
            self.others += 1
            self._step = self._nearest(work.tokens, place)
        return work

    def _nearest(self, tokens: int, place: int) -> MeasuredStep:
        """Return the nearest step in order with about ``tokens`` tokens; if none has, the closest
        number counts."""
        factors = [_factor(step.work.tokens, tokens) for step in self._steps]
        accepted = max(_ABOUT, min(factors))
        _, nearest = min(
            (abs(other - place), other)
            for other, factor in enumerate(factors)
            if factor <= accepted
        )
        return self._steps[nearest]

    def stage_seconds(self, work: StepWork, stage: int) -> float:
        return self._step.stages[stage]

    def send_seconds(self, work: StepWork, stage: int) -> float:
        return self._step.sends[stage]

    def host_seconds(self, work: StepWork) -> float:
        return self._step.host

    def swap_seconds(self, tokens: int, stage: int) -> float:
        return self._swap_token_seconds * tokens

    def reload_seconds(self, stage: int) -> float:
        return self._reload_seconds


def _factor(tokens: int, others: int) -> float:
    low, high = sorted((tokens, others))
    return (high + 1) / (low + 1)


class SteppedClock(EngineObserver):
    """An engine's clock, which advances only while the engine waits for results: that makes a
    replay exact."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._now = self._later_than(0.0)

    def now(self) -> float:
        return self._now

    def on_results(self, results: Sequence[StepResult]) -> None:
        self._now = self._later_than(self._now)

    def _later_than(self, moment: float) -> float:
        # Rounded up: a request that is due on the executor's clock is due on this one. No two
        # moments are equal, or a replay could not know whether a result or an arrival came first.
        ticks = ceil(self._executor.now() * _TICKS_PER_SECOND)
        return max(moment + 1 / _TICKS_PER_SECOND, ticks / _TICKS_PER_SECOND)


def record_run(engine: Engine, requests: Iterable[Request]) -> RunRecord:
    """Run requests to their ends on an engine whose clock is stepped, and return the record.

    The results of its executor come in the order of the plans; the requests in that of their
    arrivals, on its clock.
    """
    learn_from_results(engine.scheduler)
    record = RunRecord(engine.executor.max_in_flight)
    clock = SteppedClock(engine.executor)
    engine.now = clock.now
    engine.observers.insert(0, clock)  # other observers see the time to which results advance it
    recorder = recorder_of(engine)
    recorder.add(record)
    drive(engine, requests)
    recorder.finish()
    return record


def _step_times(record: RunRecord) -> MeasuredStages:
    """One stage that takes for each plan what it took then, in the order of the plans.

    A pipeline of any depth is replayed as one stage with as many plans in flight: results come in
    the order of the plans, so each keeps the stage busy from the result before it, or from its own
    submission, to its own result.
    """
    steps, free = [], 0.0
    for plan in record.plans:
        if plan.ends:
            known = record.known[plan.step]
            steps.append(
                MeasuredStep(
                    StepWork(), (known - max(free, record.planned[plan.step].clock),), (), 0.0
                )
            )
            free = known
    return MeasuredStages(steps)


class _ReplayingExecutor(SimulatedExecutor):
    def __init__(self, record: RunRecord, *, check: Callable[[StepPlan], None]) -> None:
        super().__init__(
            _step_times(record), max_in_flight=record.max_in_flight, answer=lambda plan: ()
        )
        self._collected = record.collected
        self._check = check
        for moment, results in record.collected.items():
            if all(result.step is None for result in results):  # else a plan ends there
                self._know(moment, StepResult(None))

    def submit(self, plan: StepPlan) -> None:
        self._check(plan)
        if plan.ends:
            self._run(plan)  # even a transition: only its time is replayed

    def _work(self, rows: Iterable[Row]) -> StepWork:
        return self._times.work()  # what the plan took is recorded

    def collect(self, until: float | None) -> list[StepResult]:
        if not super().collect(until):
            return []
        return list(self._collected[self._now])


def replay(
    record: RunRecord, make_scheduler: Callable[[], Scheduler], *, vocab_size: int
) -> list[StepPlan]:
    """Run a record's arrivals through a new engine in virtual time, every step taking what it took.

    In the record no request was aborted and no step failed; the scheduler is made as that of the
    run was. The plans are the record's if there are as many. Raises ValueError at the first plan
    that is another than the record's: scheduling depends on something else.
    """
    replayed: list[StepPlan] = []

    def check(plan: StepPlan) -> None:
        if [plan] != record.plans[len(replayed) : len(replayed) + 1]:
            raise ValueError(f"step {plan.step} of the replay is not that of the record")
        replayed.append(plan)

    scheduler = make_scheduler()
    learn_from_results(scheduler)
    executor = _ReplayingExecutor(record, check=check)
    drive(Engine(scheduler, executor, vocab_size=vocab_size), record.arrivals)
    return replayed
