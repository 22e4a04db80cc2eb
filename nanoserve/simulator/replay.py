"""Recording a run, and replaying it in virtual time: the same arrivals and step times must give the same plans."""

from collections.abc import Callable, Iterable

from nanoserve.costs.work import StepWork
from nanoserve.engine import Engine
from nanoserve.record.run_record import RunRecord
from nanoserve.request import Request
from nanoserve.scheduler.plan import Row, StepPlan, StepResult
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.simulator.executor import SimulatedExecutor
from nanoserve.simulator.fleet import drive
from nanoserve.simulator.measured_stages import MeasuredStages, MeasuredStep


def record_run(engine: Engine, requests: Iterable[Request]) -> RunRecord:
    """Run requests to their ends on an engine whose clock is stepped, and return the record.

    Args:
        engine: on any executor whose results come in the order of its plans, a pipeline's among them.
        requests: in order of arrival, on the executor's clock.
    """
    record = RunRecord(engine.executor.max_in_flight)
    engine.recorder.add(record)
    engine.recorder.step_clock()
    drive(engine, requests)
    engine.recorder.finish()
    return record


def _step_times(record: RunRecord) -> MeasuredStages:
    """One stage that takes for each plan what it took then, in the order of the plans.

    A pipeline of any depth is replayed as one stage with as many plans in flight: results come in the order of the
    plans, so each keeps the stage busy from the result before it, or from its own submission, to its own result.
    """
    steps, free = [], 0.0
    for plan in record.plans:
        if plan.ends:
            known = record.known[plan.step]
            steps.append(MeasuredStep(StepWork(), (known - max(free, record.planned[plan.step].clock),), (), 0.0))
            free = known
    return MeasuredStages(steps)


class _ReplayingExecutor(SimulatedExecutor):
    """Says what the record says, when it was known."""

    def __init__(self, record: RunRecord, *, check: Callable[[StepPlan], None]) -> None:
        super().__init__(_step_times(record), max_in_flight=record.max_in_flight, answer=lambda plan: ())
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
        return list(self._collected[self._now]) if super().collect(until) else []


def replay(record: RunRecord, make_scheduler: Callable[[], Scheduler], *, vocab_size: int) -> list[StepPlan]:
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
    drive(Engine(scheduler, executor, vocab_size=vocab_size), record.arrivals)
    return replayed
