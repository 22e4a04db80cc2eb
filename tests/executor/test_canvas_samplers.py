"""Canvas samplers: what they measure against plain formulas, and what they settle by arithmetic."""

import numpy as np
import pytest
import torch
from torch import Tensor

from nanoserve.engine_config import Denoising
from nanoserve.executor.canvas.samplers import (
    CanvasSampler,
    Probabilities,
    make_canvas_sampler,
    share_of_step,
)
from nanoserve.executor.sampling.sampler import SamplingRows, SamplingState
from nanoserve.executor.step.staging import Staging
from nanoserve.request import SamplingParams
from nanoserve.scheduler.plan import Begin

VOCAB_SIZE = 40


def sampler(text: str) -> CanvasSampler:
    return make_canvas_sampler(Denoising.parse(text))


def settled(text: str, measured: list[float], step: int = 0, length: int = 4) -> list[int]:
    found = sampler(text).settle(np.array(measured, np.float32), step, length)
    return sorted(found.tolist())


@pytest.mark.parametrize(
    ("steps", "length", "shares"),
    [(0, 4, [1, 1, 1, 1]), (2, 4, [2, 2]), (3, 8, [3, 3, 2]), (9, 4, [1, 1, 1, 1]), (1, 5, [5])],
)
def test_steps_share_a_canvas_as_sdars_script_does(
    steps: int, length: int, shares: list[int]
) -> None:
    assert [share_of_step(step, steps, length) for step in range(len(shares))] == shares


def test_confidence_settles_all_above_the_threshold_and_at_least_its_share() -> None:
    assert settled("confidence", [0.9, 0.2, 0.86, 0.85]) == [0, 2]
    assert settled("confidence", [0.3, 0.5, 0.4]) == [1]
    assert settled("confidence:steps=2", [0.9, 0.5, 0.4, 0.6]) == [0, 3]
    assert settled("confidence:threshold=0.1", [0.9, 0.5, 0.4]) == [0, 1, 2]


def test_static_settles_its_share_and_of_equals_the_first() -> None:
    assert settled("static", [0.9, 0.2, 0.95]) == [2]
    assert settled("static:steps=3", [0.5, 0.5, 0.5, 0.5]) == [0, 1]
    assert settled("static:steps=3", [0.5, 0.9, 0.5, 0.5], step=1) == [1]
    assert settled("static:steps=1", [0.5, 0.9]) == [0, 1]


def test_entropy_settles_while_the_sum_less_the_largest_is_within_the_bound() -> None:
    assert settled("entropy:bound=0.375", [2.0, 0.25, 0.125, 5.0]) == [0, 1, 2]
    assert settled("entropy:bound=0.37", [2.0, 0.25, 0.125, 5.0]) == [1, 2]
    assert settled("entropy:bound=0", [2.0, 3.0]) == [0]


CASES = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.5, top_k=6),
    SamplingParams(temperature=1.0, top_p=0.8),
    SamplingParams(temperature=1.2, top_k=9, top_p=0.7),
    SamplingParams(temperature=1.0, min_p=0.2),
]


def distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution of which a token is drawn, of logits [V], by the definitions of its
    settings."""
    if params.temperature == 0:
        return logits.double().softmax(0)
    probabilities = (logits.double() / params.temperature).softmax(0)
    order = probabilities.argsort(descending=True).tolist()
    if params.top_k > 0:
        order = order[: params.top_k]
    whole = sum(float(probabilities[token]) for token in order)
    kept, total = list[int](), 0.0
    for token in order:
        if total < params.top_p * whole and probabilities[token] >= params.min_p * max(
            probabilities
        ):
            kept.append(token)
        total += float(probabilities[token])
    mask = torch.zeros(len(logits), dtype=torch.double)
    mask[kept] = 1.0
    return probabilities * mask / (probabilities * mask).sum()


def test_probabilities_and_entropies_are_those_of_what_is_drawn_from() -> None:
    """Of rows with other settings in one batch. The last token is a mask, which is never drawn."""
    logits = 3 * torch.randn(len(CASES), VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    logits[:, -1] = -torch.inf
    begins = [Begin(0, (1,), 1, 0, 5, params) for params in CASES]
    states = [SamplingState(begin, VOCAB_SIZE) for begin in begins]
    rows = SamplingRows.stage(states, [7] * len(CASES), Staging(torch.device("cpu")))
    expected = [distribution(row, params) for row, params in zip(logits, CASES, strict=True)]
    for rank in range(2):
        tokens = torch.stack([each.argsort(descending=True)[rank] for each in expected])
        found = Probabilities(logits, tokens, rows)
        chosen = [float(each[token]) for each, token in zip(expected, tokens, strict=True)]
        assert found.of_tokens().tolist() == pytest.approx(chosen, abs=1e-6)
    entropies = [-float((each * each.clamp(min=1e-300).log()).sum()) for each in expected]
    assert found.entropies().tolist() == pytest.approx(entropies, abs=1e-5)
