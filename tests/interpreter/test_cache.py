"""The programs that move keys and values, against the plain operators: exactly what these do, and
nothing besides.

Every tensor is filled with numbers before, so that an element that is written although it should
not be, or is not although it should, makes a difference.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import triton_ops
from triton_ops import reference_operators
from triton_ops.gpu import cache as gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def filled(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def as_slice(tensor: Tensor) -> Tensor:
    """Return these numbers as every second element of a larger tensor, its first two dimensions swapped
    in memory."""
    wide = torch.full(
        (tensor.shape[1], tensor.shape[0], *tensor.shape[2:-1], 2 * tensor.shape[-1] + 1), torch.nan
    )
    view = wide.to(tensor.dtype).transpose(0, 1)[..., 1::2]
    return view.copy_(tensor)


LAYOUTS = {"contiguous": torch.Tensor.contiguous, "sliced": as_slice}


def test_a_sliced_tensor_is_contiguous_in_no_dimension() -> None:
    tensor = filled(3, 4, 5, seed=0)
    view = as_slice(tensor)
    assert torch.equal(view, tensor) and view.stride() == (11, 33, 2) and view.storage_offset() == 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("num_kv_heads", [1, 3, 8])
def test_tokens_land_in_their_slots(
    num_kv_heads: int, head_dim: int, dtype: torch.dtype, layout: str
) -> None:
    key, value = (filled(5, num_kv_heads, head_dim, seed=seed, dtype=dtype) for seed in (1, 2))
    slots = torch.tensor([33, -1, 0, 47, 16])
    _compare_writes(
        LAYOUTS[layout](key), value, _caches(layout, (4, num_kv_heads, 16, head_dim), dtype), slots
    )


def test_latents_are_written_and_copied_without_values() -> None:
    latents = filled(3, 1, 48, seed=1)
    _compare_writes(
        latents,
        latents[..., :0],
        (filled(4, 1, 16, 48, seed=2), torch.empty(4, 1, 16, 0)),
        torch.arange(3),
    )
    cache, values = filled(4, 1, 16, 48, seed=2), torch.empty(4, 1, 16, 0)
    before = cache.clone()
    gpu.copy_blocks(cache, values, torch.tensor([[0, 1], [1, 2]]))
    assert torch.equal(cache, before[[0, 0, 1, 3]])


@settings(max_examples=25, deadline=None)
@given(
    block_size=st.sampled_from([1, 8, 16, 32]),
    num_kv_heads=st.integers(1, 5),
    head_dim=st.integers(1, 40),
    layout=st.sampled_from(sorted(LAYOUTS)),
    data=st.data(),
)
def test_any_slots_of_any_cache(
    block_size: int, num_kv_heads: int, head_dim: int, layout: str, data: st.DataObject
) -> None:
    num_slots = 3 * block_size
    chosen = data.draw(st.lists(st.integers(0, num_slots - 1), unique=True, max_size=6))
    padding = data.draw(st.integers(0, 2))
    slots = torch.tensor(
        [[slot, 10**6] for slot in chosen + [-1] * padding], dtype=torch.int64
    ).reshape(-1, 2)[:, 0]
    key, value = (filled(len(slots), num_kv_heads, head_dim, seed=seed) for seed in (1, 2))
    _compare_writes(
        LAYOUTS[layout](key),
        value,
        _caches(layout, (3, num_kv_heads, block_size, head_dim), torch.float32),
        slots,
    )


def _caches(layout: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys in that layout and values contiguous: two caches with strides of their own."""
    return LAYOUTS[layout](filled(*shape, seed=3, dtype=dtype)), filled(*shape, seed=4, dtype=dtype)


def _compare_writes(
    key: Tensor, value: Tensor, caches: tuple[Tensor, Tensor], slots: Tensor
) -> None:
    expected = [cache.clone() for cache in caches]
    with reference_operators():
        triton_ops.cache_write(key, value, *expected, slots)
    gpu.cache_write(key, value, *caches, slots)
    for found, wanted in zip(caches, expected, strict=True):
        assert torch.equal(found, wanted)


def test_keys_that_do_not_fit_the_cache_are_refused() -> None:
    caches = _caches("contiguous", (4, 3, 16, 8), torch.float32)
    key = filled(2, 3, 8, seed=1)
    for bad_key, slots in ((key[:, :2], 2), (key[..., :4], 2), (key, 3)):
        with pytest.raises(ValueError, match="cannot be written"):
            gpu.cache_write(bad_key, bad_key, *caches, torch.arange(slots))


@pytest.mark.parametrize(
    "pairs", [[], [[4, 1]], [[0, 1], [1, 2], [2, 0]], [[3, 0], [3, 1], [3, 2]]], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_read_every_source_before_they_write(
    pairs: list[list[int]], dtype: torch.dtype
) -> None:
    caches = _caches("sliced", (5, 3, 16, 8), dtype)
    expected = [cache.clone() for cache in caches]
    chosen = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    with reference_operators():
        triton_ops.copy_blocks(*expected, chosen)
    gpu.copy_blocks(*caches, chosen)
    for found, wanted in zip(caches, expected, strict=True):
        assert torch.equal(found, wanted)


def _layers(
    layouts: tuple[str, str], num_layers: int, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Caches of keys in the first layout and of values in the second, no two with the same
    numbers."""
    keys, values = (
        [
            LAYOUTS[layout](filled(*shape, seed=2 * layer + kind, dtype=dtype))
            for layer in range(num_layers)
        ]
        for kind, layout in enumerate(layouts)
    )
    return keys, values


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("block_size", "head_dim"), [(16, 64), (32, 80), (16, 128), (32, 256), (6, 5)]
)
@pytest.mark.parametrize(("first_head", "num_heads"), [(0, 4), (0, 1), (1, 2), (3, 1)])
def test_a_range_of_heads_goes_out_and_back(
    first_head: int, num_heads: int, block_size: int, head_dim: int, dtype: torch.dtype, layout: str
) -> None:
    shape = (4, 4, block_size, head_dim)
    keys, values = _layers((layout, "contiguous"), 2, shape, dtype)
    _compare_moves(keys, values, torch.tensor([3, 0]), torch.tensor([1, 3]), first_head, num_heads)


@settings(max_examples=25, deadline=None)
@given(num_layers=st.integers(1, 3), data=st.data(), layout=st.sampled_from(sorted(LAYOUTS)))
def test_any_blocks_heads_and_layers(num_layers: int, data: st.DataObject, layout: str) -> None:
    num_blocks, num_kv_heads, block_size, head_dim = (
        data.draw(st.integers(1, 6)) for _ in range(4)
    )
    first_head = data.draw(st.integers(0, num_kv_heads - 1))
    num_heads = data.draw(st.integers(1, num_kv_heads - first_head))
    order = st.permutations(range(num_blocks))
    count = data.draw(st.integers(0, num_blocks))
    sources, targets = (torch.tensor(data.draw(order)[:count], dtype=torch.int64) for _ in range(2))
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    keys, values = _layers((layout, "sliced"), num_layers, shape, torch.float32)
    _compare_moves(keys, values, sources, targets, first_head, num_heads)


def _compare_moves(
    keys: list[Tensor],
    values: list[Tensor],
    sources: Tensor,
    targets: Tensor,
    first_head: int,
    num_heads: int,
) -> None:
    """Out of some blocks and into others, through a staging buffer that is a view of a larger
    one."""
    _, _, *tile = keys[0].shape
    room = torch.full((len(keys), 2, num_heads, len(sources) + 1, *tile), torch.nan).to(
        keys[0].dtype
    )
    staged = room.transpose(2, 3)[:, :, :-1]
    expected_staged = torch.empty_like(staged)
    with reference_operators():
        triton_ops.gather_blocks(expected_staged, keys, values, sources, first_head)
    gpu.gather_blocks(staged, keys, values, sources, first_head)
    assert torch.equal(staged, expected_staged)
    assert room[:, :, :, -1].isnan().all()

    expected_keys, expected_values = (
        [cache.clone() for cache in caches] for caches in (keys, values)
    )
    with reference_operators():
        triton_ops.scatter_blocks(expected_keys, expected_values, staged, targets, first_head)
    gpu.scatter_blocks(keys, values, staged, targets, first_head)
    for found, wanted in zip(keys + values, expected_keys + expected_values, strict=True):
        assert torch.equal(found, wanted)
