"""Blocks: who owns them, what they hold, and which is reused first."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nanoserve.request import Request, SamplingParams, Sequence
from nanoserve.scheduler.kv import BlockPool, CachedColumn, SequenceBlocks
from tests.fakes.integrity import check_pool


def _cached_prompt(pool: BlockPool, tokens: list[int], salt: str = "") -> list[int]:
    """Allocate, fill and cache all blocks of a prompt whose length is a multiple of the block
    size."""
    blocks = pool.allocate(len(tokens) // pool.block_size)
    link: CachedColumn | str = salt
    for index, block in enumerate(blocks):
        link = pool.insert(
            [block], link, tuple(tokens[index * pool.block_size : (index + 1) * pool.block_size])
        )
    return blocks


def _matched(pool: BlockPool, tokens: list[int], salt: str) -> list[int]:
    """The blocks of a cached prefix, in a pool of one group."""
    return [column.blocks[0] for column in pool.match(tokens, salt)]


def test_a_prefix_is_found_and_leaves_one_token_to_compute() -> None:
    pool = BlockPool(8, 2)
    blocks = _cached_prompt(pool, [1, 2, 3, 4])
    assert _matched(pool, [1, 2, 3, 4, 5], "") == blocks
    assert _matched(pool, [1, 2, 3, 4], "") == blocks[:1]
    assert _matched(pool, [1, 2, 9, 9, 9], "") == blocks[:1]
    assert pool.match([9, 9, 3, 4, 5], "") == [], "a block matches only behind its own prefix"


def test_salts_do_not_share() -> None:
    pool = BlockPool(8, 2)
    _cached_prompt(pool, [1, 2], salt="a")
    assert pool.match([1, 2, 3], "b") == []
    assert len(pool.match([1, 2, 3], "a")) == 1


def test_blank_blocks_are_reused_before_cached_ones_and_those_oldest_first() -> None:
    pool = BlockPool(4, 2)
    first, second = _cached_prompt(pool, [1, 2]), _cached_prompt(pool, [3, 4])
    pool.release(second)
    pool.release(first)
    assert pool.free_blocks == 4
    assert pool.allocate(3) == [2, 3, *second]
    assert pool.match([3, 4, 5], "") == []
    assert _matched(pool, [1, 2, 3], "") == first


def test_the_tail_of_a_prefix_is_forgotten_before_its_head() -> None:
    pool = BlockPool(2, 2)
    blocks = _cached_prompt(pool, [1, 2, 3, 4])
    pool.release(blocks)
    pool.allocate(1)
    assert _matched(pool, [1, 2, 3, 4, 5], "") == blocks[:1]


def test_equal_content_is_cached_once() -> None:
    pool = BlockPool(4, 2)
    kept, other = _cached_prompt(pool, [1, 2]), _cached_prompt(pool, [1, 2])
    assert _matched(pool, [1, 2, 3], "") == kept
    pool.release(other)
    check_pool(pool, Counter(kept))


def test_without_prefix_caching_nothing_is_found() -> None:
    blocks = SequenceBlocks(BlockPool(4, 2, prefix_caching=False))
    request = Request("r", (1, 2, 3), SamplingParams(), seed=0)
    sequence = Sequence(0, request, 0, list(request.prompt))
    blocks.grow(sequence, 3)
    sequence.computed = 3
    blocks.share_full(sequence, sequence.computed)
    assert sequence.cached_columns == []
    assert blocks.pool.match([1, 2, 3], "") == []


class _Colliding(int):
    """A token id whose hash is that of every other one."""

    def __hash__(self) -> int:
        return 0


def test_a_hash_collision_serves_nobody_elses_cache() -> None:
    cache = BlockPool(2, 2)
    tokens = [_Colliding(1), _Colliding(2)]
    others = [_Colliding(3), _Colliding(4)]
    assert hash(("", tuple(tokens))) == hash(("", tuple(others)))
    cache.insert([0], "", tuple(tokens))
    assert cache.match([*others, 5], "") == []
    assert _matched(cache, [*tokens, 5], "") == [0]


def test_more_than_is_free_is_refused() -> None:
    with pytest.raises(RuntimeError, match="3 blocks asked for, 2 free"):
        BlockPool(2, 2).allocate(3)


class PoolMachine(RuleBasedStateMachine):
    """Owners come, share, and go in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6, 1)
        self.owned: list[list[int]] = []

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        if count <= self.pool.free_blocks:
            self.owned.append(self.pool.allocate(count))

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.owned))
        self.pool.share(blocks)
        self.owned.append(list(blocks))

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), token=st.integers(1, 3))
    def cache(self, data: st.DataObject, token: int) -> None:
        blocks = data.draw(st.sampled_from(self.owned))
        if blocks and not any(block in blocks for block in _matched(self.pool, [token, 0], "")):
            self.pool.forget(blocks[0])
            self.pool.insert(blocks[:1], "", (token,))

    @rule(token=st.integers(1, 3))
    def match(self, token: int) -> None:
        blocks = _matched(self.pool, [token, 0], "")
        self.pool.share(blocks)
        self.owned.append(blocks)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1))))

    @invariant()
    def balances(self) -> None:
        check_pool(self.pool, Counter(block for blocks in self.owned for block in blocks))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
