"""The trace of an engine with two layouts: phases, what became of decodes at a turn, swaps, how
full the pools are."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from nanoserve.engine.engine import Engine
from nanoserve.lab.benchmarks.policies.variants import PrefillPrioritizing
from nanoserve.lab.simulator.fleet import drive
from nanoserve.layout import ParallelLayout
from nanoserve.record.chrome_trace import ChromeTraceFile
from nanoserve.record.events import Blocks, Collected, ExecutorFailed, Finished, Planned, Worked
from nanoserve.record.phases import Phase, PhaseTracker, PhaseTurn
from nanoserve.record.recorder import recorder_of
from nanoserve.record.times import SwapTimes
from nanoserve.record.trace import RunTrace
from nanoserve.request import Request, SamplingParams
from nanoserve.scheduler.assembly import make_extensions
from nanoserve.scheduler.load import Policy
from nanoserve.scheduler.optional import HostPlan, HostResult, LayoutCapacity, LayoutPlan, Swap
from nanoserve.scheduler.plan import Row, StepPlan, StepResult
from nanoserve.scheduler.policies.transition_minimizing import TransitionMinimizing
from nanoserve.scheduler.scheduler import Scheduler
from tests.fakes.moving_executor import KV_BYTES, WEIGHT_BYTES, MovingExecutor
from tests.lab.simulator.tier_times import TierTimes
from tests.record.planned import planned
from tests.record.tracks import tracks_of

_BLOCK_SIZE = 4
_P2_T2 = (ParallelLayout(pipeline_parallel=2), ParallelLayout(tensor_parallel=2))
_REQUESTS, _PROMPT, _ANSWER = 12, 14, 10


def _run(policy: Policy, path: Path) -> Scheduler:
    executor = MovingExecutor(
        [
            TierTimes(num_stages=2, layer=0.5, swap_token=0.125),
            TierTimes(layer=0.5, swap_token=0.125),
        ],
        block_size=_BLOCK_SIZE,
    )
    scheduler = Scheduler(
        policy,
        num_blocks=48,
        block_size=_BLOCK_SIZE,
        max_model_len=40,
        prefix_caching=False,
        pipeline_depth=2,
        extensions=make_extensions(host_blocks=24, other_layouts=[LayoutCapacity(48)]),
    )
    file = ChromeTraceFile(path)
    engine = Engine(scheduler, executor, vocab_size=2)
    link = WEIGHT_BYTES / 2
    trace = RunTrace(file, engine.now(), layouts=_P2_T2, host_link_bandwidth=link, close=file.close)
    recorder_of(engine).add(trace)
    params = SamplingParams(max_tokens=_ANSWER, ignore_eos=True)
    now = engine.now()
    requests = [
        Request(f"r{name}", (1,) * _PROMPT, params, seed=0, arrival_time=now)
        for name in range(_REQUESTS)
    ]
    drive(engine, requests)
    engine.close()
    return scheduler


def test_phases_follow_each_other_and_tell_every_token(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    _run(TransitionMinimizing(token_budget=30), path)
    phases = sorted(tracks_of(json.loads(path.read_text()))["phases"], key=lambda bar: bar["ts"])
    names = [bar["name"] for bar in phases]
    cycle = [
        "prefill in P2",
        "draining P2",
        "re-shard to T2",
        "decode in T2",
        "draining T2",
        "re-shard to P2",
    ]
    assert names == [cycle[place % 6] for place in range(len(names))]
    assert len(names) == 10, (
        "half of the prompts fill the pool: two cycles, and the second ends with a decode"
    )
    for before, after in pairwise(phases):
        assert before["ts"] + before["dur"] == pytest.approx(after["ts"], abs=0.2), (
            "rounded to 0.1 us"
        )
    computed = [bar["args"] for bar in phases if bar["name"][:4] in ("pref", "deco")]
    assert sum(one["prompt_tokens"] for one in computed) == _REQUESTS * _PROMPT
    assert sum(one["decodes"] for one in computed) == _REQUESTS * (_ANSWER - 1)


def test_swaps_stand_beside_each_worker_with_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    _run(TransitionMinimizing(token_budget=30), path)
    tracks = tracks_of(json.loads(path.read_text()))
    blocks = -(-_PROMPT // _BLOCK_SIZE)
    for rank in (0, 1):
        for direction in ("out", "in"):
            bars = tracks[f"worker {rank}, swaps {direction}"]
            assert len(bars) == _REQUESTS
            assert {bar["args"]["bytes"] for bar in bars} == {KV_BYTES * blocks * _BLOCK_SIZE}
        transitions = [
            bar for bar in tracks[f"worker {rank}"] if bar["name"].startswith("re-shard")
        ]
        assert [bar["name"] for bar in transitions] == [
            "re-shard to T2",
            "re-shard to P2",
            "re-shard to T2",
        ]
        seconds = {bar["name"][-2:]: bar["dur"] / 1e6 for bar in transitions}
        for bar in transitions:
            assert bar["args"]["bytes"] == WEIGHT_BYTES
            assert bar["args"]["share of host link"] == pytest.approx(2 / seconds[bar["name"][-2:]])


def test_a_swap_that_waits_for_layers_says_so_and_has_no_speed(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with ChromeTraceFile(path) as file:
        trace = RunTrace(file, 0.0, host_link_bandwidth=1.0)
        trace(Worked((), (SwapTimes(1, 0, "out", 8_000_000_000, 1.0, 3.0),)))
        trace(Worked((), (SwapTimes(2, 0, "out", 8_000_000_000, 3.0, 5.0, after_row=True),)))
    plain, behind_row = tracks_of(json.loads(path.read_text()))["worker 0, swaps out"]
    assert (plain["name"], plain["args"]["GB/s"]) == ("swap out", 4.0)
    assert (behind_row["name"], behind_row["args"]) == (
        "swap out, layer by layer",
        {"swap": 2, "bytes": 8_000_000_000},
    )


def test_counters_show_the_pool_fill_up_and_run_empty(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    _run(TransitionMinimizing(token_budget=30), path)
    events = json.loads(path.read_text())
    host = [event["args"] for event in events if event["name"] == "KV blocks in the host pool"]
    assert {one["used"] + one["free"] for one in host} == {24}
    assert max(one["used"] for one in host) == 24
    used = [one["used"] for one in host]
    assert used.count(0) >= 2 and used[-1] == 0
    device = [event["args"] for event in events if event["name"] == "KV blocks on the device"]
    assert 0 < max(one["used"] for one in device) <= 48


def test_a_turn_tells_what_became_of_decodes(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    _run(PrefillPrioritizing(token_budget=30), path)
    turns = [
        bar["args"]
        for bar in tracks_of(json.loads(path.read_text()))["phases"]
        if bar["name"] == "draining T2"
    ]
    assert sum(turn["sequences sent through the pool"] for turn in turns) > 0
    waited = tmp_path / "waited.json"
    _run(TransitionMinimizing(token_budget=30), waited)
    turns = [
        bar["args"]
        for bar in tracks_of(json.loads(waited.read_text()))["phases"]
        if bar["name"] == "draining T2"
    ]
    names = (
        "sequences sent through the pool",
        "finished since the pool was empty",
        "to be computed again",
    )
    assert [tuple(turn[name] for name in names) for turn in turns] == [(0, 6, 0)], (
        "nobody predicts: they end first"
    )


def _blocks(*, host: int, device: int = 3, preemptions: int = 0) -> Blocks:
    return Blocks(10, 20, host, 20, device, preemptions)


def _rows(step: int, time: float, blocks: Blocks, *, layout: int) -> Planned:
    return planned(
        StepPlan(step, rows=(Row(0, 5, (1,), True),), layouts=LayoutPlan(current=layout)),
        time,
        blocks,
    )


def _swap(step: int, time: float, blocks: Blocks, *, layout: int) -> Planned:
    return planned(
        StepPlan(
            step,
            host=HostPlan(swaps=(Swap(0, 0, "out", (1,), (1,)),)),
            layouts=LayoutPlan(current=layout),
        ),
        time,
        blocks,
    )


def _result(time: float, result: StepResult) -> Collected:
    return Collected(time, time, (result,))


def test_a_turn_is_counted_from_the_moment_at_which_the_pool_was_empty() -> None:
    tracker = PhaseTracker()
    assert tracker.on_event(_rows(0, 0.0, _blocks(host=4, device=4), layout=1)) == []
    assert tracker.on_event(_result(1.0, StepResult(0))) == []
    tracker.on_event(_rows(1, 1.0, _blocks(host=0, device=5), layout=1))
    tracker.on_event(_result(2.0, StepResult(1)))
    tracker.on_event(_rows(2, 2.0, _blocks(host=0, device=3), layout=1))
    tracker.on_event(_result(3.0, StepResult(2)))
    last = _blocks(host=1, device=0, preemptions=1)
    tracker.on_event(_swap(3, 3.0, last, layout=1))
    tracker.on_event(_result(4.0, StepResult(None, host=HostResult(swapped=(0,)))))
    over = tracker.on_event(
        planned(StepPlan(4, layouts=LayoutPlan(current=1, transition=0)), 4.0, last)
    )
    decode, drain = over
    assert decode == Phase("compute", 1, 0.0, 3.0, plans=3, decodes=3)
    assert drain == Phase(
        "drain", 1, 3.0, 4.0, swaps_out=1, turn=PhaseTurn(finished=3, through_pool=1, recomputed=1)
    )
    assert tracker.on_event(_result(9.0, StepResult(4))) == [Phase("reshard", 0, 4.0, 9.0)]
    assert tracker.on_event(Finished(10.0, last)) == [Phase("compute", 0, 9.0, 10.0)]
    assert tracker.on_event(Finished(11.0, last)) == []


def test_a_death_in_a_transition_ends_it_and_the_next_plan_tells_the_layout() -> None:
    tracker, blocks = PhaseTracker(), _blocks(host=0)
    tracker.on_event(_rows(0, 0.0, blocks, layout=0))
    tracker.on_event(planned(StepPlan(1, layouts=LayoutPlan(transition=1)), 1.0, blocks))
    lost = StepResult(None, lost="worker 1 was killed")
    assert tracker.on_event(_result(3.0, lost)) == [Phase("reshard", 1, 1.0, 3.0)]
    tracker.on_event(_rows(2, 4.0, blocks, layout=0))
    assert tracker.on_event(ExecutorFailed(5.0)) == [
        Phase("compute", 0, 4.0, 5.0, plans=1, decodes=1)
    ]


def test_an_idle_moment_is_no_drain_if_rows_follow() -> None:
    tracker, blocks = PhaseTracker(), _blocks(host=4)
    tracker.on_event(_rows(0, 0.0, blocks, layout=1))
    tracker.on_event(_result(1.0, StepResult(0)))
    tracker.on_event(_swap(1, 1.0, blocks, layout=1))
    tracker.on_event(_result(2.0, StepResult(None, host=HostResult(swapped=(0,)))))
    tracker.on_event(_rows(2, 2.0, blocks, layout=1))
    tracker.on_event(_result(3.0, StepResult(2)))
    decode, drain = tracker.on_event(
        planned(StepPlan(3, layouts=LayoutPlan(current=1, transition=0)), 3.5, blocks)
    )
    assert (decode.ended, decode.swaps_out, drain.swaps_out, drain.began) == (3.0, 1, 0, 3.0)
    assert drain.name(["P2", "T2"]) == "draining T2"
