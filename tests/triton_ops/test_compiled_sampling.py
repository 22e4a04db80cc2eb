"""The function that GPUs compile for draws by top_k gives the tokens of the plain operator; here a
CPU runs it. Their programs for other draws are tested in `tests/interpreter`."""

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.triton_ops.test_sampling import Draws, some_draws
from triton_ops import reference_operators
from triton_ops.gpu import sampling
from triton_ops.gpu.sampling import COMPILER, compiled

KINDS = ("float32", "bfloat16", "tied", "masked", "flat")


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
@pytest.mark.parametrize(("vocab_size", "rows"), [(97, 100), (5000, 1)])
def test_what_is_compiled_draws_the_tokens_of_the_plain_operator(
    vocab_size: int, rows: int
) -> None:
    for seed, kind in enumerate(KINDS):
        draws = some_draws(rows, vocab_size, "top_k", kind, seed)
        assert torch.equal(drawn(draws), expected(draws)), kind


@torch.inference_mode()
def test_top_k_is_compiled_for_one_row_and_for_more(compiler: CountingCompiler) -> None:
    """Whatever the rows are, and whichever of a batch's rows are drawn, for numbers of candidates
    that are powers of two from 64 on."""
    batch = some_draws(9, 97, "top_k", "float32", seed=1)
    for rows in ([0], [5], [0, 1], [3, 4, 5, 6], list(range(9))):
        draws = batch.of(rows)
        assert torch.equal(drawn(draws), expected(draws))
    assert compiler.graphs <= 4
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
            uses_top_p=False,
            uses_min_p=True,
        )
        assert torch.equal(tokens, expected(batch)[rows])
    assert compiler.graphs == counted


def test_a_compiler_that_fails_costs_speed_alone(
    compiler: CountingCompiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(graph: torch.fx.GraphModule, inputs: object) -> None:
        raise ValueError("no such backend\nand more of it")

    monkeypatch.setattr(sampling, "COMPILER", {"backend": fail})
    draws = some_draws(3, 97, "top_k", "float32", seed=1)
    with caplog.at_level(logging.WARNING, logger="nanoserve"):
        for _ in range(2):
            assert torch.equal(drawn(draws), expected(draws))
    (record,) = caplog.records
    assert record.getMessage().startswith("nanoserve: sampling runs uncompiled, which is slower: ")


@pytest.mark.slow  # Inductor compiles four functions
def test_what_inductor_makes_draws_the_same_tokens() -> None:
    compiled.cache_clear()
    assert COMPILER["backend"] == "inductor"
    for seed, kind in enumerate(KINDS):
        draws = some_draws(12, 1000, "top_k", kind, seed)
        assert torch.equal(drawn(draws), expected(draws)), kind
        assert torch.equal(drawn(draws.of([3])), expected(draws)[3:4]), kind
