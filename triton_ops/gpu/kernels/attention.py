"""Attention of new tokens over the paged cache: one program for rows of a single token, one for
longer rows.

Both walk over a row's keys in tiles with the online softmax (Milakov and Gimelshein 2018, "Online
normalizer calculation for softmax"; Dao et al. 2022, "FlashAttention", algorithm 1), in float32 and
in powers of two. Both put query heads that share a key-value head (a group) into the rows of one
tile, so that a tile of keys is read once for all of them; where more heads share it than a tile
takes, they are GROUPS groups. Single tokens read far more than they compute: their keys are split
over programs, whose results a third program weighs and adds up ("Flash-Decoding", Dao et al. 2023).
Longer rows compute far more than they read: their tiles are tall enough for the matrix units, and
keys that every query of a tile sees are attended without masks.

Least times: of single tokens, the bytes of the keys and values they see over the bandwidth of
memory; of longer rows, 4 * num_heads * head_dim operations for each pair of a query and a key it
sees, over the peak of matrix products.

Tensors are those of `triton_ops.paged_attention`, strides count elements, every last dimension is
contiguous, and keys and values have the same strides. HEAD_DIM is the values' width; one that is no
power of two is padded to one with masks. Keys are as wide, or wider by TAIL_DIM: then the values
are the keys' first columns, and read once. Tiles of keys are whole blocks. Without CAPPED, `scale`
brings a product of query and key to powers of two, and `soft_cap` is not read. With it, a score in
powers of two is soft_cap * tanh(x), and `scale` makes 2 ** (product * scale) = exp(2x). Sinks are
read where HAS_SINKS says so. `spans` is None where attention is causal: these programs have no such
parameter.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_keys_or_values(
    cache,
    offsets,
    used,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """A tile [keys, PADDED_HEAD_DIM]; zero where a key is not used, whatever its slot holds."""
    dims = tl.arange(0, PADDED_HEAD_DIM)[None, :] < HEAD_DIM
    if MASKED:
        if PADDED_HEAD_DIM > HEAD_DIM:
            return tl.load(cache + offsets, mask=used[:, None] & dims, other=0.0)
        return tl.load(cache + offsets, mask=used[:, None], other=0.0)
    if PADDED_HEAD_DIM > HEAD_DIM:
        return tl.load(cache + offsets, mask=dims, other=0.0)
    return tl.load(cache + offsets)


@triton.jit
def _load_blocks(table, keys, end, BLOCK_SIZE: tl.constexpr):
    """The block of every key. Behind the last key the table may hold anything: block 0 stands in
    its place."""
    return tl.load(table + keys // BLOCK_SIZE, mask=keys < end, other=0)


@triton.jit
def _attend(
    state,
    query,
    cache,
    sight,
    tiles_begin,
    tiles_end,
    scale,
    soft_cap,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    KEYS_PER_TILE: tl.constexpr,
    SLIDES: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend `query`, [rows, PADDED_HEAD_DIM] and [rows, TAIL_DIM], over the tiles of keys from
    `tiles_begin` to `tiles_end`.

    `state` is what the tiles before have come to: the weighted values [rows, PADDED_HEAD_DIM], the
    highest score and the sum of weights [rows], and the blocks of the first tile's keys, which are
    always read one tile ahead so that no address waits for them. `cache` says where keys, values
    and the row's block table are, and the strides by block and by token; `sight` from which
    positions the queries' windows count back, and the last positions that they see, [rows] both,
    which keys any of them uses (begin and end), and the window. Without MASKED every query sees
    every key of the tiles.
    """
    accumulated, highest, total, blocks = state
    key_cache, value_cache, table, block_stride, token_stride = cache
    starts, lasts, used_begin, used_end, sliding_window = sight
    query_head, query_tail = query
    padded_head_dim: tl.constexpr = query_head.shape[1]
    in_tile = tl.arange(0, KEYS_PER_TILE)
    in_block = (in_tile % BLOCK_SIZE)[:, None] * token_stride + tl.arange(0, padded_head_dim)[
        None, :
    ]
    tail_in_block = (in_tile % BLOCK_SIZE)[:, None] * token_stride + HEAD_DIM
    factor = 1.0 if CAPPED else scale
    for begin in tl.range(tiles_begin, tiles_end, KEYS_PER_TILE):
        keys = begin + in_tile
        next_blocks = _load_blocks(table, keys + KEYS_PER_TILE, used_end, BLOCK_SIZE)
        offsets = blocks.to(tl.int64)[:, None] * block_stride + in_block
        used = (keys >= used_begin) & (keys < used_end)
        key = _load_keys_or_values(key_cache, offsets, used, HEAD_DIM, padded_head_dim, MASKED)
        scores = tl.dot(query_head, tl.trans(key), input_precision="ieee")
        if TAIL_DIM:
            tail_offsets = blocks.to(tl.int64)[:, None] * block_stride + tail_in_block
            tail_offsets += tl.arange(0, TAIL_DIM)[None, :]
            key_tail = _load_keys_or_values(
                key_cache, tail_offsets, used, TAIL_DIM, TAIL_DIM, MASKED
            )
            scores = tl.dot(query_tail, tl.trans(key_tail), scores, input_precision="ieee")
        if CAPPED:
            scores = soft_cap - 2.0 * soft_cap / (tl.exp2(scores * scale) + 1.0)
        if MASKED:
            seen = keys[None, :] <= lasts[:, None]
            if SLIDES:
                seen &= keys[None, :] > starts[:, None] - sliding_window
            scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * factor)
        # A row that has seen no key yet has no highest score: any finite number keeps its weights
        # at zero.
        reference = (
            tl.where(new_highest == float("-inf"), 0.0, new_highest) if MASKED else new_highest
        )
        weights = tl.exp2(scores * factor - reference[:, None])
        kept = tl.exp2(highest - reference)
        total = total * kept + tl.sum(weights, 1)
        value = key
        if not TAIL_DIM:
            value = _load_keys_or_values(
                value_cache, offsets, used, HEAD_DIM, padded_head_dim, MASKED
            )
        accumulated = tl.dot(
            weights.to(value.dtype), value, accumulated * kept[:, None], input_precision="ieee"
        )
        highest, blocks = new_highest, next_blocks
    return accumulated, highest, total, blocks


@triton.jit
def _first_state(
    table,
    begin,
    end,
    sinks,
    has_sink,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    KEYS_PER_TILE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Nothing attended yet but the sinks, pointers [ROWS], of the rows that have one; the tiles
    will begin at key `begin`, and the last key used is the one before `end`."""
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    if HAS_SINKS:
        highest = tl.load(sinks, mask=has_sink, other=float("-inf")) * LOG2_E
    return (
        tl.zeros([ROWS, PADDED_HEAD_DIM], tl.float32),
        highest,
        tl.where(highest > float("-inf"), 1.0, 0.0),
        _load_blocks(table, begin + tl.arange(0, KEYS_PER_TILE), end, BLOCK_SIZE),
    )


@triton.jit
def _load_query(
    rows, used, HEAD_DIM: tl.constexpr, PADDED_HEAD_DIM: tl.constexpr, TAIL_DIM: tl.constexpr
):
    """Load the query heads that begin at `rows` [rows, 1]: columns that meet the keys' first ones,
    and the others."""
    dims = tl.arange(0, PADDED_HEAD_DIM)[None, :]
    head = tl.load(rows + dims, mask=used[:, None] & (dims < HEAD_DIM), other=0.0)
    tail = head
    if TAIL_DIM:
        tail = tl.load(
            rows + HEAD_DIM + tl.arange(0, TAIL_DIM)[None, :], mask=used[:, None], other=0.0
        )
    return head, tail


@triton.jit
def _start_of_span(position, length, begin):
    """The first position of the span that a position lies in. Spans are of one length, and one of
    them begins at `begin`."""
    distance = (position - begin) % length  # as negative as position - begin
    return position - tl.where(distance < 0, distance + length, distance)


@triton.jit
def _weight_or_one(total):
    """Return each row's divisor: a row that saw no keys, as a captured graph's padding may, has
    zeros to divide."""
    return tl.where(total > 0, total, 1.0)


@triton.jit(
    do_not_specialize=["sliding_window", "table_stride"],
    do_not_specialize_on_alignment=[
        "block_tables",
        "query_starts",
        "context_lengths",
        "sinks",
        "spans",
    ],
)
def decode_attention(
    out,
    split_results,
    split_weights,
    query,
    key_cache,
    value_cache,
    block_tables,
    query_starts,
    context_lengths,
    sinks,
    spans,
    scale,
    soft_cap,
    sliding_window,
    out_stride,
    query_token_stride,
    query_head_stride,
    block_stride,
    kv_head_stride,
    token_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    KEYS_PER_TILE: tl.constexpr,
    KEYS_PER_SPLIT: tl.constexpr,
    SLIDES: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Rows with one query: its heads of one group over a share of its keys. Grid: (groups, splits,
    rows).

    With SPLITS fills split_results [rows, num_heads, splits, HEAD_DIM] (not where a split has no
    keys) and split_weights [rows, num_heads, splits], the logarithm of what each weighs; else fills
    `out`. A row's keys are shared out evenly, but no split has fewer than KEYS_PER_SPLIT, a
    multiple of KEYS_PER_TILE, unless it is the last.
    """
    group, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(1)
    token = tl.load(query_starts + row)
    context = tl.load(context_lengths + row)
    if tl.load(query_starts + row + 1) - token != 1:
        return
    start = context - 1  # from which the window counts back
    if spans is not None:
        start = _start_of_span(start, tl.load(spans + 2 * row), tl.load(spans + 2 * row + 1))
    first_seen = tl.maximum(start + 1 - sliding_window, 0) if SLIDES else 0
    first_key = first_seen // BLOCK_SIZE * BLOCK_SIZE
    tiles_per_split = tl.cdiv(tl.cdiv(context - first_key, num_splits), KEYS_PER_TILE)
    share = tl.maximum(tiles_per_split * KEYS_PER_TILE, KEYS_PER_SPLIT)
    begin = first_key + split * share
    end = tl.minimum(begin + share, context)

    in_group = tl.arange(0, TILE_ROWS)
    dims = tl.arange(0, PADDED_HEAD_DIM)
    heads = group * GROUP + in_group
    results = (
        row.to(tl.int64) * tl.num_programs(0) * GROUP * num_splits + heads * num_splits + split
    )
    real = (in_group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    query_rows = (
        query + token.to(tl.int64) * query_token_stride + heads[:, None] * query_head_stride
    )
    table = block_tables + row.to(tl.int64) * table_stride
    of_head = group // GROUPS * kv_head_stride
    has_sink = (in_group < GROUP) & (split == 0) & (begin < end)  # a sink counts once
    accumulated, highest, total, _ = _attend(
        _first_state(
            table,
            begin,
            end,
            sinks + heads,
            has_sink,
            BLOCK_SIZE,
            TILE_ROWS,
            PADDED_HEAD_DIM,
            KEYS_PER_TILE,
            HAS_SINKS,
        ),
        _load_query(query_rows, in_group < GROUP, HEAD_DIM, PADDED_HEAD_DIM, TAIL_DIM),
        (key_cache + of_head, value_cache + of_head, table, block_stride, token_stride),
        (
            tl.full([TILE_ROWS], start, tl.int32),
            tl.full([TILE_ROWS], context - 1, tl.int32),
            first_seen,
            end,
            sliding_window,
        ),
        begin,
        end,
        scale,
        soft_cap,
        BLOCK_SIZE,
        HEAD_DIM,
        TAIL_DIM,
        KEYS_PER_TILE,
        SLIDES,
        CAPPED,
        True,
    )
    total = _weight_or_one(total)
    attended = accumulated / total[:, None]
    if SPLITS:
        tl.store(
            split_results + results[:, None] * HEAD_DIM + dims[None, :],
            attended,
            mask=real & (begin < end),
        )
        tl.store(split_weights + results, highest + tl.log2(total), mask=in_group < GROUP)
    else:
        out_offsets = token.to(tl.int64) * out_stride + heads[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out + out_offsets, attended.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["query_starts"])
def reduce_splits(
    out,
    split_results,
    split_weights,
    query_starts,
    num_splits,
    out_stride,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
):
    """Reduce the splits that decode_attention left: weigh them and add them up into `out`. Grid:
    (num_heads, rows)."""
    head, row = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_starts + row)
    if tl.load(query_starts + row + 1) - token != 1:
        return
    splits = tl.arange(0, PADDED_SPLITS)
    dims = tl.arange(0, PADDED_HEAD_DIM)
    results = (row.to(tl.int64) * tl.num_programs(0) + head) * num_splits + splits
    logarithms = tl.load(split_weights + results, mask=splits < num_splits, other=float("-inf"))
    has_keys = logarithms > float("-inf")
    highest = tl.max(logarithms, 0)
    weights = tl.exp2(logarithms - tl.where(highest > float("-inf"), highest, 0.0))
    total = tl.sum(weights, 0)
    partial = tl.load(
        split_results + results[:, None] * HEAD_DIM + dims[None, :],
        mask=has_keys[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    attended = tl.sum(partial * weights[:, None], 0) / _weight_or_one(total)
    out_offsets = token.to(tl.int64) * out_stride + head * HEAD_DIM + dims
    tl.store(out + out_offsets, attended.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit
def _row_of_tile(query_starts, num_rows, tile, QUERIES_PER_TILE: tl.constexpr, STEP: tl.constexpr):
    """The row that tile belongs to, if row r's tiles begin at query_starts[r] // QUERIES_PER_TILE +
    r.

    Every row then has room for its tiles, and at most one to spare: so the host need not know the
    rows' lengths.
    """
    begun = 0
    for first in range(0, num_rows, STEP):
        rows = first + tl.arange(0, STEP)
        starts = tl.load(query_starts + rows, mask=rows < num_rows, other=0)
        begun += tl.sum(
            ((starts // QUERIES_PER_TILE + rows <= tile) & (rows < num_rows)).to(tl.int32), 0
        )
    return begun - 1


@triton.jit(
    do_not_specialize=["num_rows", "num_groups", "sliding_window", "table_stride"],
    do_not_specialize_on_alignment=[
        "block_tables",
        "query_starts",
        "context_lengths",
        "sinks",
        "spans",
    ],
)
def prefill_attention(
    out,
    query,
    key_cache,
    value_cache,
    block_tables,
    query_starts,
    context_lengths,
    sinks,
    spans,
    num_rows,
    num_groups,
    scale,
    soft_cap,
    sliding_window,
    out_stride,
    query_token_stride,
    query_head_stride,
    block_stride,
    kv_head_stride,
    token_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    KEYS_PER_TILE: tl.constexpr,
    SLIDES: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Rows with more than one query: a tile of TILE_ROWS // GROUP queries in all heads of one
    group.

    Grid: (tiles * num_groups), tiles being at least num_tokens // (TILE_ROWS // GROUP) + num_rows.
    """
    queries_per_tile: tl.constexpr = TILE_ROWS // GROUP
    group = tl.program_id(0) % num_groups
    # The last tiles of a row see the most keys: they go first, so that the short ones fill the gaps
    # at the end.
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // num_groups
    row = _row_of_tile(query_starts, num_rows, tile, queries_per_tile, 128)
    start = tl.load(query_starts + row)
    length = tl.load(query_starts + row + 1) - start
    context = tl.load(context_lengths + row)
    first_query = (tile - (start // queries_per_tile + row)) * queries_per_tile
    if (length == 1) | (first_query >= length):
        return

    tile_rows = tl.arange(0, TILE_ROWS)
    dims = tl.arange(0, PADDED_HEAD_DIM)
    num_queries = tl.minimum(queries_per_tile, length - first_query)
    first_position = context - length + first_query
    end = first_position + num_queries
    # The first query's span begins at `first_start` and ends before `first_end`. The last query's
    # begins one position before `last_start_end`.
    first_start, first_end, last_start_end = first_position, first_position + 1, end
    if spans is not None:
        span, span_begin = tl.load(spans + 2 * row), tl.load(spans + 2 * row + 1)
        first_start = _start_of_span(first_start, span, span_begin)
        first_end = tl.minimum(first_start + span, context)
        last_start_end = _start_of_span(end - 1, span, span_begin) + 1
        end = tl.minimum(last_start_end - 1 + span, context)
    first_seen = tl.maximum(first_start - sliding_window + 1, 0) if SLIDES else 0
    # Tiles of keys: up to `slid` the window cuts some query off, from `whole` on the end of a span
    # does.
    begin = first_seen // BLOCK_SIZE * BLOCK_SIZE
    whole = begin + (first_end - begin) // KEYS_PER_TILE * KEYS_PER_TILE
    slid = begin
    if SLIDES:
        cut_off = tl.maximum(last_start_end - sliding_window - begin, 0)
        slid += tl.cdiv(cut_off, KEYS_PER_TILE) * KEYS_PER_TILE
        slid = tl.minimum(slid, whole)

    real = (tile_rows < num_queries * GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    token, head = (start + first_query).to(tl.int64), group * GROUP
    in_query = (tile_rows // GROUP)[:, None] * query_token_stride + (tile_rows % GROUP)[
        :, None
    ] * query_head_stride
    first_row = query + token * query_token_stride + head * query_head_stride
    is_query = tile_rows < num_queries * GROUP
    tile_query = _load_query(first_row + in_query, is_query, HEAD_DIM, PADDED_HEAD_DIM, TAIL_DIM)
    table = block_tables + row.to(tl.int64) * table_stride
    of_head = group // GROUPS * kv_head_stride
    cache = (key_cache + of_head, value_cache + of_head, table, block_stride, token_stride)
    starts = first_position + tile_rows // GROUP
    lasts = starts
    if spans is not None:
        starts = _start_of_span(starts, span, span_begin)
        lasts = tl.minimum(starts + span, context) - 1
    sight = (starts, lasts, first_seen, end, sliding_window)
    sinks += head + tile_rows % GROUP
    state = _first_state(
        table,
        begin,
        end,
        sinks,
        is_query,
        BLOCK_SIZE,
        TILE_ROWS,
        PADDED_HEAD_DIM,
        KEYS_PER_TILE,
        HAS_SINKS,
    )
    if SLIDES:
        state = _attend(
            state,
            tile_query,
            cache,
            sight,
            begin,
            slid,
            scale,
            soft_cap,
            BLOCK_SIZE,
            HEAD_DIM,
            TAIL_DIM,
            KEYS_PER_TILE,
            SLIDES,
            CAPPED,
            True,
        )
    state = _attend(
        state,
        tile_query,
        cache,
        sight,
        slid,
        whole,
        scale,
        soft_cap,
        BLOCK_SIZE,
        HEAD_DIM,
        TAIL_DIM,
        KEYS_PER_TILE,
        SLIDES,
        CAPPED,
        False,
    )
    accumulated, _, total, _ = _attend(
        state,
        tile_query,
        cache,
        sight,
        whole,
        end,
        scale,
        soft_cap,
        BLOCK_SIZE,
        HEAD_DIM,
        TAIL_DIM,
        KEYS_PER_TILE,
        SLIDES,
        CAPPED,
        True,
    )
    in_out = (
        (tile_rows // GROUP)[:, None] * out_stride
        + (tile_rows % GROUP)[:, None] * HEAD_DIM
        + dims[None, :]
    )
    attended = (accumulated / _weight_or_one(total)[:, None]).to(out.dtype.element_ty)
    tl.store(out + token * out_stride + head * HEAD_DIM + in_out, attended, mask=real)
