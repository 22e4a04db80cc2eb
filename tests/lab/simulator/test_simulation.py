"""Whole runs in virtual time: figures that can be worked out, and what a policy changes."""

import json
from itertools import islice
from pathlib import Path

import pytest

from nanoserve.errors import UsageError
from nanoserve.lab.simulator import (
    SimulationResult,
    Workload,
    burst,
    fixed_lengths,
    lognormal_lengths,
    poisson_arrivals,
    simulate,
)
from nanoserve.lab.simulator.pipeline import COUPLED
from nanoserve.record.chrome_trace import ChromeTraceFile
from nanoserve.record.metrics import Slo
from nanoserve.record.sketches import Series, Sketch
from nanoserve.record.trace import RunTrace
from nanoserve.scheduler import POLICIES, make_policy
from nanoserve.scheduler.policies.baselines import ChunkedPrefill
from tests.lab.simulator.linear_times import LinearTimes
from tests.record.tracks import tracks_of


def _run(
    policy: str, times: LinearTimes, workload: Workload, **settings: object
) -> SimulationResult:
    return simulate(make_policy(policy, 256), times, workload, **{"num_blocks": 1000, **settings})


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(("limit", "goodput"), [(150.0, 0.0), (250.0, 4.0)])
def test_rates_leave_filling_and_draining_out(replicas: int, limit: float, goodput: float) -> None:
    """Every quarter of a second a request of 100 tokens, which takes 0.2 s; the last of 101 takes
    10 minutes.

    The window begins with arrival 30, at 7.5 s, and ends with arrival 100, at 25 s: 70 requests end
    in 17.5 s.
    """
    lengths = [*islice(fixed_lengths(100, 1), 100), *islice(fixed_lengths(100, 6000), 1)]
    arrivals = [0.25 * number for number in range(101)]
    times = LinearTimes(step=0.1, prompt_token=0.001)
    result = _run(
        "sarathi", times, Workload(arrivals, lengths), slo=Slo(ttft=limit), replicas=replicas
    )
    steady = result.steady
    assert steady is not None
    assert (steady.begin, steady.end, steady.arrivals_before) == (7.5, 25.0, 30)
    assert steady.requests_per_second == pytest.approx(4.0)
    assert steady.output_tokens_per_second == pytest.approx(4.0)
    assert steady.tokens_per_second == pytest.approx(404.0)
    assert steady.goodput == pytest.approx(goodput)
    assert result.requests_per_second < 0.2  # the whole run's


def test_a_batch_that_comes_at_once_has_no_steady_rates() -> None:
    assert (
        _run("sarathi", LinearTimes(step=0.5), Workload(burst(), fixed_lengths(10, 5), 3)).steady
        is None
    )


def test_one_request_alone() -> None:
    result = _run("sarathi", LinearTimes(step=0.5), Workload([2.0], fixed_lengths(10, 5)))
    assert (result.requests, result.input_tokens, result.output_tokens) == (1, 10, 5)
    assert result.ttft_ms is not None and result.tpot_ms is not None and result.e2el_ms is not None
    assert (result.ttft_ms.mean, result.tpot_ms.mean, result.e2el_ms.mean) == (500, 500, 2500)
    assert result.seconds == 4.5
    assert result.bubble_shares == (0.0,)  # while it waited for the request, nothing was in flight
    assert result.steps == 5


def test_windows_leave_room_for_more_sequences() -> None:
    """800 tokens take 50 blocks of 16 in a full group and at most 10 in one with a window of 128,
    or 17 while 256 more are computed. So 300 blocks hold five sequences (after four, 300 - 4 * 60
    are fewer than 50 + 17, until some end earlier), and three that keep all positions."""

    def most_decoding(windows: tuple[int, ...]) -> int:
        workload = Workload(burst(), fixed_lengths(700, 100), limit=8)
        result = _run("sarathi", LinearTimes(), workload, num_blocks=300, windows=windows)
        assert (result.requests, result.output_tokens) == (8, 800)
        return max(decodes for _, _, decodes, _ in result.tokens_series)

    assert most_decoding((0, 0)) == 3
    assert most_decoding((0, 128)) in (4, 5)


def test_a_request_that_only_fits_behind_windows_is_simulated() -> None:
    def run(windows: tuple[int, ...]) -> SimulationResult:
        workload = Workload(burst(), fixed_lengths(5000, 10), limit=1)
        return _run("sarathi", LinearTimes(), workload, num_blocks=350, windows=windows)

    assert run((0, 128)).requests == 1
    with pytest.raises(UsageError, match="takes 5010 tokens, but all KV blocks together hold 2801"):
        run((0, 0))


def test_one_sequence_leaves_a_pipeline_mostly_empty() -> None:
    times = LinearTimes(num_stages=4, step=0.25)
    result = _run("throttling", times, Workload(burst(), fixed_lengths(10, 9), limit=1))
    assert result.bubble_shares == pytest.approx([0.75] * 4)
    assert result.tpot_ms is not None and result.tpot_ms.mean == 1000


def test_throttling_balances_what_the_coupled_budget_bunches_together() -> None:
    times = LinearTimes(num_stages=4, step=0.002, decode=0.0005, prompt_token=0.0002)
    results = {
        policy: _run(
            policy,
            times,
            Workload(poisson_arrivals(10.0, seed=1), fixed_lengths(200, 60), limit=200),
        )
        for policy in ("throttling", "sarathi")
    }
    throttling, sarathi = results["throttling"], results["sarathi"]
    assert throttling.bubble_share < sarathi.bubble_share
    assert throttling.tokens_variation < sarathi.tokens_variation
    assert throttling.tpot_ms is not None and sarathi.tpot_ms is not None
    assert throttling.tpot_ms.mean < sarathi.tpot_ms.mean


def test_preparing_inputs_before_each_stage_costs_the_papers_share_of_a_full_pipeline() -> None:
    times = LinearTimes(num_stages=4, step=0.83)
    requests = [Workload(burst(), fixed_lengths(16, 50), limit=400) for _ in range(2)]
    decoupled = _run("throttling", times, requests[0])
    coupled = _run("throttling", times, requests[1], runtime=COUPLED)
    assert decoupled.tokens_per_second * 0.83 == pytest.approx(coupled.tokens_per_second)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_finishes_every_request_when_blocks_are_short(policy: str) -> None:
    times = LinearTimes(num_stages=3, step=0.01, prompt_token=0.001)
    result = _run(
        policy,
        times,
        Workload(poisson_arrivals(5.0, seed=0), fixed_lengths(100, 80), 25),
        num_blocks=30,
    )
    assert (result.requests, result.output_tokens) == (25, 25 * 80)
    assert 0.5 < result.kv_peak <= 1
    assert 0 < result.kv_occupancy < result.kv_peak


def test_adaptive_throttling_preempts_less_where_memory_is_short_and_is_no_slower() -> None:
    times = LinearTimes(num_stages=2, step=0.01, prompt_token=0.0001)
    throttling, adaptive = (
        _run(
            policy,
            times,
            Workload(
                poisson_arrivals(20.0, seed=0), lognormal_lengths(40, 200, 1.0, 1.0, seed=0), 200
            ),
            num_blocks=400,
        )
        for policy in ("throttling", "adaptive")
    )
    assert adaptive.preemptions < 0.8 * throttling.preemptions
    assert adaptive.tokens_per_second > 0.98 * throttling.tokens_per_second
    assert adaptive.tpot_ms is not None and throttling.tpot_ms is not None
    assert adaptive.tpot_ms.mean < throttling.tpot_ms.mean


def test_adaptive_throttling_uses_blocks_that_a_fixed_threshold_leaves_idle() -> None:
    times = LinearTimes(num_stages=2, step=0.01)  # no step takes longer for what it holds
    results = {
        policy: _run(
            policy,
            times,
            Workload(poisson_arrivals(20.0, seed=0), fixed_lengths(400, 40), 200),
            num_blocks=600,
        )
        for policy in ("throttling", "adaptive")
    }
    throttling, adaptive = results["throttling"], results["adaptive"]
    assert adaptive.tokens_per_second > throttling.tokens_per_second * 1.02
    assert adaptive.preemptions <= throttling.preemptions


def test_equal_seeds_give_equal_results() -> None:
    first, second = (
        _run(
            "adaptive",
            LinearTimes(num_stages=2),
            Workload(poisson_arrivals(1.0, seed=0), fixed_lengths(50, 9), 40),
        )
        for _ in range(2)
    )
    assert first == second


def test_a_request_that_can_never_fit_is_refused() -> None:
    with pytest.raises(
        UsageError, match="request-0 takes 42 tokens, but all KV blocks together hold 33"
    ):
        _run("sarathi", LinearTimes(), Workload(burst(), fixed_lengths(40, 2)), num_blocks=2)
    with pytest.raises(UsageError, match="no requests"):
        _run("sarathi", LinearTimes(), Workload(burst(), fixed_lengths(4, 2), limit=0))


def test_the_stages_time_can_be_looked_at_in_a_browser(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with ChromeTraceFile(path) as file:
        trace = RunTrace(file, 0.0)
        workload = Workload(burst(), fixed_lengths(10, 3), limit=1)
        simulate(
            ChunkedPrefill(64), LinearTimes(num_stages=2), workload, num_blocks=9, observers=[trace]
        )
    bars = tracks_of(json.loads(path.read_text()))
    spans = {name: [(bar["ts"], bar["dur"]) for bar in track[:2]] for name, track in bars.items()}
    assert spans == {
        "stage 0": [(0, 1e6), (2e6, 1e6)],
        "stage 1": [(1e6, 1e6), (3e6, 1e6)],
        "micro-batch 0": [(0, 2e6), (2e6, 2e6)],
    }
    assert {bar["name"] for name in ("stage 0", "stage 1") for bar in bars[name]} == {"compute"}
    names = [bar["name"] for bar in bars["micro-batch 0"][:2]]
    assert names == ["0 decodes + 10 prompt tokens", "1 decodes + 0 prompt tokens"]


def test_a_sketch_is_exact_but_for_percentiles_which_are_right_to_a_percent() -> None:
    sketch = Sketch()
    for value in range(1, 1001):
        sketch.add(value)
    brief = sketch.distribution()
    assert brief is not None
    assert (brief.n, brief.mean, brief.min, brief.max) == (1000, 500.5, 1, 1000)
    assert brief.std == pytest.approx(288.675, abs=0.001)
    assert (brief.p50, brief.p90, brief.p99) == pytest.approx((500.5, 900.1, 990.01), rel=0.01)
    assert Sketch().distribution() is None


def test_a_series_keeps_its_shape_in_a_thousand_points() -> None:
    series = Series()
    for time in range(100_000):
        series.add(time, time % 7)
    assert 400 < len(series.points) <= 1000
    assert series.points[0] == (0, 0)
    assert series.points[-1][0] > 99_000
    assert all(value == time % 7 for time, value in series.points)
