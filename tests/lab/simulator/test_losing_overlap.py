"""Overlapped steps that begin to take longer than everything says are noticed, and left; a slower
machine is not."""

from collections.abc import Sequence

import pytest

from nanoserve.costs.corrected_predictor import CorrectedPredictor
from nanoserve.lab.benchmarks.policies.variants import KvCase, KvCases, make_requests, run_requests
from nanoserve.lab.simulator.executor import SimulatedExecutor
from nanoserve.lab.simulator.host_attention import HostAttention
from nanoserve.lab.simulator.pipeline import Passage
from nanoserve.record.run_record import RunRecord
from nanoserve.scheduler import make_policy
from nanoserve.scheduler.assembly import make_extensions
from nanoserve.scheduler.plan import Answer, StepPlan
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.scheduler.work import Strategy
from tests.fakes.distorted_predictor import DistortedPredictor
from tests.fakes.linear_predictor import LinearPredictor
from tests.fakes.observed_executor import dummy_answers
from tests.lab.simulator.tier_times import TierTimes

BLOCK_SIZE, BUDGET, LAYERS, REQUESTS = 16, 2048, 4, 160
LAYER, TOKEN, KEY, HOST_KEY, ENDS, SWAPPED_TOKEN = 0.1, 0.03, 8e-5, 8e-4, 1.0, 5e-4
"""Rows cost more than weights, and the CPU is slow: overlap pays, by 26 % of the whole, and
asymmetric steps do not."""
TIMES = TierTimes(
    num_layers=LAYERS,
    layer=LAYER,
    token=TOKEN,
    key=KEY,
    ends=ENDS,
    swap_token=SWAPPED_TOKEN,
    host_key=HOST_KEY,
)
TRUE = LinearPredictor(
    num_layers=LAYERS,
    linear=LAYER,
    row=TOKEN,
    key=KEY,
    overhead=ENDS,
    swap_token=SWAPPED_TOKEN,
    host_key=HOST_KEY,
)
CASE: KvCase = next(
    KvCases(
        input_tokens=128, outputs=(200,), requests=REQUESTS, shares=(0.04,), block_size=BLOCK_SIZE
    ).cases()
)


class SlowOverlap(SimulatedExecutor):
    """Its overlapped steps take ``factor`` times as long from ``since`` on; nobody was told."""

    factor, since = 1.0, 0.0

    def _overlap(
        self, attention: HostAttention, plan: StepPlan, tokens: dict[int, Answer], start: float
    ) -> tuple[Passage, list[Answer]]:
        (start, end), answers = super()._overlap(attention, plan, tokens, start)
        return Passage(
            start, start + (end - start) * (self.factor if start >= self.since else 1.0)
        ), answers


def run(policy: str, executor: SimulatedExecutor, predictor: CorrectedPredictor) -> RunRecord:
    def scheduler() -> Scheduler:
        return Scheduler(
            make_policy(policy, BUDGET),
            num_blocks=CASE.num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=512,
            max_num_seqs=64,
            prefix_caching=False,
            extensions=make_extensions(host_blocks=1280 if policy == "hybrid" else 0),
            predictors=(predictor,),
        )

    return run_requests(
        executor,
        scheduler,
        make_requests([CASE.shape] * REQUESTS, [0.0] * REQUESTS, 50, 1),
        vocab_size=50,
    )


def slow_overlap(factor: float, since: float) -> SimulatedExecutor:
    executor = SlowOverlap(TIMES, block_size=BLOCK_SIZE, answer=dummy_answers)
    executor.factor, executor.since = factor, since
    return executor


def strategies(record: RunRecord, since: float) -> Sequence[Strategy]:
    return [
        plan.host.strategy
        for plan in record.plans
        if plan.ends and record.planned[plan.step].time >= since
    ]


@pytest.fixture(scope="module")
def alone() -> float:
    return run("sarathi", slow_overlap(1.0, 0.0), CorrectedPredictor(TRUE)).makespan


@pytest.mark.parametrize("linear", [1.0, 0.5])
@pytest.mark.parametrize("since", [2000.0, 4500.0])
@pytest.mark.parametrize("factor", [1.85, 3.0])
def test_overlap_that_begins_to_lose_is_left_within_50_steps(
    factor: float, since: float, linear: float, alone: float
) -> None:
    """After 100 steps and after 300; the profile is right, or promises linear layers in half of
    their time."""
    record = run(
        "hybrid",
        slow_overlap(factor, since),
        CorrectedPredictor(DistortedPredictor(TRUE, linear=linear)),
    )
    late = strategies(record, since)
    assert "overlap" in late
    assert late[50:550].count("overlap") < 25, "now and then it is tried again"
    assert alone / record.makespan > 1.0


def test_overlap_that_pays_is_not_left(alone: float) -> None:
    record = run("hybrid", slow_overlap(1.0, 0.0), CorrectedPredictor(TRUE))
    taken = strategies(record, 0.0)
    assert taken.count("overlap") > 0.8 * len(taken)
    assert alone / record.makespan > 1.2
