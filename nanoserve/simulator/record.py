"""Recording a run, and replaying it in virtual time: the same arrivals and step times must give the same plans."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from nanoserve.costs.work import Chunk, StepWork
from nanoserve.engine import Engine
from nanoserve.request import Request
from nanoserve.scheduler.plan import Executor, Row, StepPlan, StepResult
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.simulator.driving import OnUpdates, drive
from nanoserve.simulator.executor import SimulatedExecutor

_TICKS_PER_SECOND = 2**20
"""Sums and differences of whole ticks are exact in floating point."""


@dataclass(slots=True)
class Record:
    """What an Engine consumed and what it answered, in order."""

    max_in_flight: int
    """Plans that the executor takes at a time."""
    arrivals: list[Request] = field(default_factory=list)
    """Requests, each with the time at which the engine took it in as its arrival time."""
    plans: list[StepPlan] = field(default_factory=list)
    """All plans."""
    submitted: dict[int, float] = field(default_factory=dict)
    """When each was, by step, as if making it took no time: when the engine last came from waiting."""
    handed_over: dict[int, float] = field(default_factory=dict)
    """When each really was made, and handed to the executor, by step."""
    results: dict[int, StepResult] = field(default_factory=dict)
    """By step. That workers died stands at the last of the plans that were lost with them, and nothing at those before
    it. Nothing stands at plans that only move KV."""
    known: dict[int, float] = field(default_factory=dict)
    """When each result was, by step; of a plan that was lost, when that was known."""
    collected: dict[float, list[StepResult]] = field(default_factory=dict)
    """Everything that became known, in order: all that did at one moment together."""


def ends(plan: StepPlan) -> bool:
    """Whether the plan's step ends; one of nothing but swaps is answered by theirs."""
    return bool(plan.rows) or plan.transition is not None or plan.strategy == "overlap"


class RecordingExecutor:
    """Passes everything on to an executor and notes it down.

    Its clock stands still but while results are waited for, like a virtual one: what the engine does between two of
    them, it does at one moment. That is what makes a replay exact.
    """

    def __init__(self, executor: Executor) -> None:
        self.max_in_flight = executor.max_in_flight
        self.record = Record(self.max_in_flight)
        self.feeds_tokens = executor.feeds_tokens
        self._executor = executor
        self._now = 0.0
        self._tick()

    def _tick(self) -> None:
        # Upwards: a request whose time has come on the executor's clock has come on this one, too. And no two moments
        # are the same, or a replay could not know which of a result and an arrival was first.
        ticks = ceil(self._executor.now() * _TICKS_PER_SECOND)
        self._now = max(self._now + 1 / _TICKS_PER_SECOND, ticks / _TICKS_PER_SECOND)

    def submit(self, plan: StepPlan) -> None:
        """Note the plan and pass it on."""
        self.record.plans.append(plan)
        self.record.submitted[plan.step] = self._now
        self.record.handed_over[plan.step] = self._executor.now()
        self._executor.submit(plan)

    def collect(self, until: float | None) -> list[StepResult]:
        """Wait with the executor and note what it says."""
        results = self._executor.collect(until)
        self._tick()
        if results:
            self.record.collected[self._now] = results
        for result in results:
            self._note(result)
        return results

    def _note(self, result: StepResult) -> None:
        record, step = self.record, result.step
        if result.lost is not None:
            lost = [plan.step for plan in record.plans if ends(plan) and plan.step not in record.known]
            record.known |= dict.fromkeys(lost, self._now)
            step = lost[-1] if lost else None
        if step is None:  # swaps are done, or workers died while nothing was in flight
            return
        record.results[step] = result
        record.known[step] = self._now

    def now(self) -> float:
        """The executor's time when it last was asked for results."""
        return self._now

    def close(self) -> None:
        """Close the executor."""
        self._executor.close()


class _RecordedTimes:
    """StepTimes of one stage that takes for each plan what it took then, in the order of the plans.

    A pipeline of any depth is replayed as one stage with as many plans in flight: results come in the order of the
    plans, so each keeps the stage busy from the result before it, or from its own submission, to its own result.
    """

    num_stages = 1

    def __init__(self, record: Record) -> None:
        self._durations = self._of(record)

    @staticmethod
    def _of(record: Record) -> Iterator[float]:
        free = 0.0
        for plan in record.plans:
            if not ends(plan):
                continue
            known = record.known[plan.step]
            yield known - max(free, record.submitted[plan.step])
            free = known

    def work(
        self, decode_contexts: Sequence[int] = (), chunks: Iterable[Chunk] = (), sampled: int | None = None
    ) -> StepWork:
        return StepWork.of()  # nobody asks what it was; rows of no tokens are no work that could be summed up

    def stage_seconds(self, work: StepWork, stage: int) -> float:
        return next(self._durations)

    def send_seconds(self, work: StepWork, stage: int) -> float:
        return 0.0

    def host_seconds(self, work: StepWork) -> float:
        return 0.0


class _ReplayingExecutor(SimulatedExecutor):
    """Says what the record says, when it was known."""

    def __init__(self, record: Record, *, check: Callable[[StepPlan], None]) -> None:
        super().__init__(_RecordedTimes(record), max_in_flight=record.max_in_flight, answer=lambda plan: ())
        self._collected = record.collected
        self._check = check
        for moment, results in record.collected.items():
            if all(result.step is None for result in results):  # else a plan ends there
                self._know(moment, StepResult(None))

    def submit(self, plan: StepPlan) -> None:
        self._check(plan)
        if ends(plan):
            super().submit(plan)

    def _work(self, rows: Iterable[Row]) -> StepWork:
        return StepWork()  # what it took is recorded

    def collect(self, until: float | None) -> list[StepResult]:
        return self._collected[self._now] if super().collect(until) else []


def _ignore(now: float, updates: object) -> None:
    """Nobody looks at the tokens."""


def record_run(engine: Engine, requests: Iterable[Request], on_updates: OnUpdates = _ignore) -> Record:
    """Run requests to their ends on an engine, whose executor is wrapped, and return the record.

    Args:
        engine: on any executor whose results come in the order of its plans, a pipeline's among them.
        requests: in order of arrival, on the executor's clock.
        on_updates: is told what sequences gained, and when.
    """
    recorder = RecordingExecutor(engine.executor)
    engine.executor = recorder

    def admitted(now: float, request: Request) -> None:
        recorder.record.arrivals.append(replace(request, arrival_time=now))

    drive(engine, requests, on_updates, admitted)
    return recorder.record


def replay(record: Record, make_scheduler: Callable[[], Scheduler], *, vocab_size: int) -> list[StepPlan]:
    """Run a record's arrivals through a new engine in virtual time, every step taking what it took.

    Args:
        record: of a run in which no request was aborted and no step failed.
        make_scheduler: a new scheduler, made as that of the run was.
        vocab_size: of the run.

    Returns:
        the plans, which are the record's if there are as many.

    Raises:
        ValueError: at the first plan that is another than the record's: scheduling depends on something else.
    """
    replayed: list[StepPlan] = []

    def check(plan: StepPlan) -> None:
        if [plan] != record.plans[len(replayed) : len(replayed) + 1]:
            raise ValueError(f"step {plan.step} of the replay is not that of the record")
        replayed.append(plan)

    scheduler = make_scheduler()
    executor = _ReplayingExecutor(record, check=check)
    drive(Engine(scheduler, executor, vocab_size=vocab_size), record.arrivals, _ignore)
    return replayed
