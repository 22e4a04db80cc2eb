"""The checks of the correctness part: operators and sampling on the device against the CPU.

An operator is held against its definition or its plain implementation in float64, or bit for bit where it only moves
numbers. Sampling draws the same tokens from the same logits and seeds: random numbers and sums are integers on both
devices. Exponentials and logarithms may differ in their last bit, which hardly ever decides between two tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor

from nanoserve.benchmarks.gpu.attention import TOLERANCES, AttentionRow, PagedAttentionShape, compared, make_batch
from nanoserve.benchmarks.gpu.engines import EngineShelf
from nanoserve.benchmarks.gpu.model_checks import CHECKED, engine_check_cases, model_cases
from nanoserve.benchmarks.gpu.running import GpuCase
from nanoserve.benchmarks.gpu.setting import GpuSetting
from nanoserve.benchmarks.report import Report
from nanoserve.models.dtypes import format_name
from nanoserve.request import SamplingParams
from nanoserve.runtime.sampling.sampler import Sampled, SamplingRows, SamplingState, sample
from nanoserve.runtime.step.staging import Staging
from nanoserve.scheduler.plan import Begin
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

ROWS = {
    "decode": tuple(AttentionRow(1, context) for context in (1, 16, 33, 700, 1500)),
    "mixed": tuple(AttentionRow(*row) for row in ((1, 1), (1, 200), (5, 37), (64, 64), (33, 300), (1, 16))),
    "prefill": tuple(AttentionRow(length, length) for length in (17, 64, 130)),
}
_DRY_ROWS = {kind: tuple(row for row in rows if row.context <= 37) for kind, rows in ROWS.items()}
_DRY_HEAD_DIMS = (64,)


def part_cases(setting: GpuSetting, report: Report, stack: ExitStack) -> Iterator[GpuCase]:
    """Everything that must be right. Triton may compile so long for the operators that the budget ends there."""
    shelf = EngineShelf(setting, stack)
    return chain(
        engine_check_cases(shelf, CHECKED[:1]),
        sampling_cases(setting),
        operator_cases(setting),
        model_cases(setting),
        engine_check_cases(shelf, () if setting.dry_run else CHECKED[1:]),
    )


def operator_cases(setting: GpuSetting) -> Iterator[GpuCase]:
    """Attention over a grid that meets each pair of neighbouring choices, then the moves, then the products.

    Attention takes the commonest head size and format with all heads, then each head size and format, each time with
    every kind of batch; blocks and windows take turns. Every further combination would cost the time to compile three
    programs.
    """
    rows = _DRY_ROWS if setting.dry_run else ROWS
    head_dims = _DRY_HEAD_DIMS if setting.dry_run else HEAD_DIMS
    common = product(HEADS, zip(BLOCK_SIZES, WINDOWS, strict=True))
    chosen = [(head_dims[0], DTYPES[0], heads, *cut) for heads, cut in common]
    grid = list(product(HEADS, BLOCK_SIZES, WINDOWS))
    for place, (head_dim, dtype) in enumerate(product(head_dims, DTYPES)):
        chosen.append((head_dim, dtype, *grid[(7 * place + 1) % len(grid)]))
    for (head_dim, dtype, heads, block_size, window), kind in product(dict.fromkeys(chosen), rows):
        shape = PagedAttentionShape(rows=rows[kind], num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim)
        name = (
            f"paged_attention, {kind}, {format_name(dtype)}, head_dim {head_dim}, {heads[0]}/{heads[1]} heads, "
            f"blocks of {block_size}" + (f", window {window}" if window else "")
        )
        yield GpuCase(name, partial(_check_attention, setting, shape, dtype, block_size, window))
    if not setting.dry_run:  # the plain implementation has no rows to pad with
        yield GpuCase("paged_attention, padding rows", partial(_check_padding, setting))
    for dtype, check in product(DTYPES, CHECKS):
        yield GpuCase(f"{check.name}, {format_name(dtype)}", partial(check.run, setting, dtype))


def _check_attention(
    setting: GpuSetting, shape: PagedAttentionShape, dtype: torch.dtype, block_size: int, window: int
) -> dict[str, Any]:
    batch = make_batch(shape, block_size=block_size, dtype=dtype, sliding_window=window, poisoned=True)
    return compared("paged_attention", batch.moved(setting.device).attend(), batch.by_definition(), TOLERANCES[dtype])


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
    """Makes the inputs on the CPU; every call gets a copy."""
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


VOCAB_SIZE = 32003
"""A prime number, as large as a small model's vocabulary."""
SAMPLED_ROWS = 16
"""Requests of each setting."""
_PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3}
_PROMPT_LENGTH = 4
_LIKELIEST = 8
"""A row's likeliest tokens are what penalties and biases are about: anything else would hardly show."""

SETTINGS: Mapping[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top_k": SamplingParams(top_k=40),
    "top_p": SamplingParams(top_p=0.9),
    "top_k and top_p": SamplingParams(top_k=40, top_p=0.9),
    "min_p": SamplingParams(min_p=0.05),
    "penalties": SamplingParams(**_PENALTIES),
    "penalties, greedy": SamplingParams(temperature=0.0, **_PENALTIES),
    "logit_bias": SamplingParams(logit_bias={7: 14.0, 20011: 13.0}),
    "min_tokens": SamplingParams(temperature=0.5, min_tokens=100),
    "all of them": SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.05, min_tokens=100, **_PENALTIES),
}


def sampling_cases(setting: GpuSetting) -> Iterator[GpuCase]:
    """Each setting alone, then all in one batch, whose rows are drawn in groups."""
    for name, params in SETTINGS.items():
        yield GpuCase(f"sampling, {name}", partial(_check_sampling, setting, [params] * SAMPLED_ROWS))
    mixed = list(SETTINGS.values()) * SAMPLED_ROWS
    yield GpuCase("sampling, in one batch", partial(_check_sampling, setting, mixed))


@torch.inference_mode()
def _check_sampling(setting: GpuSetting, batch: Sequence[SamplingParams]) -> dict[str, Any]:
    """The last row's logits are no numbers, which is to be found out; its token may be any."""
    logits = random_logits(len(batch))
    logits[-1, VOCAB_SIZE // 2] = torch.nan
    expected = draw(logits, batch)
    found = draw(logits.to(setting.device), batch)
    tokens, valid = found.tokens.cpu(), found.valid.cpu()
    differs = (valid != expected.valid) | (expected.valid & (tokens != expected.tokens))
    different = differs.nonzero()[:, 0].tolist()
    return {"check": "sampling", "rows": len(batch), "different_rows": different, "ok": not different}


def random_logits(rows: int) -> Tensor:
    """float32 [rows, VOCAB_SIZE], of numbers that a bfloat16 model could give: the likeliest often tie."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, VOCAB_SIZE, generator=generator).mul(3.0).bfloat16().float()


def draw(logits: Tensor, batch: Sequence[SamplingParams]) -> Sampled:
    """One token for each row, on the device of the logits, behind tokens that were the row's likeliest."""
    states, staging = [], Staging(logits.device)
    for row, likely in enumerate(logits.nan_to_num().cpu().topk(_LIKELIEST).indices.tolist()):
        tokens = (*likely[:_PROMPT_LENGTH], *likely[2:], *likely[4:6])
        begin = Begin(row, tokens, _PROMPT_LENGTH, row % 3, 7919 * row, batch[row], tuple(likely[:2]))
        states.append(SamplingState(begin, VOCAB_SIZE))
    rows = SamplingRows.stage(states, [len(tokens) + row for row in range(len(states))], staging)
    staging.transfer()
    return sample(logits, rows)
