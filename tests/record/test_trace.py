"""The trace of a run: what happened to each micro-batch, and what each worker did."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nanoserve.engine.engine import Engine
from nanoserve.errors import RuntimeFailure
from nanoserve.lab.simulator.executor import SimulatedExecutor
from nanoserve.lab.simulator.fleet import drive
from nanoserve.record.chrome_trace import ChromeTraceFile
from nanoserve.record.events import Collected, States
from nanoserve.record.recorder import TimedExecutor, recorder_of
from nanoserve.record.times import StageTimes
from nanoserve.record.trace import RunTrace, bars_of
from nanoserve.request import Request, SamplingParams
from nanoserve.scheduler import make_policy
from nanoserve.scheduler.plan import Executor, StepPlan, StepResult
from nanoserve.scheduler.scheduler import Scheduler
from tests.fakes.observed_executor import ObservedExecutor, UntoldExecutor, dummy_answers
from tests.lab.simulator.linear_times import LinearTimes
from tests.record.planned import NO_BLOCKS, planned
from tests.record.tracks import tracks_of


def _scheduler(executor: Executor) -> Scheduler:
    return Scheduler(
        make_policy("throttling", 7),
        num_blocks=20,
        block_size=4,
        max_model_len=40,
        prefix_caching=False,
        pipeline_depth=executor.max_in_flight,
    )


def _traced(executor: Executor, path: Path, **settings: Any) -> Engine:
    engine = Engine(_scheduler(executor), executor, vocab_size=2)
    file, reports_times = ChromeTraceFile(path), isinstance(executor, TimedExecutor)
    recorder_of(engine).add(
        RunTrace(file, engine.now(), reports_times=reports_times, close=file.close, **settings)
    )
    return engine


def _request(name: str, tokens: int, arrival_time: float = 0.0) -> Request:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return Request(name, (1,) * 7, params, seed=0, arrival_time=arrival_time)


def _run(executor: Executor, path: Path) -> None:
    engine = _traced(executor, path)
    drive(engine, [_request(f"r{name}", 4, executor.now()) for name in range(3)])
    engine.close()


def test_counters_of_a_model_with_recurrent_states(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    states = States(slots=9, working=2, snapshots=3, free=7)
    with ChromeTraceFile(path) as file:
        trace = RunTrace(file, 0.0)
        trace(planned(StepPlan(0), 1.0, replace(NO_BLOCKS, states=states)))
    counters = {one["name"]: one["args"] for one in json.loads(path.read_text()) if "args" in one}
    assert counters["slots of recurrent states"] == {"used": 2, "free": 7}


def test_bars_of_a_track_do_not_overlap_and_tell_all_tokens(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    _run(ObservedExecutor(LinearTimes(num_stages=2, step=1.0, send=0.25, host=0.125)), path)
    events = json.loads(path.read_text())
    tracks = tracks_of(events)
    assert set(tracks) == {"micro-batch 0", "micro-batch 1", "stage 0", "stage 1"}
    for bars in tracks.values():
        spans = sorted((bar["ts"], bar["ts"] + bar["dur"]) for bar in bars)
        assert all(before[1] <= after[0] + 0.2 for before, after in pairwise(spans)), (
            "rounded to 0.1 us"
        )
    counted = [event["args"] for event in events if event["name"] == "tokens of a micro-batch"]
    assert sum(one["decodes"] for one in counted) == 3 * 3
    assert sum(one["prompt tokens"] + one["decodes"] for one in counted) == 3 * (7 + 3)
    assert len(tracks["micro-batch 0"] + tracks["micro-batch 1"]) == len(counted)
    computed = [bar for bar in tracks["stage 1"] if bar["name"] == "compute"]
    assert {bar["dur"] for bar in computed} == {1e6}
    assert any(bar["name"] == "wait for activations" for bar in tracks["stage 1"])
    assert min(event["ts"] for event in events if "ts" in event) == 0


def test_one_process_has_a_track_of_what_it_computed(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    _run(UntoldExecutor(LinearTimes(), answer=dummy_answers), path)
    tracks = tracks_of(json.loads(path.read_text()))
    assert set(tracks) == {"micro-batch 0", "stage 0"}
    assert [bar["dur"] for bar in tracks["stage 0"]] == [1e6] * len(tracks["micro-batch 0"])


def test_waiting_is_named_after_what_is_waited_for() -> None:
    times = StageTimes(
        0, 1, 5, received=1.0, prepared=4.0, began=4.1, arrived=5.0, computed=6.0, sent=6.5
    )
    computed = [("compute", 5.0, 6.0), ("send", 6.0, 6.5)]
    activations = ("wait for activations", 4.1, 5.0)
    assert bars_of(times, free=0.5) == [("wait for inputs", 1.0, 4.0), activations, *computed]
    assert bars_of(times, free=3.0) == [("wait for inputs", 3.0, 4.0), activations, *computed]
    assert bars_of(times, free=4.05) == [activations, *computed]


def test_a_loss_is_shown_and_frees_the_tracks(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with ChromeTraceFile(path) as file:
        trace = RunTrace(file, 1.0)
        trace(planned(StepPlan(0), 1.0))
        trace(Collected(2.0, 2.0, (StepResult(None, lost="worker 1 was killed"),)))
        trace(planned(StepPlan(1), 3.0))
        trace(Collected(4.0, 4.0, (StepResult(1),)))
    tracks = tracks_of(json.loads(path.read_text()))
    assert [(bar["name"], bar["ts"]) for bar in tracks["deaths"]] == [("worker 1 was killed", 1e6)]
    assert [bar["args"]["step"] for bar in tracks["micro-batch 0"]] == [1]


def test_a_killed_run_leaves_what_was_known(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    traced = _traced(ObservedExecutor(LinearTimes(num_stages=2)), path)
    traced.add(_request("r", 1))
    while traced.has_work:
        traced.step()
    assert traced.scheduler.steps == 1
    assert [event["name"] for event in json.loads(path.read_text() + "]")].count("compute") == 2


class _FailingOnce(SimulatedExecutor):
    failed = False

    def collect(self, until: float | None) -> list[StepResult]:
        results = super().collect(until)
        if not self.failed:
            self.failed = True
            raise RuntimeFailure("out of memory")
        return results


def test_a_failed_step_frees_its_track(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    traced = _traced(_FailingOnce(LinearTimes(), answer=dummy_answers), path)
    traced.add(_request("fails", 1))
    (update,) = traced.step()
    assert update.sequence.error == "out of memory"
    traced.add(_request("runs", 1))
    while traced.has_work:
        traced.step()
    traced.close()
    bars = tracks_of(json.loads(path.read_text()))
    assert [bar["args"]["step"] for bar in bars["micro-batch 0"]] == [1]
    assert "micro-batch 1" not in bars


def test_a_full_disk_ends_the_trace_and_not_the_run() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no full device to write to")
    failures: list[RuntimeFailure] = []
    traced = _traced(
        SimulatedExecutor(LinearTimes(), answer=dummy_answers), full, on_failure=failures.append
    )
    traced.add(_request("r", 3))
    for _ in range(3):
        assert len(traced.step()) == 1
        assert len(failures) == 1, "it is told at once, and once"
    with pytest.raises(
        RuntimeFailure, match="the trace is not complete: cannot write /dev/full: No space left"
    ):
        traced.close()
