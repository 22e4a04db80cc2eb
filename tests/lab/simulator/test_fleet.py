"""Fleets: many engines in one virtual time, each of which works as it would alone."""

from itertools import islice

import pytest

from nanoserve.errors import UsageError
from nanoserve.lab.simulator import (
    SimulationResult,
    Workload,
    burst,
    fixed_lengths,
    lognormal_lengths,
    poisson_arrivals,
)
from nanoserve.lab.simulator.fleet import ROUTERS, round_robin
from nanoserve.lab.simulator.simulation import simulate
from nanoserve.record.metrics_observer import CompletedRequest
from nanoserve.request import Request
from nanoserve.scheduler import make_policy
from tests.lab.simulator.linear_times import LinearTimes

TIMES = LinearTimes(num_stages=3, step=0.01, decode=0.0003, prompt_token=0.0002)


def _requests(number: int = 45, rate: float = 12.0) -> list[Request]:
    return list(
        Workload(
            poisson_arrivals(rate, seed=3), lognormal_lengths(120, 40, 1.0, 1.0, seed=4), number
        )
    )


def _run(
    requests: list[Request] | Workload, policy: str = "throttling", **settings: object
) -> SimulationResult:
    return simulate(make_policy(policy, 256), TIMES, requests, **{"num_blocks": 300, **settings})


@pytest.mark.parametrize("policy", ["throttling", "sarathi", "prefill-first"])
def test_each_replica_does_what_it_would_do_alone_with_its_share(policy: str) -> None:
    requests = _requests()
    fleet = _run(requests, policy, replicas=3)
    for number, replica in enumerate(fleet.replicas):
        alone = _run(requests[number::3], policy)
        assert replica.requests == alone.requests == 15
        assert replica.output_tokens == alone.output_tokens
        assert (replica.seconds, replica.kv_peak) == (alone.seconds, alone.kv_peak)
        assert replica.bubble_share == pytest.approx(alone.bubble_share)
        assert alone.ttft_ms is not None and alone.tpot_ms is not None and alone.e2el_ms is not None
        means = (alone.ttft_ms.mean, alone.tpot_ms.mean, alone.e2el_ms.mean)
        assert (replica.ttft_ms, replica.tpot_ms, replica.e2el_ms) == pytest.approx(means)


def test_the_figures_of_a_fleet_are_those_of_its_replicas_together() -> None:
    fleet = _run(_requests(), replicas=3, router="least-tokens")
    replicas = fleet.replicas
    assert fleet.requests == sum(one.requests for one in replicas) == 45
    assert fleet.output_tokens == sum(one.output_tokens for one in replicas)
    assert fleet.seconds == max(one.seconds for one in replicas)
    assert fleet.kv_occupancy == pytest.approx(sum(one.kv_occupancy for one in replicas) / 3)
    assert fleet.e2el_ms is not None and fleet.e2el_ms.n == 45
    assert fleet.e2el_ms.mean == pytest.approx(
        sum((one.e2el_ms or 0) * one.requests for one in replicas) / 45
    )
    assert len(replicas) == 3
    assert max(share for _, share in fleet.kv_series) <= fleet.kv_peak


def test_a_fleet_of_one_is_an_engine_whatever_the_router() -> None:
    requests = _requests(40)
    assert [_run(requests, router=router) for router in ROUTERS] == [_run(requests)] * len(ROUTERS)


def test_routers() -> None:
    turns = round_robin()
    assert [turns((9, 0, 5)) for _ in range(4)] == [0, 1, 2, 0]
    fewest = ROUTERS["least-tokens"]()
    assert [fewest((9, 0, 5)), fewest((3, 2, 2)), fewest((0, 0))] == [1, 1, 0]


def test_least_tokens_sends_requests_past_a_long_one() -> None:
    arrivals = [0.0, 0.0, 0.0, 0.0]
    lengths = [next(fixed_lengths(tokens, 5)) for tokens in (1000, 10, 10, 10)]
    by_tokens, in_turn = (
        _run(Workload(arrivals, lengths), replicas=2, router=router)
        for router in ("least-tokens", "round-robin")
    )
    assert [one.requests for one in by_tokens.replicas] == [1, 3]
    assert [one.requests for one in in_turn.replicas] == [2, 2]


def test_tokens_of_answers_count_and_of_finished_requests_do_not() -> None:
    arrivals, lengths = [0.0, 0.0, 30.0, 31.0], islice(fixed_lengths(10, 50), 4)
    result = _run(Workload(arrivals, lengths), replicas=2, router="least-tokens")
    # at 30 both are idle: the first, then the other
    assert [one.requests for one in result.replicas] == [2, 2]


def test_least_tokens_shortens_the_wait_for_lengths_that_differ() -> None:
    requests = list(
        Workload(poisson_arrivals(40.0, seed=1), lognormal_lengths(300, 60, 1.5, 1.0, seed=2), 200)
    )
    waits = {}
    for router in ROUTERS:
        result = _run(requests, replicas=4, router=router, num_blocks=2000)
        assert result.ttft_ms is not None
        waits[router] = result.ttft_ms.mean
    assert waits["least-tokens"] < waits["round-robin"]


def test_replicas_without_requests_are_shown_as_idle() -> None:
    result = _run(Workload(burst(), fixed_lengths(10, 3), limit=2), replicas=4)
    assert [one.requests for one in result.replicas] == [1, 1, 0, 0]
    idle = result.replicas[3]
    assert (idle.ttft_ms, idle.bubble_share, idle.seconds, idle.kv_peak) == (None, None, 0, 0)


def test_impossible_fleets() -> None:
    for number in (0, -1, 10**9):
        with pytest.raises(UsageError, match=f"a fleet has 1 to 1024 replicas, not {number}"):
            _run([], replicas=number)
    with pytest.raises(
        UsageError, match="unknown router 'magic'; choose one of round-robin, least-tokens"
    ):
        _run([], router="magic")


def test_every_request_of_a_fleet_is_shown_once() -> None:
    seen: list[CompletedRequest] = []
    requests = _requests(50)
    _run(requests, replicas=3, request_observers=[seen.append])
    assert sorted(one.request_id for one in seen) == sorted(one.request_id for one in requests)
    lengths = {one.request_id: (len(one.prompt), one.seed) for one in requests}
    assert all((one.input_tokens, one.output_tokens) == lengths[one.request_id] for one in seen)
