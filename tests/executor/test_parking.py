"""A parked prompt: its keys and values leave the device layer by layer, beside the step that
completes it."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import LayerDifferences
from nanoserve.errors import RuntimeFailure
from nanoserve.executor.cpu_attention.host_processor import HostProcessor
from nanoserve.executor.kv_transfer.host_pool import HostPool
from nanoserve.executor.kv_transfer.transfer import LocalKvTransfer
from nanoserve.executor.local import LocalExecutor
from nanoserve.executor.stage import Stage
from nanoserve.executor.step.decode_graphs import DecodeGraphs, StaticInputs
from nanoserve.executor.step.model_runner import ModelRunner
from nanoserve.models.attention import AttentionFunction
from nanoserve.models.decoder import Decoder, DecoderLayer
from nanoserve.models.shards import make_shards
from nanoserve.request import SamplingParams
from nanoserve.scheduler.optional import HostPlan, HostRow, Swap
from nanoserve.scheduler.plan import Begin, Row, StepPlan, StepResult
from nanoserve.scheduler.work import Strategy
from tests.executor.fake_graphs import FakeRecorder
from tests.executor.small_model import (
    LayersRunBy,
    dense_greedy,
    local_executor,
    small_config,
    small_decoder,
)

LAYERS, BLOCK_SIZE, BLOCKS = 3, 4, 8
CPU = torch.device("cpu")
PROMPT = (7, 3, 58, 21, 9, 12, 40, 3, 3, 17)
DEVICE_BLOCKS, HOST_BLOCKS = (6, 1, 4), (0, 7, 3)
PARKED = Swap(5, 1, "out", DEVICE_BLOCKS, HOST_BLOCKS, after_row=True)
FINAL_CHUNK = 6


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return replace(
        small_config(), num_layers=LAYERS, layers=LayerDifferences(sliding_windows=(0, 3, 0))
    ).in_one_group()


@pytest.fixture(scope="module")
def decoder(config: ModelConfig) -> Decoder:
    return small_decoder(config).requires_grad_(False)


@pytest.fixture
def pool(config: ModelConfig) -> HostPool:
    pool = HostPool.of_one_process(
        config, num_blocks=BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float32
    )
    pool.blocks.fill_(-2.0)
    return pool


def executor_of(decoder: Decoder, pool: HostPool, **options: object) -> LocalExecutor:
    return local_executor(
        decoder,
        num_blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        host_pool=pool,
        **options,  # type: ignore[arg-type]
    )


def begin(sequence: int = 1, tokens: tuple[int, ...] = PROMPT) -> tuple[Begin, ...]:
    return (Begin(sequence, tokens, len(tokens), 0, 0, SamplingParams(temperature=0.0)),)


def chunks(first_step: int = 0) -> Iterator[StepPlan]:
    """The prompt in two chunks, parked with the second."""
    first = Row(1, 0, PROMPT[:FINAL_CHUNK], False, DEVICE_BLOCKS[:2])
    last = Row(1, FINAL_CHUNK, PROMPT[FINAL_CHUNK:], True, DEVICE_BLOCKS[2:])
    yield StepPlan(first_step, begin=begin(), rows=(first,))
    yield StepPlan(first_step + 1, rows=(last,), host=HostPlan(swaps=(PARKED,)))


def results_of(executor: LocalExecutor, plan: StepPlan) -> list[StepResult]:
    """Until it and its swaps are answered."""
    executor.submit(plan)
    results = executor.collect(None)
    while {swap.swap for swap in plan.host.swaps} - {
        swap for result in results for swap in result.host.swapped
    }:
        results += executor.collect(None)
    return results


def check_pool(pool: HostPool, runner: ModelRunner) -> None:
    """It holds what the caches hold, of every token of the prompt, and nothing elsewhere."""
    for ours, theirs in ((runner.caches.keys, 0), (runner.caches.values, 1)):
        for layer, cache in enumerate(ours):
            found = pool.blocks[layer, theirs, list(HOST_BLOCKS)]
            expected = cache[list(DEVICE_BLOCKS)]
            assert torch.equal(tokens_of(found), tokens_of(expected)), layer
    others = [block for block in range(BLOCKS) if block not in HOST_BLOCKS]
    assert (pool.blocks[:, :, others] == -2.0).all()


def tokens_of(blocks: Tensor) -> Tensor:
    """[blocks, heads, block_size, head_dim] -> [tokens of the prompt, heads, head_dim]"""
    return blocks.transpose(1, 2).flatten(0, 1)[: len(PROMPT)]


def wait_until(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + 240
    while not happened():
        assert time.monotonic() < until, "it does not happen"
        time.sleep(0.001)


def test_the_last_chunk_of_a_prompt_leaves_with_all_before_it(
    decoder: Decoder, pool: HostPool
) -> None:
    executor = executor_of(decoder, pool)
    answers = [
        answer
        for plan in chunks()
        for result in results_of(executor, plan)
        for answer in result.answers
    ]
    assert [list(answer.tokens) for answer in answers] == [dense_greedy(decoder, PROMPT, 1)]
    check_pool(pool, executor.runner)
    executor.close()


def test_a_layer_leaves_while_the_next_one_is_computed(decoder: Decoder, pool: HostPool) -> None:
    """No layer begins before the one in front of it has left, in the step that parks the prompt."""
    parking, here = False, list(HOST_BLOCKS)

    def run_layer(
        layer: DecoderLayer, hidden: Tensor, cos: Tensor, sin: Tensor, attention: AttentionFunction
    ) -> Tensor:
        if parking:
            keys, number = executor.runner.caches.keys, layer.index - 1
            if layer.index:
                wait_until(
                    lambda: torch.equal(
                        pool.blocks[number, 0, here], keys[number][list(DEVICE_BLOCKS)]
                    )
                )
            assert (pool.blocks[layer.index :, :, here] == -2.0).all(), (
                "what is not computed has not left"
            )
        output: Tensor = layer(hidden, cos, sin, attention)
        return output

    executor = executor_of(decoder, pool, layers=LayersRunBy(run_layer))
    with torch.inference_mode():
        for cache in (*executor.runner.caches.keys, *executor.runner.caches.values):
            cache.fill_(5.0)  # a number, so that what no token is in can be compared
    for plan in chunks():
        parking = bool(plan.host.swaps)
        results_of(executor, plan)
    check_pool(pool, executor.runner)
    executor.close()


def test_a_step_that_is_to_tell_of_its_layers_is_not_replayed(
    decoder: Decoder, pool: HostPool
) -> None:
    """Here the last chunk is a single token, as a decode is."""
    executor, recorder = executor_of(decoder, pool), FakeRecorder()
    runner = executor.runner
    graphs = DecodeGraphs(runner.forward, StaticInputs([(1, 1), (2, 1)], most_blocks=3, device=CPU))
    with torch.inference_mode():
        graphs.capture(recorder)
    runner.forward = graphs
    first, last = PROMPT[:-1], PROMPT[-1:]
    results_of(executor, StepPlan(0, begin=begin(), rows=(Row(1, 0, first, False, DEVICE_BLOCKS),)))
    results = results_of(
        executor,
        StepPlan(1, rows=(Row(1, len(first), last, True),), host=HostPlan(swaps=(PARKED,))),
    )
    token = next(answer.tokens for result in results for answer in result.answers)
    assert recorder.replayed == []
    check_pool(pool, runner)
    results_of(executor, StepPlan(2, rows=(Row(1, len(PROMPT), token, True),)))
    assert recorder.replayed == [1], "any other step of one token is"
    executor.close()


def test_a_prompt_of_a_grouped_model_leaves_when_the_last_layer_of_a_tensor_is_done() -> None:
    """Two groups of two layers share two tensors: one leaves behind layer 1, the other behind layer
    3, and both without the block that lies behind the window."""
    config = replace(
        small_config(), num_layers=4, layers=LayerDifferences(sliding_windows=(0, 3, 0, 3))
    )
    assert config.cache_groups.places == ((0, 0), (1, 0), (0, 1), (1, 1))
    decoder = small_decoder(config).requires_grad_(False)
    pool = HostPool.of_one_process(
        config, num_blocks=BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float32
    )
    pool.blocks.fill_(-2.0)
    table, leaving, here = (6, 1, 4, 0, 3, 7), [6, 4, 0, 3, 7], [0, 7, 3, 2, 5]
    parking, left = False, list[tuple[bool, bool]]()

    def run_layer(layer: DecoderLayer, *arguments: Any) -> Tensor:
        if parking and layer.index == 2:
            wait_until(
                lambda: torch.equal(
                    pool.blocks[0, 1, here], executor.runner.caches.values[0][leaving]
                )
            )
        if parking:
            left.append(
                (bool((pool.blocks[0] != -2.0).any()), bool((pool.blocks[1] != -2.0).any()))
            )
        output: Tensor = layer(*arguments)
        return output

    executor = executor_of(decoder, pool, layers=LayersRunBy(run_layer))
    with torch.inference_mode():
        for cache in (*executor.runner.caches.keys, *executor.runner.caches.values):
            cache.fill_(5.0)  # a number, so that what no token is in can be compared
    results_of(
        executor,
        StepPlan(0, begin=begin(), rows=(Row(1, 0, PROMPT[:FINAL_CHUNK], False, table[:4]),)),
    )
    last = Row(1, FINAL_CHUNK, PROMPT[FINAL_CHUNK:], True, table[4:])
    parked = Swap(5, 1, "out", tuple(leaving), tuple(here), after_row=True)
    parking = True
    answers = [
        one
        for result in results_of(
            executor, StepPlan(1, rows=(last,), host=HostPlan(swaps=(parked,)))
        )
        for one in result.answers
    ]
    assert [list(answer.tokens) for answer in answers] == [dense_greedy(decoder, PROMPT, 1)]
    assert left == [(False, False), (False, False), (True, False), (True, False)]
    caches = executor.runner.caches
    for tensor in range(2):
        assert torch.equal(pool.blocks[tensor, 0, here], caches.keys[tensor][leaving]), tensor
        assert torch.equal(pool.blocks[tensor, 1, here], caches.values[tensor][leaving]), tensor
    assert (pool.blocks[:, :, [1, 4, 6]] == -2.0).all()
    executor.close()


@pytest.mark.parametrize("strategy", ["overlap", "asymmetric"])
def test_a_prompt_is_parked_beside_host_sequences(
    decoder: Decoder, pool: HostPool, strategy: Strategy
) -> None:
    """Layers in which one takes part run in pieces, the others as a whole."""
    executor = executor_of(decoder, pool, processor=HostProcessor.set_apart(1, CPU))
    guest, block = (4, 4, 17), 5
    results_of(
        executor, StepPlan(0, begin=begin(2, guest), rows=(Row(2, 0, guest[:-1], False, (2,)),))
    )
    results_of(executor, StepPlan(1, host=HostPlan(swaps=(Swap(4, 2, "out", (2,), (block,)),))))
    before = pool.blocks[:, :, block].clone()
    enters = Row(
        2, len(guest) - 1, guest[-1:], True, (block,), host=HostRow(int(strategy == "asymmetric"))
    )
    first, last = chunks(2)
    results_of(executor, first)
    tokens = dict[int, list[int]]()
    for plan in (
        replace_plan(
            last,
            begin=begin(2, guest),
            rows=(*last.rows, enters),
            host=HostPlan(last.host.swaps, strategy),
        ),
        *(StepPlan(4 + step, host=HostPlan(strategy="overlap")) for step in range(LAYERS)),
    ):
        for result in results_of(executor, plan):
            tokens |= {answer.sequence: list(answer.tokens) for answer in result.answers}
    assert tokens == {1: dense_greedy(decoder, PROMPT, 1), 2: dense_greedy(decoder, guest, 1)}
    written = slice(0, len(guest) - 1)
    assert torch.equal(pool.blocks[:, :, block, :, written], before[:, :, :, written])
    pool.blocks[:, :, block] = -2.0
    check_pool(pool, executor.runner)
    executor.close()


def replace_plan(plan: StepPlan, **changes: object) -> StepPlan:
    return StepPlan(**{**{name: getattr(plan, name) for name in plan.__struct_fields__}, **changes})  # type: ignore[arg-type]


def test_every_stage_lets_its_own_layers_leave(
    decoder: Decoder, config: ModelConfig, pool: HostPool
) -> None:
    """The stages of a pipeline one after the other, as workers run them."""
    stages, transfers = list[Stage](), list[LocalKvTransfer]()
    for shard in make_shards(config, pipeline_parallel=2, tensor_parallel=1):
        shard_decoder = Decoder(config, shard=shard).eval()
        shard_decoder.load_state_dict(_weights_of(decoder, shard_decoder, shard.layers.start))
        transfers.append(LocalKvTransfer(pool.part(shard)))
        sizes = {"num_blocks": BLOCKS, "block_size": BLOCK_SIZE}
        stages.append(Stage.build(shard_decoder, **sizes, device=CPU, mechanisms=transfers[-1:]))
    for plan in chunks():
        hidden: Tensor | None = None
        for stage in stages:
            step = stage.runner.prepare(plan)
            stage.runner.begin(step)
            hidden = stage.runner.compute(step, hidden)
        for transfer in transfers:
            assert transfer.swapper.take_done(None) == tuple(swap.swap for swap in plan.host.swaps)
    alone = executor_of(decoder, pool)
    for plan in chunks():
        results_of(alone, replace_plan(plan, host=HostPlan()))
    check_pool(pool, alone.runner)
    alone.close()
    for transfer in transfers:
        transfer.close()


def _weights_of(decoder: Decoder, stage: Decoder, first_layer: int) -> dict[str, Tensor]:
    """Parameters of the whole decoder, by the names that its stage has for them."""
    whole, found = decoder.state_dict(), dict[str, Tensor]()
    for name in stage.state_dict():
        parts = name.split(".")
        if parts[0] == "layers":
            parts[1] = str(int(parts[1]) + first_layer)
        found[name] = whole[".".join(parts)]
    return found


# --------------------------------------------------------------------------------------------------
# what fails


def failing_in_layer(layer_index: int, error: BaseException) -> LayersRunBy:
    def run_layer(layer: DecoderLayer, *arguments: object) -> Tensor:
        if layer.index == layer_index:
            raise error
        output: Tensor = layer(*arguments)
        return output

    return LayersRunBy(run_layer)


def test_a_step_that_finds_no_memory_leaves_nothing_waiting(
    decoder: Decoder, pool: HostPool
) -> None:
    executor = executor_of(decoder, pool, layers=failing_in_layer(1, MemoryError()))
    executor.submit(
        StepPlan(
            0,
            begin=begin(),
            rows=(Row(1, 0, PROMPT, True, DEVICE_BLOCKS),),
            host=HostPlan(swaps=(PARKED,)),
        )
    )
    with pytest.raises(RuntimeFailure, match=r"a step of 10 tokens does not fit"):
        executor.collect(None)
    assert executor.collect(None) == [], "the swap is forgotten with the step"
    results = results_of(
        executor, StepPlan(1, host=HostPlan(swaps=(Swap(6, 1, "out", (2,), (2,)),)))
    )
    assert [result.host.swapped for result in results] == [(6,)], "later ones go on"
    executor.close()


def test_whatever_a_step_fails_with_the_executor_can_be_closed(
    decoder: Decoder, pool: HostPool
) -> None:
    executor = executor_of(decoder, pool, layers=failing_in_layer(1, ValueError("no layer today")))
    executor.submit(
        StepPlan(
            0,
            begin=begin(),
            rows=(Row(1, 0, PROMPT, True, DEVICE_BLOCKS),),
            host=HostPlan(swaps=(PARKED,)),
        )
    )
    with pytest.raises(ValueError, match="no layer today"):
        executor.collect(None)
    closing = threading.Thread(target=executor.close, daemon=True)
    closing.start()
    closing.join(240)
    assert not closing.is_alive()


def test_a_swap_that_follows_no_row_of_its_plan_is_an_error(
    decoder: Decoder, pool: HostPool
) -> None:
    executor = executor_of(decoder, pool)
    with pytest.raises(RuntimeError, match="a swap follows a row"):
        executor.submit(StepPlan(0, host=HostPlan(swaps=(PARKED,))))
    executor.close()
