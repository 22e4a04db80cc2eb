"""Answers of transformers' own generate to DiffusionGemma's prompts, with our random numbers in
place of torch's, for tests."""

import copy
import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaGenerationConfig,
    EntropyBoundSampler,
)

from nanoserve.executor.canvas.renoising import random_tokens
from nanoserve.executor.canvas.samplers import STEP_STRIDE
from nanoserve.executor.sampling.sampler import SamplingState
from nanoserve.request import SamplingParams
from nanoserve.scheduler.plan import Begin
from tests.oracle.checkpoints import VOCAB_SIZE
from tests.oracle.diffusion_gemma import END_TOKEN, LENGTH, make_diffusion_gemma
from triton_ops.sampling import exponential

RENOISING: dict[str, Any] = {
    "max_denoising_steps": 5,
    "t_min": 0.3,
    "t_max": 0.9,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 6.0},
    "stability_threshold": 0,
    "confidence_threshold": 2.7,
}
"""Settings with which canvases of a random model have various numbers of steps."""


def make_generating(directory: Path, *, vocab_size: int = VOCAB_SIZE) -> PreTrainedModel:
    """Write a checkpoint with settings of generation; returns its model. What a canvas's last step
    expected counts less there: rounding would grow tenfold with each step."""
    model = make_diffusion_gemma(directory, vocab_size=vocab_size)
    with torch.no_grad():
        model.model.decoder.self_conditioning.down_proj.weight.mul_(0.1)
    model.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps(RENOISING))
    return model


class OurNoise:
    """Stands for torch's generators while transformers generates an answer to a prompt: gives the
    numbers that this sample has here, each a function of position and step."""

    def __init__(self, prompt: tuple[int, ...], seed: int, index: int, *, greedy: bool) -> None:
        begin = Begin(0, prompt, len(prompt), index, seed, SamplingParams())
        self._state = SamplingState(begin, VOCAB_SIZE)
        self._start, self._step, self._greedy = len(prompt) - LENGTH, 0, greedy
        self._has_drawn = False
        self.steps = 0
        """Denoising steps so far, of all canvases."""

    def canvas(self, vocab_size: int) -> Tensor:
        """Random tokens: of the next step, or of a new canvas."""
        if self._has_drawn:
            self._step += 1
        else:
            self._start, self._step = self._start + LENGTH, 0
        self._has_drawn = False
        tokens = random_tokens(self._state, self._start, LENGTH, self._step, vocab_size)
        return torch.from_numpy(tokens)[None]

    def draw(self, probabilities: Tensor, num_samples: int) -> Tensor:
        """A token for each row of probabilities: the first arrival of a race of exponentials."""
        assert num_samples == 1
        self._has_drawn = True
        self.steps += 1
        if self._greedy:
            return probabilities.argmax(-1, keepdim=True)
        positions = self._start + np.arange(LENGTH) + self._step * STEP_STRIDE
        keys = torch.from_numpy(self._state.keys(positions))
        arrivals = exponential(keys, torch.arange(probabilities.shape[1])[None])
        return (probabilities / arrivals).argmax(-1, keepdim=True)


def answer(
    model: PreTrainedModel,
    prompt: tuple[int, ...],
    most: int,
    *,
    seed: int,
    index: int = 0,
    end: int | None = END_TOKEN,
    greedy: bool = False,
    **settings: Any,
) -> tuple[list[int], int]:
    """Generate with our numbers, up to `most` tokens or an end token. Returns them, and the number
    of denoising steps that it takes."""
    noise = OurNoise(prompt, seed, index, greedy=greedy)

    def canvas_of(sampler: EntropyBoundSampler, batch_size: int, device: object) -> Tensor:
        return noise.canvas(sampler.vocab_size)

    config = DiffusionGemmaGenerationConfig(**copy.deepcopy(RENOISING | settings))
    config.max_new_tokens, config.eos_token_id = most, end
    with (
        mock.patch.object(EntropyBoundSampler, "initialize_canvas", canvas_of),
        mock.patch("torch.multinomial", noise.draw),
    ):
        generated = model.generate(
            torch.tensor([prompt]), generation_config=config, disable_compile=True
        )
    tokens: list[int] = generated.sequences[0, len(prompt) :].tolist()[:most]
    if end in tokens:
        tokens = tokens[: tokens.index(end) + 1]
    return tokens, noise.steps
