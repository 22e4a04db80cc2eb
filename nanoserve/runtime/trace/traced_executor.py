"""TracingExecutor: a run as a file for ui.perfetto.dev or chrome://tracing, while it goes on. No torch."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Protocol, runtime_checkable

from nanoserve.costs.measured_machine import MachineSpeeds
from nanoserve.errors import RuntimeFailure
from nanoserve.layout import ParallelLayout
from nanoserve.measures.chrome_trace import ChromeTraceFile, Track
from nanoserve.record.forecasts import Forecast, forecasts_of
from nanoserve.runtime.trace.phases import EngineState, Phase, PhaseTracker, step_tokens
from nanoserve.runtime.trace.stage_times import StageTimes
from nanoserve.runtime.trace.traced_forecasts import HostTrace, facts_of
from nanoserve.runtime.trace.traced_moves import MovesTrace, Moving
from nanoserve.scheduler.plan import Executor, StepPlan, StepResult
from nanoserve.scheduler.scheduler import Scheduler

SCHEDULER, WORKERS = "scheduler", "workers"


@runtime_checkable
class Observed(Protocol):
    """An executor whose workers say what they did when."""

    def take_times(self) -> list[StageTimes]:
        """What they did since the last call."""


@runtime_checkable
class Measured(Protocol):
    """An executor that knows how fast its workers are."""

    speeds: MachineSpeeds | None


def host_link_bandwidth(executor: Executor) -> float | None:
    """Bytes per second of one worker to or from host memory, as measured; None where nobody did."""
    speeds = executor.speeds if isinstance(executor, Measured) else None
    return None if speeds is None else speeds.host_link_bandwidth


class RunTrace:
    """Writes what happened to plans and in workers.

    The scheduler's tracks show each micro-batch from its submission to its result, one track for each that may be in
    flight, with a counter of its tokens; the workers' tracks show waiting, computing and sending.

    Args:
        file: to write into; it is not closed.
        began: the moment that becomes 0, on the clock of all others.
        tensor_parallel: workers of a stage; None where that changes with the layout, and workers go by their ranks.
        workers: what their tracks stand under.
        scheduler: what the micro-batches' tracks stand under.
    """

    def __init__(
        self,
        file: ChromeTraceFile,
        began: float,
        *,
        tensor_parallel: int | None = 1,
        workers: str = WORKERS,
        scheduler: str = SCHEDULER,
    ) -> None:
        self._file, self._began, self._tensor_parallel = file, began, tensor_parallel
        self._workers, self._scheduler = workers, scheduler
        self._in_flight: dict[int, tuple[int, float, StepPlan]] = {}  # by step: which track, since when, what
        self._free: dict[int, float] = {}  # by rank: since when

    def on_submit(self, plan: StepPlan, now: float) -> None:
        """A plan goes to the workers. One of swaps alone has no end, one that changes the layout is no micro-batch."""
        if not plan.rows and (plan.swaps or plan.transition is not None):
            return
        taken = {track for track, _, _ in self._in_flight.values()}
        self._in_flight[plan.step] = (next(track for track in count() if track not in taken), now, plan)
        decodes, prompt = step_tokens(plan)
        tokens = {"decodes": decodes, "prompt tokens": prompt}
        self._file.counter(self._scheduler, "tokens of a micro-batch", now - self._began, tokens)

    def on_result(self, result: StepResult, now: float, forecast: Forecast | None = None) -> None:
        """Something became known: a plan's answers, or that all that was in flight is lost.

        Args:
            forecast: of the plan, if it was predicted.
        """
        if result.lost is not None:
            self._file.bar(Track(self._workers, "deaths"), result.lost, now - self._began, now - self._began)
            self.forget_plans()
        if result.step not in self._in_flight:
            return
        track, since, plan = self._in_flight.pop(result.step)
        decodes, prompt = step_tokens(plan)
        counts = {"step": plan.step, "decodes": decodes, "prompt_tokens": prompt, "sequences": len(plan.rows)}
        arguments = counts | facts_of(plan, result, forecast)
        name = f"{decodes} decodes + {prompt} prompt tokens"
        if plan.strategy != "device":
            name = f"{plan.strategy}: {name}"
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
        if self._tensor_parallel is None:
            return Track(self._workers, f"worker {rank}")
        stage, within = divmod(rank, self._tensor_parallel)
        return Track(self._workers, f"stage {stage}" + (f", rank {within}" if self._tensor_parallel > 1 else ""))


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


class TracingExecutor:
    """Passes everything on to an executor and writes it down, so that little is lost if the process is killed.

    Args:
        executor: of any kind; one whose workers are observed is asked for their times, one that moves for its moves.
        file: is closed with the executor.
        scheduler: of the same engine: how full its pools are is in the trace.
        layouts: the parallel layouts there are, by number.
        engine: number of the engine, where several write into the file: 0 is then closed last.
    """

    def __init__(
        self,
        executor: Executor,
        file: ChromeTraceFile,
        *,
        scheduler: Scheduler,
        layouts: Sequence[ParallelLayout] = (ParallelLayout(),),
        engine: int | None = None,
    ) -> None:
        self.max_in_flight = executor.max_in_flight
        self.feeds_tokens = executor.feeds_tokens
        self._executor = executor
        self._file = file
        self._closes_file = not engine
        self._scheduler = scheduler
        self._forecasts = forecasts_of(scheduler)
        self._forecasts.of_all = True
        began = executor.now()
        one_layout = len(layouts) == 1
        whose = "" if engine is None else f"engine {engine}: "
        self._trace = RunTrace(
            file,
            began,
            tensor_parallel=layouts[0].tensor_parallel if one_layout else None,
            workers=whose + WORKERS,
            scheduler=whose + SCHEDULER,
        )
        self._moves = MovesTrace(
            file,
            began,
            layouts=[layout.name for layout in layouts],
            host_link_bandwidth=host_link_bandwidth(executor),
            scheduler=whose + SCHEDULER,
            workers=whose + WORKERS,
        )
        self._host = HostTrace(file, began, scheduler=whose + SCHEDULER, workers=whose + WORKERS)
        self._phases = PhaseTracker()
        self._take_times = executor.take_times if isinstance(executor, Observed) else None
        self._take_moves = executor.take_moves if isinstance(executor, Moving) else None
        self._failure: RuntimeFailure | None = None

    def submit(self, plan: StepPlan) -> None:
        """Pass a plan on and note when."""
        self._executor.submit(plan)
        with self._as_long_as_possible():
            now = self.now()
            self._trace.on_submit(plan, now)
            self._host.on_submit(plan, now)
            state = EngineState.of(self._scheduler)
            self._moves.on_state(state, now)
            self._write_phases(self._phases.on_submit(plan, now, state))

    def collect(self, until: float | None) -> list[StepResult]:
        """Wait with the executor and note what it says.

        Raises:
            RuntimeFailure: if the executor does.
        """
        try:
            results = self._executor.collect(until)
        except RuntimeFailure:
            self._trace.forget_plans()
            self._host.forget_plans()
            with self._as_long_as_possible():
                self._write_phases(self._phases.finish(self.now()))
            raise
        self._note(results)
        return results

    def _note(self, results: Sequence[StepResult]) -> None:
        now = self.now()
        with self._as_long_as_possible():
            for result in results:
                forecast = None if result.step is None else self._forecasts.of(result.step)
                self._trace.on_result(result, now, forecast)
                self._host.on_result(result, now)
                if forecast is not None:
                    self._host.on_corrections(self._forecasts.corrections, now)
                self._write_phases(self._phases.on_result(result, now))
                if self._take_times is None and result.step is not None:
                    self._trace.on_computed(result, now)
            for times in self._take_times() if self._take_times is not None else ():
                self._trace.on_times(times)
            for move in self._take_moves() if self._take_moves is not None else ():
                self._moves.on_move(move)
            self._file.flush()

    def _write_phases(self, over: Iterable[Phase]) -> None:
        for phase in over:
            self._moves.on_phase(phase)

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
        """Close the executor, and the file unless others go on with it.

        Raises:
            RuntimeFailure: if not everything could be written. The run went on without.
        """
        self._note([])
        with self._as_long_as_possible():
            self._write_phases(self._phases.finish(self.now()))
        self._executor.close()
        with self._as_long_as_possible():
            if self._closes_file:
                self._file.close()
        if self._failure is not None:
            raise RuntimeFailure(f"the trace is not complete: {self._failure}")
