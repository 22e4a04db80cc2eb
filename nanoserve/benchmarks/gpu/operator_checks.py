"""Every operator on the device against its plain implementation on the CPU in float64, or bit for bit where it only
moves numbers."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from nanoserve.benchmarks.gpu.batches import make_batch
from nanoserve.benchmarks.gpu.cases import Case
from nanoserve.benchmarks.gpu.floors import AttentionRow, AttentionShape
from nanoserve.benchmarks.gpu.setting import Setting
from triton_ops import (
    cache_write,
    copy_blocks,
    gather_blocks,
    linear,
    reference_operators,
    scatter_blocks,
    sparse_experts,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (128, 64, 256, 80)
HEADS = ((8, 2), (16, 2), (8, 8), (14, 2))
"""Query and key-value heads: groups of 4, 8, 1 and 7."""
BLOCK_SIZES = (16, 32)
WINDOWS = (0, 48)
TOLERANCES = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 1e-4}
"""As `compared` reads them: probabilities and results are rounded to 8, 11 or 24 bits on their way."""

ROWS = {
    "decode": tuple(AttentionRow(1, context) for context in (1, 16, 33, 700, 1500)),
    "mixed": tuple(AttentionRow(*row) for row in ((1, 1), (1, 200), (5, 37), (64, 64), (33, 300), (1, 16))),
    "prefill": tuple(AttentionRow(length, length) for length in (17, 64, 130)),
}
_DRY_ROWS = {kind: tuple(row for row in rows if row.context <= 37) for kind, rows in ROWS.items()}
_DRY_HEAD_DIMS = (64,)


def operator_cases(setting: Setting) -> Iterator[Case]:
    """Attention over a grid that meets each pair of neighbouring choices, then the moves, then the products."""
    yield from _attention_cases(setting)
    if not setting.dry_run:  # the plain implementation has no rows to pad with
        yield Case("paged_attention, padding rows", partial(_check_padding, setting))
    for dtype in DTYPES:
        name = _dtype_name(dtype)
        yield Case(f"cache_write, {name}", partial(_check_cache_write, setting, dtype))
        yield Case(f"copy_blocks, {name}", partial(_check_copy_blocks, setting, dtype))
        yield Case(f"gather_blocks and scatter_blocks, {name}", partial(_check_staging, setting, dtype))
        yield Case(f"linear, {name}", partial(_check_linear, setting, dtype))
        yield Case(f"sparse_experts, {name}", partial(_check_experts, setting, dtype))


def _attention_cases(setting: Setting) -> Iterator[Case]:
    """The commonest head size and format with all heads, then each head size and format, each time with every kind of
    batch; blocks and windows take turns. Every further combination would cost the time to compile three programs."""
    rows = _DRY_ROWS if setting.dry_run else ROWS
    head_dims = _DRY_HEAD_DIMS if setting.dry_run else HEAD_DIMS
    common = list(product(HEADS, zip(BLOCK_SIZES, WINDOWS, strict=True)))
    chosen = [(head_dims[0], DTYPES[0], heads, *cut) for heads, cut in common]
    grid = list(product(HEADS, BLOCK_SIZES, WINDOWS))
    for place, (head_dim, dtype) in enumerate(product(head_dims, DTYPES)):
        chosen.append((head_dim, dtype, *grid[(7 * place + 1) % len(grid)]))
    for (head_dim, dtype, heads, block_size, window), kind in product(dict.fromkeys(chosen), rows):
        shape = AttentionShape(rows=rows[kind], num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim)
        name = (
            f"paged_attention, {kind}, {_dtype_name(dtype)}, head_dim {head_dim}, {heads[0]}/{heads[1]} heads, "
            f"blocks of {block_size}" + (f", window {window}" if window else "")
        )
        yield Case(name, partial(_check_attention, setting, shape, dtype, block_size, window))


def _check_attention(
    setting: Setting, shape: AttentionShape, dtype: torch.dtype, block_size: int, window: int
) -> dict[str, Any]:
    batch = make_batch(shape, block_size=block_size, dtype=dtype, device="cpu", sliding_window=window, poisoned=True)
    with reference_operators():
        expected = batch.moved("cpu", torch.float64).attend()
    found = batch.moved(setting.device, dtype).attend()
    return compared("paged_attention", found, expected, TOLERANCES[dtype])


def _check_padding(setting: Setting) -> dict[str, Any]:
    """Rows of a CUDA graph that stand for nothing have no context: whatever they yield is a number."""
    rows = tuple(AttentionRow(1, context) for context in (40, 1, 1))
    shape = AttentionShape(rows=rows, num_heads=8, num_kv_heads=2, head_dim=128)
    batch = make_batch(shape, block_size=16, dtype=setting.dtype, device=setting.device, poisoned=True)
    batch.context_lengths[1] = 0
    found = batch.attend()
    return compared("paged_attention", found.isfinite().float(), torch.ones_like(found), 0.0)


def _check_cache_write(setting: Setting, dtype: torch.dtype) -> dict[str, Any]:
    """Keys and values as the model gives them: parts of one wide tensor; some tokens have no slot."""
    tokens, heads, head_dim, blocks, block_size = 37, 2, 64, 6, 16
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(tokens, 3, heads, head_dim, generator=generator).to(dtype)
    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
    slots[::5] = -1
    caches = torch.full((2, blocks, heads, block_size, head_dim), torch.nan).to(dtype)
    expected, found = caches.clone(), caches.to(setting.device, copy=True)
    with reference_operators():
        cache_write(fused[:, 1], fused[:, 2], expected[0], expected[1], slots)
    there = fused.to(setting.device)
    cache_write(there[:, 1], there[:, 2], found[0], found[1], slots.to(setting.device))
    return compared("cache_write", found, expected, 0.0)


def _check_copy_blocks(setting: Setting, dtype: torch.dtype) -> dict[str, Any]:
    """A block that is copied from and to, as all sources are read before any is written."""
    caches = torch.randn(2, 7, 2, 16, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    pairs = torch.tensor([(0, 3), (3, 5), (1, 6)])
    expected, found = caches.clone(), caches.to(setting.device, copy=True)
    with reference_operators():
        copy_blocks(expected[0], expected[1], pairs)
    copy_blocks(found[0], found[1], pairs.to(setting.device))
    return compared("copy_blocks", found, expected, 0.0)


def _check_staging(setting: Setting, dtype: torch.dtype) -> dict[str, Any]:
    """Two of three heads of some blocks of two layers, there and back to other blocks."""
    layers, blocks, block_size, head_dim = 2, 7, 16, 64
    generator = torch.Generator().manual_seed(0)
    filled = torch.randn(2, layers, blocks, 3, block_size, head_dim, generator=generator).to(dtype)
    sources, targets = torch.tensor([5, 0, 3]), torch.tensor([1, 6, 2])
    staged = torch.full((layers, 2, len(sources), 2, block_size, head_dim), torch.nan).to(dtype)

    def there_and_back(caches: Tensor, buffer: Tensor) -> Tensor:
        keys, values = list(caches[0].unbind()), list(caches[1].unbind())
        gather_blocks(buffer, keys, values, sources.to(buffer.device), 1)
        scatter_blocks(keys, values, buffer, targets.to(buffer.device), 1)
        return torch.cat((caches.flatten(), buffer.flatten()))

    with reference_operators():
        expected = there_and_back(filled.clone(), staged.clone())
    found = there_and_back(filled.to(setting.device, copy=True), staged.to(setting.device, copy=True))
    return compared("gather_blocks and scatter_blocks", found, expected, 0.0)


def _check_linear(setting: Setting, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    rows, weight, bias = (torch.randn(shape, generator=generator) for shape in ((5, 96), (64, 96), (64,)))
    rows, weight, bias = (one.to(dtype) for one in (rows, weight / 96**0.5, bias))
    with reference_operators():
        expected = linear(rows.double(), weight.double(), bias.double())
    found = linear(*(one.to(setting.device) for one in (rows, weight, bias)))
    return compared("linear", found, expected, TOLERANCES[dtype])


def _check_experts(setting: Setting, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    tokens, hidden_size, inner, experts, chosen = 23, 64, 48, 6, 2
    hidden = torch.randn(tokens, hidden_size, generator=generator).to(dtype)
    gate_up = torch.randn(experts, 2 * inner, hidden_size, generator=generator).div(hidden_size**0.5).to(dtype)
    down = torch.randn(experts, hidden_size, inner, generator=generator).div(inner**0.5).to(dtype)
    weights, picked = torch.rand(tokens, experts, generator=generator).topk(chosen)
    with reference_operators():
        expected = sparse_experts(hidden.double(), weights.double(), picked, gate_up.double(), down.double())
    found = sparse_experts(*(one.to(setting.device) for one in (hidden, weights, picked, gate_up, down)))
    return compared("sparse_experts", found, expected, 2 * TOLERANCES[dtype])  # two products, one after the other


def compared(what: str, found: Tensor, expected: Tensor, tolerance: float) -> dict[str, Any]:
    """The fields of a check: NaN agrees with NaN, and nothing else with it.

    A number may differ by `tolerance` times the sum of its own size and the root mean square of its row (the last
    dimension): results over many keys are small, and leaving out one of a thousand shall show.
    """
    here, there = found.detach().cpu().double(), expected.detach().cpu().double()
    unwanted = int((here.isfinite() != there.isfinite()).sum())
    difference, size = (here - there).abs().nan_to_num(0.0), there.abs().nan_to_num(0.0)
    allowed = tolerance * (size + size.square().mean(-1, keepdim=True).sqrt())
    share = float((difference / allowed).nan_to_num(0.0).max()) if tolerance else None
    return {
        "check": what,
        "largest_difference": float(difference.max()),
        "tolerance": tolerance,
        "of_tolerance": share,
        "unwanted_nans": unwanted,
        "ok": unwanted == 0 and bool((difference <= allowed).all()),
    }


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
