"""Events that a recorder emits of an engine: every event once, in order, and nothing while nobody looks
on."""

from dataclasses import replace

import pytest

from nanoserve.engine.engine import Engine
from nanoserve.errors import RuntimeFailure
from nanoserve.lab.simulator.fleet import drive
from nanoserve.record.events import (
    Arrived,
    Collected,
    Event,
    ExecutorFailed,
    Finished,
    Gained,
    Planned,
    Stopped,
    Worked,
)
from nanoserve.record.recent_steps import MOST_RECENT_STEPS, RecentSteps
from nanoserve.record.recorder import recorded, recorder_of
from nanoserve.record.run_record import RunRecord
from nanoserve.request import FinishReason, Request, SamplingParams
from nanoserve.scheduler import make_policy
from nanoserve.scheduler.plan import StepPlan
from nanoserve.scheduler.scheduler import Scheduler
from tests.fakes.memory_checking_executor import MemoryCheckingExecutor
from tests.fakes.observed_executor import ObservedExecutor
from tests.lab.simulator.linear_times import LinearTimes

NUM_BLOCKS, BLOCK_SIZE = 40, 4


def _scheduler(policy: str = "throttling", depth: int = 1) -> Scheduler:
    return Scheduler(
        make_policy(policy, 8),
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=40,
        pipeline_depth=depth,
        prefix_caching=False,
    )


def _requests(now: float = 0.0) -> list[Request]:
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    return [
        Request(f"r{number}", (1 + number,) * 7, params, seed=0, arrival_time=now)
        for number in range(3)
    ]


def test_events_come_in_the_order_in_which_things_become_known() -> None:
    events: list[Event] = []
    engine = Engine(_scheduler(), MemoryCheckingExecutor(NUM_BLOCKS, BLOCK_SIZE), vocab_size=50)
    recorder_of(engine).add(events.append)
    engine.add(_requests()[0])
    while engine.has_work:
        engine.step()
    engine.add(_requests()[1])
    engine.stop("r1")
    engine.close()
    step = [Planned, Collected, Gained]
    assert [type(event) for event in events] == [
        Arrived,
        *(step * 3),
        Arrived,
        Stopped,
        Gained,
        Finished,
    ]
    stopped = events[-3]
    assert isinstance(stopped, Stopped)
    assert (stopped.request_id, stopped.index, stopped.reason) == ("r1", None, FinishReason.ABORT)


@pytest.mark.parametrize(
    "policy", ["sarathi", "throttling", "adaptive", "prefill-first", "decode-first"]
)
def test_a_plan_is_told_with_what_the_policy_saw_and_with_the_blocks_that_it_left(
    policy: str,
) -> None:
    executor = MemoryCheckingExecutor(NUM_BLOCKS, BLOCK_SIZE)
    engine, record = Engine(_scheduler(policy), executor, vocab_size=50), RunRecord(1)
    recorder_of(engine).add(record)
    drive(engine, _requests())
    assert record.plans == executor.plans
    owned = 0
    for planned in record.planned.values():
        assert planned.load is not None
        assert engine.scheduler.policy.decide(planned.load) == planned.decision, "policies are pure"
        owned += sum(len(row.new_blocks) for row in planned.plan.rows)
        assert 0 < planned.blocks.used_device <= owned, (
            "what sequences that ended held is free again"
        )
    assert planned.blocks.device_share == pytest.approx(planned.blocks.used_device / NUM_BLOCKS)


def test_workers_times_follow_their_plans_and_results() -> None:
    executor = ObservedExecutor(LinearTimes(num_stages=2))
    engine, record = Engine(_scheduler(depth=2), executor, vocab_size=50), RunRecord(2)
    recorder_of(engine).add(record)
    drive(engine, _requests(executor.now()))
    assert [times.step for times in record.stages()[1]] == [plan.step for plan in record.plans]
    assert len(record.stage_times) == 2 * len(record.plans)
    assert [len(event.stages) for event in record.of(Worked)] == [2] * len(record.plans)


def test_nothing_is_told_while_nobody_looks_on_and_counts_go_on() -> None:
    engine, record = (
        Engine(_scheduler(), MemoryCheckingExecutor(NUM_BLOCKS, BLOCK_SIZE), vocab_size=50),
        RunRecord(1),
    )
    first, second, third = _requests()
    drive(engine, [first])
    with recorded(engine, record):
        drive(engine, [second])
    drive(engine, [third])
    assert engine.observers == engine.scheduler.observers == [], (
        "a recorder leaves with its last observer"
    )
    assert [request.request_id for request in record.arrivals] == ["r1"]
    assert [timing.output_tokens for timing in record.timings] == [3]
    assert (engine.status.prompt_tokens, engine.status.output_tokens) == (21, 9)
    assert engine.scheduler.table.outstanding == 0


def test_recent_steps_are_kept_in_a_ring_and_taken_once() -> None:
    engine = Engine(_scheduler(), MemoryCheckingExecutor(NUM_BLOCKS, BLOCK_SIZE), vocab_size=50)
    recent = RecentSteps(engine.scheduler)
    engine.observers.append(recent)
    for turn in range(20):
        drive(
            engine,
            [
                replace(request, request_id=f"{turn} {request.request_id}")
                for request in _requests()
            ],
        )
    steps = recent.take()
    assert [step.step for step in steps] == list(range(engine.status.steps))[-MOST_RECENT_STEPS:]
    assert recent.take() == []
    drive(engine, _requests()[:1])
    prompt, *decodes = recent.take()
    assert (prompt.decodes, prompt.prompt_tokens, prompt.running) == (0, 7, 1)
    assert [(step.decodes, step.prompt_tokens) for step in decodes] == [(1, 0)] * 2


class _OutOfMemory(MemoryCheckingExecutor):
    def submit(self, plan: StepPlan) -> None:
        raise RuntimeFailure("out of memory")


def test_a_failed_step_is_told() -> None:
    engine, record = (
        Engine(_scheduler(), _OutOfMemory(NUM_BLOCKS, BLOCK_SIZE), vocab_size=50),
        RunRecord(1),
    )
    recorder_of(engine).add(record)
    drive(engine, _requests()[:1])
    assert [type(event) for event in record.events] == [Arrived, ExecutorFailed, Gained]
    with pytest.raises(RuntimeFailure, match="out of memory"):
        record.check()
