"""ObservedExecutor: a simulated pipeline that tells, as worker processes do, what each of its stages did when."""

from collections.abc import Callable, Sequence

from nanoserve.costs.work import StepWork
from nanoserve.runtime.trace.stage_times import StageTimes
from nanoserve.scheduler.plan import Answer, StepPlan, StepResult
from nanoserve.simulator.executor import DUMMY_TOKEN, SimulatedExecutor
from nanoserve.simulator.pipeline import DECOUPLED, Passage, Runtime, StepTimes


def dummy_answers(plan: StepPlan) -> tuple[Answer, ...]:
    """A token that means nothing for every row that is sampled."""
    return tuple(Answer(row.sequence, (DUMMY_TOKEN,)) for row in plan.rows if row.sample)


class ObservedExecutor(SimulatedExecutor):
    """In virtual time, which begins at ``began``; all workers prepare a plan at the same time, one after the other.

    Args:
        times, runtime, answer: as SimulatedExecutor takes them; rows are answered with tokens that mean nothing.
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
        super().__init__(times, runtime=runtime, answer=answer, observers=[self])
        self._began = began
        self._taken: list[StageTimes] = []
        self._free = [0.0] * times.num_stages
        self._prepared = 0.0
        self._step_times = times

    def on_step(self, now: float, plan: StepPlan, work: StepWork, passages: Sequence[Passage]) -> None:
        """A plan enters the pipeline: what becomes of it is known at once."""
        arrived = now
        self._prepared = max(self._prepared, now) + self._step_times.host_seconds(work)
        for stage, passage in enumerate(passages):
            began = max(self._free[stage], now)
            moments = (now, self._prepared, began, max(arrived, began), passage.end, passage.end)
            times = [self._began + moment for moment in moments]
            self._taken.append(StageTimes(plan.step, stage, work.tokens, *times))
            self._free[stage] = passage.end
            last = stage == len(passages) - 1
            arrived = passage.end + (0.0 if last else self._step_times.send_seconds(work, stage))

    def take_times(self) -> list[StageTimes]:
        """Since the last call."""
        taken, self._taken = self._taken, []
        return taken

    def now(self) -> float:
        return self._began + super().now()

    def collect(self, until: float | None) -> list[StepResult]:
        return super().collect(None if until is None else until - self._began)
