"""Attention of rows with one new token over the paged cache, with the tiles and the words of
`attention.py`.

Single tokens read far more than they compute. So a row's keys are cut into splits, which different
programs can read at the same time ("Flash-Decoding", Dao et al. 2023). Where the cuts are depends
on the row's length alone. A small batch has one program for each split, and the last program of a
row to arrive adds up what all of them have found. In a large batch one program walks over all
splits of a row. Both merge the splits in their order and with the same operations, so a row's
numbers depend neither on the other rows nor on how many programs there are.
"""

import triton
import triton.language as tl

from triton_ops.gpu.kernels.attention import (
    attend_tile,
    first_state,
    keys_in_tile,
    load_query,
    start_of_span,
    weight_or_one,
)
from triton_ops.gpu.kernels.dependent import wait_for_previous_grid


@triton.jit
def _nothing(ROWS: tl.constexpr, PADDED_HEAD_DIM: tl.constexpr):
    """Return the sums of no keys: weighted values, highest score, sum of weights."""
    return (
        tl.zeros([ROWS, PADDED_HEAD_DIM], tl.float32),
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
    )


@triton.jit
def _merge(before, split):
    """Add a split's sums to the sums of those before it.

    The compiler could fuse either of two products into a sum of both. `tl.fma` says which, so that
    every form of the program rounds alike.
    """
    accumulated, highest, total = before
    split_accumulated, split_highest, split_total = split
    new_highest = tl.maximum(highest, split_highest)
    reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    kept, weight = tl.exp2(highest - reference), tl.exp2(split_highest - reference)
    accumulated = accumulated * kept[:, None]
    weights = tl.broadcast_to(weight[:, None], accumulated.shape)
    return (
        tl.fma(split_accumulated, weights, accumulated),
        new_highest,
        tl.fma(split_total, weight, total * kept),
    )


@triton.jit
def _attend_splits(
    query,
    cache,
    sight,
    begin,
    keys_per_split,
    sinks,
    has_sink,
    scale,
    soft_cap,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    KEYS_PER_TILE: tl.constexpr,
    SLIDES: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Return the sums of all keys from `begin` to the end of `sight`, merged at every
    `keys_per_split`-th key.

    It is one loop and not a loop in a loop: so the keys of the next split are on their way while
    this one is computed.
    """
    query_head, _ = query
    rows: tl.constexpr = query_head.shape[0]
    padded_head_dim: tl.constexpr = query_head.shape[1]
    _, _, table, _, token_stride = cache
    _, _, _, end, _ = sight
    accumulated, highest, total, blocks = first_state(
        table,
        begin,
        end,
        sinks,
        has_sink,
        BLOCK_SIZE,
        rows,
        padded_head_dim,
        KEYS_PER_TILE,
        HAS_SINKS,
    )
    tile_keys = keys_in_tile(token_stride, BLOCK_SIZE, HEAD_DIM, padded_head_dim, KEYS_PER_TILE)
    merged, merged_highest, merged_total = _nothing(rows, padded_head_dim)
    next_split = begin + keys_per_split
    for tile in tl.range(begin, end, KEYS_PER_TILE):
        if tile == next_split:
            merged, merged_highest, merged_total = _merge(
                (merged, merged_highest, merged_total), (accumulated, highest, total)
            )
            accumulated, highest, total = _nothing(rows, padded_head_dim)
            next_split += keys_per_split
        accumulated, highest, total, blocks = attend_tile(
            (accumulated, highest, total, blocks),
            query,
            cache,
            sight,
            tile_keys,
            tile,
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
    return _merge((merged, merged_highest, merged_total), (accumulated, highest, total))


@triton.jit
def _results_of(
    split,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Return where a split's results lie: those of its heads side by side [TILE_ROWS,
    PADDED_HEAD_DIM], its highest scores and its sums of weights [TILE_ROWS], and which of them
    exist."""
    in_group, dims = tl.arange(0, TILE_ROWS), tl.arange(0, PADDED_HEAD_DIM)
    is_head = in_group < GROUP
    values = (split * GROUP + in_group)[:, None] * HEAD_DIM + dims[None, :]
    highest = split * 2 * GROUP + in_group
    return values, highest, highest + GROUP, is_head[:, None] & (dims < HEAD_DIM)[None, :], is_head


@triton.jit
def add_up_splits(
    split_results,
    split_weights,
    first_split,
    num_splits,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Return the sums of a row's splits, merged in their order. Loads go to the L2 cache, where
    other programs' stores are."""
    splits_at_once: tl.constexpr = 4 if PADDED_HEAD_DIM <= 128 else 2  # as registers allow
    accumulated, highest, total = _nothing(TILE_ROWS, PADDED_HEAD_DIM)
    for first in tl.range(0, num_splits, splits_at_once):
        for nth in tl.static_range(splits_at_once):
            values, highests, totals, is_value, is_head = _results_of(
                first_split + first + nth, HEAD_DIM, PADDED_HEAD_DIM, GROUP, TILE_ROWS
            )
            is_split = first + nth < num_splits
            split = (
                tl.load(
                    split_results + values,
                    mask=is_value & is_split,
                    other=0.0,
                    cache_modifier=".cg",
                ),
                tl.load(
                    split_weights + highests,
                    mask=is_head & is_split,
                    other=float("-inf"),
                    cache_modifier=".cg",
                ),
                tl.load(
                    split_weights + totals,
                    mask=is_head & is_split,
                    other=0.0,
                    cache_modifier=".cg",
                ),
            )
            # a split that is not there has nothing, which changes no sum
            accumulated, highest, total = _merge((accumulated, highest, total), split)
    return accumulated, highest, total


@triton.jit(
    do_not_specialize=["num_groups", "most_splits", "sliding_window", "table_stride"],
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
    arrivals,
    query,
    key_cache,
    value_cache,
    block_tables,
    query_starts,
    context_lengths,
    sinks,
    spans,
    num_groups,
    most_splits,
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
    DEPENDENT: tl.constexpr,
):
    """Fill `out` for rows with one query: its heads of one group. Grid: (rows * num_groups,
    programs); there is one program for all splits, or for each split that a row can have.

    A row's keys are cut evenly into at most `most_splits` splits of whole tiles, but none has fewer
    than KEYS_PER_SPLIT keys, a multiple of KEYS_PER_TILE, unless it is the last. Programs without a
    split leave at once. Only programs of a row that has several read or write split_results [rows *
    num_groups, programs, GROUP, HEAD_DIM], split_weights [rows * num_groups, programs, 2, GROUP]
    (highest scores and sums of weights) and `arrivals` [rows * num_groups], which counts the
    programs that have stored theirs. It is zero before and after a launch.
    """
    wait_for_previous_grid(DEPENDENT)
    place, nth = tl.program_id(0), tl.program_id(1)
    programs = tl.num_programs(1)
    row, group = place // num_groups, place % num_groups
    token = tl.load(query_starts + row)
    context = tl.load(context_lengths + row)
    if tl.load(query_starts + row + 1) - token != 1:
        return
    start = context - 1  # from which the window counts back
    if spans is not None:
        start = start_of_span(start, tl.load(spans + 2 * row), tl.load(spans + 2 * row + 1))
    first_seen = tl.maximum(start + 1 - sliding_window, 0) if SLIDES else 0
    first_key = first_seen // BLOCK_SIZE * BLOCK_SIZE
    tiles_per_split = tl.cdiv(tl.cdiv(context - first_key, most_splits), KEYS_PER_TILE)
    keys_per_split = tl.maximum(tiles_per_split * KEYS_PER_TILE, KEYS_PER_SPLIT)
    num_splits = tl.cdiv(context - first_key, keys_per_split)
    # a row of no keys, as a captured graph's padding may be, gets its zeros from the first program
    if (nth > 0) & (nth >= num_splits):
        return
    begin = first_key + nth * keys_per_split
    end = context
    if programs > 1:
        end = tl.minimum(begin + keys_per_split, context)

    in_group = tl.arange(0, TILE_ROWS)
    dims = tl.arange(0, PADDED_HEAD_DIM)
    heads = group * GROUP + in_group
    query_rows = (
        query + token.to(tl.int64) * query_token_stride + heads[:, None] * query_head_stride
    )
    of_head = group // GROUPS * kv_head_stride
    table = block_tables + row.to(tl.int64) * table_stride
    accumulated, highest, total = _attend_splits(
        load_query(query_rows, in_group < GROUP, HEAD_DIM, PADDED_HEAD_DIM, TAIL_DIM),
        (key_cache + of_head, value_cache + of_head, table, block_stride, token_stride),
        (
            tl.full([TILE_ROWS], start, tl.int32),
            tl.full([TILE_ROWS], context - 1, tl.int32),
            first_seen,
            end,
            sliding_window,
        ),
        begin,
        keys_per_split,
        sinks + heads,
        (in_group < GROUP) & (nth == 0) & (begin < end),  # a sink counts once
        scale,
        soft_cap,
        BLOCK_SIZE,
        HEAD_DIM,
        TAIL_DIM,
        KEYS_PER_TILE,
        SLIDES,
        CAPPED,
        HAS_SINKS,
    )
    if (programs > 1) & (num_splits > 1):
        first_split = place.to(tl.int64) * programs
        values, highests, totals, is_value, is_head = _results_of(
            first_split + nth, HEAD_DIM, PADDED_HEAD_DIM, GROUP, TILE_ROWS
        )
        tl.store(split_results + values, accumulated, mask=is_value)
        tl.store(split_weights + highests, highest, mask=is_head)
        tl.store(split_weights + totals, total, mask=is_head)
        # All threads of the program have stored before its one thread counts it (the barrier). That
        # releases the stores to the GPU, and whoever reads the count acquires what was released by
        # all who counted before: so the last program sees every split. Its other threads wait for
        # the count at a barrier.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + place, 1, sem="acq_rel", scope="gpu")
        if arrived < num_splits - 1:
            return
        # No program of this launch counts here any more, and the next launch begins when this one
        # has ended: a plain store is enough, also where a captured graph is replayed.
        tl.store(arrivals + place, 0)
        accumulated, highest, total = add_up_splits(
            split_results,
            split_weights,
            first_split,
            num_splits,
            HEAD_DIM,
            PADDED_HEAD_DIM,
            GROUP,
            TILE_ROWS,
        )
    real = (in_group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    out_offsets = token.to(tl.int64) * out_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    attended = accumulated / weight_or_one(total)[:, None]
    tl.store(out + out_offsets, attended.to(out.dtype.element_ty), mask=real)
