"""Others that compute the same attention: what they are called with, or why they cannot be asked.

torch's attention knows no paged cache: it is given keys and values that lie gathered in one piece, and the gathering
is timed apart. That flatters it; FlashInfer reads the same paged cache as our kernels.
"""

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nanoserve.benchmarks.gpu.attention import AttentionCall
from nanoserve.benchmarks.gpu.running import CannotRun, reason

FLASHINFER_WORKSPACE = 256 * 2**20


def find_peers(batch: AttentionCall) -> tuple[dict[str, Callable[[], Tensor]], dict[str, str]]:
    """Those that gave a result once, each as a call that returns it as our operator does; and why others did not."""
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
        except Exception as error:  # a peer's failure is its own: torch says no kernel, a package misses its compiler
            absent[name] = reason(error)
        else:
            ready[name] = call
    return ready, absent


def _dense(batch: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """Query [rows, num_heads, queries, head_dim], and key and value [rows, num_kv_heads, context, head_dim]."""
    if batch.is_ragged:
        raise CannotRun("takes no rows of different lengths")
    query = batch.query.view(len(batch.rows), -1, *batch.query.shape[1:])
    return (query.transpose(1, 2).contiguous(), *batch.gathered())


def _flat(attended: Tensor) -> Tensor:
    """[rows, num_heads, queries, head_dim] as our operator gives it: [tokens, num_heads * head_dim]."""
    return attended.transpose(1, 2).flatten(2).flatten(0, 1)


def _sdpa(backend: SDPBackend, batch: AttentionCall) -> Callable[[], Tensor]:
    query, key, value = _dense(batch)
    if not query.is_cuda:
        backend = SDPBackend.MATH
    given = query
    settings: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
    if batch.is_decode:  # the heads of a key-value head as its queries: faster than repeating keys, and without a mask
        given, settings = query.view(len(query), key.shape[1], -1, query.shape[-1]), {}

    def attend() -> Tensor:
        with sdpa_kernel(backend):
            return _flat(scaled_dot_product_attention(given, key, value, **settings).reshape(query.shape))

    return attend


def _is_seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key <= query


def _flex(batch: AttentionCall) -> Callable[[], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query, key, value = _dense(batch)
    if not query.is_cuda:
        raise CannotRun("is compiled for GPUs only")
    sizes = (None, None, query.shape[2], key.shape[2])
    mask = None if batch.is_decode else create_block_mask(_is_seen, *sizes, device=str(query.device))
    attend: Any = torch.compile(flex_attention, dynamic=False)
    return lambda: _flat(attend(query, key, value, block_mask=mask, enable_gqa=True))


def _flashinfer(batch: AttentionCall) -> Callable[[], Tensor]:
    library = _import("flashinfer", batch)
    dtype, device = batch.query.dtype, batch.query.device
    _, num_kv_heads, block_size, head_dim = batch.key_cache.shape
    counts = [-(-row.context // block_size) for row in batch.rows]
    indices = torch.cat([batch.block_tables[row, :count] for row, count in enumerate(counts)])
    ends = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    last = (batch.context_lengths - 1) % block_size + 1
    workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device)
    heads = (batch.query.shape[1], num_kv_heads, head_dim, block_size)
    pages = (ends.to(device), indices, last)
    if batch.is_decode:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(*pages, *heads, q_data_type=dtype, kv_data_type=dtype)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(batch.query_starts, *pages, *heads, causal=True, q_data_type=dtype, kv_data_type=dtype)
    return lambda: wrapper.run(batch.query, (batch.key_cache, batch.value_cache)).flatten(1)


def _flash_attention(batch: AttentionCall) -> Callable[[], Tensor]:
    library = _import("flash_attn", batch)
    query, key, value = (one.transpose(1, 2).contiguous() for one in _dense(batch))
    if batch.is_decode:
        attend = partial(library.flash_attn_with_kvcache, query, key, value, cache_seqlens=batch.context_lengths)
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
