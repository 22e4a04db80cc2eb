"""The script that compares a block-diffusion storyteller with the bundled one."""

import csv
import math
from collections.abc import Iterator

import pytest
import torch

from nanoserve import LLM
from nanoserve.models.loading import load_model
from scripts import compare_diffusion
from scripts.compare_diffusion import STORYTELLER, Told, measure, perplexity, time_batches, to_csv

PAIRS = (("dog", "kite"), ("mouse", "boat"))


@pytest.fixture(scope="module")
def storyteller() -> Iterator[LLM]:
    with LLM(STORYTELLER, dtype="float32") as llm:
        yield llm


def test_answers_are_measured_at_equal_length(
    storyteller: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare_diffusion, "HELD_OUT_PAIRS", PAIRS)
    texts = ("a dog ran far a dog ran far a kite", "two mice and no ship sat on a hill there")
    told = [
        Told((0,), tuple(storyteller.tokenizer.encode(text, add_special_tokens=False)), text)
        for text in texts
    ]
    whole = measure(told, [len(one.answer) for one in told], [], storyteller)
    # 7 sequences of four words each, of which the fifth and sixth of the first text come again; 5
    # and 10 words, of which "a" is in both; "mice" is a mouse, but there is no boat
    assert whole.repeated == pytest.approx(2 / 14)
    assert (whole.distinct, whole.with_nouns) == (14, 1)
    cut = measure(told, [4, 0], [], storyteller)
    assert (cut.tokens, cut.repeated, cut.with_nouns) == (4, 0.0, 1)
    assert cut.distinct <= 4


def test_a_perplexity_is_of_the_answers_alone() -> None:
    judge, _ = load_model(STORYTELLER, "float32")
    told = [Told((0, 300), (301, 302, 1), ""), Told((0,), (400,), "")]
    logprobs = []
    with torch.inference_mode():
        for one in told:
            known = list(one.prompt)
            for token in one.answer:
                attention = compare_diffusion.DenseCausalAttention(judge.config, 1, len(known))
                hidden = judge(torch.tensor(known), torch.arange(len(known)), attention)
                likelihoods = judge.compute_logits(hidden[-1:]).double().log_softmax(-1)
                logprobs.append(likelihoods[0, token].item())
                known.append(token)
    expected = math.exp(-sum(logprobs) / 4)
    assert perplexity(judge, told) == pytest.approx(expected, rel=1e-4)


def test_models_take_turns_and_their_steps_are_counted(storyteller: LLM) -> None:
    llms = [("one", storyteller), ("other", storyteller)]
    timings = time_batches(llms, batches=(1, 2), repeats=2, tokens=4)
    rows = [*csv.DictReader(to_csv(timings).splitlines())]
    found = [(row["model"], row["batch"], row["repeat"], row["tokens"]) for row in rows]
    assert found == [
        (model, str(batch), str(repeat), str(4 * batch))
        for batch in (1, 2)
        for repeat in (0, 1)
        for model in ("one", "other")
    ]
    # plain decoding: a step for each token, of which the first is that of the prompt
    assert {row["steps"] for row in rows if row["batch"] == "1"} == {"4"}
