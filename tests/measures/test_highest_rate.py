"""The search for the highest rate, on queues whose capacity is known."""

import math
from itertools import islice

import pytest

from nanoserve.benchmarks.serving.requests import poisson_arrivals, stretched_arrivals
from nanoserve.errors import UsageError
from nanoserve.measures.highest_rate import RateTrial, find_highest_rate, latency_growth
from nanoserve.record.metrics import CompletedRequest
from nanoserve.scheduler import make_policy
from nanoserve.simulator import Workload, fixed_lengths, gamma_arrivals, simulate
from tests.simulator.linear_times import LinearTimes


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("requests", [200, 1000])
def test_throughput_rises_up_to_the_capacity_of_a_scheduler_with_linear_times(seed: int, requests: int) -> None:
    """One request at a time, of one token: 0.1 s for the step and 1 ms for each of 100 prompt tokens."""
    times = LinearTimes(step=0.1, prompt_token=0.001)

    def trial(rate: float) -> RateTrial:
        ended: list[CompletedRequest] = []
        arrivals = stretched_arrivals(list(islice(gamma_arrivals(1.0, 1.0, seed), requests)), rate)
        result = simulate(
            make_policy("sarathi", 512),
            times,
            Workload(arrivals, fixed_lengths(100, 1)),
            num_blocks=1000,
            max_num_seqs=1,
            request_observers=[ended.append],
        )
        growth = latency_growth([(one.arrival, one.ttft, one.tpot, one.output_tokens) for one in ended])
        return RateTrial(result.requests_per_second, result.output_tokens_per_second, growth, None)

    assert find_highest_rate(trial, requests)["rate"] == pytest.approx(5.0, rel=0.1)


@pytest.mark.parametrize("limit", [0.3, 1.7, 9.9, 40.0])
def test_limits_are_kept_up_to_the_highest_rate(limit: float) -> None:
    """Whatever the capacity, and above it, too; each rate is tried once."""
    tried: list[float] = []

    def trial(rate: float) -> RateTrial:
        tried.append(rate)
        return RateTrial(min(rate, 5.0), min(rate, 5.0), None, 1.0 if rate <= limit else 0.98)

    found = find_highest_rate(trial, 100)
    assert limit / 1.05 <= found["rate"] <= limit
    assert found["words"] == f"99% of the requests keep to the limits up to {found['rate']:.3g} requests/s"
    assert tried[0] == math.inf and len(set(tried)) == len(tried)


@pytest.mark.parametrize(
    ("attainment", "words"), [(1.0, "even when all come at once"), (0.5, "at none of these rates")]
)
def test_every_rate_or_none_keeps_to_the_limits(attainment: float, words: str) -> None:
    found = find_highest_rate(lambda rate: RateTrial(min(rate, 5.0), min(rate, 5.0), None, attainment), 100)
    assert found == {"rate": None, "words": f"99% of the requests keep to the limits {words}"}


def test_where_nothing_is_answered_no_rate_is_found() -> None:
    found = find_highest_rate(lambda rate: RateTrial(0.0, 0.0, None, None), 100)
    assert found == {"rate": None, "words": "throughput rises with the rate at none of these rates"}


def test_a_queue_that_grows_ends_the_rise_although_throughput_could_be_higher() -> None:
    """All at once 9 are answered in a second, as batches are large then; while they come one by one, 3."""

    def trial(rate: float) -> RateTrial:
        served = min(rate, 9.0 if math.isinf(rate) else 6.0)
        return RateTrial(served, served, None if math.isinf(rate) else max(0.0, rate / 3.0 - 1), None)

    assert find_highest_rate(trial, 100)["rate"] == pytest.approx(3.0, rel=0.1)


def test_too_few_requests_are_refused() -> None:
    with pytest.raises(UsageError, match="--max-rate takes at least 16 requests, not 15"):
        find_highest_rate(lambda rate: RateTrial(1.0, 1.0, None, None), 15)


def test_latency_grows_by_what_a_queue_lags_behind() -> None:
    """At 1.2 times the capacity each second of arrivals takes 1.2 seconds; lengths and their order do not matter."""
    lengths = [10, 300, 40, 90] * 50
    arrivals = poisson_arrivals(4.0, 200, seed=1)
    growing = [(one, 0.2 * one, 0.01, tokens) for one, tokens in zip(arrivals, lengths, strict=True)]
    assert latency_growth(growing) == pytest.approx(0.2)
    slower = [(one, 1.0, 0.01 + 0.002 * one, tokens) for one, tokens in zip(arrivals, lengths, strict=True)]
    assert latency_growth(slower) == pytest.approx(0.002 * 109)  # a mean answer has 110 tokens
    steady = [(one, 1.0, 0.01, tokens) for one, tokens in zip(arrivals, lengths, strict=True)]
    assert latency_growth(steady) == pytest.approx(0.0, abs=1e-9)
    assert latency_growth([(0.0, 1.0, None, 1)] * 3) is None
