"""Every operator against an independent float64 reference, on ragged batches with poison in every
unused slot."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoserve.lab.benchmarks.gpu.attention import AttentionCall
from nanoserve.lab.benchmarks.gpu.attention import AttentionRow as Row
from tests.triton_ops.batches import build, inputs, narrowed, padded, poisoned_out, reference
from triton_ops import cache_write, copy_blocks, paged_attention

pytestmark = pytest.mark.usefixtures("implementation")

HEAD_DIM = 8


SPANS = st.tuples(st.sampled_from([1, 2, 4, 7, 32, 1 << 20]), st.integers(0, 50))
"""Lengths, and where a span begins: also behind the last position."""


def attend(batch: AttentionCall, scale: float, window: int) -> Tensor:
    out = poisoned_out(batch)
    paged_attention(out, *inputs(batch), scale=scale, sliding_window=window)
    return out


@st.composite
def ragged_rows(draw: st.DrawFn) -> list[Row]:
    rows = draw(
        st.lists(
            st.tuples(st.integers(1, 40), st.integers(0, 40), st.booleans()), min_size=1, max_size=6
        )
    )
    return [
        Row(1 if decode else queries, (1 if decode else queries) + computed)
        for queries, computed, decode in rows
    ]


@settings(max_examples=40, deadline=None)
@given(
    rows=ragged_rows(),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([0, 1, 5, 16]),
    shared=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)
@example(
    rows=[Row(1, 16), Row(1, 17), Row(1, 1)],
    heads=(4, 2),
    block_size=16,
    window=0,
    shared=0,
    seed=0,
)
@example(
    rows=[Row(16, 16), Row(1, 32), Row(17, 33)],
    heads=(4, 2),
    block_size=16,
    window=16,
    shared=1,
    seed=1,
)
def test_attention_is_the_definition_of_attention(
    rows: list[Row], heads: tuple[int, int], block_size: int, window: int, shared: int, seed: int
) -> None:
    num_heads, num_kv_heads = heads
    batch = build(
        rows,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=HEAD_DIM,
        seed=seed,
        shared=shared,
    )
    expected = reference(batch, 0.3, window)
    torch.testing.assert_close(attend(batch, 0.3, window).double(), expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=25, deadline=None)
@given(
    rows=ragged_rows(),
    heads=st.sampled_from([(4, 4), (6, 1)]),
    window=st.sampled_from([0, 0, 5]),
    spans=st.lists(SPANS, min_size=6, max_size=6),
    seed=st.integers(0, 2**31),
)
@example([Row(150, 300), Row(90, 90)], (4, 4), 0, [(4, 0), (64, 0)] * 3, 0)
@example([Row(150, 300), Row(90, 600)], (4, 4), 20, [(150, 150), (32, 7)] * 3, 0)
@example([Row(1, 600), Row(1, 40)], (6, 1), 5, [(300, 10), (40, 39)] * 3, 0)
def test_a_query_sees_to_the_end_of_its_span(
    rows: list[Row],
    heads: tuple[int, int],
    window: int,
    spans: list[tuple[int, int]],
    seed: int,
) -> None:
    """Rows of one batch may have different spans; one longer than its context shows all of it. The
    window counts back from the first position of the span."""
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "block_size": 4, "head_dim": HEAD_DIM}
    batch = build(rows, seed=seed, **sizes)
    of_rows = torch.tensor(spans[: len(rows)], dtype=torch.int32)
    out = poisoned_out(batch)
    paged_attention(out, *inputs(batch), scale=0.3, sliding_window=window, spans=of_rows)
    expected = reference(batch, 0.3, window, spans=of_rows)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=25, deadline=None)
@given(
    rows=ragged_rows(),
    padding=st.tuples(st.integers(1, 40), st.integers(0, 9)),
    window=st.sampled_from([0, 0, 5]),
    seed=st.integers(0, 2**31),
)
@example([Row(1, 9), Row(1, 4)], (6, 6), 0, 0)
def test_tokens_of_no_row_and_rows_of_no_token_are_left_alone(
    rows: list[Row], padding: tuple[int, int], window: int, seed: int
) -> None:
    """A captured graph of mixed steps pads in this way."""
    batch = build(rows, num_heads=4, num_kv_heads=2, block_size=4, head_dim=HEAD_DIM, seed=seed)
    out = attend(padded(batch, *padding), 0.3, window)
    own = len(batch.query)
    expected = reference(batch, 0.3, window)
    torch.testing.assert_close(out[:own].double(), expected, atol=1e-5, rtol=1e-5)
    assert out[own:].isnan().all()


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rows = [Row(1, 30), Row(7, 20), Row(1, 3)]
    together = build(rows, num_heads=4, num_kv_heads=2, block_size=4, head_dim=HEAD_DIM, seed=3)
    alone = replace(
        together,
        out=together.out[:1],
        query=together.query[:1],
        block_tables=together.block_tables[:1],
        query_starts=together.query_starts[:2],
        context_lengths=together.context_lengths[:1],
    )
    torch.testing.assert_close(
        attend(together, 0.3, 0)[:1], attend(alone, 0.3, 0), atol=1e-6, rtol=1e-6
    )


LONG_ROWS = [Row(1, 700), Row(90, 300), Row(1, 257), Row(3, 512), Row(70, 70), Row(1, 1)]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 64), (7, 1, 20), (2, 2, 80), (3, 1, 128)]
)
@pytest.mark.parametrize("window", [0, 100])
def test_long_rows_of_any_head_dim_in_any_precision(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, window: int
) -> None:
    batch = build(
        LONG_ROWS,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        block_size=16,
        seed=5,
        head_dim=head_dim,
        dtype=dtype,
    )
    expected = reference(batch, 0.2, window)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(
        attend(batch, 0.2, window).double(), expected, atol=tolerance, rtol=tolerance
    )


def sinks_of(num_heads: int) -> Tensor:
    return torch.linspace(-2.0, 4.0, num_heads)


@pytest.mark.parametrize(
    ("heads", "dims", "dtype", "window", "soft_cap", "sinks"),
    [
        ((4, 2), (64, 64), torch.float32, 100, 0.0, sinks_of(4)),  # gpt-oss
        ((8, 1), (64, 64), torch.bfloat16, 0, 0.0, sinks_of(8)),
        ((3, 3), (96, 96), torch.float16, 0, 2.0, None),
        ((4, 2), (256, 256), torch.float32, 100, 2.0, None),  # Gemma 2
        ((4, 1), (512, 512), torch.bfloat16, 0, 0.0, None),
        ((5, 1), (20, 12), torch.float32, 100, 2.0, sinks_of(5)),
        ((4, 4), (48, 32), torch.float16, 0, 0.0, sinks_of(4)),
        ((16, 1), (576, 512), torch.float32, 0, 0.0, None),  # DeepSeek and GLM-4.7-Flash
        ((20, 1), (576, 512), torch.bfloat16, 0, 2.0, None),
        ((16, 1), (40, 24), torch.float16, 100, 0.0, None),
    ],
)
def test_sinks_soft_caps_and_values_of_another_width(
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    window: int,
    soft_cap: float,
    sinks: Tensor | None,
) -> None:
    """A narrower value is a part of the key where one key-value head serves all, else a tensor of
    its own."""
    batch = build(
        LONG_ROWS,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        block_size=16,
        seed=6,
        head_dim=dims[0],
        dtype=dtype,
    )
    batch = narrowed(batch, dims[1], latent=heads[1] == 1) if dims[1] < dims[0] else batch
    out, scale = poisoned_out(batch), 1.5 * dims[0] ** -0.5
    paged_attention(
        out, *inputs(batch), scale=scale, sliding_window=window, soft_cap=soft_cap, sinks=sinks
    )
    tolerance = TOLERANCES[dtype]
    expected = reference(batch, scale, window, soft_cap, sinks)
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def test_as_many_heads_as_deepseek_has_share_one_latent() -> None:
    batch = build(
        [Row(1, 300), Row(5, 70)],
        num_heads=128,
        num_kv_heads=1,
        block_size=16,
        seed=8,
        head_dim=576,
    )
    batch = narrowed(batch, 512, latent=True)
    torch.testing.assert_close(
        attend(batch, 0.05, 0).double(), reference(batch, 0.05, 0), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("sink", [-math.inf, -200.0, 200.0])
def test_a_sink_of_any_size_takes_its_part(sink: float) -> None:
    batch = build(
        [Row(1, 30), Row(7, 20)],
        num_heads=2,
        num_kv_heads=1,
        block_size=4,
        head_dim=HEAD_DIM,
        seed=4,
    )
    sinks, out = torch.tensor([sink, 0.0]), poisoned_out(batch)
    paged_attention(out, *inputs(batch), scale=0.3, sliding_window=0, sinks=sinks)
    expected = reference(batch, 0.3, 0, sinks=sinks)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_tokens_land_in_their_slots_and_padding_lands_nowhere() -> None:
    num_blocks, num_kv_heads, block_size = 5, 2, 4
    key_cache = torch.full((num_blocks, num_kv_heads, block_size, HEAD_DIM), math.nan)
    value_cache = key_cache.clone()
    # A slice of a wider tensor, as the fused projection hands it over.
    key, value = torch.randn(4, num_kv_heads, 2 * HEAD_DIM).split(HEAD_DIM, dim=-1)
    cache_write(key, value, key_cache, value_cache, torch.tensor([19, -1, 0, 7]))
    for token, (block, offset) in {0: (4, 3), 2: (0, 0), 3: (1, 3)}.items():
        assert torch.equal(key_cache[block, :, offset], key[token])
        assert torch.equal(value_cache[block, :, offset], value[token])
    stored = 3 * num_kv_heads * HEAD_DIM
    assert int(key_cache.isfinite().sum()) == int(value_cache.isfinite().sum()) == stored


def test_copies_read_every_source_before_they_write() -> None:
    key_cache = torch.arange(4.0)[:, None, None, None].expand(4, 2, 3, HEAD_DIM).clone()
    value_cache = -key_cache
    copy_blocks(key_cache, value_cache, torch.tensor([[0, 1], [1, 2]]))
    assert key_cache[:, 0, 0, 0].tolist() == [0, 0, 1, 3]
    assert value_cache[:, 1, 2, 7].tolist() == [0, 0, -1, -3]


def test_latents_are_written_and_copied_without_values() -> None:
    key_cache, value_cache = torch.zeros(5, 1, 4, 12), torch.empty(5, 1, 4, 0)
    latents = torch.randn(3, 1, 12)
    cache_write(latents, latents[..., :0], key_cache, value_cache, torch.tensor([19, -1, 0]))
    copy_blocks(key_cache, value_cache, torch.tensor([[4, 0], [0, 1]]))
    assert torch.equal(key_cache[4, :, 3], latents[0]) and torch.equal(
        key_cache[1, :, 0], latents[2]
    )
    assert torch.equal(key_cache[0], key_cache[4]) and torch.count_nonzero(key_cache) == 3 * 12


# it imports torch's compiler; tests/executor/test_torch_compile.py compiles the operators quickly
@pytest.mark.slow
def test_torch_accepts_the_operators_for_tracing() -> None:
    """Schema, fake kernel and functionalization are consistent, as torch.compile relies on."""
    batch = build(
        [Row(1, 6), Row(3, 5)], num_heads=4, num_kv_heads=2, block_size=4, head_dim=HEAD_DIM, seed=7
    )
    key_cache, value_cache = torch.randn(2, *batch.key_cache.shape).unbind()
    key_cache, value_cache = key_cache.clone(), value_cache.clone()
    out = torch.empty(4, 4 * HEAD_DIM)
    metadata = (batch.block_tables, batch.query_starts, batch.context_lengths)
    operators = torch.ops.nanoserve
    torch.library.opcheck(
        operators.paged_attention.default,
        (out, batch.query, key_cache, value_cache, *metadata),
        {"scale": 0.3, "sliding_window": 0, "soft_cap": 2.0, "sinks": torch.randn(4)},
    )
    new_keys, new_values = torch.randn(3, 2, HEAD_DIM), torch.randn(3, 2, HEAD_DIM)
    slots = torch.tensor([3, -1, 0])
    torch.library.opcheck(
        operators.cache_write.default, (new_keys, new_values, key_cache, value_cache, slots)
    )
    torch.library.opcheck(
        operators.copy_blocks.default, (key_cache, value_cache, torch.tensor([[0, 1]]))
    )
