"""Attention of rows with one new token over the paged cache, with the tiles and the words of
`attention.py`.

Single tokens read far more than they compute. So a row's keys are cut into splits, which different
programs can read at the same time ("Flash-Decoding", Dao et al. 2023). Where the cuts are depends
on the row's length alone. A small batch has one program for each split. In a large batch one
program walks over all splits of a row, but rows longer than a fair share of the batch get helpers:
programs that take their part of the row's splits. Where a row has several programs, each leaves the
results of its splits in memory, and the last to arrive adds up all of them. The splits are merged
in their order and with the same operations in either case, so a row's numbers depend neither on the
other rows nor on how many programs there are.
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
    results,
    split,
    is_shared,
    sinks,
    has_sink,
    scale,
    soft_cap,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TAIL_DIM: tl.constexpr,
    KEYS_PER_TILE: tl.constexpr,
    GROUP: tl.constexpr,
    SLIDES: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Attend over all keys from `begin` to the end of `sight`, which are cut at every
    `keys_per_split`-th key.

    Return the merged sums of their splits; or store each split's own sums, as those of `split` and
    the following ones, if other programs share the row (`is_shared`). It is one loop and not a loop
    in a loop: so the keys of the next split are on their way while this one is computed.
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
            if is_shared:
                _store_split(results, split, (accumulated, highest, total), HEAD_DIM, GROUP)
            else:
                merged, merged_highest, merged_total = _merge(
                    (merged, merged_highest, merged_total), (accumulated, highest, total)
                )
            accumulated, highest, total = _nothing(rows, padded_head_dim)
            next_split += keys_per_split
            split += 1
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
    if is_shared:
        _store_split(results, split, (accumulated, highest, total), HEAD_DIM, GROUP)
    return _merge((merged, merged_highest, merged_total), (accumulated, highest, total))


@triton.jit
def _results_of(
    results,
    split,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Return where the results of a row's split lie: those of its heads side by side [TILE_ROWS,
    PADDED_HEAD_DIM], its highest scores and its sums of weights [TILE_ROWS], and which of them
    exist."""
    split_results, split_weights = results
    in_group, dims = tl.arange(0, TILE_ROWS), tl.arange(0, PADDED_HEAD_DIM)
    is_head = in_group < GROUP
    highest = split_weights + split * (2 * GROUP) + in_group
    values = split_results + split * (GROUP * HEAD_DIM)
    values += in_group[:, None] * HEAD_DIM + dims[None, :]
    return values, highest, highest + GROUP, is_head[:, None] & (dims < HEAD_DIM)[None, :], is_head


@triton.jit
def _store_split(results, split, sums, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr):
    """Store the sums of one of a row's splits."""
    accumulated, highest, total = sums
    values, highests, totals, is_value, is_head = _results_of(
        results, split, HEAD_DIM, accumulated.shape[1], GROUP, accumulated.shape[0]
    )
    tl.store(values, accumulated, mask=is_value)
    tl.store(highests, highest, mask=is_head)
    tl.store(totals, total, mask=is_head)


@triton.jit
def add_up_splits(
    results,
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
                results, first + nth, HEAD_DIM, PADDED_HEAD_DIM, GROUP, TILE_ROWS
            )
            is_split = first + nth < num_splits
            split = (
                tl.load(values, mask=is_value & is_split, other=0.0, cache_modifier=".cg"),
                tl.load(
                    highests,
                    mask=is_head & is_split,
                    other=float("-inf"),
                    cache_modifier=".cg",
                ),
                tl.load(totals, mask=is_head & is_split, other=0.0, cache_modifier=".cg"),
            )
            # a split that is not there has nothing, which changes no sum
            accumulated, highest, total = _merge((accumulated, highest, total), split)
    return accumulated, highest, total


@triton.jit
def _keys_of_rows(
    query_starts, context_lengths, rows, num_rows, sliding_window, SLIDES: tl.constexpr
):
    """Return how many keys these rows of single tokens see, spans aside. Rows of several tokens and
    rows that do not exist count as none."""
    exists = (rows >= 0) & (rows < num_rows)
    starts = tl.load(query_starts + rows, mask=exists, other=0)
    ends = tl.load(query_starts + rows + 1, mask=exists, other=0)
    keys = tl.load(context_lengths + rows, mask=exists, other=0)
    if SLIDES:
        keys = tl.minimum(keys, sliding_window)
    return tl.where(ends - starts == 1, keys, 0)


@triton.jit
def _helpers(keys, keys_per_program):
    """Return how many helpers rows of so many keys have."""
    return tl.maximum(keys - 1, 0) // keys_per_program


@triton.jit
def place_of_program(
    query_starts,
    context_lengths,
    row,
    num_rows,
    num_helpers,
    keys_per_program,
    sliding_window,
    SLIDES: tl.constexpr,
    STEP: tl.constexpr,
):
    """Return the row of a program in a large batch, its part of the row's splits, how many parts
    there are, and a number below `num_helpers` that tells rows with helpers apart.

    `row` is the program's own row. If it is below zero, the program is a helper; if no row needs
    it, its row is `num_rows`. Rows are cut so that no part is longer than a fair share: the keys of
    all rows over the number of helpers, or `keys_per_program` if that is more. Beside the first
    part of each row, there are then no more parts than helpers.
    """
    helper = row + num_helpers
    is_helper = row < 0
    part, parts, before = 0, 1, 0
    keys = _keys_of_rows(query_starts, context_lengths, row, num_rows, sliding_window, SLIDES)
    if is_helper | (keys > keys_per_program):
        all_keys = tl.full([], 0, tl.int64)
        for first in range(0, num_rows, STEP):
            rows = first + tl.arange(0, STEP)
            keys_of_rows = _keys_of_rows(
                query_starts, context_lengths, rows, num_rows, sliding_window, SLIDES
            )
            all_keys += tl.sum(keys_of_rows.to(tl.int64), 0)
        share = tl.minimum(tl.cdiv(all_keys, num_helpers), 1 << 30).to(tl.int32)
        share = tl.maximum(share, keys_per_program)
        passed, counted = 0, 0
        for first in range(0, num_rows, STEP):
            rows = first + tl.arange(0, STEP)
            keys_of_rows = _keys_of_rows(
                query_starts, context_lengths, rows, num_rows, sliding_window, SLIDES
            )
            helpers = _helpers(keys_of_rows, share)
            # a helper passes the rows whose helpers all come before it
            ends = counted + tl.cumsum(helpers, 0)
            is_passed = (rows < num_rows) & tl.where(is_helper, ends <= helper, rows < row)
            passed += tl.sum(is_passed.to(tl.int32), 0)
            before += tl.sum(tl.where(is_passed, helpers, 0), 0)
            counted += tl.sum(helpers, 0)
        row = passed
        keys = _keys_of_rows(query_starts, context_lengths, row, num_rows, sliding_window, SLIDES)
        parts = 1 + _helpers(keys, share)
        part = tl.where(is_helper, helper - before + 1, 0)
    return row, part, parts, before


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_groups",
        "num_helpers",
        "keys_per_program",
        "most_splits",
        "sliding_window",
        "table_stride",
    ],
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
    num_rows,
    num_groups,
    num_helpers,
    keys_per_program,
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
    """Fill `out` for rows with one query: its heads of one group.

    A row's keys are cut evenly into at most `most_splits` splits of whole tiles, but none has fewer
    than KEYS_PER_SPLIT keys, a multiple of KEYS_PER_TILE, unless it is the last.

    Grid: (num_rows * num_groups, programs of each row) without helpers, and with them ((num_helpers
    + num_rows) * num_groups, 1), where the helpers come first. Programs without a split leave at
    once. Only programs of a row that has several read or write split_results [places, most_splits,
    GROUP, HEAD_DIM], split_weights [places, most_splits, 2, GROUP] (highest scores and sums of
    weights) and `arrivals` [places], which counts the programs that have stored theirs. It is zero
    before and after a launch. There is a place for each group of every row, or with helpers, of as
    many rows as there are helpers.
    """
    wait_for_previous_grid(DEPENDENT)
    row, group = tl.program_id(0) // num_groups - num_helpers, tl.program_id(0) % num_groups
    part, parts, place = tl.program_id(1), tl.num_programs(1), row
    if num_helpers > 0:
        row, part, parts, place = place_of_program(
            query_starts,
            context_lengths,
            row,
            num_rows,
            num_helpers,
            keys_per_program,
            sliding_window,
            SLIDES,
            512,
        )
    if row >= num_rows:
        return
    place = place * num_groups + group
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
    splits_per_part = tl.maximum(tl.cdiv(num_splits, parts), 1)
    first_split = part * splits_per_part
    if (part > 0) & (first_split >= num_splits):
        return
    is_shared = num_splits > splits_per_part
    begin = first_key + first_split * keys_per_split
    end = tl.minimum(begin + splits_per_part * keys_per_split, context)
    first_result = place.to(tl.int64) * most_splits * GROUP
    results = (split_results + first_result * HEAD_DIM, split_weights + first_result * 2)

    in_group = tl.arange(0, TILE_ROWS)
    dims = tl.arange(0, PADDED_HEAD_DIM)
    heads = group * GROUP + in_group
    query_rows = (
        query + token.to(tl.int64) * query_token_stride + heads[:, None] * query_head_stride
    )
    of_head = group // GROUPS * kv_head_stride
    table = block_tables + row.to(tl.int64) * table_stride
    accumulated, _, total = _attend_splits(
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
        results,
        first_split,
        is_shared,
        sinks + heads,
        (in_group < GROUP) & (part == 0) & (begin < end),  # a sink counts once
        scale,
        soft_cap,
        BLOCK_SIZE,
        HEAD_DIM,
        TAIL_DIM,
        KEYS_PER_TILE,
        GROUP,
        SLIDES,
        CAPPED,
        HAS_SINKS,
    )
    if is_shared:
        # All threads of the program have stored before its one thread counts it (the barrier). That
        # releases the stores to the GPU, and whoever reads the count acquires what was released by
        # all who counted before: so the last program sees every split. Its other threads wait for
        # the count at a barrier.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + place, 1, sem="acq_rel", scope="gpu")
        if arrived < tl.cdiv(num_splits, splits_per_part) - 1:
            return
        # No program of this launch counts here any more, and the next launch counts when this one
        # has ended: a plain store is enough, also where a captured graph is replayed.
        tl.store(arrivals + place, 0)
        accumulated, _, total = add_up_splits(
            results, num_splits, HEAD_DIM, PADDED_HEAD_DIM, GROUP, TILE_ROWS
        )
    real = (in_group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    out_offsets = token.to(tl.int64) * out_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    attended = accumulated / weight_or_one(total)[:, None]
    tl.store(out + out_offsets, attended.to(out.dtype.element_ty), mask=real)
