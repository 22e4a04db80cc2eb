"""The kernels against the floor of the same run and against their peers, in turns."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanoserve.benchmarks.floors import Limits
from nanoserve.benchmarks.gpu.attention import AttentionRow, PagedAttentionShape, decode_rows, make_batch, moved_bytes
from nanoserve.benchmarks.gpu.peers import AttentionWork, find_peers, gather_call
from nanoserve.benchmarks.gpu.results import GpuCase
from nanoserve.benchmarks.gpu.setting import GpuSetting
from nanoserve.benchmarks.gpu.timing import Clock, TimeSpread, make_clock, take_turns
from triton_ops import cache_write, copy_blocks, gather_blocks, scatter_blocks

OURS = "nanoserve"
GATHER = "gathering alone"
INDEXING = "torch indexing"
BLOCK_SIZE = 16
HEAD_DIM = 128
GROUPS = {4: (32, 8), 8: (32, 4)}
"""Query heads of one key-value head: how many heads of each kind there are."""
DECODES = ((64, 4096, 4), (64, 4096, 8), (1, 32768, 4), (1, 2048, 4), (16, 2048, 4))
"""Batch, context and group."""
PREFILLS = (8192, 2048)
MIXED = (*decode_rows(32, 2048), AttentionRow(512, 2048), AttentionRow(1024, 1024))
MOVED_TOKENS = 8192
MOVED_BLOCKS = 2048
STAGED_BLOCKS, STAGED_LAYERS = 256, 8
_SMALLER_BY = 64
"""EngineSizes of a dry run, divided."""


@dataclass(frozen=True, slots=True)
class KernelBench:
    """What every row needs: a device, its clock, and what it can do at best."""

    setting: GpuSetting
    clock: Clock
    limits: Limits

    @classmethod
    def on(cls, setting: GpuSetting, limits: Limits) -> "KernelBench":
        return cls(setting, make_clock(setting), limits)

    def times(self, routes: Mapping[str, Callable[[], object]]) -> dict[str, TimeSpread]:
        return take_turns(routes, self.clock, dry_run=self.setting.dry_run)


def attention_name(kind: str, size: str, group: int) -> str:
    """How a row of attention is called, here and where its target is looked up."""
    return f"{kind} {size}, GQA {group}, head_dim {HEAD_DIM}"


def kernel_cases(bench: KernelBench) -> Iterator[GpuCase]:
    """The moves, then attention as in prompts, in decoding, and mixed.

    The moves take a moment. For each shape of prompts and of decoding torch compiles a peer anew (flex_attention),
    which may use up the budget, so what has a target comes before what has none.
    """
    yield from _move_cases(bench)
    scale = _scale(bench)
    for length in PREFILLS:
        prompt = (AttentionRow(length // scale, length // scale),)
        yield _attention_case(bench, attention_name("prefill", str(length), 4), prompt, 4)
    for batch, context, group in DECODES:
        rows = decode_rows(max(1, batch // scale), context // scale)
        yield _attention_case(bench, attention_name("decode", f"{batch} x {context}", group), rows, group)
    mixed = tuple(AttentionRow(max(1, row.queries // scale), max(1, row.context // scale)) for row in MIXED)
    yield _attention_case(bench, attention_name("mixed", "32 x 2048 + 512 of 2048 + 1024", 4), mixed, 4)


def _move_cases(bench: KernelBench) -> Iterator[GpuCase]:
    scale = _scale(bench)
    yield GpuCase(f"cache_write {MOVED_TOKENS} tokens", partial(_measure_cache_write, bench, MOVED_TOKENS // scale))
    yield GpuCase("cache_write 64 tokens", partial(_measure_cache_write, bench, 64))
    yield GpuCase(f"copy_blocks {MOVED_BLOCKS} blocks", partial(_measure_copy_blocks, bench, MOVED_BLOCKS // scale))
    for name in ("gather_blocks", "scatter_blocks"):
        yield GpuCase(
            f"{name} {STAGED_BLOCKS} blocks of {STAGED_LAYERS} layers",
            partial(_measure_staging, bench, name, STAGED_BLOCKS // scale),
        )


def _scale(bench: KernelBench) -> int:
    return _SMALLER_BY if bench.setting.dry_run else 1


def _attention_case(bench: KernelBench, name: str, rows: tuple[AttentionRow, ...], group: int) -> GpuCase:
    heads, kv_heads = GROUPS[group]
    shape = PagedAttentionShape(rows=rows, num_heads=heads, num_kv_heads=kv_heads, head_dim=HEAD_DIM)
    return GpuCase(name, partial(_measure_attention, bench, shape))


@torch.inference_mode()
def _measure_attention(bench: KernelBench, shape: PagedAttentionShape) -> dict[str, Any]:
    batch = make_batch(shape, block_size=BLOCK_SIZE, dtype=bench.setting.dtype, device=bench.setting.device)
    work = AttentionWork.of(bench.setting, shape, batch)
    peers, absent = find_peers(work)
    expected = batch.attend().clone()
    differences = {name: _difference(call(), expected) for name, call in peers.items()}
    routes: dict[str, Callable[[], object]] = {OURS: batch.attend, **peers}
    if work.key is not None:
        routes[GATHER] = gather_call(work)
    fields = measured_fields(
        bench.times(routes), bench.limits, shape.num_bytes(bench.setting.dtype.itemsize), shape.operations
    )
    return fields | {"differences": differences, "absent": absent}


def _difference(found: Tensor, expected: Tensor) -> float | None:
    """The largest, relative to the largest number there is; None for what is no number."""
    largest = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    return float(largest) if bool(largest.isfinite()) else None


def measured_fields(times: Mapping[str, TimeSpread], limits: Limits, num_bytes: int, operations: int) -> dict[str, Any]:
    """A row: each route's times, ours against the limits, and how many times as long the others take.

    `of_copy_bandwidth` and `of_matmul_peak` are the rates that our time makes of the counted bytes and operations,
    over the measured limits; `of_floor` is the larger of the two: the least possible time over ours.
    """
    ours = times[OURS].us
    seconds = ours / 1e6
    return {
        "us": ours,
        "bytes": num_bytes,
        "operations": operations,
        "of_copy_bandwidth": num_bytes / seconds / limits.bytes_per_second,
        "of_matmul_peak": operations / seconds / limits.operations_per_second,
        "of_floor": limits.seconds(num_bytes, operations) / seconds,
        "routes": dict(times),
        "slower": {name: spread.us / ours for name, spread in times.items() if name != OURS},
    }


def _caches(setting: GpuSetting, num_blocks: int) -> tuple[Tensor, Tensor]:
    shape = (num_blocks, GROUPS[4][1], BLOCK_SIZE, HEAD_DIM)
    key, value = (torch.randn(shape, device=setting.device).to(setting.dtype) for _ in range(2))
    return key, value


@torch.inference_mode()
def _measure_cache_write(bench: KernelBench, tokens: int) -> dict[str, Any]:
    """Beside torch's own indexed assignment."""
    setting, kv_heads = bench.setting, GROUPS[4][1]
    key_cache, value_cache = _caches(setting, 2 * -(-tokens // BLOCK_SIZE))
    key, value = torch.randn(2, tokens, kv_heads, HEAD_DIM, device=setting.device).to(setting.dtype).unbind()
    slots = torch.randperm(key_cache.shape[0] * BLOCK_SIZE, device=setting.device)[:tokens]
    blocks, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE

    def assign() -> None:
        key_cache[blocks, :, offsets] = key
        value_cache[blocks, :, offsets] = value

    routes = {OURS: lambda: cache_write(key, value, key_cache, value_cache, slots), INDEXING: assign}
    num_bytes = moved_bytes(tokens, kv_heads, HEAD_DIM, setting.dtype.itemsize)
    return measured_fields(bench.times(routes), bench.limits, num_bytes, 0)


@torch.inference_mode()
def _measure_copy_blocks(bench: KernelBench, blocks: int) -> dict[str, Any]:
    """Beside torch's own indexing."""
    key_cache, value_cache = _caches(bench.setting, 2 * blocks)
    pairs = torch.randperm(2 * blocks, device=bench.setting.device).view(2, blocks).t().contiguous()
    sources, targets = pairs.unbind(1)

    def index() -> None:
        key_cache[targets] = key_cache[sources]
        value_cache[targets] = value_cache[sources]

    routes = {OURS: lambda: copy_blocks(key_cache, value_cache, pairs), INDEXING: index}
    num_bytes = moved_bytes(blocks * BLOCK_SIZE, GROUPS[4][1], HEAD_DIM, bench.setting.dtype.itemsize)
    return measured_fields(bench.times(routes), bench.limits, num_bytes, 0)


@torch.inference_mode()
def _measure_staging(bench: KernelBench, name: str, blocks: int) -> dict[str, Any]:
    """Blocks of several layers into one buffer on the device, or back; beside torch's indexing, layer by layer."""
    caches = [_caches(bench.setting, 2 * blocks) for _ in range(STAGED_LAYERS)]
    keys, values = [key for key, _ in caches], [value for _, value in caches]
    chosen = torch.randperm(2 * blocks, device=bench.setting.device)[:blocks]
    staged = torch.stack([torch.stack((key[chosen], value[chosen])) for key, value in caches])

    def gather() -> None:
        for buffer, (key, value) in zip(staged, caches, strict=True):
            buffer[0] = key[chosen]
            buffer[1] = value[chosen]

    def scatter() -> None:
        for buffer, (key, value) in zip(staged, caches, strict=True):
            key[chosen] = buffer[0]
            value[chosen] = buffer[1]

    routes: dict[str, dict[str, Callable[[], object]]] = {
        "gather_blocks": {OURS: lambda: gather_blocks(staged, keys, values, chosen), INDEXING: gather},
        "scatter_blocks": {OURS: lambda: scatter_blocks(keys, values, staged, chosen), INDEXING: scatter},
    }
    tokens = STAGED_LAYERS * blocks * BLOCK_SIZE
    num_bytes = moved_bytes(tokens, GROUPS[4][1], HEAD_DIM, bench.setting.dtype.itemsize)
    return measured_fields(bench.times(routes[name]), bench.limits, num_bytes, 0)
