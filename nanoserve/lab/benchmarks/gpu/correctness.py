"""The checks of the correctness part: operators, sampling and models on the device against the CPU,
and engines.

An operator is held against its plain implementation in float64, or bit for bit where it only moves
numbers. Sampling draws the same tokens from the same logits and seeds: random numbers and sums are
integers on both devices, and the last bit of a logarithm hardly ever decides between two tokens.
Small random models are compared by their logits, engines by tokens: captured graphs against eager
steps, overlapped steps against plain ones.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from nanoserve.config.model_config import ModelConfig
from nanoserve.executor.compile.aot_build import step_arguments
from nanoserve.executor.compile.fused_layer import FusedLayer
from nanoserve.executor.sampling.sampler import Sampled, SamplingRows, SamplingState, sample
from nanoserve.executor.step.staging import Staging
from nanoserve.lab.benchmarks.gpu.attention import TOLERANCES, AttentionRow, compared, make_batch
from nanoserve.lab.benchmarks.gpu.cases import GpuCase, Row
from nanoserve.lab.benchmarks.gpu.device import GpuBench
from nanoserve.lab.benchmarks.gpu.models import FAMILIES, VOCAB_SIZE, EngineShelf
from nanoserve.lab.workloads import random_prompts
from nanoserve.models.attention import AttentionBatch, AttentionFunction, PagedAttention
from nanoserve.models.decoder import Decoder, DecoderLayer, LayerFunction
from nanoserve.models.dtypes import format_name
from nanoserve.models.loading import empty_decoder
from nanoserve.request import SamplingParams
from nanoserve.scheduler.plan import Begin
from triton_ops import (
    PackedFormat,
    add_linear,
    cache_write,
    causal_convolution,
    copy_blocks,
    fused_linear,
    gated_delta_rule,
    gather_blocks,
    linear,
    pack,
    packed_linear,
    paged_attention,
    reference_operators,
    rotate_and_write,
    round_to_nearest,
    scatter_blocks,
    selective_scan,
    sparse_experts,
    sparse_packed_experts,
    state_space_dual,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (128, 64, 256, 80)
HEADS = ((8, 2), (16, 2), (8, 8), (14, 2))  # query and key-value heads: groups of 4, 8, 1 and 7
BLOCK_SIZES = (16, 32)
WINDOWS = (0, 48)

_SEGMENTS = ((0, 1, 0, 0, 70), (1, 60, -1, 1, 5), (60, 124, 1, 2, 64), (124, 130, 2, 3, 128))
"""A row of one token, and one of three segments, for operators of layers with a state."""

_ROUNDED = (
    PackedFormat(4, 32, scale=0, offset=0, zero=8),
    PackedFormat(8, 32, scale=0, offset=0, zero=0),
)

ROWS = {
    "decode": [AttentionRow(1, context) for context in (1, 16, 33, 700, 1500)],
    "mixed": [
        AttentionRow(1, 1),
        AttentionRow(1, 200),
        AttentionRow(5, 37),
        AttentionRow(64, 64),
        AttentionRow(33, 300),
        AttentionRow(1, 16),
    ],
    "prefill": [AttentionRow(length, length) for length in (17, 64, 130)],
}
RAGGED = (AttentionRow(1, 9000), *(AttentionRow(1, 40),) * 300, AttentionRow(1, 5000))
"""Rows enough to keep a GPU busy, and among them two so long that other programs help with them."""
DRY_CONTEXT = 37  # the longest context of a dry run, in which there is one head size


def part_cases(bench: GpuBench, rows: list[Row]) -> Iterator[GpuCase]:
    """Everything that must be right. Triton may compile so long for the operators that the budget
    ends there."""
    with closing(EngineShelf(bench)) as shelf:
        yield from engine_cases(shelf, CHECKED[:1])
        yield from sampling_cases(bench)
        yield from operator_cases(bench)
        yield from model_cases(bench)
        if not bench.dry_run:
            yield from engine_cases(shelf, CHECKED[1:])


# makes an operator's inputs on the CPU
Inputs = Callable[[torch.dtype, torch.Generator], Sequence[Tensor]]


def _check_operator(
    bench: GpuBench,
    name: str,
    dtype: torch.dtype,
    make: Inputs,
    call: Callable[..., Tensor | None],
    roundings: int,
) -> Row:
    """Compare what an operator gives back for copies of the same inputs, on the CPU and on the
    device. `roundings`: products one after the other, each of which rounds its results; with none,
    numbers are only moved."""
    inputs = make(dtype, torch.Generator().manual_seed(0))
    copies = [one.clone() for one in inputs]
    if roundings:
        copies = [one.double() if one.is_floating_point() else one for one in copies]
    with reference_operators():
        expected = _result(call, copies)
    found = _result(call, [one.to(bench.device, copy=True) for one in inputs])
    return compared(name, found, expected, roundings * TOLERANCES[dtype])


def _result(call: Callable[..., Tensor | None], inputs: Sequence[Tensor]) -> Tensor:
    """Call an operator and return its result. If it returns nothing, return its first input, which
    it has filled."""
    returned = call(*inputs)
    if returned is None:
        return inputs[0]
    return returned


def operator_cases(bench: GpuBench) -> Iterator[GpuCase]:
    """Attention over a grid that meets each pair of neighbouring choices, then the moves, then the
    products. Attention takes the commonest head size and format with all heads, then each head size
    and format, each time with every kind of batch; blocks and windows take turns. Every further
    combination would cost the time to compile three programs."""
    head_dims: Sequence[int] = HEAD_DIMS
    if bench.dry_run:
        head_dims = (64,)
    chosen = [
        (head_dims[0], DTYPES[0], heads, block_size, window)
        for heads in HEADS
        for block_size, window in zip(BLOCK_SIZES, WINDOWS, strict=True)
    ]
    grid = list(product(HEADS, BLOCK_SIZES, WINDOWS))
    for place, (head_dim, dtype) in enumerate(product(head_dims, DTYPES)):
        heads, block_size, window = grid[(7 * place + 1) % len(grid)]
        chosen.append((head_dim, dtype, heads, block_size, window))
    for (head_dim, dtype, heads, block_size, window), (kind, some) in product(
        dict.fromkeys(chosen), ROWS.items()
    ):
        rows = tuple(row for row in some if row.context <= DRY_CONTEXT or not bench.dry_run)
        name = (
            f"paged_attention, {kind}, {format_name(dtype)}, head_dim {head_dim}, "
            f"{heads[0]}/{heads[1]} heads"
        )
        name += f", blocks of {block_size}"
        if window:
            name += f", window {window}"
        inputs = _attention_inputs(rows, heads, head_dim, block_size)
        attend = partial(paged_attention, scale=head_dim**-0.5, sliding_window=window)
        yield GpuCase(
            name, partial(_check_operator, bench, "paged_attention", dtype, inputs, attend, 1)
        )
    yield from _span_cases(bench, head_dims[0])
    # A dry run takes long over so many rows, and its plain implementation has none to pad with.
    if not bench.dry_run:
        inputs = _attention_inputs(RAGGED, HEADS[0], head_dims[0], BLOCK_SIZES[0])
        attend = partial(paged_attention, scale=head_dims[0] ** -0.5, sliding_window=0)
        check = partial(_check_operator, bench, "paged_attention", DTYPES[0], inputs, attend, 1)
        yield GpuCase("paged_attention, two long rows among 300 short ones", check)
        yield GpuCase("paged_attention, padding rows", partial(_check_padding, bench))
    for dtype, (operator, arguments) in product(DTYPES, OPERATORS.items()):
        if bench.dry_run and operator in PACKED and dtype != torch.float32:
            continue  # a CPU rounds the input as well
        make, call, roundings = arguments
        check = partial(_check_operator, bench, operator, dtype, make, call, roundings)
        yield GpuCase(f"{operator}, {format_name(dtype)}", check)


def _span_cases(bench: GpuBench, head_dim: int) -> Iterator[GpuCase]:
    """Attention of canvases: the queries of a row see to the end of their span."""
    heads, block_size, dtype = HEADS[0], BLOCK_SIZES[0], DTYPES[0]
    for window, (kind, some) in product(WINDOWS, ROWS.items()):
        rows = tuple(row for row in some if row.context <= DRY_CONTEXT or not bench.dry_run)
        of_rows = []
        for place, row in enumerate(rows):
            whole = [row.queries, row.context - row.queries]  # the row is one span
            of_rows.append(whole if place % 2 == 0 else [32, 5])
        inputs = _attention_inputs(rows, heads, head_dim, block_size, spans=of_rows)
        attend = partial(_attend_by_spans, scale=head_dim**-0.5, sliding_window=window)
        name = f"paged_attention with spans, {kind}"
        if window:
            name += f", window {window}"
        yield GpuCase(
            name, partial(_check_operator, bench, "paged_attention", dtype, inputs, attend, 1)
        )


def _attend_by_spans(*tensors: Tensor, scale: float, sliding_window: int) -> None:
    """`tensors` are those of `paged_attention`, and the spans."""
    causal, spans = tensors[:-1], tensors[-1]
    paged_attention(*causal, scale=scale, sliding_window=sliding_window, spans=spans)


def _attention_inputs(
    rows: Sequence[AttentionRow],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    spans: Sequence[Sequence[int]] = (),
) -> Inputs:
    """The tensors of `paged_attention`, and behind them the spans of the rows, if there are any."""

    def make(dtype: torch.dtype, generator: torch.Generator) -> Sequence[Tensor]:
        num_heads, num_kv_heads = heads
        batch = make_batch(
            rows,
            num_heads,
            num_kv_heads,
            head_dim,
            block_size=block_size,
            dtype=dtype,
            poisoned=True,
        )
        if not spans:
            return batch.tensors
        return [*batch.tensors, torch.tensor(spans, dtype=torch.int32)]

    return make


def _check_padding(bench: GpuBench) -> Row:
    """Rows of a CUDA graph that stand for nothing have no context: whatever they yield is a
    number."""
    rows = tuple(AttentionRow(1, context) for context in (40, 1, 1))
    batch = make_batch(
        rows, 8, 2, 128, block_size=16, dtype=bench.dtype, device=bench.device, poisoned=True
    )
    batch.context_lengths[1] = 0
    found = batch.attend()
    return compared("paged_attention", found.isfinite().float(), torch.ones_like(found), 0.0)


def _cache_write_inputs(dtype: torch.dtype, generator: torch.Generator) -> Sequence[Tensor]:
    """Keys and values as the model gives them: parts of one wide tensor; some tokens have no
    slot."""
    tokens, heads, head_dim, blocks, block_size = 37, 2, 64, 6, 16
    fused = torch.randn(tokens, 3, heads, head_dim, generator=generator).to(dtype)
    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
    slots[::5] = -1
    return torch.full((2, blocks, heads, block_size, head_dim), torch.nan).to(dtype), fused, slots


def _rotary_inputs(dtype: torch.dtype, generator: torch.Generator) -> Sequence[Tensor]:
    """Projected rows of 14 heads of queries and 2 of keys and values, of which a part turns; the
    weights of norms; some tokens have no slot."""
    tokens, heads, head_dim, pairs, blocks, block_size = 37, (14, 2, 2), 80, 24, 6, 16
    projected = torch.randn(tokens, sum(heads) * head_dim, generator=generator)
    norms = torch.randn(2, head_dim, generator=generator)
    angles = torch.randn(tokens, 1, pairs, generator=generator)
    caches = torch.full((2, blocks, heads[1], block_size, head_dim), torch.nan)
    numbers = [projected, norms, angles.cos(), angles.sin(), caches]
    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
    slots[::5] = -1
    return [*(one.to(dtype) for one in numbers), slots]


def _rotate_and_write(*tensors: Tensor, norm_adds_one: bool, interleaved: bool) -> Tensor:
    projected, norms, cos, sin, caches, slots = tensors
    query_norm, key_norm = norms.unbind()
    key_cache, value_cache = caches.unbind()
    query = projected.new_empty(len(projected), 14, norms.shape[-1])
    rotate_and_write(
        query,
        projected,
        query_norm,
        key_norm,
        cos,
        sin,
        key_cache,
        value_cache,
        slots,
        eps=1e-6,
        norm_adds_one=norm_adds_one,
        interleaved=interleaved,
    )
    return torch.cat((query.flatten(), caches.flatten()))


def _copy_blocks_inputs(dtype: torch.dtype, generator: torch.Generator) -> Sequence[Tensor]:
    """A block that is copied from and to, as all sources are read before any is written."""
    return torch.randn(2, 7, 2, 16, 64, generator=generator).to(dtype), torch.tensor(
        [(0, 3), (3, 5), (1, 6)]
    )


def _staging_inputs(dtype: torch.dtype, generator: torch.Generator) -> Sequence[Tensor]:
    """Two of three heads of some blocks of two layers."""
    layers, blocks, block_size, head_dim = 2, 7, 16, 64
    filled = torch.randn(2, layers, blocks, 3, block_size, head_dim, generator=generator).to(dtype)
    sources, targets = torch.tensor([5, 0, 3]), torch.tensor([1, 6, 2])
    return (
        filled,
        torch.full((layers, 2, len(sources), 2, block_size, head_dim), torch.nan).to(dtype),
        sources,
        targets,
    )


def _stage_and_restore(caches: Tensor, buffer: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
    keys, values = list(caches[0].unbind()), list(caches[1].unbind())
    gather_blocks(buffer, keys, values, sources, 1)
    scatter_blocks(keys, values, buffer, targets, 1)
    return torch.cat((caches.flatten(), buffer.flatten()))


def _linear_inputs(dtype: torch.dtype, generator: torch.Generator) -> Sequence[Tensor]:
    rows = torch.randn(5, 96, generator=generator)
    weight = torch.randn(64, 96, generator=generator) / 96**0.5
    bias = torch.randn(64, generator=generator)
    return [rows.to(dtype), weight.to(dtype), bias.to(dtype)]


def _fused_inputs(dtype: torch.dtype, generator: torch.Generator) -> Sequence[Tensor]:
    """Rows, a weight of gates and of what they multiply, its bias, a norm and a residual."""
    shapes = ((2, 4112), (2 * 70, 4112), (2 * 70,), (4112,), (2, 70))
    rows, weight, *others = (torch.randn(shape, generator=generator) for shape in shapes)
    # so that gates are numbers about 1
    return [one.to(dtype) for one in (rows, weight * 4112**-0.5, *others)]


def _fused_products(
    rows: Tensor, weight: Tensor, bias: Tensor, norm: Tensor, residual: Tensor
) -> Tensor:
    """Products with each of their surroundings: [rows, columns of all side by side]."""
    plain = partial(fused_linear, eps=1e-6, norm_adds_one=False, activation="")
    gated = partial(fused_linear, eps=1e-6, norm_adds_one=True)
    return torch.cat(
        [
            plain(rows, weight, bias, norm, None),
            plain(rows, weight[:70], None, None, residual),
            gated(rows, weight, bias, norm, residual, activation="silu"),
            gated(rows, weight, None, norm, None, activation="gelu"),
        ],
        dim=-1,
    )


def _sum_inputs(dtype: torch.dtype, generator: torch.Generator) -> Sequence[Tensor]:
    rows, weight, _ = _linear_inputs(dtype, generator)
    return [torch.randn(5, 64, generator=generator).to(dtype), rows, weight]


def _packed_inputs(dtype: torch.dtype, generator: torch.Generator) -> Sequence[Tensor]:
    rows, weight, bias = _linear_inputs(dtype, generator)
    packed = [pack(round_to_nearest(weight, form.bits, form.group)) for form in _ROUNDED]
    return [rows, bias] + packed


def _packed_products(rows: Tensor, bias: Tensor, *packed: Tensor) -> Tensor:
    found = (
        packed_linear(rows, one, bias, len(bias), form)
        for one, form in zip(packed, _ROUNDED, strict=True)
    )
    return torch.cat(list(found), dim=-1)


def _experts_inputs(dtype: torch.dtype, generator: torch.Generator) -> Sequence[Tensor]:
    tokens, hidden_size, inner, experts, chosen = 23, 64, 48, 6, 2
    hidden = torch.randn(tokens, hidden_size, generator=generator).to(dtype)
    gate_up = (
        torch.randn(experts, 2 * inner, hidden_size, generator=generator)
        .div(hidden_size**0.5)
        .to(dtype)
    )
    down = torch.randn(experts, hidden_size, inner, generator=generator).div(inner**0.5).to(dtype)
    weights, picked = torch.rand(tokens, experts, generator=generator).topk(chosen)
    return hidden, weights, picked, gate_up, down


def _packed_experts_inputs(dtype: torch.dtype, generator: torch.Generator) -> Sequence[Tensor]:
    """The tensors of `_experts_inputs`, with widths that groups divide, and biases."""
    tokens, hidden_size, inner, experts, chosen = 96, 160, 96, 8, 2
    gate_up, down = _ROUNDED
    packed = []
    for form, rows, columns in ((gate_up, 2 * inner, hidden_size), (down, hidden_size, inner)):
        weights = torch.randn(experts, rows, columns, generator=generator) / columns**0.5
        rounded = [pack(round_to_nearest(one, form.bits, form.group)) for one in weights]
        packed.append(torch.stack(rounded))
    shapes = ((tokens, hidden_size), (experts, 2 * inner), (experts, hidden_size))
    numbers = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    weights, picked = torch.rand(tokens, experts, generator=generator).topk(chosen)
    return [*numbers, weights, picked, *packed]


def _packed_experts(*tensors: Tensor) -> Tensor:
    """One token and two, whose experts multiply by themselves, then more, in tiles of 16 rows and
    of 32."""
    hidden, gate_up_bias, down_bias, weights, picked, gate_up, down = tensors
    compute = partial(sparse_packed_experts, forms=_ROUNDED, inner=96)
    biases = (gate_up_bias, down_bias)
    found = []
    for tokens in (1, 2, 40, 96):
        routed = (hidden[:tokens], weights[:tokens], picked[:tokens], gate_up, down)
        found.append(compute(*routed, biases=biases, style="gpt_oss"))
        found.append(compute(*routed, style="swiglu"))
    return torch.cat(found)


def _convolution_inputs(dtype: torch.dtype, generator: torch.Generator) -> Sequence[Tensor]:
    tokens, channels, kernel_size = _SEGMENTS[-1][1], 72, 4
    inputs = torch.randn(tokens, channels, generator=generator)
    weight = torch.randn(channels, kernel_size, generator=generator)
    states = torch.randn(len(_SEGMENTS), channels, kernel_size - 1, generator=generator)
    return [inputs.to(dtype), weight.to(dtype), states.to(dtype), torch.tensor(_SEGMENTS).int()]


def _convolve(inputs: Tensor, weight: Tensor, states: Tensor, segments: Tensor) -> Tensor:
    out = torch.empty_like(inputs)
    causal_convolution(out, inputs, weight, None, states, segments, silu=True)
    return torch.cat((out.flatten(), states.flatten()))


def _delta_rule_inputs(dtype: torch.dtype, generator: torch.Generator) -> Sequence[Tensor]:
    tokens, key_heads, value_heads, head_dim = _SEGMENTS[-1][1], 2, 4, 128
    query, key = torch.randn(2, tokens, key_heads, head_dim, generator=generator).to(dtype)
    value = torch.randn(tokens, value_heads, head_dim, generator=generator).to(dtype)
    decay, beta = torch.rand(2, tokens, value_heads, generator=generator)
    states = torch.randn(len(_SEGMENTS), value_heads, head_dim, head_dim, generator=generator)
    return [query, key, value, -decay / 4, beta, states, torch.tensor(_SEGMENTS).int()]


def _apply_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    segments: Tensor,
) -> Tensor:
    """States and what they are multiplied by are float32 in any case."""
    out, states = torch.empty_like(value), states.float()
    gated_delta_rule(out, query, key, value, decay.float(), beta.float(), states, segments)
    return torch.cat((out.flatten(), states.flatten()))


def _dual_inputs(dtype: torch.dtype, generator: torch.Generator) -> Sequence[Tensor]:
    tokens, groups, heads, state_size, head_dim = _SEGMENTS[-1][1], 2, 4, 128, 64
    query, key = torch.randn(2, tokens, groups, state_size, generator=generator).to(dtype)
    value = torch.randn(tokens, heads, head_dim, generator=generator).to(dtype)
    decay, time_step = torch.rand(2, tokens, heads, generator=generator)
    states = torch.randn(len(_SEGMENTS), heads, state_size, head_dim, generator=generator)
    return [query, key, value, -decay / 4, time_step, states, torch.tensor(_SEGMENTS).int()]


def _apply_dual(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    time_step: Tensor,
    states: Tensor,
    segments: Tensor,
) -> Tensor:
    """States, decays and time steps are float32 in any case."""
    out, states = torch.empty_like(value), states.float()
    state_space_dual(out, query, key, value, decay.float(), time_step.float(), states, segments)
    return torch.cat((out.flatten(), states.flatten()))


def _selective_inputs(dtype: torch.dtype, generator: torch.Generator) -> Sequence[Tensor]:
    tokens, channels, state_size = _SEGMENTS[-1][1], 72, 16
    query, key = torch.randn(2, tokens, state_size, generator=generator).to(dtype)
    value = torch.randn(tokens, channels, generator=generator).to(dtype)
    time_step = torch.rand(tokens, channels, generator=generator)
    rates = torch.rand(channels, state_size, generator=generator)
    states = torch.randn(len(_SEGMENTS), channels, state_size, generator=generator)
    return [query, key, value, time_step, -rates, states, torch.tensor(_SEGMENTS).int()]


def _scan_selectively(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    time_step: Tensor,
    rates: Tensor,
    states: Tensor,
    segments: Tensor,
) -> Tensor:
    """States, rates and time steps are float32 in any case."""
    out, states = torch.empty_like(value), states.float()
    selective_scan(out, query, key, value, time_step.float(), rates.float(), states, segments)
    return torch.cat((out.flatten(), states.flatten()))


OPERATORS: Mapping[str, tuple[Inputs, Callable[..., Tensor | None], int]] = {
    "cache_write": (
        _cache_write_inputs,
        lambda caches, fused, slots: cache_write(
            fused[:, 1], fused[:, 2], caches[0], caches[1], slots
        ),
        0,
    ),
    "rotate_and_write": (
        _rotary_inputs,
        partial(_rotate_and_write, norm_adds_one=False, interleaved=False),
        2,
    ),
    "rotate_and_write, neighbours": (
        _rotary_inputs,
        partial(_rotate_and_write, norm_adds_one=True, interleaved=True),
        2,
    ),
    "copy_blocks": (
        _copy_blocks_inputs,
        lambda caches, pairs: copy_blocks(caches[0], caches[1], pairs),
        0,
    ),
    "gather_blocks and scatter_blocks": (_staging_inputs, _stage_and_restore, 0),
    "linear": (_linear_inputs, linear, 1),
    "fused_linear": (_fused_inputs, _fused_products, 1),
    "add_linear": (_sum_inputs, add_linear, 1),
    "packed_linear": (_packed_inputs, _packed_products, 1),
    "sparse_experts": (_experts_inputs, sparse_experts, 2),
    "sparse_packed_experts": (_packed_experts_inputs, _packed_experts, 2),
    "causal_convolution": (_convolution_inputs, _convolve, 1),
    "gated_delta_rule": (_delta_rule_inputs, _apply_delta_rule, 1),
    "state_space_dual": (_dual_inputs, _apply_dual, 1),
    "selective_scan": (_selective_inputs, _scan_selectively, 1),
}
"""The other operators: inputs, call and roundings, as `_check_operator` takes them."""
PACKED = ("packed_linear", "sparse_packed_experts")


SAMPLED_VOCABULARY = 32003  # a prime number, as large as a small model's vocabulary
SAMPLED_ROWS = 16  # requests of each setting
_PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
}
_PROMPT_LENGTH = 4
# a row's likeliest tokens are what penalties and biases are about: anything else would hardly show
_LIKELIEST = 8

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
    "all of them": SamplingParams(
        temperature=0.8, top_k=40, top_p=0.9, min_p=0.05, min_tokens=100, **_PENALTIES
    ),
}


def sampling_cases(bench: GpuBench) -> Iterator[GpuCase]:
    """Each setting alone, then all in one batch, whose rows are drawn in groups."""
    for name, params in SETTINGS.items():
        yield GpuCase(f"sampling, {name}", partial(_check_sampling, bench, [params] * SAMPLED_ROWS))
    mixed = list(SETTINGS.values()) * SAMPLED_ROWS
    yield GpuCase("sampling, in one batch", partial(_check_sampling, bench, mixed))
    # as captured steps sample
    halved = [SETTINGS["greedy"], SETTINGS["temperature"]] * SAMPLED_ROWS
    check = partial(_check_sampling, bench, halved, torch.bfloat16)
    yield GpuCase("sampling from 16 bits", check)


@torch.inference_mode()
def _check_sampling(
    bench: GpuBench, batch: Sequence[SamplingParams], dtype: torch.dtype = torch.float32
) -> Row:
    """The last row's logits are no numbers, which is to be found out; its token may be any."""
    logits = random_logits(len(batch))
    logits[-1, SAMPLED_VOCABULARY // 2] = torch.nan
    expected = draw(logits, batch)
    found = draw(logits.to(bench.device, dtype), batch)
    tokens, valid = found.tokens.cpu(), found.valid.cpu()
    differs = (valid != expected.valid) | (expected.valid & (tokens != expected.tokens))
    different = differs.nonzero()[:, 0].tolist()
    return {
        "check": "sampling",
        "rows": len(batch),
        "different_rows": different,
        "ok": not different,
    }


def random_logits(rows: int, vocab_size: int = SAMPLED_VOCABULARY) -> Tensor:
    """float32 [rows, vocab_size], of numbers that bfloat16 has: the likeliest often tie."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, vocab_size, generator=generator).mul(3.0).bfloat16().float()


def draw(logits: Tensor, batch: Sequence[SamplingParams]) -> Sampled:
    """One token for each row, on the device of the logits, behind tokens that were the row's
    likeliest."""
    states, staging = [], Staging(logits.device)
    for row, likely in enumerate(logits.nan_to_num().cpu().topk(_LIKELIEST).indices.tolist()):
        tokens = tuple(likely[:_PROMPT_LENGTH] + likely[2:] + likely[4:6])
        begin = Begin(
            row, tokens, _PROMPT_LENGTH, row % 3, 7919 * row, batch[row], tuple(likely[:2])
        )
        states.append(SamplingState(begin, SAMPLED_VOCABULARY))
    rows = SamplingRows.stage(states, [len(tokens) + row for row in range(len(states))], staging)
    staging.transfer()
    return sample(logits, rows)


WEIGHT_STANDARD_DEVIATION = 0.15
"""Wider than at initialization, so that attention, norms and biases all leave their mark on the
logits."""
FLOAT32_TOLERANCE = 2e-3  # largest difference of a logit, in standard deviations of the logits
BFLOAT16_TOLERANCE = 0.05
"""Median difference: a rounding may send a token to another expert, and then some logits are quite
different."""
# tokens of each step: a prompt in three pieces, then single tokens
CHUNKS = (17, 17, 11, 1, 1, 1, 1)


FUSED = ("llama", "qwen3")  # families whose steps of one token run fused layers


def model_cases(bench: GpuBench) -> Iterator[GpuCase]:
    """Each family in float32 and in the format that the device is used with; in a dry run two of
    them. Some also with fused layers for single tokens."""
    families = list(FAMILIES)
    if bench.dry_run:
        families = [families[0], families[-1]]
    for family, dtype in product(families, (torch.float32, torch.bfloat16)):
        yield GpuCase(
            f"family {family}, {format_name(dtype)}", partial(_check_family, bench, family, dtype)
        )
    for family, dtype in product(FUSED, (torch.float32, torch.bfloat16)):
        check = partial(_check_family, bench, family, dtype, run_fused)
        yield GpuCase(f"fused layers of {family}, {format_name(dtype)}", check)


def run_fused(
    layer: DecoderLayer, hidden: Tensor, cos: Tensor, sin: Tensor, attention: AttentionFunction
) -> Tensor:
    """Run a layer, fused if it has few tokens: a LayerFunction for models whose layers are all
    alike."""
    fused, arguments = FusedLayer(layer), step_arguments(layer, hidden, cos, sin, attention)
    if not fused.takes(arguments):
        plain: Tensor = layer(hidden, cos, sin, attention)
        return plain
    (output,) = fused(arguments, list(layer.parameters()))
    return output


def _check_family(
    bench: GpuBench,
    family: str,
    dtype: torch.dtype,
    run_layer: LayerFunction = DecoderLayer.__call__,
) -> Row:
    config = ModelConfig.from_hf(FAMILIES[family], source=family)
    reference = empty_decoder(config, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in reference.named_parameters():
        mean = 0.0
        if "norm" in name:
            mean = 1.0
        parameter.normal_(mean, WEIGHT_STANDARD_DEVIATION, generator=generator)
    decoder = empty_decoder(config, dtype, bench.device)
    decoder.load_state_dict(reference.state_dict())
    tokens = torch.randint(
        0, VOCAB_SIZE, (sum(CHUNKS),), generator=torch.Generator().manual_seed(1)
    )
    with reference_operators():
        expected = stepwise_logits(reference, tokens)
    found = stepwise_logits(decoder, tokens.to(bench.device), run_layer).cpu()
    difference = (found - expected).abs() / expected.std()
    name, measured, tolerance = "median_difference", float(difference.median()), BFLOAT16_TOLERANCE
    if dtype == torch.float32:
        name, measured, tolerance = "largest_difference", float(difference.max()), FLOAT32_TOLERANCE
    unwanted = int((~found.isfinite()).sum())
    row: Row = {
        "check": "family",
        name: measured,
        "tolerance": tolerance,
        "of_tolerance": measured / tolerance,
    }
    if unwanted:
        row |= {name: None, "of_tolerance": None}
    return row | {"unwanted_nans": unwanted, "ok": not unwanted and measured <= tolerance}


@torch.inference_mode()
def stepwise_logits(
    decoder: Decoder, tokens: Tensor, run_layer: LayerFunction = DecoderLayer.__call__
) -> Tensor:
    """Logits of one sequence whose tokens come in CHUNKS, on shuffled blocks of a poisoned cache:
    [T, vocab_size]."""
    config, device, block_size = decoder.config, tokens.device, 16
    num_blocks = -(-len(tokens) // block_size) + 2
    blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(2)).to(device)
    shape = (2, config.num_layers, num_blocks, config.num_kv_heads, block_size, config.head_dim)
    keys, values = torch.full(shape, torch.nan, dtype=decoder.dtype, device=device)
    logits, length = [], 0
    for chunk in torch.split(tokens, list(CHUNKS)):
        positions = torch.arange(length, length + len(chunk), device=device)
        length += len(chunk)
        batch = AttentionBatch(
            block_tables=blocks[None].int(),
            query_starts=torch.tensor([0, len(chunk)], dtype=torch.int32, device=device),
            context_lengths=torch.tensor([length], dtype=torch.int32, device=device),
            slot_mapping=blocks[positions // block_size] * block_size + positions % block_size,
        )
        attention = PagedAttention(config, keys.unbind(), values.unbind(), batch)
        logits.append(decoder.compute_logits(decoder(chunk, positions, attention, run_layer)))
    return torch.cat(logits)


SPARSE = ("mixtral", "qwen3_moe")
# one with norms of queries and keys, one with windows, one with experts
CHECKED = ("qwen3", "mistral", "qwen3_moe")
PROMPT_LENGTHS = tuple(5 + 9 * place % 83 for place in range(20))
OUTPUT_LENGTHS = tuple(3 + 7 * place % 29 for place in range(20))
"""Requests come and go in the midst of others, so that batches grow, shrink, and mix prompts with
single tokens."""
GRAPHS, OVERLAP = "graph against eager", "overlapped against plain"


def engine_cases(shelf: EngineShelf, families: Sequence[str]) -> Iterator[GpuCase]:
    """In float32, where rounding does not decide between tokens."""
    for family, check in product(families, (GRAPHS, OVERLAP)):
        yield GpuCase(f"{check}, {family}", partial(_check_engine, shelf, check, family))


def _check_engine(shelf: EngineShelf, check: str, family: str) -> Row:
    """Compare an engine's tokens without and with a mechanism. Equal tokens prove nothing if the
    mechanism did not run: that is the row's `problem`."""
    answers = []
    for second in (False, True):
        sizes = {
            "max_model_len": 256,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "kv_cache_memory": 32 * 2**20,
        }
        engine = shelf.get(family, dtype="float32", **sizes, eager=check == GRAPHS and not second)
        executor = engine.llm.engine.executor
        executor.max_in_flight = 1
        if check == OVERLAP and second:
            executor.max_in_flight = engine.in_flight
        prompts = random_prompts(PROMPT_LENGTHS, VOCAB_SIZE, seed=0)
        answers.append(engine.driver.run(prompts, OUTPUT_LENGTHS).tokens)
    facts, problem = engine.llm.built.gpu, None
    fields: Row = {}
    if check == OVERLAP:
        fields["in_flight"] = executor.max_in_flight
    if facts is not None and check == GRAPHS:  # a dry run has no graphs
        fields["graphs"] = facts.graphs
        fields["mixed_graphs"] = facts.mixed_graphs
        # Experts in float32 wait to learn how many tokens each gets: such steps are compiled, and
        # cannot be captured.
        if facts.graphs == 0 and FAMILIES[family]["model_type"] not in SPARSE:
            problem = "no decode step was captured"
    elif facts is not None and executor.max_in_flight == 1:  # a CPU has nothing to gain by more
        problem = "steps were not overlapped"
    without, with_it = answers
    different = [
        place
        for place, (one, other) in enumerate(zip(without, with_it, strict=True))
        if one != other
    ]
    fields |= {"check": check, "requests": len(prompts), "different_requests": different}
    fields["ok"] = not different and problem is None
    if problem:
        fields["problem"] = problem
    return fields
