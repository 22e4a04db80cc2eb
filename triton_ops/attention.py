"""Attention of new tokens over everything their sequences have in the paged cache."""

import torch
from torch import Tensor
from torch.nn import functional

from triton_ops.registration import OPERATORS


@OPERATORS.define(writes=("out",))
def paged_attention(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    *,
    scale: float,
    sliding_window: int,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    spans: Tensor | None = None,
) -> None:
    """Attention for R rows of tokens, whatever their number per row (prefill, chunk or decode);
    fills `out`. It is causal unless `spans` says otherwise.

    out: [T, num_heads * value_dim]; query: [T, num_heads, head_dim];
    key_cache: [num_blocks, num_kv_heads, block_size, head_dim], the new tokens already written;
    value_cache: [num_blocks, num_kv_heads, block_size, value_dim], which may be a view of the keys'
    first columns (multi-head latent attention, arXiv 2405.04434); block_tables: int32 [R,
    max_blocks], the row's blocks in order, anything behind its last block; query_starts: int32 [R +
    1], row r's queries are query_starts[r] to query_starts[r + 1]; context_lengths: int32 [R], the
    row's tokens in the cache, its queries (the last of them) included; scale: what the products of
    queries and keys are multiplied by; sliding_window: positions a query sees, itself included; 0
    means all; soft_cap: scores become soft_cap * tanh(score / soft_cap) (Gemma 2, arXiv
    2408.00118); 0 leaves them; sinks: float32 [num_heads], one more score of each head that takes
    weight and has no value (gpt-oss, arXiv 2508.10925); spans: int32 [R, 2], for each row a length
    and a position. Positions are divided into spans of this length, and one of them begins at this
    position. A query sees to the end of its span, as far as the context goes (block-causal
    attention, arXiv 2503.09573), and the window counts back from the first position of the span.
    Spans of length 1 are causal. Slots that no row uses are never read into a result, whatever they
    hold.
    """
    # Rows of one token (decode) are attended together, padded by less than a factor of two; other
    # rows one by one.
    starts, contexts = query_starts.tolist(), context_lengths.tolist()
    spans_of_rows = [(1, 0)] * len(contexts)
    if spans is not None:
        spans_of_rows = spans.tolist()
    first_seen = []  # by the first query of each row
    block_size = key_cache.shape[2]
    decode_rows: dict[int, list[int]] = {}
    for row, (context, span) in enumerate(zip(contexts, spans_of_rows, strict=True)):
        length = starts[row + 1] - starts[row]
        first = _first_seen(context - length, sliding_window, span)
        first_seen.append(first)
        if length == 1:
            blocks = _padded_blocks(first, context, block_size)
            decode_rows.setdefault(blocks, []).append(row)
        elif length > 1:
            _prefill_attention(
                out[starts[row] : starts[row + 1]],
                query[starts[row] : starts[row + 1]],
                *_gather_row(key_cache, value_cache, block_tables[row], first, context),
                first,
                sliding_window,
                span,
                scale=scale,
                soft_cap=soft_cap,
                sinks=sinks,
            )
    for blocks, rows in decode_rows.items():
        chosen = torch.tensor(rows, device=query.device)
        tokens = query_starts[chosen].long()
        out[tokens] = _decode_attention(
            query[tokens],
            key_cache,
            value_cache,
            block_tables[chosen].long(),
            torch.tensor([first_seen[row] for row in rows], device=query.device),
            context_lengths[chosen].long(),
            blocks,
            scale=scale,
            soft_cap=soft_cap,
            sinks=sinks,
        )


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor | None,
    *,
    scale: float,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """query [B, H, L, head_dim], key [B, num_kv_heads, S, head_dim], value [B, num_kv_heads, S,
    value_dim] -> [B, H, L, value_dim]. `seen` says which keys a query sees, bool, broadcast to [B,
    H, L, S]; None: causal, S = L. `sinks` is broadcast to [B, H, L]. The rest is as in
    `paged_attention`."""
    group = query.shape[1] // key.shape[1]
    if not soft_cap and sinks is None:
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=seen,
            is_causal=seen is None,
            scale=scale,
            enable_gqa=group > 1,
        )
    key, value = (heads.float().repeat_interleave(group, dim=1) for heads in (key, value))
    scores = query.float() @ key.mT * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if seen is None:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(scores.shape[:-1])[..., None]), dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).to(query.dtype)


def _first_seen(position: int, sliding_window: int, span: tuple[int, int]) -> int:
    """The first position that a query at `position` sees. `span`: a length, and where one
    begins."""
    if sliding_window == 0:
        return 0
    length, begin = span
    start_of_span = position - (position - begin) % length
    return max(0, start_of_span + 1 - sliding_window)


def _padded_blocks(first_seen: int, context: int, block_size: int) -> int:
    """How many blocks a decode row's query looks at, rounded up to a power of two: rows of one
    number share a batch."""
    blocks = (context - 1) // block_size - first_seen // block_size + 1
    return 1 << (blocks - 1).bit_length()


def _decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    first_seen: Tensor,
    context_lengths: Tensor,
    blocks: int,
    *,
    scale: float,
    soft_cap: float,
    sinks: Tensor | None,
) -> Tensor:
    """query [B, num_heads, head_dim], one per row -> [B, num_heads * value_dim], over `blocks`
    blocks of each row, from that of position `first_seen`, int64 [B].

    The query heads of a key-value head are treated as its queries: one batched product with no
    repeated keys.
    """
    batch, num_heads, head_dim = query.shape
    _, num_kv_heads, block_size, _ = key_cache.shape
    first_block = first_seen // block_size
    columns = first_block[:, None] + torch.arange(blocks, device=query.device)
    table = block_tables.gather(1, columns.clamp(max=block_tables.shape[1] - 1))
    last_block = (context_lengths - 1) // block_size
    # Columns behind the row's last block may hold anything; any block of the row does in their
    # place, masked below.
    table = torch.where(
        columns <= last_block[:, None], table, block_tables.gather(1, last_block[:, None])
    )
    position = first_block[:, None] * block_size + torch.arange(
        blocks * block_size, device=query.device
    )
    seen = (position >= first_seen[:, None]) & (position < context_lengths[:, None])
    seen = seen[:, None, :, None]
    # A masked NaN would still be NaN after the product with a zero weight, so what is not seen is
    # cleared.
    key = _gather_rows(key_cache, table).masked_fill_(~seen, 0.0)
    value = _gather_rows(value_cache, table).masked_fill_(~seen, 0.0)
    attended = dense_attention(
        query.reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_dim),
        key,
        value,
        seen.transpose(2, 3),
        scale=scale,
        soft_cap=soft_cap,
        sinks=None if sinks is None else sinks.view(num_kv_heads, -1),
    )
    return attended.reshape(batch, -1)


def _gather_rows(cache: Tensor, table: Tensor) -> Tensor:
    """The blocks of table [B, blocks] -> [B, num_kv_heads, blocks * block_size, head_dim], a fresh
    copy."""
    batch, blocks = table.shape
    _, num_kv_heads, block_size, head_dim = cache.shape
    return cache[table].transpose(1, 2).reshape(batch, num_kv_heads, blocks * block_size, head_dim)


def _gather_row(
    key_cache: Tensor, value_cache: Tensor, block_table: Tensor, first: int, context: int
) -> tuple[Tensor, Tensor]:
    """One row's keys and values, exactly from the `first` position that it sees to the end of its
    context, L of them: [num_kv_heads, L, head_dim] and [..., value_dim]. Blocks before may hold
    anything."""
    size = key_cache.shape[2]
    table = block_table[None, first // size : (context - 1) // size + 1].long()
    key, value = _gather_rows(key_cache, table)[0], _gather_rows(value_cache, table)[0]
    places = slice(first % size, first % size + context - first)
    return key[:, places], value[:, places]


def _prefill_attention(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: int,
    sliding_window: int,
    span: tuple[int, int],
    *,
    scale: float,
    soft_cap: float,
    sinks: Tensor | None,
) -> None:
    """query [L, num_heads, head_dim], the last L of the row's tokens; key, value [num_kv_heads, S,
    ...], from the `first` position that the first query sees. `span` is as in `_first_seen`."""
    length, context = query.shape[0], key.shape[1]
    span_length, begin = span
    mask = None
    if context > length or 0 < sliding_window < context or span_length > 1:
        key_position = torch.arange(first, first + context, device=query.device)
        query_position = key_position[context - length :, None]
        start_of_span = query_position - (query_position - begin) % span_length
        mask = key_position < start_of_span + span_length
        if sliding_window:
            mask &= start_of_span - key_position < sliding_window
    attended = dense_attention(
        query.transpose(0, 1)[None],
        key[None],
        value[None],
        mask,
        scale=scale,
        soft_cap=soft_cap,
        sinks=None if sinks is None else sinks[:, None],
    )
    out.copy_(attended[0].transpose(0, 1).reshape(length, -1))
