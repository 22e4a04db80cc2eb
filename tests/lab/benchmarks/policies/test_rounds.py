"""Ratios are formed between variants that differ in one thing; policies are named with their
parameters."""

import pytest

from nanoserve.engine_config import EngineConfig
from nanoserve.errors import UsageError
from nanoserve.lab.benchmarks.policies.rounds import (
    Metrics,
    PolicyRound,
    pairs,
    ratios,
    samples,
    summarize,
)
from nanoserve.lab.benchmarks.policies.variants import OpenEngine, PolicyVariant
from nanoserve.lab.simulator.executor import SimulatedExecutor
from nanoserve.record.metrics import Distribution
from nanoserve.record.run_record import StageShares
from nanoserve.scheduler.optional import LayoutCapacity
from nanoserve.scheduler.policies import parse_policies
from nanoserve.scheduler.policies.token_throttling import TokenThrottling
from tests.lab.simulator.linear_times import LinearTimes

RATIOS = ("output_tokens_per_s", "ttft_ms", "tpot_ms", "e2el_ms")
CONFIG = EngineConfig(block_size=4, max_model_len=30, max_num_seqs=3, max_num_batched_tokens=64)


def _variants(*names: str) -> list[PolicyVariant]:
    engine = OpenEngine(
        name="x",
        vocab_size=50,
        executor=SimulatedExecutor(LinearTimes(num_stages=3)),
        capacities=(LayoutCapacity(9, 3),),
        compiled=False,
    )
    split = [name.partition(", ") for name in names]
    return [
        PolicyVariant(
            policy=policy, place=place, engine=engine, config=CONFIG, capacities=engine.capacities
        )
        for policy, _, place in split
    ]


def _figures(rate: float, ttft: float) -> Metrics:
    share = StageShares(computing=0.7, sending=0.1, metadata=0.0, waiting=0.2, metadata_of_step=0.0)
    return {
        "output_tokens_per_s": rate,
        "ttft_ms": Distribution.of([ttft, 3 * ttft]),
        "tpot_ms": None,
        "e2el_ms": Distribution.of([ttft]),
        "stages": [share, share],
    }


def _round(number: int, after: float = 10.0, **variants: Metrics) -> PolicyRound:
    named = {name.replace("_", ", "): figures for name, figures in variants.items()}
    return PolicyRound(
        case="work",
        number=number,
        bandwidth_before=10.0,
        bandwidth_after=after,
        foreign_cores=0.0,
        variants=named,
    )


def test_what_is_held_against_what() -> None:
    names = [
        f"{policy}, {engine}" for engine in ("pp=2", "one process") for policy in ("a", "b", "c")
    ]
    assert [called for called, _, _ in pairs(_variants(*names))] == [
        "b over a, pp=2",
        "c over a, pp=2",
        "pp=2 over one process, a",
        "pp=2 over one process, b",
        "pp=2 over one process, c",
        "b over a, one process",
        "c over a, one process",
    ]
    assert pairs(_variants("a, pp=2", "a, pp=2 coupled")) == [
        ("pp=2 over pp=2 coupled, a", "a, pp=2", "a, pp=2 coupled")
    ]
    assert pairs(_variants("a, pp=2")) == []
    assert pairs(_variants("sarathi", "neo")) == [("neo over sarathi", "neo", "sarathi")]


def test_ratios_are_of_rounds_that_count() -> None:
    rounds = [
        _round(1, a_x=_figures(10.0, 2.0), b_x=_figures(20.0, 3.0)),
        _round(2, a_x=_figures(10.0, 2.0), b_x=_figures(30.0, 2.0)),
        _round(3, after=20.0, a_x=_figures(10.0, 2.0), b_x=_figures(900.0, 2.0)),
    ]
    found = {one.metric: one for one in ratios(rounds, pairs(_variants("a, x", "b, x")), RATIOS)}
    assert set(found) == {"output_tokens_per_s", "ttft_ms", "e2el_ms"}
    rate = found["output_tokens_per_s"]
    assert (rate.variants, rate.rounds, rate.median, rate.low, rate.high) == (
        "b over a, x",
        2,
        2.5,
        2.0,
        3.0,
    )
    assert (found["ttft_ms"].low, found["ttft_ms"].high) == (1.0, 1.5)
    assert samples(rounds, RATIOS)["b, x"]["output_tokens_per_s"] == [20.0, 30.0]
    first, second = summarize(rounds)
    assert (first["variant"], first["rounds"], first["ttft_ms"]["mean"], first["tpot_ms"]) == (
        "a, x",
        2,
        4.0,
        None,
    )
    assert second["output_tokens_per_s"] == 25.0
    assert second["stages"]["1"]["computing"] == 0.7


def test_policies_have_parameters_of_their_own() -> None:
    assert tuple(parse_policies("sarathi, throttling:without_wt", 64)) == (
        "sarathi",
        "throttling:without_wt",
    )
    (variant,) = _variants("throttling:without_wt:iterations=4, x")
    scheduler = variant.scheduler()
    assert scheduler.policy == TokenThrottling(max_prefill=64, without_wt=True, iterations=4)
    assert (scheduler.pipeline_depth, scheduler.pool.num_blocks) == (3, 9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fair", "unknown policy 'fair'"),
        ("sarathi,,", "unknown policy ''"),
        ("throttling:speed=9", "no parameter 'speed'"),
        ("throttling:iterations=x", "iterations is a whole number"),
        ("throttling:threshold=2", "threshold must be"),
        ("sarathi,throttling,sarathi", "sarathi is named twice: give each parameters of its own"),
    ],
)
def test_policies_that_make_no_sense(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_policies(text, 64)
