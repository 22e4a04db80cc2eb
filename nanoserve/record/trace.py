"""A run as a file for ui.perfetto.dev or chrome://tracing, while it goes on or afterwards:
observers of its events."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from nanoserve.errors import RuntimeFailure
from nanoserve.layout import ParallelLayout
from nanoserve.record.chrome_trace import ChromeTraceFile, Track
from nanoserve.record.events import (
    Collected,
    Corrected,
    Event,
    ExecutorFailed,
    Finished,
    Forecast,
    Planned,
    Worked,
)
from nanoserve.record.phases import Phase, PhaseTracker
from nanoserve.record.times import HostTimes, Move, ReshardTimes, StageTimes
from nanoserve.scheduler.optional import HostWork, draft_of
from nanoserve.scheduler.plan import StepPlan, StepResult

_MILLI, _GIGA = 1e3, 1e9


@dataclass(slots=True)
class _Cohort:
    """Host sequences that began a token in this step, in a track since then; some of them still
    wait for it."""

    step: int
    track: int
    since: float
    size: int
    waiting: set[int]


class RunTrace:
    """An observer that writes what happens to plans, in workers, between device and host memory,
    and on the CPU.

    The scheduler's tracks show each micro-batch from its submission to its result, swaps as they
    are planned, phases, cohorts of host sequences, and counters of tokens, blocks and corrections.
    The workers' tracks show waiting, computing and sending, transitions and swaps. A full disk ends
    the trace, not the run: ``on_failure`` is told at once, and the end of the run raises
    RuntimeFailure.

    Moment ``began`` of the executor's clock becomes 0. If workers do not report times, the only
    worker is drawn by its results. ``host_link_bandwidth`` is measured, in bytes per second of one
    worker while all others move as much. ``name`` tells runs or engines in one file apart.
    ``close`` is called at the end of the run.
    """

    wants_forecasts = True  # of every plan that can be predicted

    def __init__(
        self,
        file: ChromeTraceFile,
        began: float,
        *,
        layouts: Sequence[ParallelLayout] = (ParallelLayout(),),
        reports_times: bool = True,
        host_link_bandwidth: float | None = None,
        name: str | None = None,
        close: Callable[[], None] = lambda: None,
        on_failure: Callable[[RuntimeFailure], None] = lambda failure: None,
    ) -> None:
        whose = ""
        if name is not None:
            whose = f"{name}: "
        self._file, self._began = file, began
        self._scheduler, self._workers = f"{whose}scheduler", f"{whose}workers"
        self._layouts = [layout.name for layout in layouts]
        # Ranks of a stage; if it changes with the layout, workers are named by their ranks.
        self._tensor_parallel: int | None = None
        if len(layouts) == 1:
            self._tensor_parallel = layouts[0].tensor_parallel
        self._reports_times, self._reports_host_times = reports_times, False
        self._link, self._close, self._on_failure = host_link_bandwidth, close, on_failure
        self._phases = PhaseTracker()
        # by step: which track, and what
        self._in_flight: dict[int | None, tuple[int, Planned]] = {}
        self._free: dict[int, float] = {}  # by rank: since when
        self._processor, self._processor_free = Track(self._workers, "attention on the CPU"), began
        self._cohorts: list[_Cohort] = []
        self._forecasts: dict[int, Forecast] = {}  # by step in flight
        self._corrections: Mapping[str, float] = {}  # as they are
        self._drawn_corrections: Mapping[str, float] = {}
        self._used_blocks: dict[str, tuple[int, int]] = {}  # used and all of them, as last written
        self._failure: RuntimeFailure | None = None

    def __call__(self, event: Event) -> None:
        """Write an event, until one cannot be written; raises RuntimeFailure at the end, if there
        was one."""
        try:
            if self._failure is None:
                self._write(event)
            if isinstance(event, Finished):
                self._close()
        except RuntimeFailure as failure:
            if self._failure is None:
                self._failure = failure
                self._on_failure(failure)
        if isinstance(event, Finished) and self._failure is not None:
            raise RuntimeFailure(f"the trace is not complete: {self._failure}")

    def _write(self, event: Event) -> None:
        if isinstance(event, Planned):
            self._on_plan(event)
        elif isinstance(event, Collected):
            for result in event.results:
                self._on_result(result, event)
        elif isinstance(event, Forecast):
            if event.measured is None:
                self._forecasts[event.step] = event
        elif isinstance(event, Corrected):
            self._corrections = event.corrections
        elif isinstance(event, Worked):
            for times in event.stages:
                self._on_stage(times)
            for beside in event.beside:
                self._on_move(beside)
        elif isinstance(event, ExecutorFailed):
            self._forget_plans()
            self._cohorts.clear()
        if len(self._layouts) > 1:
            self._draw_phases(event)
        if isinstance(event, Collected | Worked):
            self._file.flush()

    def _draw_phases(self, event: Event) -> None:
        track = Track(self._scheduler, "phases")
        for phase in self._phases.on_event(event):
            name = phase.name(self._layouts)
            self._bar(track, name, phase.began, phase.ended, _facts(phase))

    def _on_plan(self, planned: Planned) -> None:
        plan, now, blocks = planned.plan, planned.time, planned.blocks
        self._count_blocks("KV blocks on the device", blocks.used_device, blocks.device, now)
        self._count_blocks("KV blocks in the host pool", blocks.used_host, blocks.host, now)
        if blocks.states is not None:
            slots, free = blocks.states.slots, blocks.states.free
            self._count_blocks("slots of recurrent states", slots - free, slots, now)
        for swap in plan.host.swaps:
            moved = len(swap.device_blocks)
            arguments = {"swap": swap.swap, "sequence": swap.sequence, "blocks": moved}
            self._bar(
                Track(self._scheduler, "swaps"),
                f"{moved} blocks {swap.direction}",
                now,
                now,
                arguments,
            )
        moves_something = len(plan.host.swaps) > 0 or plan.layouts.transition is not None
        if moves_something and not plan.rows:
            return  # swaps alone have no end, and a change of the layout is no micro-batch
        track = _first_free(track for track, _ in self._in_flight.values())
        self._in_flight[plan.step] = track, planned
        counts = {"decodes": plan.decodes, "prompt tokens": plan.prompt_tokens}
        self._counter("tokens of a micro-batch", now, counts)
        beginning = {row.sequence for row in plan.rows if row.host is not None}
        if plan.host.strategy == "overlap" and beginning:
            track = _first_free(cohort.track for cohort in self._cohorts)
            self._cohorts.append(_Cohort(plan.step, track, now, len(beginning), beginning))

    def _on_result(self, result: StepResult, collected: Collected) -> None:
        now = collected.time
        if result.lost is not None:
            self._bar(Track(self._workers, "deaths"), result.lost, now, now)
            self._forget_plans()
        begun = self._in_flight.pop(result.step, None)
        if begun is not None:
            track, planned = begun
            self._on_step(track, planned, result, collected)
        if not self._reports_times and result.step is not None:
            self._bar(self._worker(0), "compute", now - result.seconds, now, {"step": result.step})
        if not self._reports_host_times:
            self._draw_works(result.host.work, now)
        if result.host.lost is not None:
            self._bar(self._processor, result.host.lost, now, now)
        answered = {answer.sequence for answer in result.answers}
        all_lost = result.lost is not None or result.host.lost is not None
        for cohort in list(self._cohorts):
            cohort.waiting -= answered
            if all_lost or not cohort.waiting:
                self._cohorts.remove(cohort)
                cohort_track = Track(self._scheduler, f"cohort {cohort.track}")
                self._bar(
                    cohort_track,
                    f"{cohort.size} host sequences",
                    cohort.since,
                    now,
                    {"step": cohort.step},
                )

    def _on_step(
        self, track: int, planned: Planned, result: StepResult, collected: Collected
    ) -> None:
        plan = planned.plan
        forecast = self._forecasts.pop(plan.step, None)
        facts: dict[str, object] = {
            "step": plan.step,
            "decodes": plan.decodes,
            "prompt_tokens": plan.prompt_tokens,
        }
        name = f"{plan.decodes} decodes + {plan.prompt_tokens} prompt tokens"
        if plan.host.strategy != "device":
            name = f"{plan.host.strategy}: {name}"
        draft_tokens = sum([draft_of(row).verify for row in plan.rows])
        if draft_tokens:
            facts["draft_tokens"] = draft_tokens
            name = f"{name} + {draft_tokens} draft tokens"
        facts["sequences"] = len(plan.rows)
        facts |= facts_of(plan, forecast, result)
        self._bar(
            Track(self._scheduler, f"micro-batch {track}"),
            name,
            planned.time,
            collected.time,
            facts,
        )
        if forecast is not None and self._corrections != self._drawn_corrections:
            self._drawn_corrections = self._corrections
            rounded = {part: round(factor, 3) for part, factor in self._corrections.items()}
            self._counter("corrections of the prediction", collected.time, rounded)

    def _forget_plans(self) -> None:
        self._in_flight.clear()
        self._forecasts.clear()
        self._free.clear()

    def _count_blocks(self, name: str, used: int, total: int, now: float) -> None:
        if total and self._used_blocks.get(name) != (used, total):
            self._used_blocks[name] = used, total
            self._counter(name, now, {"used": used, "free": total - used})

    def _on_stage(self, times: StageTimes) -> None:
        arguments = {"step": times.step, "tokens": times.tokens}
        free = self._free.get(times.rank, times.received)
        worker = self._worker(times.rank)
        for name, start, end in bars_of(times, free):
            self._bar(worker, name, start, end, arguments)
        self._free[times.rank] = times.sent

    def _on_move(self, move: Move | HostTimes) -> None:
        """A move that waited for layers has no bandwidth, and a simulated one no bytes."""
        arguments: dict[str, object]
        if isinstance(move, HostTimes):
            self._reports_host_times = True
            arguments = {"sequences": move.sequences, "ms": round(move.seconds * _MILLI, 3)}
            self._bar(
                self._processor, f"{move.sequences} sequences", move.began, move.ended, arguments
            )
            return
        seconds = move.ended - move.began
        if isinstance(move, ReshardTimes):
            track = f"worker {move.rank}"
            name = f"re-shard to {self._layouts[move.layout]}"
            arguments = {"step": move.step}
        else:
            track = f"worker {move.rank}, swaps {move.direction}"
            name = f"swap {move.direction}"
            arguments = {"swap": move.swap}
            if move.after_row:
                name = f"{name}, layer by layer"
                seconds = 0.0
        if move.num_bytes:
            arguments["bytes"] = move.num_bytes
            if seconds > 0:
                speed = move.num_bytes / seconds
                arguments["GB/s"] = round(speed / _GIGA, 3)
                if self._link is not None:
                    arguments["share of host link"] = round(speed / self._link, 3)
        self._bar(Track(self._workers, track), name, move.began, move.ended, arguments)

    def _worker(self, rank: int) -> Track:
        if self._tensor_parallel is None:
            return Track(self._workers, f"worker {rank}")
        if self._tensor_parallel == 1:
            return Track(self._workers, f"stage {rank}")
        stage, within = divmod(rank, self._tensor_parallel)
        return Track(self._workers, f"stage {stage}, rank {within}")

    def _draw_works(self, works: Sequence[HostWork], now: float) -> None:
        """Draw attention on a real CPU, of which only durations are known, in a row that ends when
        it is reported."""
        worked = sum(work.seconds for work in works)
        start = max(self._processor_free, now - worked)
        for work in works:
            end = min(start + work.seconds, now)
            sequences, keys = work.sequences, work.context_tokens
            arguments = {
                "sequences": sequences,
                "keys": keys,
                "ms": round(work.seconds * _MILLI, 3),
            }
            self._bar(self._processor, f"{sequences} sequences, {keys} keys", start, end, arguments)
            self._processor_free = start = end

    def _counter(self, name: str, time: float, values: Mapping[str, float]) -> None:
        self._file.counter(self._scheduler, name, time - self._began, values)

    def _bar(
        self,
        track: Track,
        name: str,
        start: float,
        end: float,
        facts: Mapping[str, object] | None = None,
    ) -> None:
        self._file.bar(track, name, start - self._began, end - self._began, facts)


def _first_free(taken: Iterable[int]) -> int:
    numbers = set(taken)
    return next(track for track in count() if track not in numbers)


def bars_of(times: StageTimes, free: float) -> list[tuple[str, float, float]]:
    """Names, starts and ends of a worker's activities that took time; it finished the plan before
    at ``free``."""
    ready = max(free, times.prepared)
    bars = [
        ("wait for inputs", max(free, times.received), times.prepared),
        ("wait for activations", min(max(times.began, ready), times.arrived), times.arrived),
        ("compute", times.started, times.computed),
        ("send", times.computed, times.sent),
    ]
    return [(name, begin, end) for name, begin, end in bars if end > begin]


def facts_of(plan: StepPlan, forecast: Forecast | None, result: StepResult) -> dict[str, object]:
    """Arguments of a step's bar: how it ran, what it took, and what was predicted. Cohorts are
    named by their step."""
    facts: dict[str, object] = {
        "strategy": plan.host.strategy,
        "measured_ms": round(result.seconds * _MILLI, 3),
    }
    if result.host.cohorts:
        facts["layers_of_cohorts"] = {
            f"step {cohort.step}": cohort.layers for cohort in result.host.cohorts
        }
    if forecast is not None:
        decision = forecast.decision
        facts["predicted_ms"] = round(forecast.predicted * _MILLI, 3)
        facts["decided"] = {
            "prefill_tokens": decision.prefill_tokens,
            "decodes": decision.decodes,
            "host_decodes": decision.host.decodes,
            "swap_out": decision.host.swap_out,
            "swap_in": decision.host.swap_in,
            "park": decision.host.park,
        }
        facts["alternatives"] = {
            one.strategy: f"{one.seconds * _MILLI:.3f} ms, {one.per_second:.4g} sequences/s"
            for one in decision.host.alternatives
        }
    return facts


def _facts(phase: Phase) -> dict[str, object]:
    """Arguments of a phase's bar: what was planned in it, and after a drain the fate of the
    sequences on the device."""
    if phase.kind == "compute":
        counts = {
            "plans": phase.plans,
            "prompt_tokens": phase.prompt_tokens,
            "decodes": phase.decodes,
        }
        return {**counts, "swaps out": phase.swaps_out, "swaps in": phase.swaps_in}
    if phase.turn is None:
        return {}
    names = (
        "finished since the pool was empty",
        "sequences sent through the pool",
        "to be computed again",
    )
    return dict(zip(names, phase.turn, strict=True))
