"""The functions that GPUs compile for sampling give the tokens of the plain operators; here a CPU
runs them."""

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.triton_ops.test_sampling import Draws, some_draws, some_logits
from triton_ops import likeliest_tokens, reference_operators
from triton_ops.gpu import sampling
from triton_ops.gpu.sampling import COMPILER, compiled, largest_in_pieces

WAYS = ("top_k", "top_p", "all")
"""Ways in which a batch is drawn; "all" is by temperature alone."""


class CountingCompiler:
    """A backend that runs what it is given as it is, and counts it."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        self.graphs += 1
        return graph


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingCompiler]:
    counting = CountingCompiler()
    monkeypatch.setattr(sampling, "COMPILER", {"backend": counting})
    compiled.cache_clear()
    yield counting
    compiled.cache_clear()
    torch._dynamo.reset()


@torch.inference_mode()
def drawn(draws: Draws) -> Tensor:
    """Draw as on a GPU."""
    return sampling.draw_tokens(
        draws.logits,
        draws.logits.amax(1),
        torch.arange(len(draws.logits)),
        draws.keys,
        draws.temperature,
        draws.top_k,
        draws.top_p,
        draws.min_p,
        largest_top_k=int(draws.top_k.max()),
        uses_top_p=bool((draws.top_p < 1).any()),
        uses_min_p=bool((draws.min_p > 0).any()),
    )


def expected(draws: Draws) -> Tensor:
    with reference_operators():
        return draws.tokens()


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("vocab_size", "rows"), [(97, 100), (5000, 1)])
def test_what_is_compiled_draws_the_tokens_of_the_plain_operator(
    vocab_size: int, rows: int, way: str
) -> None:
    for seed, kind in enumerate(("float32", "bfloat16", "tied", "masked", "flat")):
        draws = some_draws(rows, vocab_size, way, kind, seed)
        assert torch.equal(drawn(draws), expected(draws)), kind


@pytest.mark.parametrize("way", WAYS)
@torch.inference_mode()
def test_a_way_is_compiled_for_one_row_and_for_more(compiler: CountingCompiler, way: str) -> None:
    """Whatever the rows are, and whichever of a batch's rows are drawn; top_k for numbers of
    candidates that are powers of two from 64 on."""
    batch = some_draws(9, 97, way, "float32", seed=1)
    for rows in ([0], [5], [0, 1], [3, 4, 5, 6], list(range(9))):
        draws = batch.of(rows)
        assert torch.equal(drawn(draws), expected(draws))
    assert compiler.graphs <= (2 if way != "top_k" else 4)
    counted = compiler.graphs
    columns = (batch.keys, batch.temperature, batch.top_k, batch.top_p, batch.min_p)
    for rows in ([2], [7, 4], list(range(9))):
        chosen = torch.tensor(rows)
        tokens = sampling.draw_tokens(
            batch.logits,
            batch.logits.amax(1),
            chosen,
            *(column[chosen] for column in columns),
            largest_top_k=int(batch.top_k.max()),
            uses_top_p=way == "top_p",
            uses_min_p=True,
        )
        assert torch.equal(tokens, expected(batch)[rows])
    assert compiler.graphs == counted


@pytest.mark.usefixtures("compiler")
def test_the_likeliest_tokens_and_which_rows_are_sound() -> None:
    """With ties, rows of minus infinity, and what is no number."""
    for rows in (1, 6):
        logits = some_logits(rows, 4097, "tied", seed=3)
        logits[-1, 4096] = torch.nan
        if rows > 1:
            logits[1], logits[2, 7], logits[3, 11] = -torch.inf, torch.inf, torch.nan
        for found, wanted in zip(
            sampling.likeliest_tokens(logits), likeliest_tokens(logits), strict=True
        ):
            assert torch.equal(found.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("length", [1, 31, 4096, 4097])
def test_of_equal_numbers_in_several_pieces_the_first_is_found(length: int) -> None:
    values = torch.zeros(3, length)
    values[1, length // 2 :] = 2.0
    values[2] = -torch.inf
    largest, places = largest_in_pieces(values)
    assert largest.tolist() == [0.0, 2.0, -torch.inf]
    assert places.tolist() == [0, length // 2, 0]


def test_a_compiler_that_fails_costs_speed_alone(
    compiler: CountingCompiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(graph: torch.fx.GraphModule, inputs: object) -> None:
        raise ValueError("no such backend\nand more of it")

    monkeypatch.setattr(sampling, "COMPILER", {"backend": fail})
    draws = some_draws(3, 97, "top_p", "float32", seed=1)
    with caplog.at_level(logging.WARNING, logger="nanoserve"):
        for _ in range(2):
            assert torch.equal(drawn(draws), expected(draws))
    (record,) = caplog.records
    assert record.getMessage().startswith("nanoserve: sampling runs uncompiled, which is slower: ")


@pytest.mark.slow  # Inductor compiles eight functions
def test_what_inductor_makes_draws_the_same_tokens() -> None:
    compiled.cache_clear()
    assert COMPILER["backend"] == "inductor"
    for way in WAYS:
        for seed, kind in enumerate(("float32", "bfloat16", "tied", "masked", "flat")):
            draws = some_draws(12, 1000, way, kind, seed)
            assert torch.equal(drawn(draws), expected(draws)), (way, kind)
            assert torch.equal(drawn(draws.of([3])), expected(draws)[3:4]), (way, kind)
    logits = some_logits(5, 1000, "tied", seed=3)
    logits[2, 7] = torch.nan
    for found, wanted in zip(
        sampling.likeliest_tokens(logits), likeliest_tokens(logits), strict=True
    ):
        assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
