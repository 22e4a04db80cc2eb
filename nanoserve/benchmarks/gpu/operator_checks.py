"""Every operator on the device against its plain implementation on the CPU in float64, or bit for bit where it only
moves numbers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from nanoserve.benchmarks.gpu.attention import AttentionRow, PagedAttentionShape, make_batch
from nanoserve.benchmarks.gpu.results import GpuCase
from nanoserve.benchmarks.gpu.setting import GpuSetting
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


def operator_cases(setting: GpuSetting) -> Iterator[GpuCase]:
    """Attention over a grid that meets each pair of neighbouring choices, then the moves, then the products."""
    yield from _attention_cases(setting)
    if not setting.dry_run:  # the plain implementation has no rows to pad with
        yield GpuCase("paged_attention, padding rows", partial(_check_padding, setting))
    for dtype, check in product(DTYPES, CHECKS):
        yield GpuCase(f"{check.name}, {_dtype_name(dtype)}", partial(check.run, setting, dtype))


def _attention_cases(setting: GpuSetting) -> Iterator[GpuCase]:
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
        shape = PagedAttentionShape(rows=rows[kind], num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim)
        name = (
            f"paged_attention, {kind}, {_dtype_name(dtype)}, head_dim {head_dim}, {heads[0]}/{heads[1]} heads, "
            f"blocks of {block_size}" + (f", window {window}" if window else "")
        )
        yield GpuCase(name, partial(_check_attention, setting, shape, dtype, block_size, window))


def _check_attention(
    setting: GpuSetting, shape: PagedAttentionShape, dtype: torch.dtype, block_size: int, window: int
) -> dict[str, Any]:
    batch = make_batch(shape, block_size=block_size, dtype=dtype, device="cpu", sliding_window=window, poisoned=True)
    with reference_operators():
        expected = batch.moved("cpu", torch.float64).attend()
    found = batch.moved(setting.device, dtype).attend()
    return compared("paged_attention", found, expected, TOLERANCES[dtype])


def _check_padding(setting: GpuSetting) -> dict[str, Any]:
    """Rows of a CUDA graph that stand for nothing have no context: whatever they yield is a number."""
    rows = tuple(AttentionRow(1, context) for context in (40, 1, 1))
    shape = PagedAttentionShape(rows=rows, num_heads=8, num_kv_heads=2, head_dim=128)
    batch = make_batch(shape, block_size=16, dtype=setting.dtype, device=setting.device, poisoned=True)
    batch.context_lengths[1] = 0
    found = batch.attend()
    return compared("paged_attention", found.isfinite().float(), torch.ones_like(found), 0.0)


@dataclass(frozen=True, slots=True)
class OperatorCheck:
    """An operator called with the same inputs on the CPU and on the device."""

    name: str
    inputs: Callable[[torch.dtype, torch.Generator], Sequence[Tensor]]
    """On the CPU; every call gets a copy."""
    call: Callable[..., Tensor]
    """What it gives back is compared."""
    roundings: int = 0
    """Products one after the other, each of which rounds its results; with none, numbers are only moved."""

    def run(self, setting: GpuSetting, dtype: torch.dtype) -> dict[str, Any]:
        """The fields of a row."""
        inputs = self.inputs(dtype, torch.Generator().manual_seed(0))
        exact = torch.float64 if self.roundings else dtype
        with reference_operators():
            expected = self.call(
                *(one.to(exact if one.is_floating_point() else one.dtype, copy=True) for one in inputs)
            )
        found = self.call(*(one.to(setting.device, copy=True) for one in inputs))
        return compared(self.name, found, expected, self.roundings * TOLERANCES[dtype])


def _cache_write_inputs(dtype: torch.dtype, generator: torch.Generator) -> Sequence[Tensor]:
    """Keys and values as the model gives them: parts of one wide tensor; some tokens have no slot."""
    tokens, heads, head_dim, blocks, block_size = 37, 2, 64, 6, 16
    fused = torch.randn(tokens, 3, heads, head_dim, generator=generator).to(dtype)
    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
    slots[::5] = -1
    return fused, torch.full((2, blocks, heads, block_size, head_dim), torch.nan).to(dtype), slots


def _write_cache(fused: Tensor, caches: Tensor, slots: Tensor) -> Tensor:
    cache_write(fused[:, 1], fused[:, 2], caches[0], caches[1], slots)
    return caches


def _copy_blocks_inputs(dtype: torch.dtype, generator: torch.Generator) -> Sequence[Tensor]:
    """A block that is copied from and to, as all sources are read before any is written."""
    return torch.randn(2, 7, 2, 16, 64, generator=generator).to(dtype), torch.tensor([(0, 3), (3, 5), (1, 6)])


def _copy_blocks(caches: Tensor, pairs: Tensor) -> Tensor:
    copy_blocks(caches[0], caches[1], pairs)
    return caches


def _staging_inputs(dtype: torch.dtype, generator: torch.Generator) -> Sequence[Tensor]:
    """Two of three heads of some blocks of two layers."""
    layers, blocks, block_size, head_dim = 2, 7, 16, 64
    filled = torch.randn(2, layers, blocks, 3, block_size, head_dim, generator=generator).to(dtype)
    sources, targets = torch.tensor([5, 0, 3]), torch.tensor([1, 6, 2])
    return filled, torch.full((layers, 2, len(sources), 2, block_size, head_dim), torch.nan).to(dtype), sources, targets


def _stage_and_restore(caches: Tensor, buffer: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
    """There, and back to other blocks."""
    keys, values = list(caches[0].unbind()), list(caches[1].unbind())
    gather_blocks(buffer, keys, values, sources, 1)
    scatter_blocks(keys, values, buffer, targets, 1)
    return torch.cat((caches.flatten(), buffer.flatten()))


def _linear_inputs(dtype: torch.dtype, generator: torch.Generator) -> Sequence[Tensor]:
    rows, weight, bias = (torch.randn(shape, generator=generator) for shape in ((5, 96), (64, 96), (64,)))
    return [one.to(dtype) for one in (rows, weight / 96**0.5, bias)]


def _experts_inputs(dtype: torch.dtype, generator: torch.Generator) -> Sequence[Tensor]:
    tokens, hidden_size, inner, experts, chosen = 23, 64, 48, 6, 2
    hidden = torch.randn(tokens, hidden_size, generator=generator).to(dtype)
    gate_up = torch.randn(experts, 2 * inner, hidden_size, generator=generator).div(hidden_size**0.5).to(dtype)
    down = torch.randn(experts, hidden_size, inner, generator=generator).div(inner**0.5).to(dtype)
    weights, picked = torch.rand(tokens, experts, generator=generator).topk(chosen)
    return hidden, weights, picked, gate_up, down


CHECKS = (
    OperatorCheck("cache_write", _cache_write_inputs, _write_cache),
    OperatorCheck("copy_blocks", _copy_blocks_inputs, _copy_blocks),
    OperatorCheck("gather_blocks and scatter_blocks", _staging_inputs, _stage_and_restore),
    OperatorCheck("linear", _linear_inputs, linear, roundings=1),
    OperatorCheck("sparse_experts", _experts_inputs, sparse_experts, roundings=2),
)


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
