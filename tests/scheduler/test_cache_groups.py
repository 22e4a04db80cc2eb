"""Cache groups: how layers are cut, what a sequence holds in them, and which prefixes they still
have."""

from itertools import accumulate, chain, combinations_with_replacement, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.config.cache_groups import CacheGroups
from nanoserve.engine.engine import Engine
from nanoserve.request import Request, SamplingParams, Sequence
from nanoserve.scheduler.kv import NO_BLOCK, BlockPool, SequenceBlocks
from nanoserve.scheduler.policies.baselines import ChunkedPrefill
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.scheduler.windows import WindowedBlocks, first_seen, most_blocks, most_tokens
from tests.fakes.memory_checking_executor import MemoryCheckingExecutor

CUTS = st.sampled_from([(0,), (1,), (3,), (0, 4), (0, 2, 2), (5, 0, 1)])


def cut(
    windows: list[int],
    sources: tuple[int, ...] = (),
    longest: int = 1 << 17,
    numbers: list[int] | None = None,
) -> CacheGroups:
    return CacheGroups.cut(tuple(windows), sources, longest, tuple(numbers or [1] * len(windows)))


@pytest.mark.parametrize(
    ("name", "windows", "groups", "tensors", "padding"),
    [
        ("llama", [0] * 32, [0], 32, 0.0),
        ("mistral 0.1", [4096] * 32, [4096], 32, 0.0),
        ("gpt-oss-20b", [128, 0] * 12, [128, 0], 12, 0.0),
        ("gemma-3-1b", ([512] * 5 + [0]) * 4 + [512] * 2, [512] * 6 + [0], 4, 2 / 28),
        ("gemma-3-27b", ([1024] * 5 + [0]) * 10 + [1024] * 2, [1024] * 6 + [0], 10, 8 / 70),
        ("olmo-3-7b", [4096, 4096, 4096, 0] * 8, [4096] * 3 + [0], 8, 0.0),
    ],
)
def test_groups_of_real_models(
    name: str, windows: list[int], groups: list[int], tensors: int, padding: float
) -> None:
    found = cut(windows)
    assert (list(found.windows), found.num_tensors, found.padding) == (
        groups,
        tensors,
        pytest.approx(padding),
    )
    assert len(set(found.places)) == len(windows), "each layer has a tensor of its own in its group"
    assert [found.windows[group] for group, _ in found.places] == windows


def test_a_window_that_shows_every_position_is_none() -> None:
    assert cut([4096, 0] * 2, longest=4096) == cut([0, 0] * 2)


def test_more_kinds_than_groups_are_a_group_each() -> None:
    assert cut(list(range(1, 13))).windows == tuple(range(1, 13))


def test_layers_that_share_keys_and_values_are_in_one_place() -> None:
    found = cut([8, 0, 8, 0, 8, 0], sources=(0, 1, 2, 3, 2, 3))
    assert found.places[4] == found.places[2] and found.places[5] == found.places[3]
    assert found.num_tensors == 2


def test_a_stage_of_a_pipeline_has_every_group_and_its_own_layers_tensors() -> None:
    whole = cut(([512] * 5 + [0]) * 4 + [512] * 2)
    for first, end in pairwise([0, 7, 13, 19, 26]):
        stage = whole.of_layers(range(first, end), (1,) * 26)
        assert stage.windows == whole.windows
        assert [group for group, _ in stage.places] == [
            group for group, _ in whole.places[first:end]
        ]
        assert len(set(stage.places)) == end - first and stage.num_tensors <= 3
    assert whole.of_layers(range(26), (1,) * 26) == whole


@given(
    windows=st.lists(st.sampled_from([0, 0, 8, 64]), min_size=2, max_size=40),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_stages_have_tensors_of_their_own_which_whatever_pipeline_of_them_finds(
    windows: list[int], lengths: list[int]
) -> None:
    starts = [start for start in accumulate(lengths, initial=0) if start < len(windows)]
    numbers = (1,) * len(windows)
    found = CacheGroups.cut(tuple(windows), (), 1 << 17, numbers, tuple(starts))
    assert len(set(found.places)) == len(windows), "each layer has a tensor of its own in its group"
    assert [found.windows[group] for group, _ in found.places] == windows
    ends = [*starts[1:], len(windows)]
    tensors = [found.tensors(range(*stage)) for stage in zip(starts, ends, strict=True)]
    assert [*chain(*tensors)] == [*range(found.num_tensors)]
    for first, last in combinations_with_replacement(range(len(starts)), 2):
        layers = range(starts[first], ends[last])
        stage, begin = found.of_layers(layers, numbers), tensors[first].start
        assert stage.num_tensors == tensors[last].stop - begin
        assert stage.places == tuple(
            (group, place - begin) for group, place in found.places[layers.start : layers.stop]
        )


@pytest.mark.parametrize(
    ("name", "kinds", "local", "whole", "groups", "tensors", "padding"),
    [
        ("gemma-4-e4b", ([512] * 5 + [0]) * 4, 1024, 2048, [512] * 5 + [0] * 2, 2, 0.0),
        ("gemma-4-31b", ([1024] * 5 + [0]) * 10, 8192, 4096, [1024] * 10 + [0], 5, 0.0),
        ("gemma-4-26b-a4b", ([1024] * 5 + [0]) * 5, 4096, 2048, [1024] * 9 + [0], 3, 5 / 60),
    ],
)
def test_layers_that_cache_other_numbers_share_tensors(
    name: str,
    kinds: list[int],
    local: int,
    whole: int,
    groups: list[int],
    tensors: int,
    padding: float,
) -> None:
    numbers = [local if window else whole for window in kinds]
    found = cut(kinds, numbers=numbers)
    assert (list(found.windows), found.num_tensors, found.padding) == (
        groups,
        tensors,
        pytest.approx(padding),
    )
    parts = [(found.places[layer][0], *found.tensor_of(layer)) for layer in range(len(kinds))]
    assert len(set(parts)) == len(kinds), "each layer has a place of its own in its group's blocks"
    for layer, (group, _, part) in enumerate(parts):
        assert part < found.shares[group] == max(local, whole) // numbers[layer]
    # Ranks that hold fewer heads, and stages without some groups, have other shares of the same
    # groups.
    halves = found.of_layers(range(len(kinds)), tuple(max(number // 4, 1024) for number in numbers))
    assert (halves.windows, halves.places) == (found.windows, found.places)
    only = found.of_layers(range(5, 6), tuple(numbers))
    assert (only.num_tensors, only.tensor_numbers, only.shares[0]) == (1, whole, 1)


@given(windows=CUTS, size=st.integers(1, 4), tokens=st.integers(1, 30), chunk=st.integers(1, 9))
def test_what_a_sequence_holds_at_most_is_what_some_chunks_need(
    windows: tuple[int, ...], size: int, tokens: int, chunk: int
) -> None:
    """Against counting the blocks of every chunk that there may be."""
    chunks = [
        (at, min(tokens, at + length)) for at in range(tokens) for length in range(1, chunk + 1)
    ]
    held = [
        sum(-(-end // size) - first_seen(start, window) // size for window in windows)
        for start, end in chunks
    ]
    assert max(held) <= most_blocks(windows, tokens, size, chunk) <= max(held) + len(windows)


@given(windows=CUTS, size=st.integers(1, 4), blocks=st.integers(3, 40), longest=st.integers(1, 60))
def test_the_longest_sequence_fits(
    windows: tuple[int, ...], size: int, blocks: int, longest: int
) -> None:
    tokens = most_tokens(windows, blocks, size, longest)
    assert tokens == 0 or most_blocks(windows, tokens, size) <= blocks
    if not any(windows):
        assert tokens == min(longest, blocks // len(windows) * size)


@given(
    windows=CUTS.filter((1,).__ne__),
    size=st.integers(1, 3),
    gone=st.sets(st.integers(0, 40)),
    length=st.integers(1, 20),
)
def test_a_hit_is_the_longest_prefix_that_every_group_still_has(
    windows: tuple[int, ...], size: int, gone: set[int], length: int
) -> None:
    """Against trying every prefix, when any blocks have been used for something else."""
    groups = len(windows)
    pool = BlockPool(100, size, groups=groups)
    blocks = WindowedBlocks(pool, windows) if any(windows) else SequenceBlocks(pool)
    request = Request("r", tuple(range(length)), SamplingParams(), seed=0)
    first = Sequence(0, request, 0, list(request.prompt))
    blocks.grow(first, length)
    blocks.share_full(first, length)
    table = list(first.block_table)
    for block in gone & set(table):
        blocks.pool.forget(block)

    def has(prefix: int) -> bool:
        return all(
            table[place // size * groups + group] not in gone
            for group, window in enumerate(windows)
            for place in range(first_seen(prefix, window), prefix)
        )

    second = Sequence(1, request, 0, list(request.prompt))
    blocks.take_prefix(second)
    expected = max(end for end in range(0, length, size) if has(end))
    assert second.computed == expected
    for place, block in enumerate(second.block_table):
        column, group = divmod(place, groups)
        needed = column >= first_seen(expected, windows[group]) // size
        assert block == (table[place] if needed else NO_BLOCK)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_chunked_prompt_never_holds_more_than_its_window_and_a_chunk(
    *, async_scheduling: bool
) -> None:
    """Blocks of a window group: 60 tokens pass through a pool in which not half of them would fit."""
    window, chunk, size = 8, 6, 2
    most = (window - 1 + chunk + size - 2) // size + 1
    scheduler = Scheduler(
        ChunkedPrefill(chunk), num_blocks=most, block_size=size, max_model_len=80, windows=(window,),
        async_scheduling=async_scheduling,
    )  # fmt: skip
    executor = MemoryCheckingExecutor(
        most, size, windows=(window,), async_scheduling=async_scheduling
    )
    engine = Engine(scheduler, executor, vocab_size=50)
    engine.add(
        Request("r", tuple(range(20)) * 3, SamplingParams(max_tokens=15, ignore_eos=True), seed=0)
    )
    updates = [update for _ in range(60) for update in engine.step()]
    assert sum(len(update.new_tokens) for update in updates) == 15 and not engine.has_work
    assert len(executor.plans[0].rows[0].tokens) == chunk, "chunks are not cut for want of blocks"
    assert scheduler.steps <= 10 + 15 and scheduler.forced_steps == 0


def test_the_end_of_an_answer_is_a_prefix_though_its_beginning_is_gone() -> None:
    """A chat's next turn: the window's last tokens are enough, and nothing before them is kept."""
    scheduler = Scheduler(
        ChunkedPrefill(8), num_blocks=8, block_size=2, max_model_len=64, windows=(4,)
    )
    engine = Engine(scheduler, MemoryCheckingExecutor(8, 2, windows=(4,)), vocab_size=50)
    prompt = tuple(range(1, 31))
    for name, tokens in (("a", prompt), ("b", (*prompt, 40, 41, 42))):
        engine.add(Request(name, tokens, SamplingParams(max_tokens=1), seed=0))
        updates = [update for _ in range(9) for update in engine.step()]
    assert updates[-1].sequence.cached_tokens == 30
