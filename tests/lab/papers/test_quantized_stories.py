"""The storyteller in few bits, on short texts; and the lecture's example of formula (16)."""

import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from nanoserve import LLM
from nanoserve.lab.commands.bench_quality import own_reader
from nanoserve.lab.papers import quantized_stories
from nanoserve.lab.papers.quantized_stories import (
    FACTOR,
    DrawnStories,
    Outliers,
    QuantizedReading,
    Stories,
    keep_columns,
    perplexity,
    storyteller,
)

TALE = """Once upon a time, there was a little dog named Spot. Spot had a red ball. One day, the ball rolled into the
pond. Spot was sad. A kind duck saw the ball and pushed it back. "Thank you!" said Spot. They played all day."""


@pytest.fixture(scope="module")
def stories() -> Stories:
    directory = Path(quantized_stories.__file__).parents[2] / "assets" / "storyteller"
    return (tuple(Tokenizer.from_file(str(directory / "tokenizer.json")).encode(TALE).ids),)


def test_the_example_of_formula_16() -> None:
    """The lecture, section 2.3.3: an input of 100 and 1, weights of 0.03, a grid of 0.1."""
    inputs, weight = torch.tensor([[100.0, 1.0]]), torch.tensor([[0.03, 0.03]])

    def on_grid(numbers: Tensor) -> Tensor:
        return (numbers / 0.1).round() * 0.1

    scales = torch.tensor([4.0, 1.0])
    products = {
        "target": inputs @ weight.T,
        "equation (16)": (inputs / scales) @ (weight * scales).T,
        "RTN": inputs @ on_grid(weight).T,
        "mixed": inputs @ keep_columns(weight, torch.tensor([0]), on_grid).T,
        "AWQ": (inputs / scales) @ on_grid(weight * scales).T,
    }
    expected = {"target": 3.03, "equation (16)": 3.03, "RTN": 0.0, "mixed": 3.0, "AWQ": 2.5}
    assert {name: product.item() for name, product in products.items()} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("outliers", "channels"), [("8 salient outliers", 8), ("3 random outliers", 3)]
)
def test_outliers_are_made_without_changing_a_bit_of_what_float32_computes(
    outliers: Outliers, channels: int, stories: Stories
) -> None:
    plain, changed = (storyteller(kind, 0, stories) for kind in ("natural weights", outliers))
    for before, after in zip(plain.layers, changed.layers, strict=True):
        for norm in ("attention_norm", "feed_forward_norm"):
            ratios = after.get_submodule(norm).weight / before.get_submodule(norm).weight
            assert sorted(ratios.tolist())[-channels - 1 :] == [1.0] + [FACTOR] * channels
    assert perplexity(changed, stories) == perplexity(plain, stories)


def test_perplexity_is_what_the_engines_log_probabilities_say(stories: Stories) -> None:
    texts = (*stories, stories[0][:20])
    with LLM(dtype="float32") as llm:
        nats = -sum(own_reader(llm).log_likelihood(text) for text in texts)
    found = perplexity(storyteller("natural weights", 0, stories), texts)
    assert found == pytest.approx(math.exp(nats / sum(len(text) - 1 for text in texts)), rel=1e-4)


@pytest.mark.parametrize(
    "methods",
    [("RTN", "mixed"), pytest.param(("RTN", "mixed", "AWQ", "GPTQ"), marks=pytest.mark.slow)],
)
def test_outliers_break_rounding_and_the_remedies_mend_it(
    methods: tuple[str, ...], stories: Stories, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_stories, "METHODS", methods)
    found = QuantizedReading("8 salient outliers", 0, calibration=stories, stories=stories).run()
    lost = {
        method: value / found.perplexities["float32"]
        for method, value in found.perplexities.items()
    }
    assert list(lost) == [
        "float32",
        *(f"{method}, {bits} bits" for bits in (4, 3) for method in methods),
        *(f"{method}, W8A8" for method in ("per tensor", "per row", "LLM.int8()")),
    ]
    for bits in (4, 3):
        # The text is the one that was calibrated on: a remedy may come out a little below float32.
        assert all(
            0.9 < lost[f"{method}, {bits} bits"] < lost[f"RTN, {bits} bits"]
            for method in methods[1:]
        )
    assert lost["RTN, 3 bits"] > lost["RTN, 4 bits"] > 1.2
    assert lost["per tensor, W8A8"] > lost["per row, W8A8"] > 1.2
    assert lost["LLM.int8(), W8A8"] == pytest.approx(1.0, abs=0.02)
    assert 0.01 < found.exact_share < 0.2


def test_stories_are_drawn_anew_for_each_seed_and_again_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quantized_stories, "WINDOW", 12)
    drawn = DrawnStories(seeds=(0, 1), readings=2).run()
    assert [(len(calibration), len(stories)) for calibration, stories in drawn] == [(4, 2), (4, 2)]
    every = [story for own in drawn for texts in own for story in texts]
    assert {len(story) for story in every} == {12}
    assert len({*every}) > 6
    assert DrawnStories(seeds=(0, 1), readings=2).run() == drawn
