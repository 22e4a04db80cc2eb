"""The lecture's algorithm 1, and how often draft tokens are accepted by it and by nanoserve's
shared noise."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nanoserve.lab.papers.ratio_test import (
    acceptance_probability,
    optimal_acceptance,
    residual,
    shared_noise_acceptance,
    verify,
)
from nanoserve.scheduler.speculation.draft_lengths import expected_tokens
from tests.executor.staged_rows import row_keys
from triton_ops.sampling import exponential

DRAWS = 100_000
Floats = NDArray[np.float64]


def _distributions(*shape: int, seed: int) -> Floats:
    return np.random.default_rng(seed).dirichlet([0.5] * shape[-1], shape[:-1])


def _drawn(probabilities: Floats, random: np.random.Generator) -> NDArray[np.int64]:
    return (probabilities / random.exponential(size=probabilities.shape)).argmax(-1)


def _chi_square(found: NDArray[np.int64], expected: Floats) -> float:
    return float(((found - DRAWS * expected) ** 2 / (DRAWS * expected)).sum())


def test_the_lectures_example() -> None:
    """Section 3.1.3: "quick" and "brown" are drafted with p = .6 and .8, and the model has q = .7
    and .4."""
    accepted = acceptance_probability(np.array([0.6, 0.8]), np.array([0.7, 0.4]))
    assert accepted == pytest.approx([1.0, 0.5])
    # "quick" for sure, "brown" half of the time, and one token more: "blue" in its place, or the
    # bonus token.
    assert 1 + accepted[0] + accepted[0] * accepted[1] == pytest.approx(2.5)


def test_the_lectures_binary_proof() -> None:
    """Section 3.1.4, equations (17) to (20): A is drafted too often, and B comes of the
    residual."""
    p, q = np.array([0.8, 0.2]), np.array([0.5, 0.5])
    assert p * acceptance_probability(p, q) + (1 - optimal_acceptance(p, q)) * residual(
        p, q
    ) == pytest.approx(q)
    assert residual(p, q).tolist() == [0.0, 1.0]
    assert residual(q, q).tolist() == q.tolist()


def test_algorithm_1_keeps_the_models_distribution() -> None:
    """Three tokens in a row: each model's distribution hangs on the token before. Chi-square over
    10^5 draws."""
    vocabulary, most, random = 4, 2, np.random.default_rng(1)
    p_after, q_after = (
        _distributions(most + 1, vocabulary, vocabulary, seed=seed) for seed in (2, 3)
    )
    draft_tokens, before = np.empty((DRAWS, most), np.int64), np.zeros(DRAWS, np.int64)
    p, q = (np.empty((DRAWS, most + extra, vocabulary)) for extra in (0, 1))
    for place in range(most):
        p[:, place], q[:, place] = p_after[place, before], q_after[place, before]
        draft_tokens[:, place] = before = _drawn(p[:, place], random)
    q[:, most] = q_after[most, before]
    accepted, more = verify(draft_tokens, p, q, random)

    tokens = np.concatenate((draft_tokens, np.zeros((DRAWS, 1), np.int64)), axis=1)
    tokens[np.arange(DRAWS), accepted] = more
    # what was not answered is what plain decoding answers next
    for place in range(accepted.min() + 1, most + 1):
        late = accepted < place
        tokens[late, place] = _drawn(q_after[place, tokens[late, place - 1]], random)
    found = np.bincount(tokens @ [vocabulary**2, vocabulary, 1], minlength=vocabulary**3)
    expected = q_after[0, 0][:, None, None] * q_after[1][:, :, None] * q_after[2][None]
    # 63 degrees of freedom: exceeded once in a thousand times
    assert _chi_square(found, expected.ravel()) < 103.4

    tried = optimal_acceptance(p_after[0, 0], q_after[0, 0])
    assert np.mean(accepted > 0) == pytest.approx(tried, abs=4 * np.sqrt(0.25 / DRAWS))


def test_without_the_residual_the_distribution_is_another() -> None:
    """That chi-square test notices it."""
    p, q, random = _distributions(4, seed=5), _distributions(4, seed=6), np.random.default_rng(7)
    draft_tokens = _drawn(np.broadcast_to(p, (DRAWS, 4)), random)
    accepts = random.random(DRAWS) < acceptance_probability(p, q)[draft_tokens]
    tokens = np.where(accepts, draft_tokens, _drawn(np.broadcast_to(q, (DRAWS, 4)), random))
    # 3 degrees of freedom: once in 10^9 times
    assert _chi_square(np.bincount(tokens, minlength=4), q) > 45


def test_the_samplers_noise_matches_as_often_as_the_formula_says() -> None:
    """nanoserve's scheme: both race with the noise of the sampler, which is shared as seed and
    position are."""
    p, q = _distributions(12, seed=8), _distributions(12, seed=9)
    same, zeros = np.arange(DRAWS), np.zeros(DRAWS, np.int64)
    keys = torch.from_numpy(row_keys(zeros + 4, zeros, same))
    noise = exponential(keys, torch.arange(12)[None]).double().numpy()
    matches = (p / noise).argmax(-1) == (q / noise).argmax(-1)
    rate = shared_noise_acceptance(p, q)
    assert matches.mean() == pytest.approx(rate, abs=4 * np.sqrt(0.25 / DRAWS))
    assert np.bincount((q / noise).argmax(-1), minlength=12) / DRAWS == pytest.approx(q, abs=0.01)
    assert rate < optimal_acceptance(p, q)


@settings(max_examples=100, deadline=None)
@given(
    weights=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=6
    ).filter(lambda pairs: all(map(sum, zip(*pairs, strict=True))))
)
def test_shared_noise_lies_between_its_bound_and_the_optimum(
    weights: list[tuple[int, int]],
) -> None:
    p, q = (np.array(one) / sum(one) for one in zip(*weights, strict=True))
    optimum, shared = optimal_acceptance(p, q), shared_noise_acceptance(p, q)
    distance = 1 - optimum
    assert (1 - distance) / (1 + distance) - 1e-9 <= shared <= optimum + 1e-9
    wins = [
        1 / sum(max(p[y] / p[x], q[y] / q[x]) for y in range(len(p)))
        for x in range(len(p))
        if p[x] > 0 and q[x] > 0
    ]
    assert shared == pytest.approx(sum(wins))
    if (p == q).all():
        assert shared == pytest.approx(1.0)


def test_a_draft_token_that_is_sure_is_accepted_as_often_as_by_the_ratio_test() -> None:
    """n-grams: p is 1 for one token. Shared noise loses nothing then."""
    p, q = np.eye(5)[2], _distributions(5, seed=10)
    assert shared_noise_acceptance(p, q) == pytest.approx(q[2])
    assert optimal_acceptance(p, q) == pytest.approx(q[2])


def test_equal_rates_give_the_papers_expectation() -> None:
    """Leviathan et al., equation 1, from algorithm 1 itself."""
    p, q, most = _distributions(3, seed=11), _distributions(3, seed=12), 3
    random = np.random.default_rng(13)
    wide_p, wide_q = (
        np.broadcast_to(one, (DRAWS, most + extra, 3)) for one, extra in ((p, 0), (q, 1))
    )
    accepted, _ = verify(_drawn(wide_p, random), wide_p, wide_q, random)
    assert 1 + accepted.mean() == pytest.approx(
        expected_tokens(optimal_acceptance(p, q), most), rel=0.01
    )
