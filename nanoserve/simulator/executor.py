"""SimulatedExecutor: answers plans on a virtual clock, when a pipeline of stages would have."""

import heapq
import math
from collections.abc import Callable, Iterable, Sequence

from nanoserve.costs.work import StepWork
from nanoserve.record.times import StageTimes, Times
from nanoserve.scheduler.plan import Answer, Row, StepPlan, StepResult, work_of
from nanoserve.simulator.pipeline import DECOUPLED, Passage, Pipeline, Runtime, StepTimes

END_TOKEN, DUMMY_TOKEN = 0, 1
VOCAB_SIZE = 2
"""Number of different answer tokens: END_TOKEN ends the sequence, DUMMY_TOKEN does not."""
_END, _DUMMY = (END_TOKEN,), (DUMMY_TOKEN,)


class DummyModel:
    """Answers tokens that mean nothing and ends each sequence after ``seed`` of them.

    How long an answer will be is thus as unknown to the scheduler as it is in life.
    """

    def __init__(self) -> None:
        self._last: dict[int, int] = {}

    def __call__(self, plan: StepPlan) -> tuple[Answer, ...]:
        """One token for every row that is sampled; a row of no tokens was answered when its token began."""
        for sequence in plan.end:
            del self._last[sequence]
        for begin in plan.begin:
            self._last[begin.sequence] = begin.prompt_length + begin.seed - 1
        last = self._last
        return tuple(
            [
                Answer(row.sequence, _DUMMY if row.start + len(row.tokens) < last[row.sequence] else _END)
                for row in plan.rows
                if row.sample and row.tokens
            ]
        )


class SimulatedExecutor:
    """The Executor protocol in virtual time; nothing passes but what ``collect`` waits for.

    Args:
        times: how long each stage and each link takes.
        runtime: how inputs are prepared.
        max_in_flight: plans in the pipeline at most; None means one for each stage.
        answer: the tokens of a plan; None means a DummyModel.
    """

    def __init__(
        self,
        times: StepTimes,
        *,
        runtime: Runtime = DECOUPLED,
        max_in_flight: int | None = None,
        answer: Callable[[StepPlan], tuple[Answer, ...]] | None = None,
    ) -> None:
        self.max_in_flight = max_in_flight or times.num_stages
        self.feeds_tokens = False
        self.ready = True
        self.pipeline = Pipeline(times, runtime)  # in which plans run now
        self.pipelines: tuple[Pipeline, ...] = (self.pipeline,)  # one for each parallel layout
        self.host_tokens = 0  # sampled so far for sequences in host memory
        self.due = 0.0  # time of the next result; now, if the engine has not answered the last one
        self._times = times
        self._answer = answer or DummyModel()
        self._told: list[Times] = []
        self._now = 0.0
        self._pending: list[tuple[float, int, StepResult]] = []  # a heap: when, in which order, what
        self._results = self._in_flight = 0

    def submit(self, plan: StepPlan) -> None:
        """Send a plan into the pipeline now; it is known at once when it will leave."""
        self._run(plan)

    def _run(self, plan: StepPlan) -> Sequence[Passage]:
        """Run a plan now; returns its passage through each stage."""
        self._check_room(plan)
        answers = self._answer(plan)
        work = self._work(plan.rows)
        passages = self.pipeline.run(work, self._now)
        self._end(passages[-1].end, StepResult(plan.step, answers, seconds=passages[-1].end - passages[0].start))
        self._tell(plan, work, passages)
        return passages

    def _check_room(self, plan: StepPlan) -> None:
        if self._in_flight >= self.max_in_flight:
            raise RuntimeError(f"plan {plan.step}: {self.max_in_flight} plans are in flight already")

    def _end(self, time: float, result: StepResult) -> None:
        """A plan is in flight until then."""
        self._in_flight += 1
        self._know(time, result)

    def _know(self, time: float, result: StepResult) -> None:
        """The result will be known then."""
        heapq.heappush(self._pending, (time, self._results, result))
        self._results += 1

    def _tell(self, plan: StepPlan, work: StepWork, passages: Sequence[Passage]) -> None:
        """What the stages will do for a plan that is submitted now."""
        now, step, tokens = self._now, plan.step, work.tokens
        for stage, (start, end) in enumerate(passages):
            self._told.append(StageTimes(step, stage, tokens, now, now, start, start, end, end))

    def take_times(self) -> Sequence[Times]:
        """Times of the plans submitted since the last call; a simulation knows them at once."""
        told = tuple(self._told)
        self._told.clear()
        return told

    def _work(self, rows: Iterable[Row]) -> StepWork:
        return work_of(rows, self._times.work)

    def collect(self, until: float | None) -> list[StepResult]:
        """Let time pass until the next plan leaves the pipeline or the next swap is over, at most until that moment.

        Returns:
            all results that are known then.

        Raises:
            RuntimeError: if nothing is in flight and no moment is given, because the wait would never end.
        """
        moments = [self._pending[0][0]] if self._pending else []
        if until is not None:
            moments.append(until)
        if not moments:
            raise RuntimeError("nothing is in flight: there is nothing to wait for")
        self._now = max(self._now, min(moments))
        results = []
        while self._pending and self._pending[0][0] <= self._now:
            result = heapq.heappop(self._pending)[2]
            self._in_flight -= result.step is not None
            results.append(result)
        self.due = self._now if results else self._pending[0][0] if self._pending else math.inf
        return results

    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return self._now

    def close(self) -> None:
        """Nothing is held."""
