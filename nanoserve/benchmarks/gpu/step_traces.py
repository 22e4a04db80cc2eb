"""Decode steps of an engine under torch's profiler, and the same steps without it.

The profiler's trace is the JSON that torch exports; its times are microseconds. It tells how many kernels a step ran,
how long they took, and when the device waited.
"""

import itertools
import json
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile, record_function

from nanoserve.benchmarks.gpu.device import GpuBench, TimeSpread
from nanoserve.benchmarks.gpu.models import TimedEngine
from nanoserve.benchmarks.gpu.running import Row
from nanoserve.engine import Engine
from nanoserve.errors import RuntimeFailure
from nanoserve.measures.workloads import random_prompts
from nanoserve.processes.temporary import temporary_directory
from nanoserve.request import Request, SamplingParams

STEP_MARK = "nanoserve step"
"""What the host's share of every step is called in the trace."""
_DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCH_KINDS = ("cuda_runtime", "cuda_driver")
_SETTLING_STEPS = 8
_TIMED_STEPS = 32
_TRACED_STEPS = 16


class _Work(NamedTuple):
    """Something the device did, from when to when."""

    start: float
    end: float
    is_kernel: bool


def summarize_trace(events: Iterable[Mapping[str, Any]]) -> dict[str, float] | None:
    """Summarize the events of a trace; None unless at least two of its steps launched kernels, as on a CPU.

    A kernel belongs to the step whose mark its launch lies in, by the correlation that the profiler gives both; those
    of a CUDA graph have the one of the graph's launch. The last step is left out: nothing says when it ended.

    Returns:
        Steps traced, kernels of a step and microseconds of one on average, the median time from the first kernel of a
        step to the first of the next ("step_us"), and shares of all time: in which the device did anything ("busy"),
        nothing between the last work of a step and the first kernel of the next one ("idle_between_steps"), and
        nothing between the kernels of a step ("idle_within_steps").
    """
    steps = [step for step in _work_of_steps(list(events)) if any(work.is_kernel for work in step)]
    if len(steps) < 2:
        return None
    starts = [min(work.start for work in step if work.is_kernel) for step in steps]
    total, last = starts[-1] - starts[0], len(steps) - 1
    whole = sorted(work for step in steps for work in step)
    ends = [max(work.end for work in step) for step in steps[:last]]
    between = sum(_idle(whole, ended, following) for ended, following in zip(ends, starts[1:], strict=True))
    idle = _idle(whole, starts[0], starts[-1])
    kernels = [work.end - work.start for step in steps[:last] for work in step if work.is_kernel]
    return {
        "steps": last,
        "kernels_per_step": len(kernels) / last,
        "kernel_us": statistics.fmean(kernels),
        "step_us": statistics.median(after - before for before, after in itertools.pairwise(starts)),
        "busy": 1 - idle / total,
        "idle_between_steps": between / total,
        "idle_within_steps": (idle - between) / total,
    }


def _work_of_steps(events: Sequence[Mapping[str, Any]]) -> list[list[_Work]]:
    """What each marked step launched, in the order of the steps."""

    def correlation(event: Mapping[str, Any]) -> Any:
        return event.get("args", {}).get("correlation")

    launches = (event for event in events if event.get("cat") in _LAUNCH_KINDS and "dur" in event)
    launched = {correlation(event): event["ts"] for event in launches}
    marked = [event for event in events if event.get("name") == STEP_MARK and event.get("cat") == "user_annotation"]
    steps: dict[float, list[_Work]] = {mark["ts"]: [] for mark in sorted(marked, key=lambda mark: mark["ts"])}
    for event in events:
        at = launched.get(correlation(event)) if event.get("cat") in _DEVICE_KINDS else None
        for mark in marked if at is not None else ():
            if mark["ts"] <= at <= mark["ts"] + mark["dur"]:
                steps[mark["ts"]].append(_Work(event["ts"], event["ts"] + event["dur"], event["cat"] == "kernel"))
    return list(steps.values())


def _idle(work: Sequence[_Work], start: float, end: float) -> float:
    """Microseconds from start to end in which none of the work, which is sorted by its start, goes on."""
    idle, known = 0.0, start
    for one in work:
        idle += max(0.0, min(one.start, end) - known)
        known = max(known, one.end)
    return idle + max(0.0, end - known)


def trace_decode(bench: GpuBench, engine: TimedEngine, *, batch: int, context: int) -> Row:
    """The fields of a row: `step_us` without the profiler, the trace's summary, and what is idle when the
    work that the trace saw is held against steps without the profiler, whose own cost lies on the host."""
    with _decoding(engine, batch, context) as inner:
        _take(inner, _SETTLING_STEPS)
        unprofiled = TimeSpread.of(_take(inner, _TIMED_STEPS))
        found = summarize_trace(_trace_events(bench, inner))
    fields: Row = {"batch": batch, "unprofiled_step_us": unprofiled, "overlaps": engine.in_flight > 1}
    if found is None:
        return fields
    idle = max(0.0, 1 - found["busy"] * found["step_us"] / unprofiled.us)
    return {**fields, **found, "idle_without_profiler": idle}


@contextmanager
def _decoding(engine: TimedEngine, batch: int, context: int) -> Iterator[Engine]:
    """Within it the engine has `batch` requests, all past their prompts of `context` tokens."""
    inner, names = engine.llm.engine, [f"traced-{place}" for place in range(batch)]
    steps = _SETTLING_STEPS + _TIMED_STEPS + 2 * _TRACED_STEPS
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=steps + batch + 8)
    prompts = random_prompts([context] * batch, engine.llm.config.vocab_size, seed=0)
    waiting = set(names)
    try:
        for name, prompt in zip(names, prompts, strict=True):
            inner.add(Request(name, prompt, params, seed=0, arrival_time=inner.now()))
        while waiting:
            for update in inner.step():
                if update.sequence.error is not None:
                    raise RuntimeFailure(update.sequence.error)
                waiting.discard(update.request_id)
        yield inner
    finally:
        for name in names:
            inner.stop(name)


def _take(engine: Engine, steps: int) -> list[float]:
    """Seconds of each."""
    times = [time.perf_counter()]
    for _ in range(steps):
        engine.step()
        times.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(times)]


def _trace_events(bench: GpuBench, engine: Engine) -> list[dict[str, Any]]:
    activities = [ProfilerActivity.CPU, *([] if bench.dry_run else [ProfilerActivity.CUDA])]
    with profile(activities=activities) as profiler:
        _take(engine, _TRACED_STEPS)  # the profiler's own first steps are slow
        for _ in range(_TRACED_STEPS):
            with record_function(STEP_MARK):
                engine.step()
        bench.synchronize()
    with temporary_directory() as directory:
        path = directory / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
        return events
