"""Decisions by a predictor that is wrong in the beginning: a second is lost, and no more."""

import pytest

from nanoserve.costs.corrected_predictor import CorrectedPredictor
from nanoserve.costs.predictor import CostPredictor
from nanoserve.lab.papers.apex.settings import A10
from nanoserve.lab.papers.cases import BLOCK_SIZE, draw_lengths
from nanoserve.lab.simulator import SimulationResult, Workload, burst, simulate
from nanoserve.scheduler import make_policy
from nanoserve.scheduler.predictor import Predictor
from tests.fakes.distorted_predictor import DistortedPredictor

REQUESTS, BLOCKS = 100, 3400


def serve(policy: str, processor: float | None, *predictors: Predictor) -> SimulationResult:
    """Figure 7's requests, 200 tokens each, all at once; with another share of what the CPU should
    reach."""
    costs = A10.costs(processor)
    return simulate(
        make_policy(policy, 1024),
        costs,
        Workload(burst(), draw_lengths("1000:200", 0), REQUESTS),
        num_blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=REQUESTS,
        host_blocks=costs.memory.host_kv_blocks(costs.machine.host_memory_bytes, BLOCK_SIZE)
        if predictors
        else 0,
        predictors=predictors,
    )


@pytest.mark.parametrize("processor", [0.08, None])
def test_a_wrong_profile_costs_a_second_until_it_is_known(processor: float | None) -> None:
    # It promises a CPU four times as fast as the default, and linear layers in a quarter of their
    # time.
    promised = DistortedPredictor(CostPredictor(A10.costs()), linear=0.25, host_attention=0.25)
    alone = serve("sarathi", processor)
    hybrid = serve("hybrid", processor, CorrectedPredictor(promised))
    assert hybrid.seconds < alone.seconds + 1.5  # of 40 s, once
    if processor is None:
        right = serve("hybrid", processor, CostPredictor(A10.costs()))
        assert hybrid.host_tokens > 1000
        assert hybrid.seconds < min(right.seconds + 1, alone.seconds)
