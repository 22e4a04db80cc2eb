"""APEX's rule 1 over whole runs: nothing moves to host memory while the device can hold it."""

import pytest

from nanoserve.config.published_shapes import load_shape
from nanoserve.costs.hardware import load_machine
from nanoserve.costs.predictor import CostPredictor
from nanoserve.costs.step_costs import StepCosts
from nanoserve.lab.simulator import Workload, burst, fixed_lengths, simulate
from nanoserve.scheduler import make_policy

# 24 requests of 1,100 tokens take 69 blocks of 16 each: 63 % of 2,621.
REQUESTS, PROMPT, ANSWER, BLOCKS = 24, 1000, 100, 2621


@pytest.mark.parametrize("policy", ["neo", "overlap", "apex", "hybrid"])
def test_what_the_device_has_room_for_never_leaves_it(policy: str) -> None:
    costs = StepCosts(load_shape("llama-3.1-8b"), load_machine("apex-t4"))
    result = simulate(
        make_policy(policy, 2048),
        costs,
        Workload(burst(), fixed_lengths(PROMPT, ANSWER), limit=REQUESTS),
        num_blocks=BLOCKS,
        host_blocks=10 * BLOCKS,
        predictors=[CostPredictor(costs)],
    )
    assert 0.6 < result.kv_peak <= REQUESTS * 69 / BLOCKS
    assert (result.requests, result.output_tokens) == (REQUESTS, REQUESTS * ANSWER)
    assert (result.swapped_out_tokens, result.swapped_in_tokens, result.host_tokens) == (0, 0, 0)
