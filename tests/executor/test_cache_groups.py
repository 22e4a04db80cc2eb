"""Layers with windows give their blocks back, and say what they say when they keep them: a real,
tiny model."""

from dataclasses import replace
from itertools import cycle

import pytest
import torch

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import LayerDifferences, LayerShape
from nanoserve.engine.engine import Engine
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import UsageError
from nanoserve.executor.kv_transfer.host_pool import HostPool
from nanoserve.executor.start.model_loading import keeps_all_positions, with_cache_groups
from nanoserve.executor.step.decode_graphs import (
    DecodeGraphs,
    StaticInputs,
    bucket_sizes,
    graph_sizes,
)
from nanoserve.layout import ParallelLayout
from nanoserve.models.decoder import Decoder
from nanoserve.request import Request, SamplingParams
from nanoserve.scheduler import make_policy
from nanoserve.scheduler.assembly import make_extensions
from nanoserve.scheduler.kv import NO_BLOCK
from nanoserve.scheduler.plan import StepPlan
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.scheduler.windows import most_blocks
from tests.executor.fake_graphs import FakeRecorder
from tests.executor.small_model import (
    VOCAB_SIZE,
    dense_greedy,
    local_executor,
    small_config,
    small_decoder,
)
from tests.fakes.integrity import check_integrity
from tests.fakes.linear_predictor import LinearPredictor

WINDOWS = {
    "one kind": (7, 7, 7, 7),
    "two kinds": (9, 0, 9, 0),
    "several groups of a kind": (6, 6, 6, 0, 6),
    "three kinds": (0, 5, 13, 0),
    "two shapes": (9, 9, 0, 9, 9, 0, 9, 0),
}
PROMPT = tuple(1 + (number * number) % 59 for number in range(61))
GREEDY = SamplingParams(temperature=0, max_tokens=9)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=7, n=3, frequency_penalty=0.3)


def windowed(name: str) -> Decoder:
    """With two shapes, layers with a window cache half as much, and the last two share what earlier
    ones cache."""
    windows, config = WINDOWS[name], small_config()
    layers = LayerDifferences(sliding_windows=windows)
    if name == "two shapes":
        sources = (0, 1, 2, 3, 4, 5, 4, 5)
        size, heads, inner = config.head_dim, config.num_kv_heads, config.intermediate_size
        shapes = tuple(
            LayerShape(
                size if window else 2 * size,
                heads,
                inner,
                values_are_keys=not window,
                has_kv=own == layer,
            )
            for layer, (own, window) in enumerate(zip(sources, windows, strict=True))
        )
        layers = replace(layers, kv_sources=sources, shapes=shapes)
    return small_decoder(replace(config, num_layers=len(windows), layers=layers))


class Watched:
    """An engine that counts the blocks that its sequences hold."""

    def __init__(
        self, decoder: Decoder, config: ModelConfig, *, num_blocks: int, block_size: int = 4, budget: int = 8,
        host_blocks: int = 0, policy: str = "sarathi", async_scheduling: bool = False,
    ) -> None:  # fmt: skip
        decoder.config = config
        pool = None
        if host_blocks:
            pool = HostPool.of_one_process(
                config, num_blocks=host_blocks, block_size=block_size, dtype=decoder.dtype
            )
        executor = local_executor(
            decoder,
            num_blocks=num_blocks,
            block_size=block_size,
            host_pool=pool,
            async_scheduling=async_scheduling,
        )
        self.scheduler = Scheduler(
            make_policy(policy, budget, swaps=pool is not None),
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=96,
            extensions=make_extensions(host_blocks=host_blocks),
            predictors=[LinearPredictor(swap_token=1e-6)] if pool is not None else (),
            async_scheduling=async_scheduling,
            windows=config.cache_groups.windows,
        )
        self.engine = Engine(self.scheduler, executor, vocab_size=VOCAB_SIZE)
        self.most_held = self.cached_tokens = 0
        self.plans: list[StepPlan] = []
        submit = executor.submit
        executor.submit = lambda plan: (self.plans.append(plan), submit(plan))[1]

    def run(self, requests: list[Request]) -> dict[tuple[str, int], list[int]]:
        tokens: dict[tuple[str, int], list[int]] = {}
        for request in requests:
            self.engine.add(request)
        while self.engine.has_work:
            for update in self.engine.step():
                assert update.sequence.error is None
                self.cached_tokens = update.sequence.cached_tokens
                tokens.setdefault((update.request_id, update.index), []).extend(update.new_tokens)
            held = [
                block
                for one in self.scheduler.running
                for block in one.block_table
                if block != NO_BLOCK
            ]
            self.most_held = max(self.most_held, len(held))
            check_integrity(self.scheduler)
        return tokens


def replayed(watched: Watched, decoder: Decoder) -> FakeRecorder:
    """Have its decode steps replayed, as a GPU's are."""
    runner, recorder = watched.engine.executor.runner, FakeRecorder()
    groups = len(decoder.config.cache_groups.windows)
    sizes = graph_sizes(bucket_sizes(8), draft_tokens=False)
    static = StaticInputs(sizes, most_blocks=24, device=torch.device("cpu"), groups=groups)
    runner.forward = DecodeGraphs(runner.forward, static)
    runner.forward.capture(recorder)
    return recorder


def requests() -> list[Request]:
    """Long and short ones, with common beginnings, greedy and sampled, forked."""
    lengths, params = (61, 33, 12, 50, 61, 1, 40), cycle((GREEDY, SAMPLED))
    return [
        Request(
            str(number),
            (*PROMPT[: length // 2], *PROMPT[-length + length // 2 :]),
            next(params),
            seed=number,
        )
        for number, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("name", WINDOWS)
def test_one_sequence_is_answered_as_in_a_dense_pass_and_holds_windows(name: str) -> None:
    decoder = windowed(name)
    expected = dense_greedy(decoder, PROMPT, 9)
    groups = decoder.config.cache_groups
    watched = Watched(decoder, decoder.config, num_blocks=200)
    assert watched.run([Request("r", PROMPT, GREEDY, seed=0)]) == {("r", 0): expected}
    full = len(groups.windows) * watched.scheduler.pool.blocks_for(len(PROMPT) + 9)
    assert watched.most_held <= most_blocks(groups.windows, 70, 4, chunk=8) < full
    # The next turn finds what every group still has: the answer but for its last token, in whole
    # blocks.
    turn = (*PROMPT, *expected, 5, 6, 7)
    again = Request("again", turn, GREEDY, seed=0)
    assert watched.run([again]) == {("again", 0): dense_greedy(decoder, turn, 9)}
    assert watched.cached_tokens == 68
    watched.engine.close()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("one kind", {"num_blocks": 7, "budget": 7}),
        ("two kinds", {"num_blocks": 45, "block_size": 2, "budget": 16, "async_scheduling": True}),
        ("two kinds", {"num_blocks": 26, "host_blocks": 60}),
        ("several groups of a kind", {"num_blocks": 30, "block_size": 8, "policy": "throttling"}),
        (
            "several groups of a kind",
            {"num_blocks": 44, "block_size": 4, "host_blocks": 90, "budget": 64},
        ),
        ("three kinds", {"num_blocks": 44, "policy": "prefill-first", "budget": 64}),
        ("two shapes", {"num_blocks": 45, "block_size": 2, "budget": 16, "async_scheduling": True}),
        ("two shapes", {"num_blocks": 26, "host_blocks": 60}),
    ],
)
def test_tokens_are_those_of_masks_over_all_positions(name: str, settings: dict) -> None:
    """Under chunks, prefix hits, forks, preemption and swaps, in pools that are much too small for
    masks."""
    decoder = windowed(name)
    config = decoder.config
    masked = Watched(decoder, config.in_one_group(), num_blocks=400, budget=2048)
    expected = masked.run(requests())
    masked.engine.close()
    grouped = Watched(decoder, config, **settings)
    recorder = replayed(grouped, decoder) if grouped.scheduler.async_scheduling else None
    assert grouped.run(requests()) == expected
    assert recorder is None or len(recorder.replayed) > 10
    swapped = {swap.direction for plan in grouped.plans for swap in plan.host.swaps}
    assert (
        swapped == {"in", "out"}
        if "host_blocks" in settings
        else grouped.scheduler.table.preemptions > 0
    )
    grouped.engine.close()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, None),
        ({"speculate": "ngram", "host_kv_memory": 1 << 20, "tensor_parallel": 2}, None),
        ({"speculate": "draft:storyteller-draft"}, "--speculate draft:storyteller-draft"),
        ({"policy": "hybrid"}, "attention in host memory"),
        ({"decode_layout": ParallelLayout(tensor_parallel=2), "pipeline_parallel": 2}, None),
        ({"host_kv_memory": 1 << 20, "pipeline_parallel": 2}, None),
    ],
)
def test_what_takes_no_groups_keeps_all_positions_and_is_named(
    settings: dict, reason: str | None
) -> None:
    config, plain = windowed("two kinds").config, small_config()
    engine = EngineConfig(**settings)
    assert keeps_all_positions(config, engine) == reason
    assert keeps_all_positions(plain, engine) is None
    grouped = with_cache_groups(config, engine)
    assert grouped.cache_groups.windows == ((9, 0) if reason is None else (0,))
    assert with_cache_groups(grouped, engine) == grouped


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "hybrid"},
        {"host_kv_memory": 1 << 20, "tensor_parallel": 2},
        {"speculate": "eagle:head"},
        {"speculate": "medusa:heads"},
        {"speculate": "draft:storyteller-draft"},
    ],
)
def test_what_takes_no_layers_of_several_shapes_is_refused_by_name(settings: dict) -> None:
    config, engine = windowed("two shapes").config, EngineConfig(**settings)
    with pytest.raises(UsageError) as refusal:
        with_cache_groups(config, engine)
    told = (
        f"{keeps_all_positions(config, engine)}: layers of llama differ in their keys and values; "
        "leave it out"
    )
    assert str(refusal.value) == told
