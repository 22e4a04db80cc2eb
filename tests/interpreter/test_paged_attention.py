"""The GPU's paged attention against float64: ragged batches, and poison wherever no row has
anything."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import product

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoserve.engine_config import EngineConfig
from nanoserve.lab.benchmarks.gpu.attention import AttentionCall
from nanoserve.lab.benchmarks.gpu.attention import AttentionRow as Row
from tests.triton_ops.batches import build, inputs, narrowed, padded, poisoned_out, reference
from triton_ops.gpu import attention, configurations
from triton_ops.gpu.configurations import (
    AttentionConfiguration,
    DecodeConfiguration,
    PrefillConfiguration,
    UnsupportedByGpu,
    busy_programs,
)
from triton_ops.gpu.kernels.decode_attention import place_of_program

SCALE = 0.2
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SMALL = AttentionConfiguration(
    DecodeConfiguration(keys_per_tile=32, num_warps=4, num_stages=2, keys_per_split=32),
    PrefillConfiguration(rows_per_tile=32, keys_per_tile=32, num_warps=4, num_stages=2),
)
"""Tiles so small that short rows have many."""

MIXED = [Row(1, 150), Row(40, 75), Row(1, 1), Row(3, 33), Row(33, 33)]


@pytest.fixture(autouse=True)
def poisoned_scratch() -> Iterator[None]:
    """Memory of torch.empty is NaN here: a split that is read but was never written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def check(
    batch: AttentionCall,
    window: int,
    *,
    configuration: AttentionConfiguration = SMALL,
    multiprocessors: int = 2,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    spans: Tensor | None = None,
) -> None:
    out = poisoned_out(batch)
    attention.attend(
        configuration,
        multiprocessors,
        (out, *inputs(batch)),
        scale=SCALE,
        sliding_window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        spans=spans,
    )
    tolerance = TOLERANCES[out.dtype]
    expected = reference(batch, SCALE, window, soft_cap, sinks, spans)
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("block_size", "window"), [(16, 0), (16, 40), (32, 0), (32, 17)])
def test_every_shape_in_its_default_configuration(
    dtype: torch.dtype, head_dim: int, block_size: int, window: int
) -> None:
    batch = build(
        MIXED,
        num_heads=4,
        num_kv_heads=2,
        block_size=block_size,
        seed=1,
        head_dim=head_dim,
        dtype=dtype,
    )
    out = poisoned_out(batch)
    attention.paged_attention(out, *inputs(batch), scale=SCALE, sliding_window=window)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(
        out.double(), reference(batch, SCALE, window), atol=tolerance, rtol=tolerance
    )


@st.composite
def ragged_rows(draw: st.DrawFn) -> list[Row]:
    """Lengths of one, around the edges of blocks and tiles, and long; decodes, prefills and
    chunks."""
    edges = st.sampled_from([1, 2, 15, 16, 17, 31, 32, 33, 48, 64, 65])
    queries = st.one_of(st.just(1), st.just(1), edges)
    computed = st.one_of(st.just(0), edges, st.integers(0, 200))
    rows = draw(st.lists(st.tuples(queries, computed), min_size=1, max_size=5))
    return [Row(new, new + cached) for new, cached in rows]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=ragged_rows(),
    heads=st.sampled_from([(2, 2), (4, 2), (5, 1), (16, 1)]),
    block_size=st.sampled_from([16, 32]),
    window=st.sampled_from([0, 0, 1, 16, 31, 50]),
    multiprocessors=st.sampled_from([1, 2, 8]),
    shared=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)
@example(
    rows=[Row(1, 16), Row(1, 17), Row(1, 1)],
    heads=(4, 2),
    block_size=16,
    window=0,
    multiprocessors=1,
    shared=0,
    seed=0,
)
@example(
    rows=[Row(129, 129)],
    heads=(5, 1),
    block_size=16,
    window=50,
    multiprocessors=1,
    shared=0,
    seed=1,
)
def test_ragged_batches(
    rows: list[Row],
    heads: tuple[int, int],
    block_size: int,
    window: int,
    multiprocessors: int,
    shared: int,
    seed: int,
) -> None:
    num_heads, num_kv_heads = heads
    batch = build(
        rows,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        seed=seed,
        shared=shared,
        head_dim=64,
    )
    check(batch, window, multiprocessors=multiprocessors)


@pytest.mark.parametrize("window", [0, 700])
@pytest.mark.parametrize("multiprocessors", [1, 100])
def test_long_rows_whole_and_in_many_splits(window: int, multiprocessors: int) -> None:
    rows = [Row(1, 2100), Row(1, 64), Row(1, 700), Row(1, 1)]
    batch = build(rows, num_heads=4, num_kv_heads=1, block_size=16, seed=2, head_dim=64)
    configuration = replace(
        SMALL, decode=replace(SMALL.decode, keys_per_tile=128, keys_per_split=128)
    )
    check(batch, window, configuration=configuration, multiprocessors=multiprocessors)


def with_wider_tables(batch: AttentionCall, blocks: int) -> AttentionCall:
    """Return a copy of these rows whose tables are wider by entries that name no block."""
    more = torch.full((len(batch.block_tables), blocks), 10**6, dtype=torch.int32)
    return replace(batch, block_tables=torch.cat([batch.block_tables, more], dim=1))


def some_rows(batch: AttentionCall, rows: list[int]) -> AttentionCall:
    """Rows of a batch of single tokens, in any order and any number of times."""
    return replace(
        batch,
        out=batch.out[rows],
        query=batch.query[rows],
        block_tables=batch.block_tables[rows],
        query_starts=torch.arange(len(rows) + 1, dtype=torch.int32),
        context_lengths=batch.context_lengths[rows],
    )


@pytest.mark.parametrize(("dtype", "window"), [(torch.bfloat16, 0), (torch.float32, 100)], ids=str)
def test_the_numbers_of_a_row_depend_on_nothing_but_the_row(
    dtype: torch.dtype, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are alone, or few enough to have a program for each split, or so many that each has one
    program; beside an unlike row, and with tables of their own length or as a captured graph has
    them. A bit that differs shows."""
    programs = dict[int, int]()
    launched = attention.decode_attention

    class Recorded:
        def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
            rows, programs[rows] = grid
            return launched[grid]  # type: ignore[no-any-return]

    monkeypatch.setattr(attention, "decode_attention", Recorded())
    rows = [Row(1, 150), Row(1, 1), Row(1, 70)]
    batch = build(
        rows, num_heads=2, num_kv_heads=1, block_size=16, seed=3, head_dim=32, dtype=dtype
    )

    def attend(some: AttentionCall) -> Tensor:
        out = poisoned_out(some)
        attention.attend(SMALL, 2, (out, *inputs(some)), scale=SCALE, sliding_window=window)
        return out

    together = attend(batch)
    tolerance = TOLERANCES[dtype]
    expected = reference(batch, SCALE, window)
    torch.testing.assert_close(together.double(), expected, atol=tolerance, rtol=tolerance)
    wide = with_wider_tables(batch, 40)
    for some, chosen in (
        (batch, [2, 0]),
        (batch, [0]),
        (wide, [0]),
        (batch, [1]),
        (wide, [2]),
        (wide, [0, 1, 2, 0]),
    ):
        assert torch.equal(attend(some_rows(some, chosen)), together[chosen])
    # two multiprocessors are busy with four programs: with four rows
    assert programs[4] == 1 and min(programs[rows] for rows in (1, 2, 3)) > 1


def test_counters_are_ready_for_the_next_launch_and_the_same_numbers_come_again() -> None:
    """Nothing but the programs themselves resets them, as where a captured graph is replayed."""
    batch = build(
        [Row(1, 130), Row(1, 30)],
        num_heads=4,
        num_kv_heads=2,
        block_size=16,
        seed=6,
        head_dim=32,
    )
    results = []
    for _ in range(2):
        out = poisoned_out(batch)
        attention.attend(SMALL, 4, (out, *inputs(batch)), scale=SCALE, sliding_window=0)
        results.append(out)
        counters = attention.arrival_counters(out.device, busy_programs(SMALL.decode, 4))
        assert len(counters) == 8 and torch.count_nonzero(counters) == 0
    assert torch.equal(*results)


def test_a_launch_of_the_most_rows_is_one_that_cuda_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second and third sizes of a grid are at most 65,535 (CUDA C++ Programming Guide,
    technical specifications), and 65,536 sequences may run in one step."""
    grids = list[tuple[int, ...]]()

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *arguments, **constants: None

    for program in ("decode_attention", "prefill_attention"):
        monkeypatch.setattr(attention, program, Recorded())
    (setting,) = (field for field in fields(EngineConfig) if field.name == "max_num_seqs")
    _, most = setting.metadata["range"]
    cache, rows = torch.zeros(1, 2, 16, 32), torch.zeros(1, 1).int().expand(most, 1)
    out, query = torch.zeros(1, 64).expand(most, 64), torch.zeros(1, 2, 32).expand(most, 2, 32)
    starts = torch.arange(most + 1).int()
    tensors = (out, query, cache, cache, rows, starts, rows[:, 0])
    attention.attend(SMALL, 132, tensors, scale=SCALE, sliding_window=0)
    assert grids == [(2 * most, 1)] and most > 65_535
    wide = torch.zeros(1, 512).int().expand(most, 512)  # so that rows may need helpers
    attention.attend(SMALL, 132, (*tensors[:4], wide, *tensors[5:]), scale=SCALE, sliding_window=0)
    splits_of_a_row = 64
    assert grids.pop() == (2 * (most + splits_of_a_row), 1)
    longer = torch.cat([starts[:-1], starts[-1:] + 31])  # the last row has 32 tokens
    out, query = torch.zeros(1, 64).expand(most + 31, 64), query[:1].expand(most + 31, 2, 32)
    attention.attend(
        SMALL, 132, (out, query, *tensors[2:5], longer, rows[:, 0]), scale=SCALE, sliding_window=0
    )
    (tiles,), _ = grids[1:]
    assert tiles >= 2 * (most + 1) and tiles < 2**31


@triton.jit
def write_places(
    found, starts, contexts, num_rows, num_helpers, keys_per_program, window, SLIDES: tl.constexpr
):
    """Write what each program of a large batch has to do: [programs, 4]."""
    program = tl.program_id(0)
    row, part, parts, place = place_of_program(
        starts,
        contexts,
        program - num_helpers,
        num_rows,
        num_helpers,
        keys_per_program,
        window,
        SLIDES,
        4,
    )
    tl.store(found + 4 * program, row)
    tl.store(found + 4 * program + 1, part)
    tl.store(found + 4 * program + 2, parts)
    tl.store(found + 4 * program + 3, place)


def places_of(
    rows: list[tuple[int, int]], helpers: int, keys_per_program: int, window: int
) -> list[tuple[int, ...]]:
    """Run it for rows of so many tokens and keys."""
    starts = torch.tensor([0, *(tokens for tokens, _ in rows)]).cumsum(0).int()
    contexts = torch.tensor([keys for _, keys in rows]).int()
    found = torch.full((helpers + len(rows), 4), -1, dtype=torch.int32)
    numbers = (len(rows), helpers, keys_per_program, window)
    write_places[(len(found),)](found, starts, contexts, *numbers, SLIDES=window > 0)
    return [tuple(line) for line in found.tolist()]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from([1, 1, 1, 3]),
            st.sampled_from([0, 1, 7, 50, 51, 100, 101, 102, 400, 5000, 2**30]),
        ),
        min_size=1,
        max_size=13,
    ),
    helpers=st.sampled_from([2, 3, 8, 33]),
    window=st.sampled_from([0, 0, 101, 1000]),
)
@example(rows=[(1, 50)] * 5 + [(1, 1000)] + [(1, 50)] * 3, helpers=8, window=0)
@example(rows=[(1, 2**30)] * 12, helpers=2, window=0)  # more keys than 32 bits count
@example(rows=[(1, 101)] * 8 + [(1, 5000)], helpers=8, window=0)
def test_no_program_has_more_than_its_fair_share(
    rows: list[tuple[int, int]], helpers: int, window: int
) -> None:
    """Programs of a row are all there once, and rows that several share tell their results apart.
    The expected parts are counted here with exact numbers."""
    found = places_of(rows, helpers, 100, window)
    seen = [min(keys, window) if window else keys for _, keys in rows]
    seen = [keys if tokens == 1 else 0 for (tokens, _), keys in zip(rows, seen, strict=True)]
    share = max(-(-sum(seen) // helpers), 100)
    parts_of_rows = defaultdict[int, list[int]](list)
    places = dict[int, set[int]]()
    for row, part, parts, place in found:
        if row < len(rows):
            assert parts == max(1, -(-seen[row] // share))
            parts_of_rows[row].append(part)
            if parts > 1:
                places.setdefault(row, set()).add(place)
    assert {row: sorted(parts) for row, parts in parts_of_rows.items()} == {
        row: list(range(max(1, -(-keys // share)))) for row, keys in enumerate(seen)
    }
    assert [row for row, *_ in found[helpers:]] == list(range(len(rows)))
    assert all(part == 0 for _, part, *_ in found[helpers:])
    flat = [place for of_row in places.values() for place in of_row]
    assert len(flat) == len(places) == len(set(flat)) and set(flat) <= set(range(helpers))


LONG_AMONG_SHORT = [Row(1, keys) for keys in (30, 500, 1, 64, 9, 310, 5, 33)]


def build_small(rows: list[Row], dtype: torch.dtype = torch.float32) -> AttentionCall:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "block_size": 16, "head_dim": 32}
    return build(rows, **sizes, seed=7, dtype=dtype)  # type: ignore[arg-type]


def few_keys_per_program(monkeypatch: pytest.MonkeyPatch, keys: int) -> None:
    for module in (attention, configurations):
        monkeypatch.setattr(module, "KEYS_PER_PROGRAM", keys)


class Launched:
    """The program, and what its launches were given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.grids = list[tuple[int, int]]()
        self.results = list[Tensor]()
        self._program = attention.decode_attention
        monkeypatch.setattr(attention, "decode_attention", self)

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        def launch(out: Tensor, results: Tensor, *arguments: object, **constants: object) -> None:
            self.grids.append(grid)
            self.results.append(results)
            self._program[grid](out, results, *arguments, **constants)

        return launch


@pytest.mark.parametrize("multiprocessors", [4, 8])
@pytest.mark.parametrize("case", ["", "window", "soft cap", "sinks", "spans"])
def test_long_rows_of_a_large_batch_get_helpers(
    multiprocessors: int, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_keys_per_program(monkeypatch, 64)
    launched = Launched(monkeypatch)
    window = 290 if case in ("window", "spans") else 0
    check(
        build_small([*LONG_AMONG_SHORT[:4], Row(3, 200), *LONG_AMONG_SHORT[4:]]),
        window,
        multiprocessors=multiprocessors,
        soft_cap=2.0 if case == "soft cap" else 0.0,
        sinks=sinks_of(4) if case == "sinks" else None,
        spans=torch.tensor([[50, 7]] * 9).int() if case == "spans" else None,
    )
    # programs of two groups of heads, for nine rows and for as many helpers as a row has splits
    splits = multiprocessors * 2 // 2
    assert launched.grids == [(2 * (splits + 9), 1)]
    (results,) = launched.results
    assert results.shape == (2 * splits, splits, 2, 32)
    is_stored = results.isfinite().all(-1).all(-1)
    assert bool((is_stored == results.isfinite().any(-1).any(-1)).all())
    # only the two long rows leave results, in two groups, and each of its splits leaves one
    assert int(is_stored.any(1).sum()) == 4 and int(is_stored.sum(1).max()) > 2


@pytest.mark.parametrize(("dtype", "window"), [(torch.bfloat16, 0), (torch.float32, 290)], ids=str)
def test_helpers_change_no_number_of_a_row(
    dtype: torch.dtype, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are read by one program, by several, or by one for each split. A bit that differs
    shows."""
    batch = build_small(LONG_AMONG_SHORT, dtype)
    launched = Launched(monkeypatch)

    def attend(some: AttentionCall) -> Tensor:
        out = poisoned_out(some)
        attention.attend(SMALL, 8, (out, *inputs(some)), scale=SCALE, sliding_window=window)
        return out

    with_one_program = attend(batch)
    assert launched.grids.pop() == (2 * 8, 1)
    few_keys_per_program(monkeypatch, 64)
    for order in (list(range(8)), [5, 1, 0, 2, 1, 1, 5, 3, 4], [1] * 8, [1, *[2] * 60, 5]):
        assert torch.equal(attend(some_rows(batch, order)), with_one_program[order])
        assert launched.grids.pop() == (2 * (8 + len(order)), 1)
    for order in ([1], [5, 0], [2, 1, 5]):
        assert torch.equal(attend(some_rows(batch, order)), with_one_program[order])
        rows, programs = launched.grids.pop()
        assert rows == 2 * len(order) and programs > 1
    counters = attention.arrival_counters(batch.out.device, 16)
    assert torch.count_nonzero(counters) == 0


SPANS = st.tuples(st.sampled_from([1, 2, 7, 16, 32, 33, 100, 1 << 20]), st.integers(0, 300))
"""Lengths, and where a span begins: also behind the last position."""


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=ragged_rows(),
    heads=st.sampled_from([(2, 2), (4, 2), (5, 1), (16, 1)]),
    block_size=st.sampled_from([16, 32]),
    window=st.sampled_from([0, 0, 1, 16, 31, 50]),
    multiprocessors=st.sampled_from([1, 2, 8]),
    spans=st.lists(SPANS, min_size=5, max_size=5),
    seed=st.integers(0, 2**31),
)
@example([Row(129, 300), Row(64, 64)], (5, 1), 16, 50, 1, [(129, 171), (32, 0)] * 3, 0)
@example([Row(100, 250)], (4, 2), 32, 31, 2, [(33, 7)] * 5, 1)
@example([Row(1, 190), Row(1, 90)], (4, 2), 16, 16, 8, [(100, 90), (40, 89)] * 3, 2)
def test_spans_of_any_length_that_begin_anywhere(
    rows: list[Row],
    heads: tuple[int, int],
    block_size: int,
    window: int,
    multiprocessors: int,
    spans: list[tuple[int, int]],
    seed: int,
) -> None:
    """Rows of one batch differ in their spans, and windows count back from the first position of
    one."""
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "block_size": block_size}
    batch = build(rows, **sizes, seed=seed, head_dim=64)
    of_rows = torch.tensor(spans[: len(rows)], dtype=torch.int32)
    check(batch, window, multiprocessors=multiprocessors, spans=of_rows)


def sinks_of(num_heads: int) -> Tensor:
    return torch.linspace(-2.0, 4.0, num_heads)


@pytest.mark.parametrize("multiprocessors", [1, 8])
@pytest.mark.parametrize(
    ("heads", "dims", "dtype", "window", "soft_cap", "sinks"),
    [
        ((4, 2), (64, 64), torch.float32, 40, 0.0, sinks_of(4)),
        ((16, 1), (64, 64), torch.bfloat16, 0, 0.0, sinks_of(16)),
        ((4, 2), (80, 80), torch.float32, 17, 2.0, None),
        ((2, 2), (32, 32), torch.float16, 0, 2.0, torch.tensor([-torch.inf, 200.0])),
        ((20, 1), (48, 32), torch.float32, 0, 0.0, None),  # 20 heads are two groups of ten
        ((17, 1), (48, 32), torch.float16, 40, 2.0, sinks_of(17)),  # 17 are groups of one
        ((16, 1), (96, 80), torch.bfloat16, 17, 0.0, None),
    ],
)
def test_sinks_soft_caps_latents_and_many_heads(
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    window: int,
    soft_cap: float,
    sinks: Tensor | None,
    multiprocessors: int,
) -> None:
    batch = build(
        MIXED,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        block_size=16,
        seed=1,
        head_dim=dims[0],
        dtype=dtype,
    )
    batch = narrowed(batch, dims[1], latent=True) if dims[1] < dims[0] else batch
    check(batch, window, multiprocessors=multiprocessors, soft_cap=soft_cap, sinks=sinks)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(512, 512), (576, 512)])
def test_the_widest_heads_in_their_default_configuration(head_dim: int, value_dim: int) -> None:
    """Heads of Gemma 4, and DeepSeek's latents."""
    rows, heads = [Row(1, 70), Row(5, 20)], {"num_heads": 32, "num_kv_heads": 1}
    batch = build(rows, **heads, block_size=16, seed=1, head_dim=head_dim, dtype=torch.bfloat16)
    batch = narrowed(batch, value_dim, latent=True)
    out = poisoned_out(batch)
    attention.paged_attention(out, *inputs(batch), scale=0.05, sliding_window=0)
    torch.testing.assert_close(out.double(), reference(batch, 0.05, 0), atol=2e-2, rtol=2e-2)


def test_a_batch_as_wide_as_rows_are_searched() -> None:
    """Rows of tiles are found 128 at a time: here the longer ones lie on both sides of that, beside
    rows of nothing."""
    rows = [Row(1, 5)] * 127 + [Row(3, 20), Row(2, 2), Row(1, 3), Row(17, 40)]
    batch = build(rows, num_heads=1, num_kv_heads=1, block_size=16, seed=3, head_dim=64)
    starts = batch.query_starts
    empty = starts[-1:].expand(3)
    padded = replace(
        batch,
        query_starts=torch.cat([starts, empty]),
        context_lengths=torch.cat([batch.context_lengths, torch.zeros(3, dtype=torch.int32)]),
        block_tables=torch.cat(
            [
                batch.block_tables,
                torch.full((3, batch.block_tables.shape[1]), 10**6, dtype=torch.int32),
            ]
        ),
    )
    out = poisoned_out(batch)
    attention.attend(SMALL, 1, (out, *inputs(padded)), scale=SCALE, sliding_window=0)
    torch.testing.assert_close(out.double(), reference(batch, SCALE, 0), atol=1e-5, rtol=1e-5)


def test_blocks_that_a_window_has_left_behind_may_be_gone() -> None:
    """They may be another row's by now, so neither they nor what the table says of them is looked
    at."""
    window, rows = 20, [Row(1, 90), Row(20, 110), Row(50, 64)]
    batch = build(rows, num_heads=4, num_kv_heads=2, block_size=16, seed=9, head_dim=64)
    for index, row in enumerate(rows):
        first_seen = max(0, row.context - row.queries + 1 - window)
        gone = batch.block_tables[index, : first_seen // 16]
        batch.key_cache[gone.long()] = batch.value_cache[gone.long()] = torch.nan
        gone.fill_(10**6)
    canvases = torch.tensor([[row.queries, row.context - row.queries] for row in rows]).int()
    for multiprocessors, spans in product((1, 8), (None, canvases)):
        check(batch, window, multiprocessors=multiprocessors, spans=spans)


def test_tensors_may_be_parts_of_wider_ones() -> None:
    """Queries as a fused projection hands them over, caches that lie layer by layer in one
    allocation."""
    batch = build(MIXED, num_heads=4, num_kv_heads=2, block_size=16, seed=4, head_dim=64)
    fused = torch.full((batch.query.shape[0], 8, 64), torch.nan)
    fused[:, 2:6] = batch.query
    caches = torch.stack([batch.key_cache, batch.value_cache], dim=1)
    check(replace(batch, query=fused[:, 2:6], key_cache=caches[:, 0], value_cache=caches[:, 1]), 0)


@pytest.mark.parametrize("sinks", [None, sinks_of(4)], ids=["", "sinks"])
@pytest.mark.parametrize("multiprocessors", [1, 100])
def test_padding_rows_of_a_captured_graph_give_numbers(
    multiprocessors: int, sinks: Tensor | None
) -> None:
    """A row with nothing in the cache gets zeros; its neighbour with one token gets that token's
    value."""
    batch = build(
        [Row(1, 60), Row(1, 1), Row(1, 1)],
        num_heads=4,
        num_kv_heads=2,
        block_size=16,
        seed=5,
        head_dim=64,
    )
    lengths = torch.tensor([60, 1, 0], dtype=torch.int32)
    tables = batch.block_tables.clone()
    tables[2] = 10**6
    out = poisoned_out(batch)
    tensors = (out, *inputs(replace(batch, context_lengths=lengths, block_tables=tables)))
    attention.attend(SMALL, multiprocessors, tensors, scale=SCALE, sliding_window=0, sinks=sinks)
    torch.testing.assert_close(
        out[:2].double(), reference(batch, SCALE, 0, 0.0, sinks)[:2], atol=1e-5, rtol=1e-5
    )
    if sinks is None:
        value = batch.value_cache[batch.block_tables[1, 0], :, 0]
        torch.testing.assert_close(
            out[1], value.repeat_interleave(2, dim=0).flatten(), atol=1e-6, rtol=0
        )
    assert torch.count_nonzero(out[2]) == 0


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=ragged_rows(),
    padding=st.tuples(st.integers(1, 70), st.integers(0, 40)),
    window=st.sampled_from([0, 0, 1, 31]),
    multiprocessors=st.sampled_from([1, 2, 8]),
    features=st.sets(st.sampled_from(["sinks", "helpers"])),
    seed=st.integers(0, 2**31),
)
@example(MIXED, (0, 3), 0, 1, {"helpers"}, 0)
@example(MIXED, (53, 0), 40, 8, {"sinks"}, 1)
@example([Row(1, 400), *[Row(1, 30)] * 3, Row(2, 70)], (2, 3), 0, 1, {"helpers"}, 2)
@example([Row(33, 33)], (31, 31), 0, 8, set(), 3)
@example([Row(1, 40), Row(1, 2)], (1, 2), 0, 2, {"sinks"}, 4)
def test_padding_of_a_mixed_step_changes_no_bit_of_a_row(
    rows: list[Row],
    padding: tuple[int, int],
    window: int,
    multiprocessors: int,
    features: set[str],
    seed: int,
) -> None:
    """Tokens of no row keep what is in their memory, and rows of no token are not looked up, also
    where long rows have helpers. A graph has more tokens than rows, and one of a single row is not
    replayed for a single token: that is a decode step."""
    batch = build(rows, num_heads=4, num_kv_heads=2, block_size=16, seed=seed, head_dim=32)
    more_tokens, more_rows = padding
    more_rows = min(more_rows, len(batch.query) + more_tokens - len(rows) - 1)
    if more_rows < 0 or (len(rows) + more_rows == 1 and rows[0].queries == 1):
        return
    graph = padded(batch, more_tokens, more_rows)
    sinks = sinks_of(4) if "sinks" in features else None
    outs = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        if "helpers" in features:
            few_keys_per_program(monkeypatch, 64)
        for each in (batch, graph):
            out = poisoned_out(each)
            tensors = (out, *inputs(each))
            attention.attend(
                SMALL, multiprocessors, tensors, scale=SCALE, sliding_window=window, sinks=sinks
            )
            outs.append(out)
    plain, captured = outs
    expected = reference(batch, SCALE, window, 0.0, sinks)
    torch.testing.assert_close(plain.double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(captured[: len(plain)], plain)
    assert captured[len(plain) :].isnan().all()


@pytest.mark.parametrize(
    ("rows", "unused"),
    [([Row(1, 20), Row(1, 40)], "prefill_attention"), ([Row(20, 20)], "decode_attention")],
    ids=["single tokens", "one longer row"],
)
def test_only_the_programs_that_have_work_are_launched(
    rows: list[Row], unused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(attention, unused)
    check(build(rows, num_heads=2, num_kv_heads=1, block_size=16, seed=6, head_dim=64), 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 112}, "no head_dim 112, only 32, 64, 80, 96, 128, 256, 512, 576"),
        ({"head_dim": 512}, "heads of 512 in 16 bits only"),
        ({"head_dim": 576}, "no width of values for head_dim 576 but 576, only 512"),
        ({"block_size": 8}, "no block_size 8, only 16, 32"),
        (
            {"dtype": torch.float64},
            "one of bfloat16, float16 and float32 for all, not torch.float64",
        ),
    ],
    ids=[
        "head_dim",
        "float32 of wide heads",
        "values as wide as latents' keys",
        "block_size",
        "dtype",
    ],
)
def test_what_no_program_does_is_said_before_any_is_launched(
    changes: dict[str, object], message: str
) -> None:
    shape = {"head_dim": 64, "block_size": 16, "dtype": torch.float32, **changes}
    batch = build([Row(1, 5)], num_heads=2, num_kv_heads=1, seed=7, **shape)  # type: ignore[arg-type]
    out = poisoned_out(batch)
    with pytest.raises(UnsupportedByGpu, match=message):
        attention.paged_attention(out, *inputs(batch), scale=SCALE, sliding_window=0)
    assert bool(out.isnan().all())


def test_tensors_that_would_be_read_wrongly_are_refused() -> None:
    batch = build([Row(1, 5)], num_heads=2, num_kv_heads=1, block_size=16, seed=8, head_dim=64)
    turned = replace(batch, query=batch.query.mT.contiguous().mT)
    unlike = replace(batch, value_cache=torch.stack([batch.value_cache] * 2, dim=1)[:, 0])
    mixed = replace(batch, query=batch.query.half())
    narrow = replace(batch, value_cache=batch.value_cache[..., :32])
    for wrong, scale, message in (
        (turned, 1.0, "contiguous"),
        (unlike, 1.0, "alike"),
        (mixed, 1.0, "float16"),
        (narrow, 1.0, "keys' first columns"),
        (batch, -1.0, "scale"),
    ):
        with pytest.raises(UnsupportedByGpu, match=message):
            attention.paged_attention(
                poisoned_out(batch), *inputs(wrong), scale=scale, sliding_window=0
            )
