"""Running requests through an Engine while looking at the clock: token ids in, token ids out. No torch."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nanoserve.benchmarks.floors import StepShape
from nanoserve.engine import Engine
from nanoserve.errors import RuntimeFailure
from nanoserve.measures.metrics import RequestTiming
from nanoserve.processes.interrupts import deferred_interrupts
from nanoserve.record.events import Collected, Event, Planned
from nanoserve.request import Request, SamplingParams


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: what it held, seconds in the executor, and seconds of the whole step with scheduling around it."""

    shape: StepShape
    executor_seconds: float
    step_seconds: float

    @property
    def engine_seconds(self) -> float:
        """The engine's own time: scheduling, applying and everything else around the executor."""
        return self.step_seconds - self.executor_seconds


@dataclass(frozen=True, slots=True)
class EngineRun:
    """What became of requests that were issued together: when their tokens came, which they were, and in what steps."""

    timings: tuple[RequestTiming, ...]
    tokens: tuple[tuple[int, ...], ...]
    steps: tuple[StepRecord, ...]


class _Progress:
    """The tokens of one request so far, each with its time."""

    def __init__(self, input_tokens: int) -> None:
        self.input_tokens = input_tokens
        self.tokens: list[int] = []
        self.times: list[float] = []

    @property
    def timing(self) -> RequestTiming:
        return RequestTiming(self.input_tokens, tuple(self.times))


class _FinishedSteps:
    """An observer that remembers the shape and the duration of every plan that has ended."""

    def __init__(self) -> None:
        self._shapes: dict[int, StepShape] = {}
        self.finished: list[tuple[StepShape, float]] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Planned):
            self._shapes[event.plan.step] = StepShape.of(event.plan)
        for result in event.results if isinstance(event, Collected) else ():
            if result.step is not None:
                self.finished.append((self._shapes.pop(result.step), result.seconds))


class EngineDriver:
    """Issues requests to an engine all at once and waits for the last token.

    Prefixes are never shared between runs: each has a cache salt of its own. ``on_step`` is told of each step.
    """

    def __init__(self, engine: Engine, on_step: Callable[[StepShape], None] = lambda _: None) -> None:
        self._engine = engine
        self._on_step = on_step
        self._steps = _FinishedSteps()
        engine.recorder.add(self._steps)
        self._runs = 0

    def run(self, prompts: Sequence[tuple[int, ...]], output_tokens: Sequence[int]) -> EngineRun:
        """Every prompt gets exactly its number of output tokens, taken greedily; end tokens do not end it.

        Raises:
            UsageError: if a request can never run.
            RuntimeFailure: if one fails.
        """
        engine, salt = self._engine, f"run-{self._runs}"
        self._runs += 1
        self._steps.finished.clear()
        issued = engine.now()
        running: dict[str, _Progress] = {}
        try:
            for index, (prompt, length) in enumerate(zip(prompts, output_tokens, strict=True)):
                params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=length)
                request = Request(f"{salt}-{index}", prompt, params, seed=0, arrival_time=issued, cache_salt=salt)
                engine.add(request)
                running[request.request_id] = _Progress(len(prompt))
            steps = self._drain(running, issued)
        finally:  # an interrupted run leaves nothing behind for the next one
            for name in running:
                engine.stop(name)
        done = running.values()
        timings, tokens = tuple(one.timing for one in done), tuple(tuple(one.tokens) for one in done)
        return EngineRun(timings, tokens, tuple(steps))

    def _drain(self, running: dict[str, _Progress], issued: float) -> list[StepRecord]:
        engine, finished = self._engine, self._steps.finished
        steps: list[StepRecord] = []
        while engine.has_work:
            began = time.perf_counter()
            with deferred_interrupts():
                updates = engine.step()
            now, seconds = engine.now() - issued, time.perf_counter() - began
            for update in updates:
                if update.sequence.error is not None:
                    raise RuntimeFailure(update.sequence.error)
                running[update.request_id].tokens += update.new_tokens
                running[update.request_id].times += [now] * len(update.new_tokens)
            for shape, inside in finished:
                steps.append(StepRecord(shape, inside, seconds / len(finished)))
                self._on_step(shape)
            finished.clear()
        return steps
