"""What a GPU did during some steps, read off the profiler's trace: how many kernels, how long, and when it waited.

No torch: a trace is the JSON that torch.profiler exports. Times in it are microseconds.
"""

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

STEP_MARK = "nanoserve step"
"""What the host's share of every step is called in the trace."""
_DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCH_KINDS = ("cuda_runtime", "cuda_driver")


class StepTrace(msgspec.Struct, frozen=True):
    """Some steps on the device."""

    steps: int
    """How many were traced, the last one left out: nothing says when it ended."""
    kernels_per_step: float
    kernel_us: float
    """Kernels that a step launched, and how long one ran on average."""
    step_us: float
    """From the first kernel of a step to the first of the next, in the median."""
    busy: float
    """The share of all time in which the device did anything."""
    idle_between_steps: float
    """The share in which it did nothing between the last work of a step and the first kernel of the next one."""
    idle_within_steps: float
    """The share in which it did nothing between the kernels of a step."""


class _Work(NamedTuple):
    """Something the device did, from when to when."""

    start: float
    end: float
    is_kernel: bool


def summarize_trace(events: Iterable[Mapping[str, Any]]) -> StepTrace | None:
    """Of the events of a trace with at least two steps that launched kernels; None for any other.

    A kernel belongs to the step whose mark its launch lies in, by the correlation that the profiler gives both; those
    of a CUDA graph have the one of the graph's launch.
    """
    found = list(events)
    steps = [step for step in _work_of_steps(found) if any(work.is_kernel for work in step)]
    if len(steps) < 2:
        return None
    starts = [min(work.start for work in step if work.is_kernel) for step in steps]
    total = starts[-1] - starts[0]
    whole = sorted(work for step in steps for work in step)
    between = 0.0
    for step, following in zip(steps, starts[1:], strict=False):
        ended = max(work.end for work in step)
        between += _idle(whole, ended, following)
    idle = _idle(whole, starts[0], starts[-1])
    kernels = [work for step in steps[:-1] for work in step if work.is_kernel]
    return StepTrace(
        steps=len(steps) - 1,
        kernels_per_step=len(kernels) / (len(steps) - 1),
        kernel_us=statistics.fmean(work.end - work.start for work in kernels),
        step_us=statistics.median(after - before for before, after in itertools.pairwise(starts)),
        busy=1 - idle / total,
        idle_between_steps=between / total,
        idle_within_steps=(idle - between) / total,
    )


def _work_of_steps(events: Sequence[Mapping[str, Any]]) -> list[list[_Work]]:
    """What each marked step launched, in the order of the steps."""
    marks = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("name") == STEP_MARK and event.get("cat") == "user_annotation"
    )
    launches = {
        _correlation(event): event["ts"] for event in events if event.get("cat") in _LAUNCH_KINDS and "dur" in event
    }
    steps: list[list[_Work]] = [[] for _ in marks]
    for event in events:
        launched = launches.get(_correlation(event)) if event.get("cat") in _DEVICE_KINDS else None
        if launched is None:
            continue
        for place, (began, ended) in enumerate(marks):
            if began <= launched <= ended:
                work = _Work(event["ts"], event["ts"] + event["dur"], event["cat"] == "kernel")
                steps[place].append(work)
                break
    return steps


def _correlation(event: Mapping[str, Any]) -> Any:
    return event.get("args", {}).get("correlation")


def _idle(work: Sequence[_Work], start: float, end: float) -> float:
    """Microseconds from start to end in which none of the work, which is sorted by its start, goes on."""
    idle, known = 0.0, start
    for one in work:
        if one.start >= end:
            break
        idle += max(0.0, one.start - known)
        known = max(known, one.end)
    return idle + max(0.0, end - known)
