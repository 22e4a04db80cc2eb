"""Runs in virtual time: what is measured of them, and that the simulator makes the same of them."""

from dataclasses import replace

import msgspec
import pytest

from nanoserve.benchmarks.cpu_load import ForeignLoad
from nanoserve.benchmarks.hybrid.cases import Case, Work
from nanoserve.benchmarks.hybrid.policies import HybridEngine, Scheduling
from nanoserve.benchmarks.hybrid.rounds import Bench, Figures, HybridRound, findings, pairs
from nanoserve.benchmarks.pipeline.running import make_requests, run_requests
from nanoserve.errors import RuntimeFailure
from nanoserve.scheduler.plan import StepResult
from tests.benchmarks.hybrid.simulated_engine import BLOCK_SIZE, TIMES, VOCAB_SIZE, simulated_engine

POLICIES = ("sarathi", "neo", "overlap", "apex:minimum_ratio=0", "hybrid")
OUTPUT, REQUESTS = 40, 12


def _case(share: float) -> Case:
    work = Work(input_tokens=13, outputs=(OUTPUT,), requests=REQUESTS, shares=(share,), block_size=BLOCK_SIZE)
    return next(work.cases())


def _bench(engine: HybridEngine, share: float) -> Bench:
    scheduling = Scheduling(engine, POLICIES, block_size=BLOCK_SIZE, max_num_seqs=64, token_budget=32)
    case = _case(share)
    return Bench(
        case=case.name,
        variants=list(scheduling.variants(case)),
        make_requests=lambda number: make_requests(case.shapes, [0.0] * REQUESTS, VOCAB_SIZE, number),
        vocab_size=VOCAB_SIZE,
        probe=lambda: 1e10,
        foreign=ForeignLoad(),
        keep=lambda variant, run: None,
        engine=engine,
        block_size=BLOCK_SIZE,
    )


@pytest.fixture(scope="module")
def tight() -> HybridRound:
    """With memory for a third."""
    return next(_bench(simulated_engine(), 0.3).rounds(1))


def test_the_simulator_and_the_predictor_know_a_run_that_is_as_they_say(tight: HybridRound) -> None:
    for name, figures in tight.variants.items():
        assert figures.simulation_error == pytest.approx(0, abs=1e-4), f"{name}: the record's clock ticks"
        assert figures.simulated.steps == figures.steps
        assert figures.errors.all is not None and figures.errors.all.median < 0.001


def test_tokens_are_counted_where_they_were_computed(tight: HybridRound) -> None:
    for name, figures in tight.variants.items():
        device, host = figures.latencies.device, figures.latencies.host
        assert device.tokens + host.tokens == REQUESTS * (OUTPUT - 1)
        assert (host.tokens > 0) == (name != "sarathi")
        assert (figures.processor_share > 0) == (figures.steps.hybrid > 0) == (name != "sarathi")
        assert (figures.swaps_out > 0) == (name != "sarathi")
    overlap = tight.variants["overlap"].latencies
    assert overlap.host.itl_ms is not None and overlap.device.itl_ms is not None
    assert overlap.host.itl_ms.p50 > 3 * overlap.device.itl_ms.p50, "a token on the host takes L + 1 steps"


def test_errors_and_gains_are_those_of_the_strategies_that_ran(tight: HybridRound) -> None:
    overlap, neo = tight.variants["overlap"], tight.variants["neo"]
    assert overlap.errors.asymmetric is None and overlap.errors.overlap is not None and neo.errors.overlap is None
    assert overlap.gains is not None and overlap.gains.overlap is not None and overlap.gains.asymmetric is None
    assert neo.gains is not None and neo.gains.asymmetric is not None and neo.gains.asymmetric.steps > 10


def test_gains_come_near_their_bounds_and_never_beyond(tight: HybridRound) -> None:
    assert findings([tight], holds_everything=False).beyond_bound == ()
    for figures in tight.variants.values():
        assert figures.gains is not None
        for part in (figures.gains.asymmetric, figures.gains.overlap):
            if part is not None and part.steps > 10:
                assert part.reached is not None and 0.8 < part.reached < 1.05


def test_with_memory_for_everything_no_step_is_hybrid() -> None:
    done = next(_bench(simulated_engine(), 1.0).rounds(1))
    assert {figures.steps.hybrid for figures in done.variants.values()} == {0}
    assert len({figures.seconds for figures in done.variants.values()}) == 1
    assert findings([done], holds_everything=True).hybrid_although_it_fits == ()


def test_hybrid_steps_although_everything_fits_are_found(tight: HybridRound) -> None:
    found = findings([tight, tight], holds_everything=True)
    assert found.hybrid_although_it_fits == ("neo", "overlap", "apex:minimum_ratio=0", "hybrid")


def test_gains_beyond_the_bound_are_found(tight: HybridRound) -> None:
    overlap = tight.variants["overlap"]
    assert overlap.gains is not None and overlap.gains.overlap is not None
    more = msgspec.structs.replace(overlap.gains.overlap, gain=overlap.gains.overlap.bound + 0.03)
    held = msgspec.structs.replace(overlap, gains=msgspec.structs.replace(overlap.gains, overlap=more))
    done = msgspec.structs.replace(tight, variants=tight.variants | {"overlap": held})
    assert findings([done], holds_everything=False).beyond_bound == ("overlap",)


def test_a_machine_slower_than_its_profile_shows_in_the_simulators_error() -> None:
    slow = replace(TIMES, layer=2 * TIMES.layer, token=2 * TIMES.token, key=2 * TIMES.key)
    bench = _bench(simulated_engine(slow), 1.0)
    first, second = bench.rounds(2)
    figures: list[Figures] = [done.variants["hybrid"] for done in (first, second)]
    assert figures[0].simulation_error == pytest.approx(1.0, abs=0.05), "the profile promises twice the throughput"
    errors = [one.errors.all.median for one in figures if one.errors.all is not None]
    assert errors[1] < 0.1, "what the predictor learned in one round it knows in the next"


def test_the_simulator_is_fed_with_what_was_measured_in_the_round() -> None:
    slow = replace(TIMES, layer=2 * TIMES.layer, token=2 * TIMES.token, key=2 * TIMES.key)
    first, second = _bench(simulated_engine(measured=[TIMES, slow]), 1.0).rounds(2)
    assert first.variants["sarathi"].simulation_error == pytest.approx(0, abs=1e-4)
    assert second.variants["sarathi"].simulation_error == pytest.approx(-0.5, abs=0.05)


def test_everyone_is_held_against_the_first() -> None:
    assert pairs(("sarathi", "neo")) == [("neo over sarathi", "neo", "sarathi")]


def test_a_round_survives_its_report(tight: HybridRound) -> None:
    assert msgspec.convert(msgspec.to_builtins(tight), HybridRound) == tight


def test_a_run_in_which_attention_on_the_cpu_is_lost_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = simulated_engine()
    bench = _bench(engine, 0.3)
    collect = engine.executor.collect

    def losing(until: float | None) -> list[StepResult]:
        return [msgspec.structs.replace(result, host_lost="the thread died") for result in collect(until)]

    monkeypatch.setattr(engine.executor, "collect", losing)
    requests = bench.make_requests(1)
    with pytest.raises(RuntimeFailure, match="attention on the CPU is lost: the thread died"):
        run_requests(engine.executor, bench.variants[0].make_scheduler, requests, vocab_size=VOCAB_SIZE)
