"""Runs on two real workers: replayed to equal plans, and simulated with the times that their stages
took."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from nanoserve.engine_config import EngineConfig
from nanoserve.executor.start.model_loading import read_config
from nanoserve.lab.benchmarks.policies.engines import open_workers
from nanoserve.lab.benchmarks.policies.simulated import compare_with_simulator
from nanoserve.lab.benchmarks.policies.variants import (
    OpenEngine,
    PolicyVariant,
    fitted,
    make_requests,
    run_requests,
)
from nanoserve.lab.benchmarks.serving.requests import poisson_arrivals
from nanoserve.models.hub import resolve_model
from nanoserve.record.run_record import RunRecord, stage_shares
from nanoserve.request import RequestShape
from nanoserve.scheduler.scheduler import Scheduler

CONFIG = EngineConfig(
    dtype="float32",
    eager=True,
    kv_cache_memory=64 << 20,
    max_model_len=512,
    max_num_seqs=32,
    pipeline_parallel=2,
)
RESOLVED = resolve_model(None)
MODEL = read_config(RESOLVED)


@pytest.fixture(scope="module")
def engine() -> Iterator[OpenEngine]:
    with ExitStack() as opened:
        yield open_workers(opened, "pp=2", RESOLVED, CONFIG, MODEL, None)


def _maker(engine: OpenEngine, policy: str) -> Callable[[], Scheduler]:
    config = replace(fitted(CONFIG, MODEL, [engine]), max_num_batched_tokens=64)
    return PolicyVariant(
        policy=policy, engine=engine, config=config, capacities=engine.capacities
    ).scheduler


def _run(
    engine: OpenEngine, make: Callable[[], Scheduler], shapes: list[RequestShape], rate: float
) -> RunRecord:
    arrivals = poisson_arrivals(rate, len(shapes), seed=1)
    requests = make_requests(shapes, arrivals, MODEL.vocab_size, seed=1)
    return run_requests(
        engine.executor, make, requests, vocab_size=MODEL.vocab_size, workers=engine.workers
    )


@pytest.mark.parametrize("policy", ["sarathi", "throttling", "throttling:without_wt:min_prefill=8"])
def test_a_real_run_is_replayed_to_equal_plans(engine: OpenEngine, policy: str) -> None:
    make = _maker(engine, policy)
    run = _run(engine, make, [RequestShape(10 + 7 * number, 6) for number in range(8)], rate=100.0)
    # which raises at another plan
    compared = compare_with_simulator(run, make, vocab_size=MODEL.vocab_size)
    assert compared is not None
    assert compared["replayed"] == compared["plans"] == len(run.plans) > 8
    assert all(timing.output_tokens == 6 for timing in run.timings)
    assert min(compared["makespan"], compared["ttft"]) > 0


def test_workers_say_what_they_did_in_order(engine: OpenEngine) -> None:
    run = _run(engine, _maker(engine, "throttling"), [RequestShape(20, 5)] * 4, rate=float("inf"))
    stages = run.stages()
    steps = [plan.step for plan in run.plans]
    assert [[times.step for times in stage] for stage in stages] == [steps, steps]
    for first, second in zip(*stages, strict=True):
        for times in (first, second):
            assert times.received <= times.began <= times.arrived <= times.computed <= times.sent
            assert times.received <= times.prepared <= times.computed
        assert run.planned[first.step].time <= first.received
        assert first.computed <= second.computed <= run.known[first.step] + 1e-5, "known in ticks"
    for shares in stage_shares(run):
        assert 0 < shares.computing < 1
        assert (
            shares.computing + shares.sending + shares.metadata + shares.waiting == pytest.approx(1)
        )
