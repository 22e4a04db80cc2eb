"""Random lives of an engine on tiny pools: preempt x prefix cache x chunk x length x abort x fork x
policy."""

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings

from nanoserve.engine.engine import Engine
from nanoserve.scheduler import POLICIES, make_policy
from nanoserve.scheduler.load import Policy
from nanoserve.scheduler.policies.token_throttling import TokenThrottling
from nanoserve.scheduler.scheduler import Scheduler
from tests.fakes.memory_checking_executor import MemoryCheckingExecutor
from tests.scheduler.lives import WINDOWS, check_outputs, live, lives

CASES: dict[str, Callable[[int], Policy]] = {name: partial(make_policy, name) for name in POLICIES}
CASES["throttling, half of the pool kept free"] = lambda budget: TokenThrottling(
    max_prefill=budget, min_prefill=1, threshold=0.5
)
"""By token budget; with its usual threshold, throttling would hardly meet it in pools so small."""


@pytest.mark.parametrize("policy", CASES)
@settings(max_examples=25, deadline=None)
@given(life=lives(WINDOWS))
def test_every_request_gets_the_tokens_it_would_get_alone(policy: str, life: dict) -> None:
    executor = MemoryCheckingExecutor(
        life["num_blocks"],
        life["block_size"],
        depth=life["depth"],
        async_scheduling=life["async_scheduling"],
        windows=life["windows"],
    )
    scheduler = Scheduler(
        CASES[policy](life["token_budget"]),
        num_blocks=life["num_blocks"],
        block_size=life["block_size"],
        max_model_len=life["max_model_len"],
        max_num_seqs=life["max_num_seqs"],
        prefix_caching=life["prefix_caching"],
        pipeline_depth=life["depth"],
        async_scheduling=life["async_scheduling"],
        windows=life["windows"],
    )
    engine = Engine(scheduler, executor, vocab_size=50)
    outputs, reasons = live(engine, life["arrivals"])

    check_outputs(life["arrivals"], life["max_model_len"], outputs, reasons)
    assert scheduler.pool.free_blocks == life["num_blocks"]
