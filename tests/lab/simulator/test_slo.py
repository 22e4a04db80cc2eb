"""Attainment of objectives, and goodput, while time passes."""

import pytest

from nanoserve.lab.simulator import Workload, fixed_lengths, poisson_arrivals, simulate
from nanoserve.record.metrics import Slo
from nanoserve.record.metrics_observer import CompletedRequest, SloMeter
from nanoserve.scheduler import make_policy
from tests.lab.simulator.linear_times import LinearTimes

TIMES = LinearTimes(step=0.1)


def test_attainment_is_the_share_within_all_limits_and_goodput_its_rate() -> None:
    # The second request comes while the first one's only step runs, and waits for it: a TTFT of 100
    # and 150 ms.
    workload = Workload([0.0, 0.05], [next(fixed_lengths(10, tokens)) for tokens in (1, 5)])
    result = simulate(
        make_policy("sarathi", 64), TIMES, workload, num_blocks=100, slo=Slo(ttft=120, tpot=1000)
    )
    assert result.slo_attainment == 0.5
    assert result.goodput == pytest.approx(1 / result.seconds)
    assert result.seconds == pytest.approx(0.6)


def test_without_limits_there_is_no_attainment() -> None:
    result = simulate(
        make_policy("sarathi", 64), TIMES, Workload([0.0], fixed_lengths(10, 2)), num_blocks=100
    )
    assert (result.slo_attainment, result.goodput) == (None, None)


def test_an_answer_of_one_token_has_no_tpot_to_be_late_with() -> None:
    meter = SloMeter(Slo(ttft=100, tpot=1))
    assert meter.attainment is None
    meter(CompletedRequest("one token", 0.0, 10, 1, 0.1, None, 0.1))
    meter(CompletedRequest("slow", 0.0, 10, 3, 0.1, 0.0011, 0.2))
    meter(CompletedRequest("late", 0.0, 10, 3, 0.1001, 0.001, 0.2))
    meter(CompletedRequest("exactly", 0.0, 10, 3, 0.1, 0.001, 0.2))
    assert (meter.requests, meter.attaining, meter.attainment) == (4, 2, 0.5)


def test_one_run_sweeps_many_limits() -> None:
    meters = [SloMeter(Slo(ttft=limit)) for limit in (1, 150, 200, 10_000)]
    workload = Workload(poisson_arrivals(8.0, seed=0), fixed_lengths(40, 6), limit=100)
    simulate(make_policy("sarathi", 64), TIMES, workload, num_blocks=100, request_observers=meters)
    shares = [meter.attainment for meter in meters]
    assert shares[0] == 0
    assert shares[-1] == 1
    assert 0 < (shares[1] or 0) < (shares[2] or 0) < 1
