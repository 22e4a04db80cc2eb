"""Completions that echo their prompts: what lm-evaluation-harness asks for, on the bundled
model."""

import asyncio
from typing import Any, cast

import msgspec
import openai
import pytest
import torch
import transformers
from torch import Tensor

from nanoserve import LLM, SamplingParams
from nanoserve.models.hub import resolve_model
from nanoserve.request import CompletionOutput, RequestOutput, TokenLogprob
from nanoserve.server.answers import ChatFormat, TextFormat, token_texts
from nanoserve.text.tokenizer import load_tokenizer
from tests.server.starting import Server, running

MODEL = "storyteller"
PROMPT = "Once upon a time there was a dog who liked apples."
ECHO: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "echo": True, "temperature": 0}


def test_an_echo_has_the_prompts_tokens_before_those_of_the_answer(
    client: openai.OpenAI, storyteller: LLM
) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=1, prompt_logprobs=1)
    expected = storyteller.generate(PROMPT, params)[0]
    choice = client.completions.create(**ECHO, max_tokens=3, logprobs=1).choices[0]
    assert choice.text == PROMPT + expected.outputs[0].text
    found = choice.logprobs
    assert (
        found is not None
        and found.tokens
        and found.token_logprobs
        and found.top_logprobs
        and found.text_offset
    )
    scored = [*(expected.prompt_logprobs or ()), *(expected.outputs[0].logprobs or ())]
    assert scored[0] is None and found.token_logprobs[0] is None and found.top_logprobs[0] is None
    own, likeliest = (
        [one.logprob for one in scored if one],
        [one.top[0][1] for one in scored if one],
    )
    assert found.token_logprobs[1:] == pytest.approx(own, abs=1e-4)
    assert [max(top.values()) for top in found.top_logprobs[1:]] == pytest.approx(
        likeliest, abs=1e-4
    )
    begin, *texts = found.tokens
    assert begin == "<|endoftext|>" and "".join(texts) == choice.text, (
        "control tokens are listed, and in no text"
    )
    assert found.text_offset == [0, *(len("".join(texts[:place])) for place in range(len(texts)))]


def test_an_echo_alone_generates_nothing(client: openai.OpenAI, server: Server) -> None:
    longer = client.completions.create(**ECHO, max_tokens=1, logprobs=2).choices[0].logprobs
    before = server.metric("vllm:generation_tokens_total")
    # the second time nothing comes from the cache
    for settings in ({"logprobs": 2}, {"logprobs": 2, "n": 2}, {}):
        answer = client.completions.create(**ECHO, max_tokens=0, **settings)
        assert answer.usage is not None and answer.usage.completion_tokens == 0
        assert len(answer.choices) == settings.get("n", 1)
        for choice in answer.choices:
            assert (choice.text, choice.finish_reason) == (PROMPT, "length")
            if "logprobs" not in settings:
                assert choice.logprobs is None
                continue
            assert (
                choice.logprobs is not None
                and longer is not None
                and longer.token_logprobs is not None
            )
            assert choice.logprobs.token_logprobs == longer.token_logprobs[:-1]
    assert server.metric("vllm:generation_tokens_total") == before
    server.wait_idle()


def numbers(choice: openai.types.CompletionChoice) -> list[float]:
    """Log probabilities; 0 for a prompt's first token, which has none."""
    assert choice.logprobs is not None
    return [one or 0.0 for one in choice.logprobs.token_logprobs or ()]


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_several_prompts_and_samples_are_the_same_streamed(
    client: openai.OpenAI, storyteller: LLM, max_tokens: int
) -> None:
    tokens = storyteller.tokenizer.encode(PROMPT)
    asked = ECHO | {
        "prompt": [tokens, tokens[:3]],
        "n": 2,
        "logprobs": 0,
        "max_tokens": max_tokens,
        "seed": 3,
    }
    whole = client.completions.create(**asked)
    texts, logprobs = [""] * 4, [list[float]() for _ in range(4)]
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            logprobs[choice.index] += numbers(choice)
    assert texts == [choice.text for choice in whole.choices]
    assert texts[0].startswith(PROMPT) and texts[3].startswith(
        storyteller.tokenizer.decode(tokens[:3])
    )
    for choice, streamed in zip(whole.choices, logprobs, strict=True):
        assert streamed == pytest.approx(numbers(choice), abs=1e-4)
    assert list(map(len, logprobs)) == [
        length + max_tokens for length in (len(tokens), len(tokens), 3, 3)
    ]


def test_a_prompt_alone_may_fill_the_context(client: openai.OpenAI) -> None:
    full = ECHO | {"prompt": [300] * 1024, "logprobs": 0}
    choice = client.completions.create(**full, max_tokens=0).choices[0]
    assert choice.logprobs is not None and len(choice.logprobs.tokens or ()) == 1024
    with pytest.raises(
        openai.BadRequestError, match="the context holds 1024 with at least one for the answer"
    ):
        client.completions.create(**full, max_tokens=1)


def test_log_probabilities_of_prompts_count_as_well(client: openai.OpenAI) -> None:
    crowd = ECHO | {"prompt": [[300] * 1000] * 128, "n": 16, "logprobs": 2, "max_tokens": 0}
    with pytest.raises(
        openai.BadRequestError, match="2048000 tokens with 3 log probabilities each are more than"
    ):
        client.completions.create(**crowd)


def test_parts_of_a_character_begin_where_it_begins(storyteller: LLM) -> None:
    tokenizer = storyteller.tokenizer
    text = "a \U0001f600 b"
    tokens = tokenizer.encode(text)
    scored = (None, *(TokenLogprob(token, -2.0, 2, ((token, -2.0),)) for token in tokens[1:]))
    output = CompletionOutput(0, "", (), (), "length", None, cast(Any, None))
    request = RequestOutput("r", None, tuple(tokens), (output,), True, 0, scored)
    answer = TextFormat(MODEL, token_texts(tokenizer), tokenizer, [text])
    lists = asyncio.run(answer.choice(0, request, output))["logprobs"]
    parts = [place for place, token in enumerate(lists["tokens"]) if token.startswith("bytes:")]
    assert len(parts) > 1 and {lists["text_offset"][place] for place in parts} == {
        text.index("\U0001f600")
    }
    assert lists["text_offset"][-1] == text.index(" b")


def test_parts_of_a_character_are_told_apart_by_their_bytes(storyteller: LLM) -> None:
    text, tokenizer = " \U0001f600", storyteller.tokenizer
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert len(tokens) == 5, "a blank, and the character's four bytes"
    ranked = tuple((token, -1.0 - place) for place, token in enumerate(tokens))
    scored = tuple(
        TokenLogprob(token, logprob, rank, ranked)
        for rank, (token, logprob) in enumerate(ranked, 1)
    )
    output = CompletionOutput(0, text, tuple(tokens), scored, "length", None, cast(Any, None))
    request = RequestOutput("r", None, (), (output,), True, 0, None)
    texts = token_texts(tokenizer)
    chat = ChatFormat(MODEL, texts, lambda: tokenizer.answer_parser(()))
    choice = asyncio.run(chat.choice(0, request, output))
    entries = msgspec.json.decode(msgspec.json.encode(choice))["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == text.encode()
    for entry in entries:
        assert (
            bytes(byte for other in entry["top_logprobs"] for byte in other["bytes"])
            == text.encode()
        )
    choice = asyncio.run(TextFormat(MODEL, texts, tokenizer).choice(0, request, output))
    lists = msgspec.json.decode(msgspec.json.encode(choice))["logprobs"]
    # as OpenAI's completions write them
    names = [" ", r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x98", r"bytes:\x80"]
    assert lists["tokens"] == names
    assert (
        lists["top_logprobs"] == [dict(zip(names, (-1.0, -2.0, -3.0, -4.0, -5.0), strict=True))] * 5
    )


# --------------------------------------------------------------------------------- beside
# transformers, item by item

CONFIGURATIONS = {
    "sarathi": (),
    "throttling, 2 stages": ("--policy", "throttling", "--pp", "2"),
    "hybrid": ("--policy", "hybrid", "--host-kv-memory", "32MiB"),
}
SUBJECTS = (
    "The dog",
    "A little girl",
    "My old friend Tom",
    "The king of the sea",
    "Sam's mother",
    "Nobody here",
)
ENDINGS = (
    " went home.",
    " was very happy and sang.",
    " ate the moon",
    " said: no!",
    " and",
    " opened the red box",
)


def log_probabilities(model: transformers.PreTrainedModel, tokens: list[int]) -> Tensor:
    """float64 [L - 1, V], of every token that may follow each beginning but the last."""
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0, :-1].double().log_softmax(-1)


@pytest.mark.slow
@pytest.mark.parametrize("options", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_items_are_scored_as_transformers_scores_them(options: tuple[str, ...]) -> None:
    """Each token's error is at most four times the largest that transformers itself makes in
    float32, as against float64; so both pick the same choice of every item in which no two are that
    near."""
    model_type: Any = transformers.AutoModelForCausalLM
    directory = resolve_model(None).directory
    single, double = (
        model_type.from_pretrained(directory, dtype=dtype)
        for dtype in (torch.float32, torch.float64)
    )
    tokenizer = load_tokenizer(directory)
    contexts = [tokenizer.encode(subject) for subject in SUBJECTS]
    endings = [tokenizer.encode(ending, add_special_tokens=False) for ending in ENDINGS]
    items = [[context + ending for ending in endings] for context in contexts]
    exact = [[log_probabilities(double, tokens) for tokens in item] for item in items]
    own = (log_probabilities(single, tokens) for item in items for tokens in item)
    rounding = max(
        float((a - b).abs().max())
        for a, b in zip(own, (one for item in exact for one in item), strict=True)
    )
    assert 0 < rounding < 1e-4
    small = ("--dtype", "float32", "--eager", "--max-model-len", "128", "--kv-cache-memory", "1MiB")
    with running(*small, *options) as server:
        for max_tokens in (1, 0):
            for context, item, wanted in zip(contexts, items, exact, strict=True):
                asked = {
                    "prompt": item,
                    "echo": True,
                    "logprobs": 1,
                    "max_tokens": max_tokens,
                    "temperature": 0,
                }
                choices = server.post("/v1/completions", asked).json()["choices"]
                sums: list[tuple[float, float]] = []
                for tokens, choice, rows in zip(item, choices, wanted, strict=True):
                    found, top = (
                        choice["logprobs"]["token_logprobs"],
                        choice["logprobs"]["top_logprobs"],
                    )
                    assert len(found) == len(tokens) + max_tokens
                    scores = rows[range(len(rows)), tokens[1:]]
                    torch.testing.assert_close(
                        torch.tensor(found[1 : len(tokens)]).double(),
                        scores,
                        rtol=0,
                        atol=4 * rounding,
                    )
                    likeliest = torch.tensor(
                        [max(one.values()) for one in top[1 : len(tokens)]]
                    ).double()
                    torch.testing.assert_close(likeliest, rows.amax(1), rtol=0, atol=4 * rounding)
                    sums.append(
                        (
                            sum(found[len(context) : len(tokens)]),
                            float(scores[len(context) - 1 :].sum()),
                        )
                    )
                picked, right = (
                    max(range(len(sums)), key=lambda place: sums[place][side]) for side in (0, 1)
                )
                assert picked == right
