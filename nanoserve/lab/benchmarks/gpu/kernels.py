"""The kernels against the floor of the same run and against their peers, in turns.

torch's attention knows no paged cache: it is given keys and values in one piece, and gathering them
is timed apart. That flatters it; FlashInfer reads the same paged cache as our kernels.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nanoserve.lab.benchmarks.floors import Limits
from nanoserve.lab.benchmarks.gpu.attention import (
    AttentionCall,
    AttentionRow,
    decode_rows,
    make_batch,
)
from nanoserve.lab.benchmarks.gpu.cases import CannotRun, GpuCase, Row, reason
from nanoserve.lab.benchmarks.gpu.device import Call, GpuBench, TimeSpread
from nanoserve.models.dtypes import format_name
from triton_ops import (
    cache_write,
    copy_blocks,
    gather_blocks,
    pack,
    packed_linear,
    round_to_nearest,
    scatter_blocks,
)

OURS = "nanoserve"
BLOCK_SIZE = 16
HEAD_DIM = 128
KV_HEADS = 8
# query heads of one key-value head: how many heads of each kind there are
GROUPS = {4: (32, KV_HEADS), 8: (32, 4)}
_MIXED = decode_rows(32, 2048) + (AttentionRow(512, 2048), AttentionRow(1024, 1024))
BATCHES: Sequence[tuple[str, int, Sequence[AttentionRow]]] = (
    ("prefill 8192", 4, [AttentionRow(8192, 8192)]),
    ("prefill 2048", 4, [AttentionRow(2048, 2048)]),
    ("decode 64 x 4096", 4, decode_rows(64, 4096)),
    ("decode 64 x 4096", 8, decode_rows(64, 4096)),
    ("decode 1 x 32768", 4, decode_rows(1, 32768)),
    ("decode 1 x 2048", 4, decode_rows(1, 2048)),
    ("decode 16 x 2048", 4, decode_rows(16, 2048)),
    ("mixed 32 x 2048 + 512 of 2048 + 1024", 4, _MIXED),
)
"""Name, group and rows of each."""
STAGED_LAYERS = 8
PRODUCT = (14336, 4096)
"""Outputs and inputs of the matrices that are quantized: those of Llama-3.1-8B's widest layers."""
PRODUCT_ROWS = (1, 16, 2048)
_SMALLER_BY = 64  # sizes are divided by this in a dry run


def part_cases(bench: GpuBench, rows: list[Row]) -> Iterator[GpuCase]:
    """The moves, then attention as in prompts, in decoding, and mixed, then products with integers.
    The moves take a moment. For each shape of prompts and of decoding torch recompiles a peer
    (flex_attention), which may use up the budget, so what has a target comes before what has
    none."""
    scale = 1
    if bench.dry_run:
        scale = _SMALLER_BY
    staged = f"256 blocks of {STAGED_LAYERS} layers"
    yield GpuCase("cache_write 8192 tokens", partial(_measure_cache_write, bench, 8192 // scale))
    yield GpuCase("cache_write 64 tokens", partial(_measure_cache_write, bench, 64))
    yield GpuCase("copy_blocks 2048 blocks", partial(_measure_copy_blocks, bench, 2048 // scale))
    yield GpuCase(
        f"gather_blocks {staged}", partial(_measure_staging, bench, 256 // scale, back=False)
    )
    yield GpuCase(
        f"scatter_blocks {staged}", partial(_measure_staging, bench, 256 // scale, back=True)
    )
    for size, group, full in BATCHES:
        small = tuple(
            AttentionRow(max(1, row.queries // scale), max(1, row.context // scale)) for row in full
        )
        name = f"{size}, GQA {group}, head_dim {HEAD_DIM}"
        yield GpuCase(name, partial(_measure_attention, bench, small, *GROUPS[group]))
    for bits, some in product((4, 8), PRODUCT_ROWS):
        case = f"product int{bits}, {some} x {PRODUCT[1]} x {PRODUCT[0]}, groups of 128"
        yield GpuCase(
            case, partial(_measure_product, bench, bits, some, [size // scale for size in PRODUCT])
        )


@torch.inference_mode()
def _measure_attention(
    bench: GpuBench, rows: Sequence[AttentionRow], heads: int, kv_heads: int
) -> Row:
    sizes = (heads, kv_heads, HEAD_DIM)
    batch = make_batch(rows, *sizes, block_size=BLOCK_SIZE, dtype=bench.dtype, device=bench.device)
    peers, absent = find_peers(batch)
    expected = batch.attend().clone()
    differences = {name: _difference(call(), expected) for name, call in peers.items()}
    routes: dict[str, Call] = {OURS: batch.attend, **peers}
    if not batch.is_ragged:  # what torch's attention would have to be preceded by
        routes["gathering alone"] = batch.gathered
    fields = measured_fields(bench.times(routes), bench.limits, batch.num_bytes, batch.operations)
    return fields | {"differences": differences, "absent": absent}


def _difference(found: Tensor, expected: Tensor) -> float | None:
    """The largest, relative to the largest number there is; None for what is no number."""
    largest = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    return float(largest) if bool(largest.isfinite()) else None


def measured_fields(
    times: Mapping[str, TimeSpread], limits: Limits, num_bytes: int, operations: int
) -> Row:
    """A row: each route's times, ours against the limits, and how many times as long the others
    take. `of_copy_bandwidth` and `of_matmul_peak` are the rates that our time makes of the counted
    bytes and operations, over the measured limits; `of_floor` is the larger of the two: the least
    possible time over ours."""
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


def moved_fields(bench: GpuBench, tokens: int, ours: Call, indexing: Call) -> Row:
    """A row for the keys and values of ``tokens`` tokens, each read once and written once, against
    torch's indexing."""
    num_bytes = 2 * 2 * tokens * KV_HEADS * HEAD_DIM * bench.dtype.itemsize
    return measured_fields(
        bench.times({OURS: ours, "torch indexing": indexing}), bench.limits, num_bytes, 0
    )


def _caches(bench: GpuBench, num_blocks: int) -> tuple[Tensor, Tensor]:
    shape = (num_blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    key, value = (torch.randn(shape, device=bench.device).to(bench.dtype) for _ in range(2))
    return key, value


@torch.inference_mode()
def _measure_cache_write(bench: GpuBench, tokens: int) -> Row:
    keys, values = _caches(bench, 2 * -(-tokens // BLOCK_SIZE))
    key, value = (
        torch.randn(2, tokens, KV_HEADS, HEAD_DIM, device=bench.device).to(bench.dtype).unbind()
    )
    slots = torch.randperm(len(keys) * BLOCK_SIZE, device=bench.device)[:tokens]
    blocks, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE

    def index() -> None:
        keys[blocks, :, offsets] = key
        values[blocks, :, offsets] = value

    return moved_fields(bench, tokens, lambda: cache_write(key, value, keys, values, slots), index)


@torch.inference_mode()
def _measure_copy_blocks(bench: GpuBench, blocks: int) -> Row:
    keys, values = _caches(bench, 2 * blocks)
    pairs = torch.randperm(2 * blocks, device=bench.device).view(2, blocks).t().contiguous()
    sources, targets = pairs.unbind(1)

    def index() -> None:
        keys[targets] = keys[sources]
        values[targets] = values[sources]

    return moved_fields(bench, blocks * BLOCK_SIZE, lambda: copy_blocks(keys, values, pairs), index)


@torch.inference_mode()
def _measure_staging(bench: GpuBench, blocks: int, *, back: bool) -> Row:
    """Blocks of several layers into one buffer on the device, or back; torch indexes layer by
    layer."""
    layers = [_caches(bench, 2 * blocks) for _ in range(STAGED_LAYERS)]
    keys, values = [key for key, _ in layers], [value for _, value in layers]
    chosen = torch.randperm(2 * blocks, device=bench.device)[:blocks]
    staged = torch.stack([torch.stack((key[chosen], value[chosen])) for key, value in layers])

    def index() -> None:
        for buffer, layer in zip(staged, layers, strict=True):
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

    return moved_fields(bench, STAGED_LAYERS * blocks * BLOCK_SIZE, ours, index)


@torch.inference_mode()
def _measure_product(bench: GpuBench, bits: int, num_rows: int, sizes: Sequence[int]) -> Row:
    """Rows times integers in 4 or 8 bits, against torch's product with the same matrix in the rows'
    dtype."""
    outputs, columns = sizes
    weight = torch.randn(outputs, columns, device=bench.device)
    quantized = round_to_nearest(weight, bits, min(128, columns))
    packed, form = pack(quantized), quantized.format
    unpacked = quantized.dequantize().to(bench.dtype)
    rows = torch.randn(num_rows, columns, device=bench.device).to(bench.dtype)
    ours = partial(packed_linear, rows, packed, None, outputs, form)
    peer = partial(torch.nn.functional.linear, rows, unpacked)
    num_bytes = packed.nbytes + (rows.numel() + num_rows * outputs) * bench.dtype.itemsize
    name = f"torch, {format_name(bench.dtype)}"
    times = bench.times({OURS: ours, name: peer})
    fields = measured_fields(times, bench.limits, num_bytes, 2 * num_rows * outputs * columns)
    return fields | {"differences": {name: _difference(peer(), ours())}}


FLASHINFER_WORKSPACE = 256 * 2**20


def find_peers(batch: AttentionCall) -> tuple[dict[str, Callable[[], Tensor]], dict[str, str]]:
    """Try each peer once. Returns the working peers as calls that return the result as our operator
    does, and the reasons why other peers are absent."""
    ready: dict[str, Callable[[], Tensor]] = {}
    absent: dict[str, str] = {}
    for name, make in _MAKERS.items():
        try:
            call = make(batch)
            with torch.inference_mode():
                call()
            if batch.query.is_cuda:
                torch.cuda.synchronize(batch.query.device)
        except CannotRun as error:
            absent[name] = str(error)
        # a peer's failure is its own: torch says no kernel, a package misses its compiler
        except Exception as error:
            absent[name] = reason(error)
        else:
            ready[name] = call
    return ready, absent


def _dense(batch: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """Query [rows, num_heads, queries, head_dim], and key and value [rows, num_kv_heads, context,
    head_dim]."""
    if batch.is_ragged:
        raise CannotRun("takes no rows of different lengths")
    key, value = batch.gathered()
    _, num_heads, head_dim = batch.query.shape
    query = batch.query.view(len(batch.rows), -1, num_heads, head_dim)
    return query.transpose(1, 2).contiguous(), key, value


def _flat(attended: Tensor) -> Tensor:
    """[rows, num_heads, queries, head_dim] as our operator gives it: [tokens, num_heads *
    head_dim]."""
    return attended.transpose(1, 2).flatten(2).flatten(0, 1)


def _sdpa(backend: SDPBackend, batch: AttentionCall) -> Callable[[], Tensor]:
    query, key, value = _dense(batch)
    if not query.is_cuda:
        backend = SDPBackend.MATH
    given = query
    settings: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
    # the heads of a key-value head as its queries: faster than repeating keys, and without a mask
    if batch.is_decode:
        given, settings = query.view(len(query), key.shape[1], -1, query.shape[-1]), {}

    def attend() -> Tensor:
        with sdpa_kernel(backend):
            return _flat(
                scaled_dot_product_attention(given, key, value, **settings).reshape(query.shape)
            )

    return attend


def _flex(batch: AttentionCall) -> Callable[[], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query, key, value = _dense(batch)
    if not query.is_cuda:
        raise CannotRun("is compiled for GPUs only")
    mask = None
    if not batch.is_decode:
        device = str(query.device)
        mask = create_block_mask(
            lambda _b, _h, q, k: k <= q, None, None, query.shape[2], key.shape[2], device=device
        )
    attend: Any = torch.compile(flex_attention, dynamic=False)
    return lambda: _flat(attend(query, key, value, block_mask=mask, enable_gqa=True))


def _flashinfer(batch: AttentionCall) -> Callable[[], Tensor]:
    library = _import("flashinfer", batch)
    dtype, device = batch.query.dtype, batch.query.device
    _, num_kv_heads, block_size, head_dim = batch.key_cache.shape
    counts = [-(-row.context // block_size) for row in batch.rows]
    indices = torch.cat([batch.block_tables[row, :count] for row, count in enumerate(counts)])
    ends = torch.tensor([0] + counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    last = (batch.context_lengths - 1) % block_size + 1
    workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device)
    heads = (batch.query.shape[1], num_kv_heads, head_dim, block_size)
    pages = (ends.to(device), indices, last)
    if batch.is_decode:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "HND", use_tensor_cores=True
        )
        wrapper.plan(*pages, *heads, q_data_type=dtype, kv_data_type=dtype)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(
            batch.query_starts, *pages, *heads, causal=True, q_data_type=dtype, kv_data_type=dtype
        )
    return lambda: wrapper.run(batch.query, (batch.key_cache, batch.value_cache)).flatten(1)


def _flash_attention(batch: AttentionCall) -> Callable[[], Tensor]:
    library = _import("flash_attn", batch)
    query, key, value = (one.transpose(1, 2).contiguous() for one in _dense(batch))
    if batch.is_decode:
        attend = partial(
            library.flash_attn_with_kvcache, query, key, value, cache_seqlens=batch.context_lengths
        )
    else:
        attend = partial(library.flash_attn_func, query, key, value, causal=True)
    return lambda: attend().flatten(2).flatten(0, 1)


def _import(name: str, batch: AttentionCall) -> Any:
    if not batch.query.is_cuda:
        raise CannotRun("needs a GPU")
    try:
        return import_module(name)
    except ImportError as error:
        raise CannotRun(f"is not importable ({error})") from error


_MAKERS: Mapping[str, Callable[[AttentionCall], Callable[[], Tensor]]] = {
    "SDPA flash": partial(_sdpa, SDPBackend.FLASH_ATTENTION),
    "SDPA cuDNN": partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
    "flex_attention": _flex,
    "FlashInfer": _flashinfer,
    "flash-attn": _flash_attention,
}
