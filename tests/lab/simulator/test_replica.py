"""nanoserve's simulator and a second one, written from the papers alone (replica.py), give the same
throughput."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest

from nanoserve.lab.simulator import SimulationResult, Workload, poisson_arrivals, simulate
from nanoserve.request import RequestShape
from nanoserve.scheduler import make_policy
from nanoserve.scheduler.work import Chunk, StepWork
from tests.lab.simulator.replica import (
    Outcome,
    Pipeline,
    Replica,
    Request,
    SarathiServe,
    TokenThrottling,
)

STAGES = 4
LINK_SECONDS = 0.002
POLICIES = {"sarathi": SarathiServe(), "throttling": TokenThrottling()}


def stage_seconds(prompt_tokens: int, decodes: int, context: int) -> float:
    return 0.02 + 1e-4 * prompt_tokens + 2e-4 * decodes + 1e-6 * context


class SharedTimes:
    """The replica's cost function for nanoserve's simulator."""

    num_stages = STAGES

    def work(
        self,
        decode_contexts: Sequence[int] = (),
        chunks: Iterable[Chunk] = (),
        sampled: int | None = None,
    ) -> StepWork:
        return StepWork.of(decode_contexts, chunks, sampled)

    def stage_seconds(self, work: StepWork, stage: int) -> float:
        context = work.decode_context + sum(start + length for start, length in work.chunks)
        return stage_seconds(work.tokens - work.decodes, work.decodes, context)

    def send_seconds(self, work: StepWork, stage: int) -> float:
        return LINK_SECONDS

    def host_seconds(self, work: StepWork) -> float:
        return 0.0


@dataclass(frozen=True)
class Load:
    requests: list[Request]
    blocks: int
    block_size: int = 16


def at_once(count: int, prompt: int, answer: int) -> list[Request]:
    return [Request(0.0, prompt, answer) for _ in range(count)]


def poisson(rate: float, lengths: list[tuple[int, int]]) -> list[Request]:
    arrivals = poisson_arrivals(rate, seed=1)
    return [
        Request(arrival, prompt, answer)
        for arrival, (prompt, answer) in zip(arrivals, lengths, strict=False)
    ]


def uneven_lengths(count: int) -> list[tuple[int, int]]:
    """Lognormal lengths of prompts and answers, with medians of 400 and 55 tokens."""
    draw = random.Random(7)

    def tokens(logarithm: float, spread: float, most: int) -> int:
        return 1 + min(most, int(draw.lognormvariate(logarithm, spread)))

    return [(tokens(6.0, 1.2, 6000), tokens(4.0, 1.0, 600)) for _ in range(count)]


# With the long prompts, Sarathi-Serve preempts. The long answers are short of blocks, but none is
# preempted. The last prompts take so much of the pool that Token Throttling has to let them past
# its threshold.
LOADS = {
    "closed batch": Load(at_once(100, 300, 60), blocks=4000),
    "light": Load(poisson(1.5, [(400, 80)] * 30), blocks=4000),
    "heavy": Load(poisson(12.0, [(400, 80)] * 100), blocks=4000),
    "long prompts": Load(at_once(20, 6000, 20), blocks=2400),
    "long answers": Load(at_once(40, 70, 150), blocks=30, block_size=256),
    "uneven lengths": Load(poisson(6.0, uneven_lengths(70)), blocks=4000),
    "one prompt at a time": Load(at_once(3, 3100, 20), blocks=200),
}


def run_replica(load: Load, policy: str) -> Outcome:
    pipeline = Pipeline(STAGES, load.blocks, load.block_size, stage_seconds, LINK_SECONDS)
    return Replica(pipeline, POLICIES[policy]).run(load.requests)


def run_nanoserve(load: Load, policy: str) -> SimulationResult:
    """Without the admission reserve, which is no paper's."""
    workload = Workload(
        [request.arrival for request in load.requests],
        [RequestShape(request.prompt, request.answer) for request in load.requests],
    )
    return simulate(
        make_policy(policy, 2048, {"admission_reserve": False}),
        SharedTimes(),
        workload,
        num_blocks=load.blocks,
        block_size=load.block_size,
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", LOADS)
def test_both_simulators_give_the_same_throughput(name: str, policy: str) -> None:
    replica = run_replica(LOADS[name], policy)
    ours = run_nanoserve(LOADS[name], policy)

    assert ours.seconds == pytest.approx(replica.makespan, rel=0.01)
    assert ours.tokens_per_second == pytest.approx(replica.tokens_per_second, rel=0.01)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_short_request_passes_the_pipeline_once_for_each_token(policy: str) -> None:
    prompt, answer = 20, 4
    load = Load(at_once(1, prompt, answer), blocks=10)

    passes = [stage_seconds(prompt, 0, prompt)]
    passes += [stage_seconds(0, 1, prompt + token) for token in range(1, answer)]
    by_hand = STAGES * sum(passes) + answer * (STAGES - 1) * LINK_SECONDS
    assert run_replica(load, policy).makespan == pytest.approx(by_hand)
    assert run_nanoserve(load, policy).seconds == pytest.approx(by_hand)
