"""ObservedExecutor: a simulated pipeline that tells, as worker processes do, what each of its
stages did when."""

from collections.abc import Callable, Sequence

from nanoserve.lab.simulator.executor import DUMMY_TOKEN, SimulatedExecutor
from nanoserve.lab.simulator.pipeline import DECOUPLED, Passage, Runtime, StepTimes
from nanoserve.record.times import StageTimes
from nanoserve.scheduler.plan import Answer, StepPlan, StepResult
from nanoserve.scheduler.work import StepWork


def dummy_answers(plan: StepPlan) -> tuple[Answer, ...]:
    """A token that means nothing for every row that is sampled."""
    return tuple(Answer(row.sequence, (DUMMY_TOKEN,)) for row in plan.rows if row.sample)


class UntoldExecutor(SimulatedExecutor):
    """Says what it did with its results alone, as an engine's own process does."""

    take_times = None  # type: ignore[assignment]


class ObservedExecutor(SimulatedExecutor):
    """In virtual time, which begins at ``began``; all workers prepare a plan at the same time, one
    after the other.

    Args:
        times, runtime, answer: as SimulatedExecutor takes them; rows are answered with tokens that
            mean nothing.
        began: what the clock shows at first, as real ones show something, too.
    """

    def __init__(
        self,
        times: StepTimes,
        *,
        runtime: Runtime = DECOUPLED,
        began: float = 1000.0,
        answer: Callable[[StepPlan], tuple[Answer, ...]] = dummy_answers,
    ) -> None:
        super().__init__(times, runtime=runtime, answer=answer)
        self._began = began
        self._free = [0.0] * times.num_stages
        self._prepared = 0.0
        self._step_times = times

    def _tell(self, plan: StepPlan, work: StepWork, passages: Sequence[Passage]) -> None:
        arrived = now = self._now
        self._prepared = max(self._prepared, now) + self._step_times.host_seconds(work)
        for stage, passage in enumerate(passages):
            began = max(self._free[stage], now)
            moments = (now, self._prepared, began, max(arrived, began), passage.end, passage.end)
            times = [self._began + moment for moment in moments]
            self._told.append(StageTimes(plan.step, stage, work.tokens, *times))
            self._free[stage] = passage.end
            last = stage == len(passages) - 1
            arrived = passage.end + (0.0 if last else self._step_times.send_seconds(work, stage))

    def now(self) -> float:
        return self._began + super().now()

    def collect(self, until: float | None) -> list[StepResult]:
        return super().collect(None if until is None else until - self._began)
