"""Attention of new tokens over the paged cache: the program for rows of several tokens, and what it
shares with that for rows of one (`decode_attention.py`).

Both walk over a row's keys in tiles with the online softmax (Milakov and Gimelshein 2018, "Online
normalizer calculation for softmax"; Dao et al. 2022, "FlashAttention", algorithm 1), in float32 and
in powers of two. Both put query heads that share a key-value head (a group) into the rows of one
tile, so that a tile of keys is read once for all of them; where more heads share it than a tile
takes, they are GROUPS groups. Rows of several tokens compute far more than they read: their tiles
are tall enough for the matrix units, and keys that every query of a tile sees are attended without
masks.

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
def keys_in_tile(
    token_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    KEYS_PER_TILE: tl.constexpr,
):
    """Return the numbers of a tile's keys [KEYS_PER_TILE], and where the first columns [keys,
    PADDED_HEAD_DIM] and the tail [keys, 1] of each lie in its block."""
    in_tile = tl.arange(0, KEYS_PER_TILE)
    in_block = (in_tile % BLOCK_SIZE)[:, None] * token_stride + tl.arange(0, PADDED_HEAD_DIM)[
        None, :
    ]
    tail_in_block = (in_tile % BLOCK_SIZE)[:, None] * token_stride + HEAD_DIM
    return in_tile, in_block, tail_in_block


@triton.jit
def attend_tile(
    state,
    query,
    cache,
    sight,
    tile_keys,
    begin,
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
    """Attend `query`, [rows, PADDED_HEAD_DIM] and [rows, TAIL_DIM], over the tile of keys that
    begins at `begin`.

    `state` is what the tiles before have come to: the weighted values [rows, PADDED_HEAD_DIM], the
    highest score and the sum of weights [rows], and the blocks of this tile's keys, which are
    always read one tile ahead so that no address waits for them. `cache` says where keys, values
    and the row's block table are, and the strides by block and by token; `sight` from which
    positions the queries' windows count back, and the last positions that they see, [rows] both,
    which keys any of them uses (begin and end), and the window; `tile_keys` is of `keys_in_tile`.
    Without MASKED every query sees every key of the tile.
    """
    accumulated, highest, total, blocks = state
    key_cache, value_cache, table, block_stride, _ = cache
    starts, lasts, used_begin, used_end, sliding_window = sight
    query_head, query_tail = query
    in_tile, in_block, tail_in_block = tile_keys
    padded_head_dim: tl.constexpr = query_head.shape[1]
    factor = 1.0 if CAPPED else scale
    keys = begin + in_tile
    next_blocks = _load_blocks(table, keys + KEYS_PER_TILE, used_end, BLOCK_SIZE)
    offsets = blocks.to(tl.int64)[:, None] * block_stride + in_block
    used = (keys >= used_begin) & (keys < used_end)
    key = _load_keys_or_values(key_cache, offsets, used, HEAD_DIM, padded_head_dim, MASKED)
    scores = tl.dot(query_head, tl.trans(key), input_precision="ieee")
    if TAIL_DIM:
        tail_offsets = blocks.to(tl.int64)[:, None] * block_stride + tail_in_block
        tail_offsets += tl.arange(0, TAIL_DIM)[None, :]
        key_tail = _load_keys_or_values(key_cache, tail_offsets, used, TAIL_DIM, TAIL_DIM, MASKED)
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
    reference = tl.where(new_highest == float("-inf"), 0.0, new_highest) if MASKED else new_highest
    weights = tl.exp2(scores * factor - reference[:, None])
    kept = tl.exp2(highest - reference)
    total = total * kept + tl.sum(weights, 1)
    value = key
    if not TAIL_DIM:
        value = _load_keys_or_values(value_cache, offsets, used, HEAD_DIM, padded_head_dim, MASKED)
    accumulated = tl.dot(
        weights.to(value.dtype), value, accumulated * kept[:, None], input_precision="ieee"
    )
    return accumulated, new_highest, total, next_blocks


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
    """Attend over the tiles of keys from `tiles_begin` to `tiles_end`, as `attend_tile` does."""
    _, _, _, _, token_stride = cache
    query_head, _ = query
    padded_head_dim: tl.constexpr = query_head.shape[1]
    tile_keys = keys_in_tile(token_stride, BLOCK_SIZE, HEAD_DIM, padded_head_dim, KEYS_PER_TILE)
    for begin in tl.range(tiles_begin, tiles_end, KEYS_PER_TILE):
        state = attend_tile(
            state,
            query,
            cache,
            sight,
            tile_keys,
            begin,
            scale,
            soft_cap,
            BLOCK_SIZE,
            HEAD_DIM,
            TAIL_DIM,
            KEYS_PER_TILE,
            SLIDES,
            CAPPED,
            MASKED,
        )
    return state


@triton.jit
def first_state(
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
def load_query(
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
def start_of_span(position, length, begin):
    """The first position of the span that a position lies in. Spans are of one length, and one of
    them begins at `begin`."""
    distance = (position - begin) % length  # as negative as position - begin
    return position - tl.where(distance < 0, distance + length, distance)


@triton.jit
def weight_or_one(total):
    """Return each row's divisor: a row that saw no keys, as a captured graph's padding may, has
    zeros to divide."""
    return tl.where(total > 0, total, 1.0)


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
        first_start = start_of_span(first_start, span, span_begin)
        first_end = tl.minimum(first_start + span, context)
        last_start_end = start_of_span(end - 1, span, span_begin) + 1
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
    tile_query = load_query(first_row + in_query, is_query, HEAD_DIM, PADDED_HEAD_DIM, TAIL_DIM)
    table = block_tables + row.to(tl.int64) * table_stride
    of_head = group // GROUPS * kv_head_stride
    cache = (key_cache + of_head, value_cache + of_head, table, block_stride, token_stride)
    starts = first_position + tile_rows // GROUP
    lasts = starts
    if spans is not None:
        starts = start_of_span(starts, span, span_begin)
        lasts = tl.minimum(starts + span, context) - 1
    sight = (starts, lasts, first_seen, end, sliding_window)
    sinks += head + tile_rows % GROUP
    state = first_state(
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
    attended = (accumulated / weight_or_one(total)[:, None]).to(out.dtype.element_ty)
    tl.store(out + token * out_stride + head * HEAD_DIM + in_out, attended, mask=real)
