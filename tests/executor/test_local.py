"""LocalExecutor keeps the Executor's contract."""

import platform
import resource
import subprocess
import sys
import threading
from functools import cache
from itertools import cycle

import pytest
import torch

from nanoserve.config.model_config import ModelConfig
from nanoserve.engine.engine import Engine
from nanoserve.errors import RuntimeFailure
from nanoserve.executor.kv_transfer.host_pool import HostPool
from nanoserve.executor.kv_transfer.swapping import BlockMover
from nanoserve.executor.local import LocalExecutor
from nanoserve.models.decoder import Decoder
from nanoserve.request import Request, SamplingParams, SequenceUpdate
from nanoserve.scheduler import POLICIES, make_policy
from nanoserve.scheduler.assembly import make_extensions
from nanoserve.scheduler.optional import HostPlan, HostResult, Swap
from nanoserve.scheduler.plan import Begin, Executor, Row, StepPlan, StepResult
from nanoserve.scheduler.scheduler import Scheduler
from tests.executor.small_model import (
    VOCAB_SIZE,
    dense_greedy,
    local_executor,
    small_config,
    small_decoder,
)
from tests.executor.swaps import watch_swaps
from tests.fakes.integrity import check_integrity, host_pool
from tests.fakes.linear_predictor import LinearPredictor

PROMPT = (7, 3, 58, 21, 9)


def make_executor(decoder: Decoder | None = None, *, num_blocks: int = 8) -> LocalExecutor:
    return local_executor(decoder or small_decoder(), num_blocks=num_blocks, block_size=4)


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


KEEPS_MEMORY = """
from pathlib import Path

import torch

from tests.executor.test_local import make_executor


def resident_pages():
    return int(Path("/proc/self/statm").read_text().split()[1])


executor = make_executor()
begun = resident_pages()
torch.ones(2**24)
freed = resident_pages()
executor.close()
print(freed - begun, freed - resident_pages())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries differ")
def test_memory_of_a_step_is_kept_until_the_executor_is_closed() -> None:
    """In a process of its own: an allocation that failed, as in other tests, gives a thread another
    heap. Page faults are not counted: the system may take pages away at any time."""
    printed = subprocess.run(
        [sys.executable, "-c", KEEPS_MEMORY], capture_output=True, text=True, check=True
    ).stdout
    kept, returned = map(int, printed.split())
    # a tensor of 64 MiB that was freed
    assert kept > 2**25 // resource.getpagesize()
    assert returned > 2**25 // resource.getpagesize()


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
    """torch's allocator raises after a recording that failed; the error that closes the engine is
    another one."""
    refused = []

    def refuse() -> None:
        refused.append(True)
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    monkeypatch.setattr("torch.cuda.empty_cache", refuse)
    executor = make_executor()
    monkeypatch.setattr(executor.runner, "device", torch.device("cuda"))
    executor.close()
    assert refused
    with pytest.raises(RuntimeError, match="closed"):
        executor.submit(first_plan(0))


def test_a_cache_beyond_all_memory_is_one_clear_line() -> None:
    with pytest.raises(
        RuntimeFailure,
        match=r"out of memory on cpu: a KV cache of .* GiB .* lower --kv-cache-memory$",
    ):
        make_executor(num_blocks=2**38)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_a_step_beyond_all_memory_is_one_clear_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = small_decoder()
    executor = make_executor(decoder)

    def fail(hidden: torch.Tensor) -> torch.Tensor:
        raise error

    monkeypatch.setattr(decoder, "compute_logits", fail)
    executor.submit(first_plan(0))
    with pytest.raises(
        RuntimeFailure, match=r"a step of 5 tokens .* lower --max-num-batched-tokens$"
    ):
        executor.collect(None)


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    executor = make_executor()
    executor.submit(StepPlan(0, rows=(Row(9, 0, PROMPT, True, (0, 1)),)))
    with pytest.raises(RuntimeError, match="without having begun"):
        executor.collect(None)


# -------------------------------------------------------------------------------------------- with
# a real scheduler

REQUESTS = [
    (PROMPT, SamplingParams(temperature=0.0, max_tokens=12)),
    (
        PROMPT[:2],
        SamplingParams(
            temperature=1.3, max_tokens=9, frequency_penalty=0.5, repetition_penalty=1.2
        ),
    ),
    ((*PROMPT, *PROMPT, 4), SamplingParams(temperature=0.8, top_k=9, top_p=0.9, max_tokens=7, n=2)),
    (
        (*PROMPT, *PROMPT, 8),
        SamplingParams(temperature=1.0, min_p=0.05, max_tokens=10, min_tokens=4),
    ),
    (
        (50, 51, 52, 53, 54, 55, 56, 57, 58),
        SamplingParams(temperature=0.0, max_tokens=8, presence_penalty=1.0),
    ),
]


def run(
    config: ModelConfig,
    decoder: Decoder,
    requests: list[Request],
    *,
    num_blocks: int,
    block_size: int,
    budget: int,
    policy: str = "sarathi",
    host_blocks: int = 0,
    prefix_caching: bool = True,
) -> tuple[dict[tuple[str, int], tuple[int, ...]], Scheduler]:
    """All tokens by (request, sample), and the scheduler that saw to it."""
    pool = None
    if host_blocks:
        pool = HostPool.of_one_process(
            config, num_blocks=host_blocks, block_size=block_size, dtype=decoder.dtype
        )
    executor = local_executor(decoder, num_blocks=num_blocks, block_size=block_size, host_pool=pool)
    scheduler = Scheduler(
        make_policy(policy, budget, swaps=pool is not None),
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=32,
        max_num_seqs=8,
        prefix_caching=prefix_caching,
        extensions=make_extensions(host_blocks=host_blocks),
        predictors=[LinearPredictor(swap_token=1e-6)],
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
        check_integrity(scheduler)
    engine.close()
    assert all(update.sequence.error is None for update in last.values())
    return tokens, scheduler


@cache
def requests_and_tokens() -> tuple[list[Request], dict[tuple[str, int], tuple[int, ...]]]:
    """Greedy, seeded, penalized, forked ones; and what each gets alone in plenty of room."""
    config, decoder = small_config(), small_decoder()
    requests = [
        Request(str(number), prompt, params, seed=40 + number, end_tokens=(3,))
        for number, (prompt, params) in enumerate(REQUESTS)
    ]
    alone: dict[tuple[str, int], tuple[int, ...]] = {}
    for request in requests:
        alone |= run(config, decoder, [request], num_blocks=32, block_size=4, budget=64)[0]
    return requests, alone


def test_tokens_do_not_depend_on_what_shares_the_engine() -> None:
    config, decoder = small_config(), small_decoder()
    requests, alone = requests_and_tokens()
    together, scheduler = run(config, decoder, requests, num_blocks=12, block_size=4, budget=5)
    assert together == alone
    assert scheduler.table.preemptions > 0, "where that is forced"
    assert run(config, decoder, requests, num_blocks=70, block_size=1, budget=16)[0] == alone


# ----------------------------------------------------------------------------------------------
# with a host pool


ORDINARY = [name for name, entry in POLICIES.items() if not entry.attends_on_host]


@pytest.mark.parametrize(
    ("policy", "prefix_caching"),
    [
        pytest.param(
            policy,
            caching,
            marks=() if policy in ("sarathi", "throttling", "seesaw") else pytest.mark.slow,
        )
        for policy, caching in zip(ORDINARY, cycle((True, False)))
    ],
)
def test_tokens_are_the_same_where_sequences_move_to_host_memory_and_back(
    policy: str, monkeypatch: pytest.MonkeyPatch, *, prefix_caching: bool
) -> None:
    config, decoder = small_config(), small_decoder()
    requests, alone = requests_and_tokens()
    moved = watch_swaps(monkeypatch)
    together, scheduler = run(
        *(config, decoder, requests),
        num_blocks=8,
        block_size=4,
        budget=16,
        policy=policy,
        host_blocks=16,
        prefix_caching=prefix_caching,
    )
    assert together == alone
    assert moved.count("out") == moved.count("in") > 0
    assert host_pool(scheduler).free_blocks == 16


def test_a_full_pool_leaves_the_rest_to_be_computed_again() -> None:
    config, decoder = small_config(), small_decoder()
    requests, alone = requests_and_tokens()
    together, scheduler = run(
        config, decoder, requests, num_blocks=8, block_size=4, budget=16, host_blocks=2
    )
    assert together == alone
    assert scheduler.table.preemptions > 0


def swapping_executor(num_blocks: int = 8) -> LocalExecutor:
    pool = HostPool.of_one_process(small_config(), num_blocks=8, block_size=4, dtype=torch.float32)
    return local_executor(small_decoder(), num_blocks=num_blocks, block_size=4, host_pool=pool)


def test_swaps_alone_are_answered_by_their_ids_alone() -> None:
    executor = swapping_executor()
    caches = executor.runner.caches.keys[1]
    with torch.inference_mode():
        caches[5].fill_(3.5)
    executor.submit(StepPlan(0, host=HostPlan(swaps=(Swap(4, 1, "out", (5,), (7,)),))))
    assert executor.collect(None) == [StepResult(None, host=HostResult(swapped=(4,)))]
    executor.submit(StepPlan(1, host=HostPlan(swaps=(Swap(5, 1, "in", (2,), (7,)),))))
    assert executor.collect(executor.now() + 60) == [
        StepResult(None, host=HostResult(swapped=(5,)))
    ]
    assert (caches[2] == 3.5).all()
    assert executor.collect(None) == [], "nothing is under way any more"
    executor.close()


def test_a_plan_with_rows_begins_its_swaps_first() -> None:
    executor = swapping_executor()
    begin, row = first_plan(3).begin, first_plan(3).rows
    executor.submit(
        StepPlan(3, begin=begin, rows=row, host=HostPlan(swaps=(Swap(9, 1, "out", (5,), (7,)),)))
    )
    results = executor.collect(None)
    while sum(len(result.host.swapped) for result in results) == 0:
        results += executor.collect(None)
    assert [result.step for result in results if result.answers] == [3]
    assert [result.host.swapped for result in results if result.host.swapped] == [(9,)]
    executor.close()


def test_without_a_pool_a_swap_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no host pool"):
        make_executor().submit(StepPlan(0, host=HostPlan(swaps=(Swap(4, 1, "out", (5,), (7,)),))))


def test_a_swap_that_finds_no_memory_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> int:
        raise MemoryError

    executor = swapping_executor()
    monkeypatch.setattr(BlockMover, "out", fail)
    executor.submit(
        StepPlan(
            0, host=HostPlan(swaps=(Swap(4, 1, "out", (5,), (7,)), Swap(5, 2, "in", (1,), (2,))))
        )
    )
    with pytest.raises(RuntimeFailure, match="a swap does not fit"):
        while True:
            executor.collect(None)
    assert executor.collect(None) == [], "what was under way beside it is forgotten"
    executor.close()


def test_a_step_that_fails_waits_for_the_swaps_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their blocks are free for others as soon as the failure is told."""
    executor, gate, ended = swapping_executor(), threading.Event(), []

    def slow(*arguments: object) -> int:
        gate.wait(240)
        ended.append(True)
        return 0

    def fail(hidden: torch.Tensor) -> torch.Tensor:
        threading.Timer(0.05, gate.set).start()
        raise MemoryError

    monkeypatch.setattr(BlockMover, "into", slow)
    monkeypatch.setattr(executor.runner.decoder, "compute_logits", fail)
    begin, row = first_plan(3).begin, first_plan(3).rows
    executor.submit(
        StepPlan(3, begin=begin, rows=row, host=HostPlan(swaps=(Swap(9, 1, "in", (5,), (7,)),)))
    )
    with pytest.raises(RuntimeFailure, match="a step of 5 tokens"):
        executor.collect(None)
    assert ended and executor.collect(None) == []
    executor.close()
