"""LocalExecutor keeps the Executor's contract."""

import pytest
import torch

from nanoserve.config import ModelConfig
from nanoserve.engine import Engine
from nanoserve.errors import RuntimeFailure
from nanoserve.models.decoder import Decoder
from nanoserve.request import Request, SamplingParams, SequenceUpdate
from nanoserve.runtime.local import LocalExecutor
from nanoserve.scheduler import make_policy
from nanoserve.scheduler.plan import Begin, Executor, Row, StepPlan
from nanoserve.scheduler.scheduler import Scheduler
from tests.runtime.small_model import VOCAB_SIZE, dense_greedy, small_config, small_decoder

PROMPT = (7, 3, 58, 21, 9)


def make_executor(decoder: Decoder | None = None, *, num_blocks: int = 8) -> LocalExecutor:
    return LocalExecutor(decoder or small_decoder(), small_config(), num_blocks=num_blocks, block_size=4, device="cpu")


def first_plan(step: int) -> StepPlan:
    begin = Begin(1, PROMPT, len(PROMPT), 0, 0, SamplingParams(temperature=0.0))
    return StepPlan(step, begin=(begin,), rows=(Row(1, 0, PROMPT, True, (0, 1)),))


def test_a_plan_runs_when_it_is_collected() -> None:
    decoder = small_decoder()
    executor: Executor = make_executor(decoder)
    executor.submit(first_plan(17))
    (result,) = executor.collect(None)
    assert result.step == 17
    assert list(result.answers[0].tokens) == dense_greedy(decoder, PROMPT, 1)
    assert result.seconds > 0
    assert executor.collect(None) == []


def test_without_a_plan_it_waits_until_the_time_given() -> None:
    executor = make_executor()
    until = executor.now() + 0.02
    assert executor.collect(until) == []
    assert executor.now() >= until


def test_one_plan_may_be_in_flight() -> None:
    executor = make_executor()
    executor.submit(first_plan(0))
    with pytest.raises(RuntimeError, match="at most 1 plan"):
        executor.submit(first_plan(1))


def test_closed_means_closed() -> None:
    executor = make_executor()
    executor.close()
    executor.close()
    with pytest.raises(RuntimeError, match="closed"):
        executor.submit(first_plan(0))
    with pytest.raises(RuntimeError, match="closed"):
        executor.collect(None)


def test_a_gpu_that_takes_no_memory_back_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's allocator raises after a recording that failed; the error that closes the engine is another one."""
    refused = []

    def refuse() -> None:
        refused.append(True)
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    monkeypatch.setattr("torch.cuda.empty_cache", refuse)
    executor = make_executor()
    monkeypatch.setattr(executor, "_device", torch.device("cuda"))
    executor.close()
    assert refused
    with pytest.raises(RuntimeError, match="closed"):
        executor.submit(first_plan(0))


def test_a_cache_beyond_all_memory_is_one_clear_line() -> None:
    with pytest.raises(RuntimeFailure, match=r"out of memory on cpu: a KV cache of .* GiB .* lower --kv-cache-memory$"):
        make_executor(num_blocks=2**38)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_a_step_beyond_all_memory_is_one_clear_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = small_decoder()
    executor = make_executor(decoder)

    def fail(hidden: torch.Tensor) -> torch.Tensor:
        raise error

    monkeypatch.setattr(decoder, "compute_logits", fail)
    executor.submit(first_plan(0))
    with pytest.raises(RuntimeFailure, match=r"a step of 5 tokens .* lower --max-num-batched-tokens$"):
        executor.collect(None)


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    executor = make_executor()
    executor.submit(StepPlan(0, rows=(Row(9, 0, PROMPT, True, (0, 1)),)))
    with pytest.raises(RuntimeError, match="without having begun"):
        executor.collect(None)


# -------------------------------------------------------------------------------------------- with a real scheduler

REQUESTS = [
    (PROMPT, SamplingParams(temperature=0.0, max_tokens=12)),
    (PROMPT[:2], SamplingParams(temperature=1.3, max_tokens=9, frequency_penalty=0.5, repetition_penalty=1.2)),
    ((*PROMPT, *PROMPT, 4), SamplingParams(temperature=0.8, top_k=9, top_p=0.9, max_tokens=7, n=2)),
    ((*PROMPT, *PROMPT, 8), SamplingParams(temperature=1.0, min_p=0.05, max_tokens=10, min_tokens=4)),
    ((50, 51, 52, 53, 54, 55, 56, 57, 58), SamplingParams(temperature=0.0, max_tokens=8, presence_penalty=1.0)),
]


def run(
    config: ModelConfig, decoder: Decoder, requests: list[Request], *, num_blocks: int, block_size: int, budget: int
) -> tuple[dict[tuple[str, int], tuple[int, ...]], int]:
    """All tokens by (request, sample), and how many preemptions it took."""
    executor = LocalExecutor(decoder, config, num_blocks=num_blocks, block_size=block_size, device="cpu")
    scheduler = Scheduler(
        make_policy("sarathi", budget),
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=32,
        max_num_seqs=8,
        prefix_caching=True,
        pipeline_depth=1,
    )
    engine = Engine(scheduler, executor, vocab_size=VOCAB_SIZE)
    for request in requests:
        engine.add(request)
    tokens: dict[tuple[str, int], tuple[int, ...]] = {}
    last: dict[tuple[str, int], SequenceUpdate] = {}
    while engine.has_work:
        for update in engine.step():
            name = (update.request_id, update.index)
            tokens[name] = tokens.get(name, ()) + update.new_tokens
            last[name] = update
        scheduler.check_integrity()
    engine.close()
    assert all(update.sequence.error is None for update in last.values())
    return tokens, sum(update.sequence.preemptions for update in last.values())


def test_tokens_do_not_depend_on_what_shares_the_engine() -> None:
    """Greedy, seeded, penalized, forked; alone in plenty of room, and together where preemption is forced."""
    config, decoder = small_config(), small_decoder()
    requests = [
        Request(str(number), prompt, params, seed=40 + number, end_tokens=(3,))
        for number, (prompt, params) in enumerate(REQUESTS)
    ]
    alone: dict[tuple[str, int], tuple[int, ...]] = {}
    for request in requests:
        alone |= run(config, decoder, [request], num_blocks=32, block_size=4, budget=64)[0]
    together, preemptions = run(config, decoder, requests, num_blocks=12, block_size=4, budget=5)
    assert together == alone
    assert preemptions > 0
    assert run(config, decoder, requests, num_blocks=70, block_size=1, budget=16)[0] == alone
