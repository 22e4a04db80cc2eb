"""Figures from a profiler's trace, on traces made by hand: times are microseconds."""

from typing import Any

import pytest

from nanoserve.lab.benchmarks.gpu.engine import STEP_MARK, summarize_trace

Event = dict[str, Any]


def mark(start: float, duration: float) -> Event:
    return {"cat": "user_annotation", "name": STEP_MARK, "ts": start, "dur": duration}


def launch(at: float, correlation: int, kind: str = "cuda_runtime") -> Event:
    return {
        "cat": kind,
        "name": "launch",
        "ts": at,
        "dur": 1.0,
        "args": {"correlation": correlation},
    }


def work(start: float, duration: float, correlation: int, kind: str = "kernel") -> Event:
    return {
        "cat": kind,
        "name": "work",
        "ts": start,
        "dur": duration,
        "args": {"correlation": correlation},
    }


def test_kernels_belong_to_the_step_that_launched_them() -> None:
    events = [
        {"cat": "cpu_op", "name": "something else", "ts": 0.0},
        work(1.0, 2.0, 99),  # launched outside of any step
        mark(0.0, 10.0),
        launch(1.0, 1),
        launch(2.0, 2, "cuda_driver"),
        work(10.0, 4.0, 1),
        work(16.0, 4.0, 2),
        mark(30.0, 10.0),
        launch(31.0, 3),  # a graph: its kernels share a correlation
        work(40.0, 5.0, 3),
        work(45.0, 5.0, 3),
        work(45.0, 1.0, 3),
        mark(60.0, 10.0),
        launch(61.0, 4),
        work(70.0, 5.0, 4),
    ]
    found = summarize_trace(events)
    assert found is not None
    assert found["steps"] == 2
    assert found["kernels_per_step"] == 2.5
    assert found["kernel_us"] == pytest.approx((4 + 4 + 5 + 5 + 1) / 5)
    assert found["step_us"] == pytest.approx(30.0)
    assert found["idle_between_steps"] == pytest.approx((20 + 20) / 60)
    assert found["idle_within_steps"] == pytest.approx(2 / 60)
    assert found["busy"] == pytest.approx(18 / 60)


def test_a_copy_before_a_step_ends_waiting_but_begins_no_step() -> None:
    """Inputs of the next step travel while nothing else happens: the device is idle before and
    behind them."""
    events = [
        *(mark(0.0, 5.0), launch(1.0, 1), work(10.0, 10.0, 1)),
        *(
            mark(20.0, 5.0),
            launch(21.0, 2),
            launch(22.0, 3),
            work(24.0, 2.0, 2, "gpu_memcpy"),
            work(30.0, 10.0, 3),
        ),
    ]
    found = summarize_trace(events)
    assert found is not None
    assert found["idle_between_steps"] == pytest.approx((4 + 4) / 20)
    assert found["idle_within_steps"] == 0.0


def test_overlapped_steps_leave_no_idle_time() -> None:
    events = [
        *(mark(0.0, 5.0), launch(1.0, 1), work(10.0, 30.0, 1)),
        *(mark(12.0, 5.0), launch(13.0, 2), work(40.0, 30.0, 2)),
    ]
    found = summarize_trace(events)
    assert found is not None
    assert (found["idle_between_steps"], found["busy"]) == (0.0, 1.0)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_trace_without_two_steps_on_the_device_says_nothing(steps: int) -> None:
    events = [mark(0.0, 10.0), mark(20.0, 10.0), launch(1.0, 1), *[work(5.0, 1.0, 1)] * steps]
    assert summarize_trace(events) is None
