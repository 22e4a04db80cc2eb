"""Decode steps of an engine under torch's profiler, and the same steps without it."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from torch.profiler import ProfilerActivity, profile, record_function

from nanoserve.benchmarks.gpu.engines import OpenEngine
from nanoserve.benchmarks.gpu.setting import Setting
from nanoserve.benchmarks.gpu.timing import Spread
from nanoserve.benchmarks.gpu.trace import STEP_MARK, StepTrace, summarize_trace
from nanoserve.engine import Engine
from nanoserve.errors import RuntimeFailure
from nanoserve.measures.workloads import random_prompts
from nanoserve.processes.temporary import temporary_directory
from nanoserve.request import Request, SamplingParams

_SETTLING_STEPS = 8
_TIMED_STEPS = 32
_TRACED_STEPS = 16


def trace_decode(setting: Setting, engine: OpenEngine, *, batch: int, context: int) -> dict[str, Any]:
    """The fields of a row: `step_us` without the profiler, the trace's summary (StepTrace), and what is idle when the
    work that the trace saw is held against steps without the profiler, whose own cost lies on the host."""
    with _decoding(engine, batch, context) as inner:
        _take(inner, _SETTLING_STEPS)
        seconds = _take(inner, _TIMED_STEPS)
        found = _traced(setting, inner)
    fields: dict[str, Any] = {"unprofiled_step_us": Spread.of(seconds), "overlaps": engine.overlaps}
    if found is None:
        return fields
    busy_us = found.busy * found.step_us
    idle = max(0.0, 1 - busy_us / fields["unprofiled_step_us"].us)
    return {**fields, **msgspec.to_builtins(found), "idle_without_profiler": idle}


@contextmanager
def _decoding(engine: OpenEngine, batch: int, context: int) -> Iterator[Engine]:
    """Within it the engine has `batch` requests, all past their prompts of `context` tokens."""
    inner, names = engine.llm.engine, [f"traced-{place}" for place in range(batch)]
    steps = _SETTLING_STEPS + _TIMED_STEPS + 2 * _TRACED_STEPS
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=steps + batch + 8)
    prompts = random_prompts([context] * batch, engine.llm.config.vocab_size, seed=0)
    try:
        for name, prompt in zip(names, prompts, strict=True):
            inner.add(Request(name, prompt, params, seed=0, arrival_time=inner.now()))
        waiting = set(names)
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
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    return seconds


def _traced(setting: Setting, engine: Engine) -> StepTrace | None:
    """None where the trace holds no kernels: on a CPU."""
    activities = [ProfilerActivity.CPU]
    if setting.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        _take(engine, _TRACED_STEPS)  # the profiler's own first steps are slow
        for _ in range(_TRACED_STEPS):
            with record_function(STEP_MARK):
                engine.step()
        setting.synchronize()
    with temporary_directory() as directory:
        path = directory / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    return summarize_trace(trace["traceEvents"])
