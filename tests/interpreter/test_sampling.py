"""The GPU's programs that sample give the tokens of the plain operators, whose functions are
tested against a sort in float64."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.triton_ops.test_sampling import Draws, some_draws, some_logits
from triton_ops import likeliest_tokens, reference_operators
from triton_ops.gpu import sampling as gpu
from triton_ops.gpu.sampling_constants import BLOCK

KINDS = ("float32", "bfloat16", "tied", "masked", "flat")
SHAPES = [(1, 5000), (3, 2 * BLOCK), (7, 97), (2, 2), (70, 1030)]
"""Rows and tokens. The interpreted GPU cuts the vocabulary of one row, and of three, in pieces, and
has one program for each of 70 rows."""


@pytest.fixture(autouse=True)
def poisoned_scratch() -> Iterator[None]:
    """Memory of torch.empty is not zero here: what is read but was never written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def drawn(draws: Draws, rows: Tensor | None = None) -> Tensor:
    """Draw as on a GPU these rows of the batch, or all; the settings are those of the rows."""
    if rows is None:
        rows = torch.arange(len(draws.logits))
    return gpu.draw_tokens(
        draws.logits,
        draws.logits.amax(1).float(),
        rows,
        draws.keys,
        draws.temperature,
        draws.top_k,
        draws.top_p,
        draws.min_p,
        largest_top_k=0,
        uses_top_p=bool((draws.top_p < 1).any()),
        uses_min_p=True,
    )


def expected(draws: Draws) -> Tensor:
    with reference_operators():
        return draws.tokens()


@pytest.mark.parametrize("way", ["all", "top_p"])
@pytest.mark.parametrize(("rows", "vocab_size"), SHAPES)
def test_the_tokens_are_those_of_the_plain_operator(rows: int, vocab_size: int, way: str) -> None:
    for seed, kind in enumerate(KINDS):
        draws = some_draws(rows, vocab_size, way, kind, seed)
        assert torch.equal(drawn(draws), expected(draws)), kind


def test_rows_without_top_p_are_drawn_beside_rows_with_it() -> None:
    draws = some_draws(6, 300, "top_p", "float32", seed=2)
    draws.top_p[1] = draws.top_p[4] = 1.0
    assert torch.equal(drawn(draws), expected(draws))


@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_the_least_logit_of_top_p_is_that_of_a_sort_in_float64(spread: float) -> None:
    """Also where one token has most of a row, and the thousands that share the rest are each less
    likely than 1 in 10^5."""
    logits = some_logits(6, 7000, "float32", seed=3).mul_(spread / 3)
    if spread < 1:
        logits.sub_(13.0)[:, 5000] = 0.0
    top_p = torch.tensor([0.99, 0.995, 0.95, 0.9999, 0.5, 1.0], dtype=torch.float64)
    maxima = logits.amax(1)
    least = gpu._least_of_top_p(
        gpu._Launch(logits, 6), logits, maxima, torch.arange(6), torch.ones(6), top_p
    )
    scaled, shares = logits - maxima[:, None], logits.double().softmax(1)
    for row in range(5):
        order = scaled[row].argsort(descending=True)
        place = int((shares[row][order].cumsum(0) < top_p[row]).sum())
        assert least[row] == scaled[row][order[place]]
    assert least[5] == -torch.inf
    assert spread > 1 or (least[:2] < -12).all()


@pytest.mark.parametrize("way", ["all", "top_p"])
def test_some_rows_of_a_batch_are_drawn(way: str) -> None:
    batch = some_draws(5, 1500, way, "bfloat16", seed=4)
    rows = torch.tensor([4, 1, 2])
    chosen = replace(batch.of(rows.tolist()), logits=batch.logits)
    assert torch.equal(drawn(chosen, rows), expected(batch)[rows])
    assert len(drawn(replace(batch.of([]), logits=batch.logits), rows[:0])) == 0


def test_rows_of_logits_may_be_apart() -> None:
    draws = some_draws(3, 1100, "all", "float32", seed=5)
    wide = torch.full((3, 1500), torch.inf)
    wide[:, :1100] = draws.logits
    assert torch.equal(drawn(replace(draws, logits=wide[:, :1100])), expected(draws))
    found = gpu.likeliest_tokens(wide[:, :1100])
    assert torch.equal(found[1], draws.logits.argmax(1))


@pytest.mark.parametrize("way", ["all", "top_p"])
def test_rows_that_are_no_numbers_get_a_token_of_the_vocabulary(way: str) -> None:
    draws = some_draws(4, 1025, way, "float32", seed=6)
    draws.logits[0], draws.logits[1, 7], draws.logits[2, 1024] = -torch.inf, torch.inf, torch.nan
    tokens = drawn(draws)
    assert ((tokens >= 0) & (tokens < 1025)).all()
    sound = draws.of([3])
    assert torch.equal(tokens[3:], expected(sound))


@pytest.mark.parametrize(("rows", "vocab_size"), SHAPES)
def test_the_likeliest_tokens_and_which_rows_are_finite(rows: int, vocab_size: int) -> None:
    """With ties, and in the last rows with what is no number."""
    for seed, kind in enumerate(KINDS):
        logits = some_logits(rows, vocab_size, kind, seed)
        if rows > 2:
            logits[0, 0], logits[1], logits[2, 1:] = -0.0, -torch.inf, torch.nan
        if rows > 3:
            logits[3, vocab_size // 2], logits[4, 1], logits[4, 5:] = torch.inf, -torch.nan, 9e9
            logits[5], logits[5, 3] = -0.0, 0.0
        with reference_operators():
            wanted = likeliest_tokens(logits)
        for found, other in zip(gpu.likeliest_tokens(logits), wanted, strict=True):
            assert found.dtype == other.dtype
            assert torch.equal(found.nan_to_num(nan=7.0), other.nan_to_num(nan=7.0)), kind


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_give_the_tokens_of_the_same_numbers_in_32(dtype: torch.dtype) -> None:
    for rows, vocab_size in SHAPES:
        draws = some_draws(rows, vocab_size, "all", "float32", seed=7)
        halved = draws.logits.to(dtype)
        exact = halved.float()
        assert torch.equal(
            drawn(replace(draws, logits=halved)), expected(replace(draws, logits=exact))
        )
        both = zip(gpu.likeliest_tokens(halved), gpu.likeliest_tokens(exact), strict=True)
        for found, wanted in both:
            assert found.dtype == wanted.dtype
            assert torch.equal(found, wanted)


def test_counters_are_zero_after_each_launch() -> None:
    draws = some_draws(2, 4000, "top_p", "float32", seed=1)
    gpu.arrival_counters.cache_clear()
    launch = gpu._Launch(draws.logits, 2)
    assert launch.grid[1] > 1
    gpu.likeliest_tokens(draws.logits)
    drawn(draws)
    assert not launch.arrivals.any()
