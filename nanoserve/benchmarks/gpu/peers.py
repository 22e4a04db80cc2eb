"""Others that compute the same attention: what they are called with, or why they cannot be asked.

torch's attention knows no paged cache: it is given keys and values that lie gathered in one piece, and the gathering
is timed apart. That flatters it; FlashInfer reads the same paged cache as our kernels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nanoserve.benchmarks.gpu.attention import AttentionCall, PagedAttentionShape
from nanoserve.benchmarks.gpu.running import CannotRun, reason

FLASHINFER_WORKSPACE = 256 * 2**20


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """One case of attention, paged and, where all rows are alike, also gathered."""

    shape: PagedAttentionShape
    batch: AttentionCall
    gathered: tuple[Tensor, Tensor, Tensor] | None
    """[rows, num_heads, queries, head_dim], and twice [rows, num_kv_heads, context, head_dim]; None for ragged rows."""

    @classmethod
    def of(cls, shape: PagedAttentionShape, batch: AttentionCall) -> "AttentionWork":
        if len(set(shape.rows)) > 1:
            return cls(shape, batch, None)
        query = batch.query.view(len(shape.rows), shape.rows[0].queries, shape.num_heads, shape.head_dim)
        return cls(shape, batch, (query.transpose(1, 2).contiguous(), *batch.gathered(shape.rows[0].context)))

    @property
    def device(self) -> torch.device:
        return self.batch.query.device

    @property
    def is_decode(self) -> bool:
        return self.shape.tokens == len(self.shape.rows)

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value.

        Raises:
            CannotRun: for ragged rows.
        """
        if self.gathered is None:
            raise CannotRun("takes no rows of different lengths")
        return self.gathered

    def flat(self, attended: Tensor) -> Tensor:
        """[rows, num_heads, queries, head_dim] as our operator gives it: [tokens, num_heads * head_dim]."""
        return attended.transpose(1, 2).reshape(self.shape.tokens, -1)


def find_peers(work: AttentionWork) -> tuple[dict[str, Callable[[], Tensor]], dict[str, str]]:
    """Those that gave a result once, each as a call that returns it as our operator does; and why others did not."""
    ready: dict[str, Callable[[], Tensor]] = {}
    absent: dict[str, str] = {}
    for name, make in _MAKERS.items():
        try:
            call = make(work)
            with torch.inference_mode():
                call()
            if work.device.type == "cuda":
                torch.cuda.synchronize(work.device)
        except CannotRun as error:
            absent[name] = str(error)
        except Exception as error:  # a peer's failure is its own: torch says no kernel, a package misses its compiler
            absent[name] = reason(error)
        else:
            ready[name] = call
    return ready, absent


def _sdpa(backend: SDPBackend, work: AttentionWork) -> Callable[[], Tensor]:
    query, key, value = work.dense()
    if work.device.type != "cuda":
        backend = SDPBackend.MATH
    given = query
    settings: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
    if work.is_decode:  # the heads of a key-value head as its queries: faster than repeating keys, and without a mask
        given, settings = query.view(len(query), key.shape[1], -1, query.shape[-1]), {}
    elif query.shape[2] != key.shape[2]:
        raise CannotRun("has no causal mask for the end of a sequence")

    def attend() -> Tensor:
        with sdpa_kernel(backend):
            return work.flat(scaled_dot_product_attention(given, key, value, **settings).reshape(query.shape))

    return attend


def _flex(work: AttentionWork) -> Callable[[], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query, key, value = work.dense()
    if work.device.type != "cuda":
        raise CannotRun("is compiled for GPUs only")
    mask = None
    if not work.is_decode:
        length, context = query.shape[2], key.shape[2]

        def is_seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return key <= query + context - length

        mask = create_block_mask(is_seen, None, None, length, context, device=str(work.device))
    attend: Any = torch.compile(flex_attention, dynamic=False)
    return lambda: work.flat(attend(query, key, value, block_mask=mask, enable_gqa=True))


def _flashinfer(work: AttentionWork) -> Callable[[], Tensor]:
    library = _import("flashinfer", work)
    batch, shape = work.batch, work.shape
    block_size = batch.key_cache.shape[2]
    contexts = [row.context for row in shape.rows]
    counts = [-(-context // block_size) for context in contexts]
    indices = torch.cat([batch.block_tables[row, :count] for row, count in enumerate(counts)])
    ends = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    last = torch.tensor([(context - 1) % block_size + 1 for context in contexts], dtype=torch.int32)
    device = work.device
    workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device)
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, block_size)
    pages = (ends.to(device), indices, last.to(device))
    dtype = batch.query.dtype
    if work.is_decode:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(*pages, *heads, q_data_type=dtype, kv_data_type=dtype)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(batch.query_starts, *pages, *heads, causal=True, q_data_type=dtype, kv_data_type=dtype)
    return lambda: wrapper.run(batch.query, (batch.key_cache, batch.value_cache)).flatten(1)


def _flash_attention(work: AttentionWork) -> Callable[[], Tensor]:
    library = _import("flash_attn", work)
    query, key, value = (one.transpose(1, 2).contiguous() for one in work.dense())
    if work.is_decode:
        lengths = work.batch.context_lengths
        return lambda: (
            library.flash_attn_with_kvcache(query, key, value, cache_seqlens=lengths).flatten(2).flatten(0, 1)
        )
    return lambda: library.flash_attn_func(query, key, value, causal=True).flatten(2).flatten(0, 1)


def _import(name: str, work: AttentionWork) -> Any:
    if work.device.type != "cuda":
        raise CannotRun("needs a GPU")
    try:
        return import_module(name)
    except ImportError as error:
        raise CannotRun(f"is not importable ({error})") from error


_MAKERS: Mapping[str, Callable[[AttentionWork], Callable[[], Tensor]]] = {
    "SDPA flash": partial(_sdpa, SDPBackend.FLASH_ATTENTION),
    "SDPA cuDNN": partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
    "flex_attention": _flex,
    "FlashInfer": _flashinfer,
    "flash-attn": _flash_attention,
}
