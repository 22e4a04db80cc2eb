"""The search for the highest rate, on queues whose capacity is known."""

import heapq
import math
import random
from collections.abc import Callable
from functools import cache, partial
from itertools import islice

import pytest

from nanoserve.errors import UsageError
from nanoserve.lab.benchmarks.serving.requests import poisson_arrivals, stretched_arrivals
from nanoserve.lab.highest_rate import (
    HighestRate,
    RateTrial,
    TimedAnswer,
    Verdict,
    judge_queue,
    judge_share,
    latency_growth,
)
from nanoserve.lab.simulator import Workload, fixed_lengths, gamma_arrivals, simulate
from nanoserve.record.metrics_observer import CompletedRequest
from nanoserve.scheduler import make_policy
from tests.lab.simulator.linear_times import LinearTimes

Trial = Callable[[float, int], RateTrial]


arrivals_of_one_a_second = cache(partial(poisson_arrivals, 1.0))


def queue_trial(
    service: Callable[[random.Random], float], servers: int, seed: int, limit: float | None
) -> Trial:
    """A first-come-first-served queue; `limit` is the longest latency that keeps to the limits, in
    seconds. Each trial has the same services, drawn once."""
    generator, services = random.Random(f"services of {seed}"), list[float]()

    def trial(rate: float, requests: int) -> RateTrial:
        services.extend(service(generator) for _ in range(requests - len(services)))
        free = [0.0] * servers
        answers = []
        arrivals = stretched_arrivals(arrivals_of_one_a_second(requests, seed), rate)
        for arrival, duration in zip(arrivals, services, strict=False):
            begin = max(heapq.heappop(free), arrival)
            end = begin + duration
            heapq.heappush(free, end)
            answers.append(TimedAnswer(arrival, end - arrival, None, 1))
        attainment = None
        if limit is not None:
            attainment = sum(answer.ttft <= limit for answer in answers) / requests
        return RateTrial(requests / max(free), answers, attainment)

    return trial


QUEUES = {
    "equal": (lambda generator: 0.2, 1),
    "exponential": (lambda generator: generator.expovariate(5.0), 1),
    "four servers": (lambda generator: generator.expovariate(1.25), 4),
}
"""Service times and servers; each queue ends 5 requests a second."""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", QUEUES)
def test_the_highest_rate_is_the_capacity_of_a_queue(kind: str, seed: int) -> None:
    service, servers = QUEUES[kind]
    found = HighestRate(queue_trial(service, servers, seed, None), 1000, 64_000).find()
    assert 0.97 * 5.0 <= found["rate"] <= 1.02 * 5.0


def test_limits_are_kept_up_to_the_rate_that_theory_says() -> None:
    """With exponential service, a latency exceeds t in exp(-(5 - rate) t) of all cases: 1 % at 5 -
    ln(100) / t."""
    limit = 2.0
    found = HighestRate(
        queue_trial(lambda one: one.expovariate(5.0), 1, 0, limit), 1000, 64_000
    ).find()
    assert found["rate"] == pytest.approx(5.0 - math.log(100) / limit, rel=0.1)
    assert "no queue grows and 99% of the requests keep to the limits up to" in found["words"]


def test_a_rate_above_the_capacity_does_not_count_although_a_short_run_keeps_to_the_limits() -> (
    None
):
    """At 1.1 times the capacity, the 600th request waits some 11 s, but 600 requests all keep to 20
    s."""
    trial = queue_trial(lambda generator: 0.2, 1, 0, 20.0)
    assert trial(5.5, 600).attainment == 1.0
    assert judge_queue(trial(5.5, 600).answers) is not Verdict.HOLDS
    assert HighestRate(trial, 600, 9600).find()["rate"] <= 1.02 * 5.0


@pytest.mark.parametrize(("rate", "verdict"), [(4.0, Verdict.HOLDS), (6.0, Verdict.FAILS)])
def test_a_scheduler_with_linear_times_keeps_up_below_its_capacity(
    rate: float, verdict: Verdict
) -> None:
    """One request at a time, of one token: 0.1 s for the step and 1 ms for each of 100 prompt
    tokens, so 5 a second."""
    ended: list[CompletedRequest] = []
    arrivals = stretched_arrivals(list(islice(gamma_arrivals(1.0, 1.0, 0), 2000)), rate)
    simulate(
        make_policy("sarathi", 512),
        LinearTimes(step=0.1, prompt_token=0.001),
        Workload(arrivals, fixed_lengths(100, 1)),
        num_blocks=1000,
        max_num_seqs=1,
        request_observers=[ended.append],
    )
    assert (
        judge_queue(
            [TimedAnswer(one.arrival, one.ttft, one.tpot, one.output_tokens) for one in ended]
        )
        is verdict
    )


def test_an_undecided_rate_is_said_and_counts_as_too_high() -> None:
    runs: list[tuple[float, int]] = []

    def trial(rate: float, requests: int) -> RateTrial:
        runs.append((rate, requests))
        arrivals = stretched_arrivals(poisson_arrivals(1.0, requests, 0), rate)
        bursts = random.Random(0)
        return RateTrial(
            4.0,
            [TimedAnswer(one, 1 + (rate > 3) * bursts.random() * one, None, 1) for one in arrivals],
        )

    found = HighestRate(trial, 64, 256).find()
    assert found["rate"] <= 3.0
    assert found["undecided"] and all(rate > 3.0 for rate in found["undecided"])
    assert [requests for rate, requests in runs if rate == found["undecided"][0]] == [64, 128, 256]
    assert "; runs of 256 requests did not decide " in found["words"]


def test_requests_that_keep_to_limits_even_at_once_ask_for_more_of_them() -> None:
    found = HighestRate(lambda rate, requests: RateTrial(5.0, [], 1.0), 100, 100).find()
    assert found["rate"] is None
    assert (
        found["words"]
        == "all 100 requests keep to the limits even when they come at once: give more --requests"
    )


def test_where_no_rate_keeps_to_the_limits_the_share_at_the_lowest_is_said() -> None:
    trial = queue_trial(lambda generator: 0.2 if generator.random() < 0.9 else 3.0, 1, 0, 2.0)
    words = HighestRate(trial, 400, 1600).find()["words"]
    assert words.startswith(
        "no queue grows and 99% of the requests keep to the limits at none of these rates; at the "
    )
    assert words.endswith("% keep to them")


def test_where_nothing_is_answered_no_rate_is_found() -> None:
    found = HighestRate(lambda rate, requests: RateTrial(0.0, []), 100, 100).find()
    assert (found["rate"], found["words"]) == (None, "no queue grows at none of these rates")


def test_too_few_requests_are_refused() -> None:
    with pytest.raises(UsageError, match="--max-rate takes at least 16 requests, not 15"):
        HighestRate(lambda rate, requests: RateTrial(1.0, []), 15, 15)


@pytest.mark.parametrize(
    ("share", "requests", "verdict"),
    [
        # 0.99 ** 100 = 0.37: a hundred good answers are no surprise at 99 %
        (1.0, 100, Verdict.UNDECIDED),
        (1.0, 2000, Verdict.HOLDS),
        (0.98, 200, Verdict.UNDECIDED),
        (0.98, 5000, Verdict.FAILS),  # 0.98 is 7 standard errors below 0.99
        (0.5, 20, Verdict.FAILS),
    ],
)
def test_shares_of_few_requests_decide_nothing(
    share: float, requests: int, verdict: Verdict
) -> None:
    assert judge_share(share, requests) is verdict


def test_a_run_that_is_short_beside_its_latencies_is_undecided() -> None:
    """All 200 requests came within 20 s, and each took 13 s: the batch was still growing."""
    answers = [TimedAnswer(0.1 * number, 0.5, 0.1, 126) for number in range(200)]
    assert judge_queue(answers) is Verdict.UNDECIDED
    assert (
        judge_queue([answer._replace(arrival=10 * answer.arrival) for answer in answers])
        is Verdict.HOLDS
    )


def test_latency_grows_by_what_a_queue_lags_behind() -> None:
    """At 1.2 times the capacity each second of arrivals takes 1.2 seconds; lengths and their order
    do not matter."""
    lengths = [10, 300, 40, 90] * 50
    arrivals = poisson_arrivals(4.0, 200, seed=1)
    growing = [
        TimedAnswer(one, 0.2 * one, 0.01, tokens)
        for one, tokens in zip(arrivals, lengths, strict=True)
    ]
    assert latency_growth(growing) == pytest.approx(0.2)
    slower = [
        TimedAnswer(one, 1.0, 0.01 + 0.002 * one, tokens)
        for one, tokens in zip(arrivals, lengths, strict=True)
    ]
    assert latency_growth(slower) == pytest.approx(0.002 * 109)  # a mean answer has 110 tokens
    steady = [
        TimedAnswer(one, 1.0, 0.01, tokens) for one, tokens in zip(arrivals, lengths, strict=True)
    ]
    assert latency_growth(steady) == pytest.approx(0.0, abs=1e-9)
    assert latency_growth([TimedAnswer(0.0, 1.0, None, 1)] * 3) is None
