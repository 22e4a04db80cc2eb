"""TracedExecutor: a run as a file for ui.perfetto.dev or chrome://tracing, while it goes on. No torch."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Protocol, runtime_checkable

from nanoserve.errors import RuntimeFailure
from nanoserve.measures.chrome_trace import ChromeTraceFile, Track
from nanoserve.runtime.stage_times import StageTimes
from nanoserve.scheduler.plan import Executor, StepPlan, StepResult

_SCHEDULER, _WORKERS = "scheduler", "workers"


@runtime_checkable
class Observed(Protocol):
    """An executor whose workers say what they did when."""

    def take_times(self) -> list[StageTimes]:
        """What they did since the last call."""


class RunTrace:
    """Writes what happened to plans and in workers.

    The scheduler's tracks show each micro-batch from its submission to its result, one track for each that may be in
    flight, with a counter of its tokens; the workers' tracks show waiting, computing and sending.

    Args:
        file: to write into; it is not closed.
        began: the moment that becomes 0, on the clock of all others.
        tensor_parallel: workers of a stage.
        workers: what their tracks stand under.
        scheduler: what the micro-batches' tracks stand under.
    """

    def __init__(
        self,
        file: ChromeTraceFile,
        began: float,
        *,
        tensor_parallel: int = 1,
        workers: str = _WORKERS,
        scheduler: str = _SCHEDULER,
    ) -> None:
        self._file, self._began, self._tensor_parallel = file, began, tensor_parallel
        self._workers, self._scheduler = workers, scheduler
        self._in_flight: dict[int, tuple[int, float, StepPlan]] = {}  # by step: which track, since when, what
        self._free: dict[int, float] = {}  # by rank: since when

    def on_submit(self, plan: StepPlan, now: float) -> None:
        """A plan goes to the workers."""
        taken = {track for track, _, _ in self._in_flight.values()}
        self._in_flight[plan.step] = (next(track for track in count() if track not in taken), now, plan)
        decodes, prompt = step_tokens(plan)
        tokens = {"decodes": decodes, "prompt tokens": prompt}
        self._file.counter(self._scheduler, "tokens of a micro-batch", now - self._began, tokens)

    def on_result(self, result: StepResult, now: float) -> None:
        """Something became known: a plan's answers, or that all that was in flight is lost."""
        if result.lost is not None:
            self._file.bar(Track(self._workers, "deaths"), result.lost, now - self._began, now - self._began)
            self.forget_plans()
        if result.step not in self._in_flight:
            return
        track, since, plan = self._in_flight.pop(result.step)
        decodes, prompt = step_tokens(plan)
        arguments = {"step": plan.step, "decodes": decodes, "prompt_tokens": prompt, "sequences": len(plan.rows)}
        name = f"{decodes} decodes + {prompt} prompt tokens"
        place = Track(self._scheduler, f"micro-batch {track}")
        self._file.bar(place, name, since - self._began, now - self._began, arguments)

    def forget_plans(self) -> None:
        """Nothing that is in flight will be answered."""
        self._in_flight.clear()
        self._free.clear()

    def on_times(self, times: StageTimes) -> None:
        """A worker has done its part."""
        arguments = {"step": times.step, "tokens": times.tokens}
        for name, start, end in bars_of(times, free=self._free.get(times.rank, times.received)):
            self._file.bar(self._worker(times.rank), name, start - self._began, end - self._began, arguments)
        self._free[times.rank] = times.sent

    def on_computed(self, result: StepResult, now: float) -> None:
        """What the only worker there is needed, which says no more than how long that was."""
        self._file.bar(
            self._worker(0), "compute", now - result.seconds - self._began, now - self._began, {"step": result.step}
        )

    def _worker(self, rank: int) -> Track:
        stage, within = divmod(rank, self._tensor_parallel)
        return Track(self._workers, f"stage {stage}" + (f", rank {within}" if self._tensor_parallel > 1 else ""))


def step_tokens(plan: StepPlan) -> tuple[int, int]:
    """Decodes, which are rows of one token, and tokens of longer rows."""
    lengths = [len(row.tokens) for row in plan.rows]
    decodes = lengths.count(1)
    return decodes, sum(lengths) - decodes


def bars_of(times: StageTimes, free: float) -> list[tuple[str, float, float]]:
    """What a worker did for a plan, each with its beginning and its end; what took no time is left out.

    Args:
        free: when it was through with the plan before.
    """
    ready = max(free, times.prepared)
    bars = [
        ("wait for inputs", max(free, times.received), times.prepared),
        ("wait for activations", min(max(times.began, ready), times.arrived), times.arrived),
        ("compute", times.started, times.computed),
        ("send", times.computed, times.sent),
    ]
    return [(name, begin, end) for name, begin, end in bars if end > begin]


class TracedExecutor:
    """Passes everything on to an executor and writes it down, so that little is lost if the process is killed.

    Args:
        executor: of any kind; one whose workers are observed is asked for their times.
        file: is closed with the executor.
        tensor_parallel: workers of a stage.
    """

    def __init__(self, executor: Executor, file: ChromeTraceFile, *, tensor_parallel: int = 1) -> None:
        self.max_in_flight = executor.max_in_flight
        self.feeds_tokens = executor.feeds_tokens
        self._executor = executor
        self._file = file
        self._trace = RunTrace(file, executor.now(), tensor_parallel=tensor_parallel)
        self._take_times = executor.take_times if isinstance(executor, Observed) else None
        self._failure: RuntimeFailure | None = None

    def submit(self, plan: StepPlan) -> None:
        """Pass a plan on and note when."""
        self._executor.submit(plan)
        with self._as_long_as_possible():
            self._trace.on_submit(plan, self.now())

    def collect(self, until: float | None) -> list[StepResult]:
        """Wait with the executor and note what it says.

        Raises:
            RuntimeFailure: if the executor does.
        """
        try:
            results = self._executor.collect(until)
        except RuntimeFailure:
            self._trace.forget_plans()
            raise
        self._note(results)
        return results

    def _note(self, results: Sequence[StepResult]) -> None:
        now = self.now()
        with self._as_long_as_possible():
            for result in results:
                self._trace.on_result(result, now)
                if self._take_times is None:
                    self._trace.on_computed(result, now)
            for times in self._take_times() if self._take_times is not None else ():
                self._trace.on_times(times)
            self._file.flush()

    @contextmanager
    def _as_long_as_possible(self) -> Iterator[None]:
        """Write inside; a full disk ends the trace, not the run."""
        try:
            yield
        except RuntimeFailure as failure:
            self._failure = self._failure or failure

    def now(self) -> float:
        """The executor's."""
        return self._executor.now()

    def close(self) -> None:
        """Close the executor and the file.

        Raises:
            RuntimeFailure: if not everything could be written. The run went on without.
        """
        self._note([])
        self._executor.close()
        with self._as_long_as_possible():
            self._file.close()
        if self._failure is not None:
            raise RuntimeFailure(f"the trace is not complete: {self._failure}")
