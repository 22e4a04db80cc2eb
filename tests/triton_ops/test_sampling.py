"""Drawing tokens, and log probabilities: both implementations agree, with each other and with
float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from triton_ops import (
    allow_tokens,
    draw_tokens,
    likeliest_tokens,
    reference_operators,
    token_logprobs,
)
from triton_ops.cpu import cpu_operators
from triton_ops.sampling import top_tokens

LARGE = 151_936
"""The tokens of Qwen3: threads share a row."""


@dataclass(frozen=True)
class Draws:
    """Rows that are drawn in one way."""

    logits: Tensor
    keys: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def tokens(self) -> Tensor:
        settings = (
            torch.arange(len(self.logits)),
            self.keys,
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
        )
        used = {
            "uses_top_p": bool((self.top_p < 1).any()),
            "uses_min_p": bool((self.min_p > 0).any()),
        }
        return draw_tokens(
            self.logits, self.logits.amax(1), *settings, largest_top_k=int(self.top_k.max()), **used
        )

    def of(self, rows: list[int]) -> "Draws":
        columns = {name: getattr(self, name)[rows] for name in self.__dataclass_fields__}
        return Draws(**columns)


def some_keys(rows: int, seed: int) -> Tensor:
    words = np.random.default_rng(seed).integers(-(2**31), 2**31, (rows, 2), dtype=np.int32)
    return torch.from_numpy(words)


def some_logits(rows: int, vocab_size: int, kind: str, seed: int) -> Tensor:
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    match kind:
        case "float32":
            return logits
        case "bfloat16":
            return logits.bfloat16().float()
        case "tied":
            return (logits / 2).round() + 0.0  # no negative zeros, which come behind the others
        case "masked":  # most is forbidden, as by a grammar
            kept = (
                torch.rand(rows, vocab_size, generator=torch.Generator().manual_seed(seed + 1))
                < 0.2
            )
            kept[:, vocab_size // 2] = True
            return logits.masked_fill(~kept, -torch.inf)
        case _:
            return logits.bfloat16().float() / 40


def some_draws(rows: int, vocab_size: int, way: str, kind: str, seed: int) -> Draws:
    """Rows with settings that differ: those of one of the ways in which a batch is drawn."""
    random = np.random.default_rng(seed)

    def one_of(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(random.choice(values, rows)).to(dtype)

    top_k, top_p = torch.zeros(rows, dtype=torch.int64), torch.ones(rows, dtype=torch.float64)
    if way == "top_k":
        top_k = one_of([1, 2, 5, 20, vocab_size - 1], torch.int64).clamp_(1, vocab_size - 1)
        top_p = one_of([0.1, 0.5, 0.9, 1.0], torch.float64)
    if way == "top_p":
        top_p = one_of([1e-9, 0.1, 0.5, 0.8, 0.95, 0.9999], torch.float64)
    return Draws(
        some_logits(rows, vocab_size, kind, seed),
        some_keys(rows, seed),
        one_of([1e-30, 0.3, 0.7, 1.0, 1.5, 100.0], torch.float32),
        top_k,
        top_p,
        one_of([0.0, 0.0, 0.05, 0.5, 1.0], torch.float64),
    )


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("way", ["top_k", "top_p", "all"])
@pytest.mark.parametrize(
    ("vocab_size", "rows"), [(2, 3000), (97, 4000), (300, 2000), (1025, 200), (LARGE, 5)]
)
def test_both_implementations_draw_the_same_tokens(vocab_size: int, rows: int, way: str) -> None:
    """101,255 draws in all, with every combination of the settings above and five kinds of
    logits."""
    if not cpu_operators().wait():
        pytest.skip(f"no CPU operators: {cpu_operators().problem}")
    if way == "top_p":  # plain torch is slow at it
        rows //= 5
    for seed, kind in enumerate(("float32", "bfloat16", "tied", "masked", "flat")):
        draws = some_draws(rows, vocab_size, way, kind, seed)
        found = draws.tokens()
        with reference_operators():
            assert torch.equal(found, draws.tokens()), kind


@pytest.mark.parametrize(
    "top_k, top_p, min_p", [(0, 1.0, 0.0), (0, 0.8, 0.0), (9, 1.0, 0.0), (12, 0.9, 0.02)]
)
def test_tokens_are_as_frequent_as_they_are_likely(
    top_k: int, top_p: float, min_p: float, implementation: str
) -> None:
    """Chi-square against probabilities in float64, of 100,000 draws, of 2,000 in plain torch, which
    is slow; a correct sampler misses the level 1 time in 10^4."""
    count, temperature = 100_000 if implementation == "cpu" else 2_000, 0.8
    row = torch.from_numpy(np.random.default_rng(3).normal(0, 1.2, 40)).float()
    same = Draws(
        row.expand(count, -1),
        some_keys(count, seed=5),
        torch.full((count,), temperature),
        torch.full((count,), top_k),
        torch.full((count,), top_p, dtype=torch.float64),
        torch.full((count,), min_p, dtype=torch.float64),
    )
    order = row.double().numpy().argsort()[::-1]
    weights = np.exp((row.double().numpy()[order] - row.max().item()) / np.float32(temperature))
    weights[top_k or len(weights) :] = 0
    better = (np.cumsum(weights) - weights) / weights.sum()
    weights[(better >= top_p) | (weights < min_p)] = 0
    observed = np.bincount(same.tokens().numpy(), minlength=40)[order]
    kept = weights > 0
    expected = count * weights[kept] / weights.sum()
    assert observed[~kept].sum() == 0
    freedom = kept.sum() - 1
    assert ((observed[kept] - expected) ** 2 / expected).sum() < freedom + 3.72 * np.sqrt(
        2 * freedom
    ) + 10


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("way", ["top_k", "top_p", "all"])
def test_a_row_does_not_depend_on_the_others_or_on_threads(way: str) -> None:
    draws = some_draws(3, LARGE, way, "bfloat16", seed=11)
    together = draws.tokens().tolist()
    assert draws.of([2, 0, 1]).tokens().tolist() == [together[row] for row in (2, 0, 1)]
    with threads(1):
        assert [draws.of([row]).tokens().item() for row in range(3)] == together
    with threads(3):
        assert [draws.of([row]).tokens().item() for row in range(3)] == together


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("way", ["top_k", "top_p", "all"])
def test_rows_may_lie_apart_and_what_is_not_a_number_harms_no_other(way: str) -> None:
    """Pad the rows, as the logits of a model with a padded vocabulary are."""
    draws = some_draws(8, 200, way, "float32", seed=2)
    expected = draws.tokens()
    padded = torch.full((8, 256), torch.inf)
    padded[:, :200] = draws.logits
    padded[3, 7], padded[5, 9] = torch.nan, torch.inf
    found = replace(draws, logits=padded[:, :200]).tokens()
    sound = [0, 1, 2, 4, 6, 7]
    assert torch.equal(found[sound], expected[sound])


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("kind", ["float32", "tied", "masked"])
@pytest.mark.parametrize("most", [0, 1, 5, 20, 1000])
@pytest.mark.parametrize("vocab_size", [3, 130, 5000])
def test_log_probabilities_are_those_of_float64(vocab_size: int, most: int, kind: str) -> None:
    logits = some_logits(4, vocab_size, kind, seed=most)
    chosen = logits.argsort(1, descending=True)[:, min(vocab_size // 2, 40)]
    logits[2, 0] = torch.nan
    logprobs, ranks, best, best_logprobs = token_logprobs(logits, chosen, most)
    assert best.shape == best_logprobs.shape == (4, min(most, vocab_size))
    for row in (0, 1, 3):
        exact = logits[row].double().log_softmax(0)
        order = sorted(range(vocab_size), key=lambda token: (-exact[token].item(), token))[:most]
        assert logprobs[row].item() == pytest.approx(exact[chosen[row]].item(), abs=2e-6, rel=1e-6)
        assert ranks[row] == (exact > exact[chosen[row]]).sum() + 1
        assert best[row].tolist() == order
        torch.testing.assert_close(best_logprobs[row].double(), exact[order], atol=2e-6, rtol=1e-6)


def test_the_largest_of_a_large_vocabulary_are_found_whatever_is_asked_for() -> None:
    """Many or few, and more than there are blocks with a maximum of their own."""
    logits = some_logits(2, LARGE, "bfloat16", seed=4)
    for most in (1, 20, 1100, 3000):
        assert torch.equal(
            token_logprobs(logits, torch.tensor([0, 1]), most)[2], top_tokens(logits, most)
        )


@pytest.mark.usefixtures("implementation")
def test_the_likeliest_token_is_the_lowest_of_equal_ones_and_unsound_rows_are_told() -> None:
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor(
        [[1.0, 3.0, 3.0], [-inf, -inf, -2.0], [-inf, -inf, -inf], [5.0, inf, 1.0], [2.0, 4.0, nan]]
    )
    maxima, tokens, finite = likeliest_tokens(logits)
    assert finite.tolist() == [True, True, False, False, False]
    assert (maxima[:2].tolist(), tokens[:2].tolist()) == ([3.0, -2.0], [1, 2])


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_give_the_tokens_of_the_same_numbers_in_32(dtype: torch.dtype) -> None:
    draws = some_draws(5, 3000, "all", "float32", seed=7)
    halved = draws.logits.to(dtype)
    exact = replace(draws, logits=halved.float())
    maxima, likeliest, finite = likeliest_tokens(halved)
    for found, wanted in zip(
        (maxima, likeliest, finite), likeliest_tokens(exact.logits), strict=True
    ):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    settings = draws.keys, draws.temperature, draws.top_k, draws.top_p, draws.min_p
    uses = {"largest_top_k": 0, "uses_top_p": False, "uses_min_p": True}
    assert torch.equal(
        draw_tokens(halved, maxima, torch.arange(5), *settings, **uses), exact.tokens()
    )


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("vocab_size", [8, 13, 200])
def test_forbidden_tokens_are_minus_infinity_in_their_rows_alone(vocab_size: int) -> None:
    logits, random = some_logits(5, vocab_size, "float32", seed=1), np.random.default_rng(1)
    before, allowed = logits.clone(), random.random((2, vocab_size)) < 0.5
    bits = torch.from_numpy(np.packbits(allowed, axis=1, bitorder="little"))
    expected = before.clone()
    expected[[3, 1]] = expected[[3, 1]].masked_fill(torch.from_numpy(~allowed), -torch.inf)
    assert torch.equal(allow_tokens(logits, torch.tensor([3, 1]), bits), expected)
    assert torch.equal(logits, before)


@pytest.mark.slow  # it imports torch's compiler
def test_torch_accepts_them_for_tracing() -> None:
    draws = some_draws(3, 50, "top_p", "float32", seed=1)
    settings = (
        torch.arange(3),
        draws.keys,
        draws.temperature,
        draws.top_k,
        draws.top_p,
        draws.min_p,
    )
    used = {"largest_top_k": 0, "uses_top_p": True, "uses_min_p": True}
    arguments = (draws.logits, draws.logits.amax(1), *settings)
    torch.library.opcheck(torch.ops.nanoserve.draw_tokens.default, arguments, used)
    torch.library.opcheck(
        torch.ops.nanoserve.token_logprobs.default, (draws.logits, torch.tensor([1, 2, 3]), 5)
    )
    bits = torch.zeros(1, 7, dtype=torch.uint8)
    torch.library.opcheck(
        torch.ops.nanoserve.allow_tokens.default, (draws.logits, torch.tensor([1]), bits)
    )
