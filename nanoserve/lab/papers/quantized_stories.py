"""The lecture's section 2.3 on the bundled storyteller: its perplexity when weights, or inputs too,
have few bits.

It reads stories that it has drawn itself, so that no text needs to be at hand. The logarithm of a
perplexity over the unchanged model's is then an estimate of the Kullback-Leibler divergence between
both, in nats per token.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from nanoserve.llm import LLM
from nanoserve.models import rounding
from nanoserve.models.decoder import Decoder, DecoderLayer
from nanoserve.models.hub import resolve_model
from nanoserve.models.loading import load_model
from nanoserve.models.rounding import (
    InputStatistics,
    fold_awq_scales,
    gptq,
    input_statistics,
    llm_int8,
    rtn,
)
from nanoserve.request import SamplingParams

GROUP = 128
SALIENT = 0.035
"""Share of the columns of a layer that mixed precision keeps: 9 of 256, where 1 % would be fewer
than the outliers."""
OUTLIER = 6.0  # LLM.int8() keeps columns with an input of this size
FACTOR = 64.0
"""How much larger outliers are made. A power of two, so that float32 computes the same bits as
without them."""
WINDOW = 512
METHODS = ("RTN", "mixed", "AWQ", "GPTQ")
"""They quantize weights alone."""
_CALIBRATION = 4  # stories

Outliers = Literal["natural weights", "8 salient outliers", "3 random outliers"]
"""Channels before attention, and before the feed-forward part, that are made outliers."""
Stories = tuple[tuple[int, ...], ...]
Multiply = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class DrawnStories:
    """A job that draws stories of WINDOW tokens for calibration and for reading, for each seed."""

    seeds: tuple[int, ...]
    readings: int

    def run(self) -> list[tuple[Stories, Stories]]:
        samples = _CALIBRATION + self.readings
        with LLM(dtype="float32") as llm:
            start = llm.tokenizer.encode("Once upon a time")
            length = WINDOW - len(start)
            params = [
                SamplingParams(n=samples, max_tokens=length, ignore_eos=True, seed=seed)
                for seed in self.seeds
            ]
            outputs = llm.generate([start] * len(params), params)
        drawn = [
            tuple(tuple(start) + one.token_ids for one in output.outputs) for output in outputs
        ]
        return [(own[:_CALIBRATION], own[_CALIBRATION:]) for own in drawn]


class QuantizedPerplexities(NamedTuple):
    perplexities: Mapping[str, float]  # by method and bits: "AWQ, 4 bits"
    exact_share: float  # share of the columns that LLM.int8() leaves in float32


@dataclass(frozen=True, slots=True)
class QuantizedReading:
    """A job that reads stories with the storyteller, unchanged and quantized by every method."""

    outliers: Outliers
    seed: int
    calibration: Stories
    stories: Stories

    @torch.inference_mode()
    def run(self) -> QuantizedPerplexities:
        decoder = storyteller(self.outliers, self.seed, self.calibration)
        statistics, read = (
            gather(decoder, self.calibration),
            partial(perplexity, stories=self.stories),
        )
        found, kept = {"float32": read(decoder)}, list[Tensor]()
        for bits, method in product((4, 3), METHODS):
            quantized = deepcopy(decoder)
            for layer, known in zip(_layers(quantized), statistics, strict=True):
                _quantize(layer, known, method, bits)
            found[f"{method}, {bits} bits"] = read(quantized)

        def decomposed(input: Tensor, weight: Tensor) -> Tensor:
            kept.append(input.abs().amax(0) >= OUTLIER)
            return llm_int8(input, weight, threshold=OUTLIER)

        by_row: Multiply = partial(llm_int8, threshold=math.inf)
        for name, multiply in (
            ("per tensor", _by_tensor),
            ("per row", by_row),
            ("LLM.int8()", decomposed),
        ):
            with _multiplying(decoder, multiply):
                found[f"{name}, W8A8"] = read(decoder)
        return QuantizedPerplexities(found, torch.cat(kept).float().mean().item())


@torch.inference_mode()
def storyteller(outliers: Outliers, seed: int, calibration: Stories) -> Decoder:
    """The bundled model. Weights of a norm are multiplied to make outliers, and the columns behind
    them divided."""
    decoder, _ = load_model(cast(Path, resolve_model(None).directory), "float32")
    generator = torch.Generator().manual_seed(seed)
    for layer, known in zip(_layers(decoder), gather(decoder, calibration), strict=True):
        for norm, name in (
            (layer.attention_norm, "qkv"),
            (layer.feed_forward_norm, "feed_forward.gate_up"),
        ):
            weight = cast(Tensor, layer.get_submodule(name).weight)
            impact = known[name].magnitudes * weight.norm(dim=0)  # equation (15)
            if outliers == "3 random outliers":
                impact = torch.rand(len(impact), generator=generator)
            count = 0
            if outliers != "natural weights":
                count = int(outliers[0])
            channels = impact.topk(count).indices
            norm.weight[channels] *= FACTOR
            weight[:, channels] /= FACTOR
    return decoder


@torch.inference_mode()
def perplexity(decoder: Decoder, stories: Stories) -> float:
    """exp of the mean negative log probability of every token after the first of its story."""
    texts = [torch.tensor(story) for story in stories]
    return rounding.perplexity(decoder, rounding.run_texts(decoder, texts), texts)


def gather(decoder: Decoder, stories: Stories) -> list[dict[str, InputStatistics]]:
    """Gather statistics of the inputs to the matrices of each layer."""
    with ExitStack() as gathering:
        found = [gathering.enter_context(input_statistics(layer)) for layer in _layers(decoder)]
        perplexity(decoder, stories)
    return found


def keep_columns(weight: Tensor, kept: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """The weight [N, K] rounded, but for the columns of these indices: mixed precision."""
    return rounded(weight.index_fill(1, kept, 0.0)).index_copy(1, kept, weight[:, kept])


def _layers(decoder: Decoder) -> list[DecoderLayer]:
    return cast(list[DecoderLayer], list(decoder.layers))


def _quantize(
    layer: DecoderLayer, known: dict[str, InputStatistics], method: str, bits: int
) -> None:
    def rounded(weight: Tensor) -> Tensor:
        return rtn(weight, bits, GROUP).dequantize()

    if method == "AWQ":
        fold_awq_scales(layer, known, bits, GROUP)
    for name, inputs in known.items():
        weight = cast(Tensor, layer.get_submodule(name).weight)
        if method == "GPTQ":
            weight.copy_(gptq(weight, inputs.gram, bits, GROUP).dequantize())
        elif method == "mixed":
            salient = inputs.magnitudes.topk(round(SALIENT * weight.shape[1])).indices
            weight.copy_(keep_columns(weight, salient, rounded))
        else:
            weight.copy_(rounded(weight))


def _by_tensor(input: Tensor, weight: Tensor) -> Tensor:
    """The product in 8 bits, with one scale for all inputs and one for the weight."""
    inputs, weights = (
        rtn(part.reshape(1, -1), 8).dequantize().view_as(part) for part in (input, weight)
    )
    return functional.linear(inputs, weights)


def _multiplying(decoder: Decoder, multiply: Multiply) -> ExitStack:
    """Until it is closed, the decoder's layers multiply inputs [T, K] and weights [N, K] by this
    function."""
    hooks = ExitStack()
    for module in decoder.layers.modules():
        if isinstance(module, nn.Linear):
            hook = module.register_forward_hook(
                lambda own, inputs, _: multiply(inputs[0], own.weight)
            )
            hooks.callback(hook.remove)
    return hooks
