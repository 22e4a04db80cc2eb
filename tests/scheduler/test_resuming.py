"""A request whose engine died goes on in another engine: the tokens it has already are computed,
not sampled again."""

from dataclasses import replace

import pytest

from nanoserve.engine.engine import Engine
from nanoserve.request import Request, SamplingParams, SequenceUpdate
from nanoserve.scheduler.policies.baselines import ChunkedPrefill
from nanoserve.scheduler.scheduler import Scheduler
from tests.fakes.integrity import check_integrity
from tests.fakes.memory_checking_executor import MemoryCheckingExecutor
from tests.fakes.reference import expected_tokens

BLOCK_SIZE = 4
CONTEXT = 32


def _engine(budget: int = 64) -> Engine:
    scheduler = Scheduler(
        ChunkedPrefill(budget), num_blocks=24, block_size=BLOCK_SIZE, max_model_len=CONTEXT
    )
    return Engine(scheduler, MemoryCheckingExecutor(24, BLOCK_SIZE), vocab_size=1000)


def _finish(engine: Engine) -> list[SequenceUpdate]:
    updates = []
    while engine.has_work:
        updates += engine.step()
        check_integrity(engine.scheduler)
    assert engine.scheduler.pool.free_blocks == engine.scheduler.pool.num_blocks
    return updates


def _tokens(updates: list[SequenceUpdate], index: int) -> list[int]:
    return [token for update in updates if update.index == index for token in update.new_tokens]


@pytest.mark.parametrize("budget", [3, 64])
@pytest.mark.parametrize("lengths", [(0, 0), (5, 2), (0, 6), (9, 9)])
def test_every_sample_goes_on_behind_the_tokens_it_has(
    budget: int, lengths: tuple[int, int]
) -> None:
    params = SamplingParams(temperature=1, n=2, max_tokens=10, ignore_eos=True)
    request = Request("r", tuple(range(7)), params, seed=5)
    whole = [expected_tokens(request, index=index, max_model_len=CONTEXT)[0] for index in range(2)]
    engine = _engine(budget)
    engine.add(
        replace(request, resumed=tuple(tuple(whole[index][: lengths[index]]) for index in range(2)))
    )
    updates = _finish(engine)
    for index in range(2):
        assert _tokens(updates, index) == whole[index][lengths[index] :]


def test_a_sample_that_had_ended_is_stopped_and_its_sibling_computes_the_prompt() -> None:
    params = SamplingParams(temperature=1, n=2, max_tokens=10, ignore_eos=True)
    request = Request("r", tuple(range(7)), params, seed=5)
    whole = [
        tuple(expected_tokens(request, index=index, max_model_len=CONTEXT)[0]) for index in range(2)
    ]
    for steps in range(3):  # stopped while it waits, and while its prompt is computed
        engine = _engine(budget=4)
        engine.add(replace(request, resumed=(whole[0][:9], whole[1][:3])))
        updates = [update for _ in range(steps) for update in engine.step()]
        engine.stop("r", index=0)
        assert _tokens(updates + _finish(engine), 1) == list(whole[1][3:])
