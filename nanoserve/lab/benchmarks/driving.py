"""Running requests through an Engine while looking at the clock, and what its steps achieved. No
torch."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from msgspec.structs import replace

from nanoserve.engine.interface import InferenceEngine
from nanoserve.errors import RuntimeFailure
from nanoserve.lab.benchmarks.floors import STEP_KINDS, Limits, ModelCost, step_kind, step_work
from nanoserve.lab.benchmarks.rounds import GIGA
from nanoserve.record.events import Collected, Event, Planned
from nanoserve.record.metrics import MILLISECONDS, Distribution, RequestTiming
from nanoserve.record.recorder import recorder_of
from nanoserve.request import Request, SamplingParams
from nanoserve.scheduler.work import StepWork
from nanoserve.utils.interrupts import deferred_interrupts

ALL = "all"
_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: what it held, seconds in the executor, and seconds of the whole step with
    scheduling around it."""

    work: StepWork
    executor_seconds: float
    step_seconds: float

    @property
    def engine_seconds(self) -> float:
        """Scheduling, applying and everything else around the executor; 0 where that hides behind
        another step."""
        return max(0.0, self.step_seconds - self.executor_seconds)


@dataclass(frozen=True, slots=True)
class EngineRun:
    """Outcome of requests that were issued together: times of their tokens, the tokens, and the
    steps."""

    timings: tuple[RequestTiming, ...]
    tokens: tuple[tuple[int, ...], ...]
    steps: tuple[StepRecord, ...] = ()


class EngineDriver:
    """Issues requests to an engine all at once and waits for the last token. Prefixes are never
    shared between runs: each run has its own cache salt. ``on_step`` is called for each step;
    ``windows`` are the model's."""

    def __init__(
        self,
        engine: InferenceEngine,
        on_step: Callable[[StepWork], None] = lambda _: None,
        windows: Sequence[int] = (),
    ) -> None:
        self._engine, self._on_step, self._windows = engine, on_step, windows
        self._finished: list[tuple[StepWork, float]] = []  # plans that ended, and their durations
        for each in engine.engines:
            recorder_of(each).add(partial(self._observe, {}))
        self._runs = 0

    def _observe(self, in_flight: dict[int, StepWork], event: Event) -> None:
        """Take in an event of one engine; ``in_flight`` are its plans in flight."""
        if isinstance(event, Planned):
            in_flight[event.plan.step] = step_work(event.plan, self._windows)
        for result in event.results if isinstance(event, Collected) else ():
            if result.step is not None:
                self._finished.append((in_flight.pop(result.step), result.seconds))

    def run(
        self,
        prompts: Sequence[tuple[int, ...]],
        output_tokens: Sequence[int],
        params: SamplingParams = _GREEDY,
    ) -> EngineRun:
        """Every prompt gets exactly its number of output tokens, by default taken greedily; end
        tokens do not end it. Raises UsageError if a request can never run, and RuntimeFailure if
        one fails."""
        engine, salt = self._engine, f"run-{self._runs}"
        self._runs += 1
        self._finished.clear()
        issued = engine.now()
        # tokens of each request, each with its time
        answers: dict[str, list[tuple[float, int]]] = {}
        try:
            for index, (prompt, length) in enumerate(zip(prompts, output_tokens, strict=True)):
                own = replace(params, ignore_eos=True, max_tokens=length)
                request = Request(
                    f"{salt}-{index}", prompt, own, seed=0, arrival_time=issued, cache_salt=salt
                )
                engine.add(request)
                answers[request.request_id] = []
            steps = self._drain(answers, issued)
        finally:  # an interrupted run leaves nothing behind for the next one
            for name in answers:
                engine.stop(name)
        timings = [
            RequestTiming(len(prompt), tuple(time for time, _ in answer))
            for prompt, answer in zip(prompts, answers.values(), strict=True)
        ]
        tokens = tuple(tuple(token for _, token in answer) for answer in answers.values())
        return EngineRun(tuple(timings), tokens, tuple(steps))

    def _drain(
        self, answers: dict[str, list[tuple[float, int]]], issued: float
    ) -> list[StepRecord]:
        engine, finished = self._engine, self._finished
        steps: list[StepRecord] = []
        while engine.has_work:
            began = time.perf_counter()
            with deferred_interrupts():
                updates = engine.step()
            now, seconds = engine.now() - issued, time.perf_counter() - began
            for update in updates:
                if update.sequence.error is not None:
                    raise RuntimeFailure(update.sequence.error)
                answers[update.request_id] += [(now, token) for token in update.new_tokens]
            for work, inside in finished:
                # steps of several engines overlap, and none has a time of its own
                if len(engine.engines) == 1:
                    steps.append(StepRecord(work, inside, seconds / len(finished)))
                self._on_step(work)
            finished.clear()
        return steps


class StepSummary(msgspec.Struct, frozen=True):
    """Steps of one kind; rates and shares are of their sums, so that long steps weigh more."""

    steps: int  # number of steps
    step_ms: Distribution | None  # durations of the steps, in milliseconds
    read_gb_per_s: float  # the bytes that they cannot do without, over their durations
    gflops: float  # the operations that they cannot do without, over their durations
    # the sum of their floors over the sum of their durations; 1 is the floor itself
    of_floor: float | None
    # that share, step by step; both are None without the machine's limits
    step_of_floor: Distribution | None
    engine_ms: float  # the engine's own time per step, in the median
    engine_share: float  # its sum over the sum of their durations

    @classmethod
    def of(
        cls, steps: Sequence[StepRecord], cost: ModelCost, limits: Limits | None
    ) -> "StepSummary":
        seconds = sum(step.step_seconds for step in steps)
        of_floor: float | None = None
        shares: list[float] = []
        if limits is not None:
            floors = [cost.floor_seconds(step.work, limits) for step in steps]
            shares = [floor / step.step_seconds for floor, step in zip(floors, steps, strict=True)]
            of_floor = sum(floors) / seconds
        return cls(
            steps=len(steps),
            step_ms=Distribution.of(step.step_seconds * MILLISECONDS for step in steps),
            read_gb_per_s=sum(cost.step_bytes(step.work) for step in steps) / seconds / GIGA,
            gflops=sum(cost.step_operations(step.work) for step in steps) / seconds / GIGA,
            of_floor=of_floor,
            step_of_floor=Distribution.of(shares),
            engine_ms=statistics.median(step.engine_seconds for step in steps) * MILLISECONDS,
            engine_share=sum(step.engine_seconds for step in steps) / seconds,
        )

    @property
    def beats_floor(self) -> bool:
        """Whether they took less than the least time there is: the machine's limits were measured
        too low."""
        return self.of_floor is not None and self.of_floor > 1


def summarize_steps(
    steps: Sequence[StepRecord], cost: ModelCost, limits: Limits | None
) -> dict[str, StepSummary]:
    """For each kind of step that occurred, and under "all" for all of them."""
    kinds = {kind: [step for step in steps if step_kind(step.work) == kind] for kind in STEP_KINDS}
    kinds[ALL] = list(steps)
    return {name: StepSummary.of(some, cost, limits) for name, some in kinds.items() if some}
