"""The kernels against the floor of the same run and against their peers, in turns."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanoserve.benchmarks.floors import Limits
from nanoserve.benchmarks.gpu.attention import AttentionRow, PagedAttentionShape, decode_rows, make_batch, moved_bytes
from nanoserve.benchmarks.gpu.peers import AttentionWork, find_peers
from nanoserve.benchmarks.gpu.running import GpuCase
from nanoserve.benchmarks.gpu.setting import GpuSetting
from nanoserve.benchmarks.gpu.timing import DeviceTimer, TimeSpread
from nanoserve.benchmarks.report import Report
from triton_ops import cache_write, copy_blocks, gather_blocks, scatter_blocks

OURS = "nanoserve"
GATHER = "gathering alone"
INDEXING = "torch indexing"
BLOCK_SIZE = 16
HEAD_DIM = 128
KV_HEADS = 8
GROUPS = {4: (32, KV_HEADS), 8: (32, 4)}
"""Query heads of one key-value head: how many heads of each kind there are."""
DECODES = ((64, 4096, 4), (64, 4096, 8), (1, 32768, 4), (1, 2048, 4), (16, 2048, 4))
"""Batch, context and group."""
PREFILLS = (8192, 2048)
MIXED = (*decode_rows(32, 2048), AttentionRow(512, 2048), AttentionRow(1024, 1024))
MOVED_TOKENS = 8192
MOVED_BLOCKS = 2048
STAGED_BLOCKS, STAGED_LAYERS = 256, 8
_SMALLER_BY = 64
"""Sizes are divided by this in a dry run."""


def attention_name(kind: str, size: str, group: int) -> str:
    """How a row of attention is called, here and where its target is looked up."""
    return f"{kind} {size}, GQA {group}, head_dim {HEAD_DIM}"


def part_cases(setting: GpuSetting, report: Report, stack: ExitStack) -> Iterator[GpuCase]:
    """Each kernel against the limits of the device."""
    return kernel_cases(DeviceTimer.on(setting, report))


def kernel_cases(timer: DeviceTimer) -> Iterator[GpuCase]:
    """The moves, then attention as in prompts, in decoding, and mixed.

    The moves take a moment. For each shape of prompts and of decoding torch recompiles a peer (flex_attention),
    which may use up the budget, so what has a target comes before what has none.
    """
    scale = _SMALLER_BY if timer.setting.dry_run else 1
    for name, make in _moves(scale).items():
        yield GpuCase(name, partial(_measure_move, timer, make))
    batches: dict[tuple[str, str, int], tuple[AttentionRow, ...]] = {}
    for length in PREFILLS:
        batches["prefill", str(length), 4] = (AttentionRow(length // scale, length // scale),)
    for batch, context, group in DECODES:
        batches["decode", f"{batch} x {context}", group] = decode_rows(max(1, batch // scale), context // scale)
    batches["mixed", "32 x 2048 + 512 of 2048 + 1024", 4] = tuple(
        AttentionRow(max(1, row.queries // scale), max(1, row.context // scale)) for row in MIXED
    )
    for (kind, size, group), rows in batches.items():
        heads, kv_heads = GROUPS[group]
        shape = PagedAttentionShape(rows=rows, num_heads=heads, num_kv_heads=kv_heads, head_dim=HEAD_DIM)
        yield GpuCase(attention_name(kind, size, group), partial(_measure_attention, timer, shape))


@torch.inference_mode()
def _measure_attention(timer: DeviceTimer, shape: PagedAttentionShape) -> dict[str, Any]:
    batch = make_batch(shape, block_size=BLOCK_SIZE, dtype=timer.setting.dtype, device=timer.setting.device)
    work = AttentionWork.of(shape, batch)
    peers, absent = find_peers(work)
    expected = batch.attend().clone()
    differences = {name: _difference(call(), expected) for name, call in peers.items()}
    routes: dict[str, Callable[[], object]] = {OURS: batch.attend, **peers}
    if work.gathered is not None:  # what torch's attention would have to be preceded by
        routes[GATHER] = partial(batch.gathered, shape.rows[0].context)
    fields = measured_fields(
        timer.times(routes), timer.limits, shape.num_bytes(timer.setting.dtype.itemsize), shape.operations
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


_Routes = Mapping[str, Callable[[], object]]
_Move = Callable[[GpuSetting], tuple[_Routes, int]]
"""Ours and torch's own indexing, and of how many tokens they move the keys and values."""


def _moves(scale: int) -> Mapping[str, _Move]:
    staged = f"{STAGED_BLOCKS} blocks of {STAGED_LAYERS} layers"
    return {
        f"cache_write {MOVED_TOKENS} tokens": partial(_cache_write_routes, MOVED_TOKENS // scale),
        "cache_write 64 tokens": partial(_cache_write_routes, 64),
        f"copy_blocks {MOVED_BLOCKS} blocks": partial(_copy_blocks_routes, MOVED_BLOCKS // scale),
        f"gather_blocks {staged}": partial(_staging_routes, STAGED_BLOCKS // scale, back=False),
        f"scatter_blocks {staged}": partial(_staging_routes, STAGED_BLOCKS // scale, back=True),
    }


@torch.inference_mode()
def _measure_move(timer: DeviceTimer, make: _Move) -> dict[str, Any]:
    routes, tokens = make(timer.setting)
    num_bytes = moved_bytes(tokens, KV_HEADS, HEAD_DIM, timer.setting.dtype.itemsize)
    return measured_fields(timer.times(routes), timer.limits, num_bytes, 0)


def _caches(setting: GpuSetting, num_blocks: int) -> tuple[Tensor, Tensor]:
    shape = (num_blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    key, value = (torch.randn(shape, device=setting.device).to(setting.dtype) for _ in range(2))
    return key, value


def _cache_write_routes(tokens: int, setting: GpuSetting) -> tuple[_Routes, int]:
    key_cache, value_cache = _caches(setting, 2 * -(-tokens // BLOCK_SIZE))
    key, value = torch.randn(2, tokens, KV_HEADS, HEAD_DIM, device=setting.device).to(setting.dtype).unbind()
    slots = torch.randperm(key_cache.shape[0] * BLOCK_SIZE, device=setting.device)[:tokens]
    blocks, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE

    def assign() -> None:
        key_cache[blocks, :, offsets] = key
        value_cache[blocks, :, offsets] = value

    return {OURS: lambda: cache_write(key, value, key_cache, value_cache, slots), INDEXING: assign}, tokens


def _copy_blocks_routes(blocks: int, setting: GpuSetting) -> tuple[_Routes, int]:
    key_cache, value_cache = _caches(setting, 2 * blocks)
    pairs = torch.randperm(2 * blocks, device=setting.device).view(2, blocks).t().contiguous()
    sources, targets = pairs.unbind(1)

    def index() -> None:
        key_cache[targets] = key_cache[sources]
        value_cache[targets] = value_cache[sources]

    return {OURS: lambda: copy_blocks(key_cache, value_cache, pairs), INDEXING: index}, blocks * BLOCK_SIZE


def _staging_routes(blocks: int, setting: GpuSetting, *, back: bool) -> tuple[_Routes, int]:
    """Blocks of several layers into one buffer on the device, or back; torch indexes layer by layer."""
    caches = [_caches(setting, 2 * blocks) for _ in range(STAGED_LAYERS)]
    keys, values = [key for key, _ in caches], [value for _, value in caches]
    chosen = torch.randperm(2 * blocks, device=setting.device)[:blocks]
    staged = torch.stack([torch.stack((key[chosen], value[chosen])) for key, value in caches])

    def index() -> None:
        for buffer, layer in zip(staged, caches, strict=True):
            for part, cache in zip(buffer, layer, strict=True):
                if back:
                    cache[chosen] = part
                else:
                    part[:] = cache[chosen]

    def ours() -> None:
        if back:
            scatter_blocks(keys, values, staged, chosen)
        else:
            gather_blocks(staged, keys, values, chosen)

    return {OURS: ours, INDEXING: index}, STAGED_LAYERS * blocks * BLOCK_SIZE
