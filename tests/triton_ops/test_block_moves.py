"""Blocks of the cache out to a staging buffer and back, by layers and by ranges of heads."""

import pytest
import torch
from torch import Tensor

from triton_ops import gather_blocks, scatter_blocks

pytestmark = pytest.mark.usefixtures("implementation")

NUM_LAYERS, NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM = 3, 5, 4, 2, 8


def caches(seed: int, num_kv_heads: int = NUM_KV_HEADS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(
        torch.randn(NUM_LAYERS, NUM_BLOCKS, num_kv_heads, BLOCK_SIZE, HEAD_DIM, generator=generator)
    )


def room(num_blocks: int, num_heads: int, num_layers: int = NUM_LAYERS) -> Tensor:
    return torch.full((num_layers, 2, num_blocks, num_heads, BLOCK_SIZE, HEAD_DIM), torch.nan)


def test_a_staged_block_is_the_caches_block() -> None:
    keys, values = caches(1), caches(2)
    staged = room(num_blocks=2, num_heads=2)
    gather_blocks(staged, keys, values, torch.tensor([4, 0]), first_head=1)
    for layer in range(NUM_LAYERS):
        for index, block in enumerate((4, 0)):
            assert torch.equal(staged[layer, 0, index], keys[layer][block, 1:3])
            assert torch.equal(staged[layer, 1, index], values[layer][block, 1:3])


def test_it_comes_back_into_other_blocks_and_touches_no_others() -> None:
    keys, values = caches(1), caches(2)
    staged = torch.randn(NUM_LAYERS, 2, 2, 2, BLOCK_SIZE, HEAD_DIM)
    expected = torch.stack([torch.stack(keys), torch.stack(values)], dim=1)
    expected[:, :, [3, 1], 2:] = staged
    scatter_blocks(keys, values, staged, torch.tensor([3, 1]), first_head=2)
    assert torch.equal(torch.stack([torch.stack(keys), torch.stack(values)], dim=1), expected)


def test_shards_of_half_the_heads_each_fill_a_whole_cache() -> None:
    """Re-sharding: two devices' caches become one's."""
    whole_keys, whole_values = caches(5), caches(6)
    half = NUM_KV_HEADS // 2
    blocks = torch.arange(NUM_BLOCKS)
    shards = [(caches(seed, half), caches(seed + 1, half)) for seed in (1, 3)]
    for index, (keys, values) in enumerate(shards):
        staged = room(NUM_BLOCKS, half)
        gather_blocks(staged, keys, values, blocks)
        scatter_blocks(whole_keys, whole_values, staged, blocks, first_head=index * half)
    for layer in range(NUM_LAYERS):
        assert torch.equal(whole_keys[layer], torch.cat([keys[layer] for keys, _ in shards], dim=1))
        assert torch.equal(
            whole_values[layer], torch.cat([values[layer] for _, values in shards], dim=1)
        )


def test_one_layer_of_several_may_be_moved() -> None:
    keys, values = caches(1), caches(2)
    staged = room(num_blocks=1, num_heads=NUM_KV_HEADS, num_layers=1)
    gather_blocks(staged, keys[1:2], values[1:2], torch.tensor([2]))
    assert torch.equal(staged[0, 0, 0], keys[1][2]) and torch.equal(staged[0, 1, 0], values[1][2])


@pytest.mark.parametrize(
    ("staged", "num_values", "first_head", "problem"),
    [
        (room(2, 4), 2, 0, "one of values"),
        (room(1, 4), 3, 0, r"shape \(3, 2, 2, 4, 2, 8\), not \(3, 2, 1, 4, 2, 8\)"),
        (room(2, 4, num_layers=2), 3, 0, r"not \(2, 2, 2, 4, 2, 8\)"),
        (room(2, 2), 3, 3, "heads 3 to 4 were asked for; the caches have 4 heads"),
        (room(2, 2), 3, -1, "heads -1 to 0"),
    ],
)
def test_what_does_not_fit_is_refused(
    staged: Tensor, num_values: int, first_head: int, problem: str
) -> None:
    keys, values = caches(1), caches(2)[:num_values]
    blocks = torch.tensor([0, 1])
    with pytest.raises(ValueError, match=problem):
        gather_blocks(staged, keys, values, blocks, first_head)
    with pytest.raises(ValueError, match=problem):
        scatter_blocks(keys, values, staged, blocks, first_head)
    assert staged.isnan().all() and torch.equal(torch.stack(keys), torch.stack(caches(1)))


# it imports torch's compiler; tests/executor/test_torch_compile.py compiles the operators quickly
@pytest.mark.slow
def test_torch_accepts_them_for_tracing() -> None:
    operators = torch.ops.nanoserve
    keys, values, blocks = caches(1), caches(2), torch.tensor([4, 0])
    torch.library.opcheck(operators.gather_blocks.default, (room(2, 3), keys, values, blocks, 1))
    torch.library.opcheck(
        operators.scatter_blocks.default, (keys, values, torch.zeros_like(room(2, 3)), blocks, 1)
    )
