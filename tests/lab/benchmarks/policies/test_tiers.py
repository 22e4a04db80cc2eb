"""Runs in virtual time: what is measured of them, and that the simulator makes the same of them."""

from dataclasses import replace
from functools import partial

import msgspec
import pytest

from nanoserve.engine_config import EngineConfig
from nanoserve.errors import RuntimeFailure
from nanoserve.lab.benchmarks.policies.gains import HYBRID
from nanoserve.lab.benchmarks.policies.metrics import findings
from nanoserve.lab.benchmarks.policies.rounds import Bench, Metrics, PolicyRound
from nanoserve.lab.benchmarks.policies.variants import KvCases, OpenEngine
from nanoserve.lab.commands.bench_hybrid import hybrid_benches
from nanoserve.scheduler.plan import StepResult
from tests.lab.benchmarks.policies.simulated_engine import BLOCK_SIZE, TIMES, simulated_engine

POLICIES = ("sarathi", "neo", "overlap", "apex:minimum_ratio=0", "hybrid")
OUTPUT, REQUESTS = 40, 12


def _bench(engine: OpenEngine, share: float) -> Bench:
    work = KvCases(
        input_tokens=13,
        outputs=(OUTPUT,),
        requests=REQUESTS,
        shares=(share,),
        block_size=BLOCK_SIZE,
    )
    config = EngineConfig(
        block_size=BLOCK_SIZE, max_model_len=200, max_num_seqs=64, max_num_batched_tokens=32
    )
    (bench,) = hybrid_benches(partial(Bench, probe=lambda: 1e10), engine, POLICIES, work, config)
    return bench


def _is_hybrid(figures: Metrics) -> bool:
    return any(figures["steps"][strategy] for strategy in HYBRID)


@pytest.fixture(scope="module")
def tight() -> PolicyRound:
    """With memory for a third."""
    return _bench(simulated_engine(), 0.3).round(1)


def test_the_simulator_and_the_predictor_know_a_run_that_is_as_they_say(tight: PolicyRound) -> None:
    for name, figures in tight.variants.items():
        assert figures["simulation_error"] == pytest.approx(0, abs=1e-4), (
            f"{name}: the record's clock ticks"
        )
        assert figures["simulated"]["steps"] == figures["steps"]
        assert figures["errors"]["all"]["median"] < 0.001


def test_a_simulated_policy_knows_what_the_real_one_had_learned_when_it_began() -> None:
    """Rows cost much more than weights, which the profile does not know, and which is measured in
    each round."""
    other = replace(TIMES, layer=0.2, token=0.3)
    bench = _bench(simulated_engine(other, measured=[other, other]), 0.3)
    for number in (1, 2):
        hybrid = bench.round(number).variants["hybrid"]
        assert hybrid["simulated"]["steps"] == hybrid["steps"]
        assert hybrid["simulation_error"] == pytest.approx(0, abs=1e-4)


def test_tokens_are_counted_where_they_were_computed(tight: PolicyRound) -> None:
    for name, figures in tight.variants.items():
        device, host = figures["latencies"]["device"], figures["latencies"]["host"]
        assert device["tokens"] + host["tokens"] == REQUESTS * (OUTPUT - 1)
        assert (host["tokens"] > 0) == (name != "sarathi")
        assert (figures["processor_share"] > 0) == _is_hybrid(figures) == (name != "sarathi")
        assert (figures["swaps_out"] > 0) == (name != "sarathi")
    overlap = tight.variants["overlap"]["latencies"]
    assert overlap["host"]["itl_ms"].p50 > 3 * overlap["device"]["itl_ms"].p50, (
        "a token on the host takes L + 1 steps"
    )


def test_errors_and_gains_are_those_of_the_strategies_that_ran(tight: PolicyRound) -> None:
    overlap, neo = tight.variants["overlap"], tight.variants["neo"]
    assert overlap["errors"]["asymmetric"] is None and neo["errors"]["overlap"] is None
    assert overlap["errors"]["overlap"]["steps"] > 10 and overlap["gains"]["overlap"]["steps"] > 10
    assert overlap["gains"]["asymmetric"] is None
    assert neo["gains"]["asymmetric"]["steps"] > 10


def test_gains_come_near_their_bounds_and_never_beyond(tight: PolicyRound) -> None:
    assert findings([tight], holds_everything=False)["beyond_bound"] == ()
    for figures in tight.variants.values():
        for part in figures["gains"].values():
            if part is not None and part["steps"] > 10:
                assert part["reached"] is not None and 0.8 < part["reached"] < 1.05


def test_with_memory_for_everything_no_step_is_hybrid() -> None:
    done = _bench(simulated_engine(), 1.0).round(1)
    assert not any(map(_is_hybrid, done.variants.values()))
    assert len({figures["seconds"] for figures in done.variants.values()}) == 1
    assert findings([done], holds_everything=True)["hybrid_although_it_fits"] == ()


def test_hybrid_steps_although_everything_fits_are_found(tight: PolicyRound) -> None:
    found = findings([tight, tight], holds_everything=True)
    assert found["hybrid_although_it_fits"] == ("neo", "overlap", "apex:minimum_ratio=0", "hybrid")


def test_gains_beyond_the_bound_are_found(tight: PolicyRound) -> None:
    overlap = tight.variants["overlap"]
    gain = overlap["gains"]["overlap"]
    more = gain | {"gain": gain["bound"] + 0.03}
    held = overlap | {"gains": overlap["gains"] | {"overlap": more}}
    done = msgspec.structs.replace(tight, variants=tight.variants | {"overlap": held})
    assert findings([done], holds_everything=False)["beyond_bound"] == ("overlap",)


def test_a_machine_slower_than_its_profile_shows_in_the_simulators_error() -> None:
    slow = replace(TIMES, layer=2 * TIMES.layer, token=2 * TIMES.token, key=2 * TIMES.key)
    bench = _bench(simulated_engine(slow), 1.0)
    first, second = bench.round(1), bench.round(2)
    figures = [done.variants["hybrid"] for done in (first, second)]
    assert figures[0]["simulation_error"] == pytest.approx(1.0, abs=0.05), (
        "the profile promises twice the throughput"
    )
    errors = [one["errors"]["all"]["median"] for one in figures]
    assert errors[1] < 0.1, "what the predictor learned in one round it knows in the next"


def test_the_simulator_is_fed_with_what_was_measured_in_the_round() -> None:
    slow = replace(TIMES, layer=2 * TIMES.layer, token=2 * TIMES.token, key=2 * TIMES.key)
    bench = _bench(simulated_engine(measured=[TIMES, slow]), 1.0)
    first, second = bench.round(1), bench.round(2)
    assert first.variants["sarathi"]["simulation_error"] == pytest.approx(0, abs=1e-4)
    assert second.variants["sarathi"]["simulation_error"] == pytest.approx(-0.5, abs=0.05)


def test_a_run_in_which_attention_on_the_cpu_is_lost_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = simulated_engine()
    bench = _bench(engine, 0.3)
    collect = engine.executor.collect

    def losing(until: float | None) -> list[StepResult]:
        return [
            msgspec.structs.replace(
                result, host=msgspec.structs.replace(result.host, lost="the thread died")
            )
            for result in collect(until)
        ]

    monkeypatch.setattr(engine.executor, "collect", losing)
    with pytest.raises(RuntimeFailure, match="attention on the CPU is lost: the thread died"):
        bench.variants[0].run(bench.requests(1))
