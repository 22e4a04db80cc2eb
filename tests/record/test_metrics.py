"""The definitions of docs/benchmarks.md, on numbers one can check in one's head."""

import pytest

from nanoserve.record.metrics import BatchRates, Distribution, RequestTiming, request_distributions


def test_the_metrics_of_one_request() -> None:
    timing = RequestTiming(input_tokens=10, token_times=(2.0, 2.5, 3.0, 5.0))
    assert timing.ttft == 2.0
    assert timing.e2el == 5.0
    assert timing.tpot == 1.0  # (5 - 2) / (4 - 1)
    assert timing.itls == (0.5, 0.5, 2.0)


def test_one_token_has_no_tpot() -> None:
    assert RequestTiming(10, (2.0,)).tpot is None
    assert request_distributions([RequestTiming(10, (2.0,))])["itl_ms"] is None


def test_percentiles_interpolate_linearly() -> None:
    found = Distribution.of([0.0, 10.0, None])
    assert found is not None
    assert (found.n, found.mean, found.p50, found.p90) == (2, 5.0, 5.0, 9.0)


def test_itl_pools_the_gaps_of_all_requests() -> None:
    found = request_distributions(
        [RequestTiming(1, (1.0, 2.0)), RequestTiming(1, (1.0, 4.0, 6.0))]
    )["itl_ms"]
    assert found is not None
    assert (found.n, found.p50, found.max) == (3, 2000.0, 3000.0)


def test_rates_of_a_batch() -> None:
    timings = [RequestTiming(30, (1.0, 2.0, 3.0)), RequestTiming(30, (2.0, 3.0, 4.0))]
    rates = BatchRates.of(timings)
    assert rates.prefill == 30.0  # 60 prompt tokens until both had a first token, at 2.0
    assert rates.decode == 1.5  # the three tokens after 2.0, in two seconds
    assert rates.output == 1.5
    assert rates.total == 16.5


def test_a_batch_without_decoding_has_no_decode_rate() -> None:
    assert BatchRates.of([RequestTiming(30, (1.0,))]).decode is None


def test_no_values_have_no_distribution() -> None:
    assert Distribution.of([None]) is None
    assert Distribution.of([]) is None


def test_the_spread_is_the_population_s() -> None:
    found = Distribution.of([1.0, 3.0])
    assert found is not None
    assert found.std == pytest.approx(1.0)
