"""The sampler of free canvases against transformers' own, and its random numbers."""

import numpy as np
import pytest
import torch
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    EntropyBoundSampler,
    EntropyBoundSamplerConfig,
    LinearTemperatureScheduleLogitsProcessor,
    StableAndConfidentStoppingCriteria,
)

from nanoserve.config.model_parts import RenoisingConfig
from nanoserve.executor.canvas.renoising import Renoising, random_tokens
from nanoserve.executor.canvas.samplers import entropies_of
from nanoserve.executor.sampling.sampler import SamplingState
from nanoserve.request import SamplingParams
from nanoserve.scheduler.plan import Begin

LENGTH, VOCAB_SIZE = 8, 50


def logits_of(seed: int, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(LENGTH, VOCAB_SIZE, generator=generator)


def test_temperatures_fall_as_the_schedule_of_transformers() -> None:
    renoising = Renoising(RenoisingConfig(max_denoising_steps=7, t_min=0.3, t_max=1.1))
    theirs = LinearTemperatureScheduleLogitsProcessor(0.3, 1.1, 7)
    ones = torch.ones(1)
    for step in range(7):
        scaled = theirs(torch.empty(0), ones, 7 - step)
        assert renoising.temperature(step) == pytest.approx(1 / float(scaled))
    assert renoising.temperature(0) == 1.1


@pytest.mark.parametrize("bound", [1e-6, 0.5, 3.0, 100.0])
@pytest.mark.parametrize("scale", [2.0, 9.0])
def test_the_accepted_places_are_those_of_transformers(bound: float, scale: float) -> None:
    theirs = EntropyBoundSampler(EntropyBoundSamplerConfig(bound), LENGTH, VOCAB_SIZE, 5)
    renoising = Renoising(RenoisingConfig(entropy_bound=bound))
    for seed in range(5):
        logits = logits_of(seed, scale)
        current, drawn = torch.zeros(2, 1, LENGTH, dtype=torch.int64)
        theirs.accept_canvas(current, drawn, logits[None], 1)
        expected = torch.nonzero(theirs.accepted_token_mask[0])[:, 0].tolist()
        found = renoising.accepted(entropies_of(logits).numpy())
        assert sorted(found.tolist()) == expected


@pytest.mark.parametrize("stability", [0, 1, 2])
@pytest.mark.parametrize("confidence", [0.05, 10.0])
def test_a_canvas_is_final_when_transformers_stops(stability: int, confidence: float) -> None:
    """The likeliest tokens change between steps 2 and 3, and stay from step 3 on."""
    theirs = StableAndConfidentStoppingCriteria(stability, confidence)
    renoising = Renoising(
        RenoisingConfig(
            max_denoising_steps=9, stability_threshold=stability, confidence_threshold=confidence
        )
    )
    earlier = list[np.ndarray]()
    for step in range(8):
        logits = logits_of(int(step >= 3), 2.0 * (step + 1))
        likeliest = logits.argmax(-1)
        expected = bool(theirs(likeliest[None], logits[None])[0])
        found = renoising.is_final(
            step, entropies_of(logits).numpy(), likeliest.numpy(), earlier[-stability - 1 :]
        )
        assert found == expected, step
        earlier.append(likeliest.numpy())
    assert renoising.is_final(8, np.full(LENGTH, 99.0), earlier[0], [])


def state_of(seed: int, index: int) -> SamplingState:
    return SamplingState(Begin(0, (1,), 1, index, seed, SamplingParams()), VOCAB_SIZE)


def test_random_tokens_are_uniform_and_differ_by_all_that_they_are_for() -> None:
    """Of 51,200 draws each of 50 tokens has 1,024; four standard deviations are 127."""
    many = np.concatenate(
        [random_tokens(state_of(3, 0), 7, 512, step, VOCAB_SIZE) for step in range(100)]
    )
    counts = np.bincount(many, minlength=VOCAB_SIZE)
    assert len(counts) == VOCAB_SIZE
    assert abs(counts - 1024).max() < 127
    draws = {
        tuple(random_tokens(state_of(seed, index), first, 12, step, VOCAB_SIZE))
        for seed in (0, 1)
        for index in (0, 1)
        for first in (0, 12)
        for step in (0, 1)
    }
    assert len(draws) == 16
    whole = random_tokens(state_of(1, 1), 5, 12, 2, VOCAB_SIZE)
    assert whole[4:].tolist() == random_tokens(state_of(1, 1), 9, 8, 2, VOCAB_SIZE).tolist()
