"""Attention of prompts in bfloat16, in each way that a processor can multiply: tiles (AMX), dot
products of pairs (AVX-512), and float32. Each is allowed in turn on the processor at hand."""

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from nanoserve.lab.benchmarks.gpu.attention import TOLERANCES, AttentionCall, compared, make_batch
from nanoserve.lab.benchmarks.gpu.attention import AttentionRow as Row
from tests.triton_ops.batches import build, inputs, poisoned_out, reference
from triton_ops import paged_attention
from triton_ops.cpu import cpu_operators

OPERATORS = torch.ops.nanoserve
WAYS = {"tiles": (True, False), "dots": (False, True), "float32": (False, False)}


def processor_flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    return set(next((line for line in lines if line.startswith("flags")), "").split())


@pytest.fixture(scope="module", autouse=True)
def _cpu_operators() -> None:
    if not cpu_operators().wait():
        pytest.skip(f"no CPU operators: {cpu_operators().problem}")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Allow one way of multiplying; skip those that this processor does not have."""
    tiles, dots = WAYS[request.param]
    if tiles and not OPERATORS.has_tiles():
        pytest.skip("this processor has no tiles")
    if dots and not (
        "avx512_bf16" in processor_flags() and torch.backends.cpu.get_cpu_capability() == "AVX512"
    ):
        pytest.skip("this processor has no dot products of bfloat16")
    before = OPERATORS.allow_tiles(tiles), OPERATORS.allow_dots(dots)
    yield request.param
    OPERATORS.allow_tiles(before[0])
    OPERATORS.allow_dots(before[1])


def attend(
    batch: AttentionCall,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    spans: Tensor | None = None,
) -> Tensor:
    out = poisoned_out(batch)
    others = {"soft_cap": soft_cap, "sinks": sinks, "spans": spans}
    paged_attention(out, *inputs(batch), scale=scale, sliding_window=window, **others)
    return out


@st.composite
def prompts(draw: st.DrawFn) -> list[Row]:
    """Prompts, chunks of them behind a prefix in the cache, and single tokens, around the sizes of
    tiles and panels."""
    lengths = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 130]))
    prefixes = st.one_of(st.just(0), st.integers(1, 40), st.sampled_from([255, 256, 257, 300]))
    rows = draw(st.lists(st.tuples(lengths, prefixes), min_size=1, max_size=3))
    return [Row(queries, queries + before) for queries, before in rows]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=prompts(),
    heads=st.sampled_from([(2, 2), (4, 2), (7, 1), (16, 1)]),
    head_dim=st.sampled_from([20, 64, 80, 128, 256]),
    block_size=st.sampled_from([1, 16, 24]),
    window=st.sampled_from([0, 0, 1, 33, 100]),
    soft_cap=st.sampled_from([0.0, 2.0]),
    largest_sink=st.sampled_from([None, 4.0]),
    span=st.sampled_from([(1, 0), (1, 0), (4, 0), (50, 0), (50, 30), (33, 700), (1 << 20, 0)]),
    seed=st.integers(0, 2**31),
)
@example([Row(300, 300)], (1, 1), 64, 16, 0, 0.0, None, (1, 0), 0)
@example([Row(40, 600)], (2, 2), 128, 16, 33, 0.0, 4.0, (1, 0), 1)
@example([Row(150, 300), Row(4, 260)], (2, 2), 64, 16, 0, 0.0, None, (4, 0), 2)
@example([Row(256, 700), Row(70, 600)], (2, 2), 64, 16, 100, 0.0, None, (256, 444), 3)
@example([Row(70, 600)], (2, 2), 64, 16, 40, 0.0, None, (32, 7), 4)
def test_every_way_is_the_definition_of_attention(
    way: str,
    rows: list[Row],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    window: int,
    soft_cap: float,
    largest_sink: float | None,
    span: tuple[int, int],
    seed: int,
) -> None:
    batch = build(
        rows,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        block_size=block_size,
        seed=seed,
        head_dim=head_dim,
        dtype=torch.bfloat16,
    )
    sinks = None if largest_sink is None else torch.linspace(-2.0, largest_sink, heads[0])
    scale = 1.5 * head_dim**-0.5
    spans = torch.tensor([span] * len(rows), dtype=torch.int32)
    others = (scale, window, soft_cap, sinks, spans)
    expected = reference(batch, *others).unflatten(1, (heads[0], head_dim))
    found = attend(batch, *others).unflatten(1, (heads[0], head_dim))
    check = compared("attention", found, expected, TOLERANCES[torch.bfloat16])
    assert check["ok"], check


@cache
def beside_torch(
    queries: int, before: int, head_dim: int, scale: float
) -> tuple[AttentionCall, Tensor, Tensor]:
    """A batch, what is right in float64, and what torch's own attention makes of it in bfloat16."""
    row = Row(queries, queries + before)
    batch = make_batch([row], 4, 2, head_dim, block_size=16, dtype=torch.bfloat16, seed=9)
    key, value = batch.gathered()
    mask = torch.ones(queries, queries + before, dtype=torch.bool).tril(before)
    theirs = functional.scaled_dot_product_attention(
        batch.query.transpose(0, 1)[None], key, value, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return batch, reference(batch, scale, 0), theirs[0].transpose(0, 1).flatten(1)


@pytest.mark.parametrize(("queries", "before"), [(200, 0), (70, 300)])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("spread", [1.0, 6.0], ids=["flat", "peaked"])
def test_no_way_is_less_exact_than_torch(
    way: str, queries: int, before: int, head_dim: int, spread: float
) -> None:
    """Errors against float64 beside those of torch's own attention, which rounds weights as
    well."""
    scale = spread * head_dim**-0.5
    batch, expected, theirs = beside_torch(queries, before, head_dim, scale)
    our_error, their_error = attend(batch, scale).double() - expected, theirs.double() - expected
    assert our_error.square().mean().sqrt() <= 1.05 * their_error.square().mean().sqrt()
    assert our_error.abs().max() <= 1.25 * their_error.abs().max()


def cut(batch: AttentionCall, first: int, last: int) -> AttentionCall:
    """Some queries of a batch of one row, as a step of its own."""
    return replace(
        batch,
        out=batch.out[first:last],
        query=batch.query[first:last],
        query_starts=torch.tensor([0, last - first], dtype=torch.int32),
        context_lengths=batch.context_lengths - len(batch.query) + last,
    )


@pytest.fixture
def _batch_invariant() -> Iterator[None]:
    OPERATORS.set_batch_invariant(True)
    yield
    OPERATORS.set_batch_invariant(False)


@pytest.mark.usefixtures("_batch_invariant")
@pytest.mark.parametrize("window", [0, 70])
def test_a_query_is_the_same_in_a_step_of_any_size(way: str, window: int) -> None:
    """Bit for bit, alone or beside others: in the whole prompt, in a chunk of it, or as a single
    token."""
    batch = make_batch([Row(700, 720)], 6, 2, 80, block_size=16, dtype=torch.bfloat16, seed=3)
    whole = attend(batch, 0.2, window)
    for first, last in [(0, 1), (0, 33), (255, 256), (250, 410), (699, 700)]:
        assert torch.equal(attend(cut(batch, first, last), 0.2, window), whole[first:last])


def test_ways_are_taken_where_they_are_allowed(way: str) -> None:
    """A weight is rounded to bfloat16 unless products are of float32: one of 1 + 2^-10 then equals
    one of 1."""
    batch = make_batch([Row(2, 2)], 1, 1, 32, block_size=16, dtype=torch.bfloat16)
    batch.query.fill_(0.0)
    batch.query[1, 0, 0] = 1.0
    block = int(batch.block_tables[0, 0])
    keys, values = batch.key_cache[block, 0], batch.value_cache[block, 0]
    keys[:2] = 0.0
    keys[0, 0] = 2.0**-10
    values[0], values[1] = 1.0, -1.0
    found = attend(batch, 1.0)[1, 0].item()
    assert found == (pytest.approx(math.tanh(2.0**-11), rel=1e-2) if way == "float32" else 0.0)


def test_tiles_are_those_that_the_system_lists() -> None:
    """Linux lists a processor's tiles if it saves them, and lets a process have them (but for a
    reason as below)."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("built for processors without tiles")
    assert OPERATORS.has_tiles() == ({"amx_tile", "amx_bf16"} <= processor_flags())


REFUSED = """
import ctypes

class Stack(ctypes.Structure):
    _fields_ = [("memory", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

memory = ctypes.create_string_buffer(8192)  # the content of tiles alone is as large
stack = Stack(ctypes.addressof(memory), 0, len(memory))
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0

import torch
from nanoserve.lab.benchmarks.gpu.attention import AttentionRow, make_batch
from triton_ops import linear
from triton_ops.cpu import cpu_operators

assert cpu_operators().wait()
assert not torch.ops.nanoserve.has_tiles()
assert make_batch([AttentionRow(70, 70)], 2, 1, 64, block_size=16, dtype=torch.bfloat16).attend().isfinite().all()
assert linear(torch.ones(16, 64).bfloat16(), torch.ones(32, 64).bfloat16()).eq(64).all()
"""


@pytest.mark.slow  # it imports torch in a process of its own
def test_a_process_that_may_not_use_tiles_computes_without_them() -> None:
    """Linux refuses tiles to a process that handles signals on a stack that their content would not
    fit on. An instruction for tiles would end it."""
    if not OPERATORS.has_tiles():
        pytest.skip("this processor has no tiles")
    outcome = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
