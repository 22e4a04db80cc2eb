"""A run of a real model, replayed in virtual time: the scheduler makes the same plans."""

import pytest

from nanoserve.engine.engine import Engine
from nanoserve.lab.simulator.replay import record_run, replay
from nanoserve.request import Request, SamplingParams
from nanoserve.scheduler import make_policy
from nanoserve.scheduler.scheduler import Scheduler
from tests.executor.small_model import VOCAB_SIZE, local_executor, small_config, small_decoder


def _scheduler(policy: str) -> Scheduler:
    return Scheduler(make_policy(policy, 8), num_blocks=12, block_size=4, max_model_len=32)


@pytest.mark.parametrize("policy", ["sarathi", "throttling", "adaptive"])
def test_a_replay_makes_the_plans_of_a_real_run(policy: str) -> None:
    config = small_config()
    executor = local_executor(small_decoder(config), num_blocks=12, block_size=4)
    began = executor.now()
    requests = [
        Request(
            f"r{number}",
            tuple(range(1, 4 + 2 * number)),
            SamplingParams(temperature=1.0, max_tokens=12),
            seed=number,
            arrival_time=began + 0.003 * number,
        )
        for number in range(8)
    ]
    record = record_run(Engine(_scheduler(policy), executor, vocab_size=VOCAB_SIZE), requests)
    assert len(record.plans) > 12
    assert replay(record, lambda: _scheduler(policy), vocab_size=VOCAB_SIZE) == record.plans
