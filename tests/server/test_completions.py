"""Both kinds of completion on the bundled model, through OpenAI's own client."""

import json
import math
import shutil
import subprocess
from typing import Any

import openai
import pytest

from nanoserve import LLM, SamplingParams
from tests.server.starting import Server

MODEL = "storyteller"
PROMPT = "Once upon a time"
STORY: list[Any] = [{"role": "user", "content": "Tell me a story about a cat and a boat."}]


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id == MODEL and model.object == "model"
    assert model.model_dump()["root"] == MODEL
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("gpt-7")


def test_a_completion_is_what_the_engine_says_offline(
    client: openai.OpenAI, storyteller: LLM
) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=20)
    expected = storyteller.generate(PROMPT, SamplingParams(temperature=0, max_tokens=20))[0]
    assert answer.choices[0].text == expected.outputs[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        len(expected.prompt_token_ids),
        20,
    )
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 20


def test_a_chat_is_what_the_engine_says_offline(client: openai.OpenAI, storyteller: LLM) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=STORY, temperature=0, max_completion_tokens=15
    )
    expected = storyteller.chat(STORY, SamplingParams(temperature=0, max_tokens=15))[0].outputs[0]
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == expected.text


def test_a_chat_without_a_limit_ends_by_itself(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=STORY, temperature=0)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.total_tokens < 1024


def test_the_pieces_of_a_chat_make_the_whole(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {
        "model": MODEL,
        "messages": STORY,
        "n": 2,
        "seed": 5,
        "max_tokens": 12,
    }
    whole = client.chat.completions.create(**settings)
    chunks = list(
        client.chat.completions.create(
            **settings, stream=True, stream_options={"include_usage": True}
        )
    )
    texts, reasons = ["", ""], [None, None]
    roles: list[list[str | None]] = [[], []]
    for chunk in chunks[:-1]:
        assert chunk.object == "chat.completion.chunk" and chunk.usage is None
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        roles[choice.index].append(choice.delta.role)
    assert roles == [["assistant", *[None] * (len(told) - 1)] for told in roles], (
        "with the first text of each choice"
    )
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_says_the_usage_in_every_chunk_where_asked_for(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {
        "prompt": PROMPT,
        "max_tokens": 4,
        "ignore_eos": True,
        "stream": True,
        "stream_options": options,
    }
    lines = server.post("/v1/completions", body).text.splitlines()
    chunks = [
        json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")
    ]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 4 and chunks[-1]["choices"] == []


def test_a_stream_without_the_option_has_no_usage(server: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2, "stream": True}
    text = server.post("/v1/completions", body).text
    assert text.endswith("data: [DONE]\n\n") and "usage" not in text


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_curl_reads_a_stream_that_openai_would_send(server: Server) -> None:
    body = json.dumps({"messages": STORY, "max_tokens": 3, "temperature": 0, "stream": True})
    words = ["curl", "--silent", "--no-buffer", "--include", server.url + "/v1/chat/completions"]
    words += ["--header", "content-type: application/json", "--data", body]
    head, _, events = subprocess.run(
        words, capture_output=True, text=True, timeout=240
    ).stdout.partition("\n\n")
    assert head.startswith("HTTP/1.1 200") and "content-type: text/event-stream" in head
    *chunks, done, rest = events.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    objects = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
    assert [set(chunk) for chunk in objects] == [
        {"id", "object", "created", "model", "choices"}
    ] * len(objects)
    assert objects[-1]["choices"][0]["finish_reason"] == "length"


def test_many_prompts_of_either_kind_are_answered_in_order(
    client: openai.OpenAI, storyteller: LLM
) -> None:
    prompts = [PROMPT, "The dog"]
    ids = [storyteller.tokenizer.encode(prompt) for prompt in prompts]
    settings: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 6}
    texts = client.completions.create(prompt=prompts, **settings)
    tokens = client.completions.create(prompt=ids, **settings)
    alone = [
        client.completions.create(prompt=prompt, **settings).choices[0].text for prompt in prompts
    ]
    assert (
        [choice.text for choice in texts.choices]
        == [choice.text for choice in tokens.choices]
        == alone
    )
    assert [choice.index for choice in texts.choices] == [0, 1]
    streamed = ["", ""]
    for chunk in client.completions.create(prompt=prompts, stream=True, **settings):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == alone


def test_equal_seeds_give_equal_texts(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {
        "model": MODEL,
        "prompt": PROMPT,
        "temperature": 1,
        "max_tokens": 16,
    }
    first, again, other = (
        client.completions.create(**settings, seed=seed).choices[0].text for seed in (7, 7, 8)
    )
    assert first == again != other


def test_a_stop_string_ends_the_text_and_leaks_no_part_of_itself(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {
        "model": MODEL,
        "prompt": PROMPT,
        "temperature": 0,
        "max_tokens": 40,
    }
    whole = client.completions.create(**settings).choices[0].text
    stop = whole[20:31]  # cuts through tokens
    answer = client.completions.create(**settings, stop=stop)
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    pieces = [
        chunk.choices[0].text
        for chunk in client.completions.create(**settings, stop=[stop, "never"], stream=True)
    ]
    assert "".join(pieces) == answer.choices[0].text


def test_log_probabilities_of_a_chat(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {
        "model": MODEL,
        "messages": STORY,
        "temperature": 0,
        "max_tokens": 6,
    }
    answer = client.chat.completions.create(**settings, logprobs=True, top_logprobs=3)
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    content = answer.choices[0].logprobs.content
    assert "".join(token.token for token in content) == answer.choices[0].message.content
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob <= 0
        assert bytes(token.bytes or []).decode() == token.token
    streamed = client.chat.completions.create(
        **settings, logprobs=True, top_logprobs=3, stream=True
    )
    tokens = [
        token
        for chunk in streamed
        for choice in chunk.choices
        if choice.logprobs is not None
        for token in choice.logprobs.content or []
    ]
    assert [token.token for token in tokens] == [token.token for token in content]
    without = client.chat.completions.create(**settings)
    assert without.choices[0].logprobs is None


def test_log_probabilities_of_a_completion(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {
        "model": MODEL,
        "prompt": PROMPT,
        "temperature": 0,
        "max_tokens": 5,
        "logprobs": 2,
    }
    choice = client.completions.create(**settings).choices[0]
    assert choice.logprobs is not None and choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset == [
        0,
        *(len("".join(choice.logprobs.tokens[:end])) for end in range(1, 5)),
    ]
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs or [])
    offsets: list[int] = []
    for chunk in client.completions.create(**settings, stream=True):
        if chunk.choices[0].logprobs is not None:
            offsets += chunk.choices[0].logprobs.text_offset or []
    assert offsets == choice.logprobs.text_offset


def test_a_bias_and_the_other_settings_reach_the_sampler(
    client: openai.OpenAI, storyteller: LLM
) -> None:
    settings: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    token = storyteller.tokenizer.encode(" dog")[0]
    biased = client.completions.create(**settings, logit_bias={str(token): 100}).choices[0].text
    assert biased == storyteller.tokenizer.decode([token] * 4)
    repeated = client.completions.create(
        **settings,
        logit_bias={str(token): 30},
        presence_penalty=2.0,
        extra_body={"repetition_penalty": 50.0},
    )
    assert repeated.choices[0].text != biased
    extras = {"top_k": 1, "min_p": 0.1, "ignore_eos": True, "min_tokens": 2}
    first = (
        client.completions.create(**(settings | {"temperature": 1.5}), extra_body=extras)
        .choices[0]
        .text
    )
    assert first == client.completions.create(**settings).choices[0].text, (
        "the likeliest alone is left"
    )
    stopped = client.completions.create(
        **settings, logit_bias={str(token): 100}, extra_body={"stop_token_ids": [token]}
    )
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("", "stop")


def test_ignore_eos_goes_on_to_the_limit(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=STORY, temperature=0, max_tokens=300, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"


def test_developer_messages_and_content_parts(client: openai.OpenAI, server: Server) -> None:
    parts = [{"type": "text", "text": "Tell me a story"}, {"type": "text", "text": "about a fox."}]
    written: list[Any] = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": parts},
    ]
    plain = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Tell me a story\nabout a fox."},
    ]
    tokens = [
        server.post("/tokenize", {"messages": messages}).json()["tokens"]
        for messages in (written, plain)
    ]
    assert tokens[0] == tokens[1]
    answer = client.chat.completions.create(model=MODEL, messages=written, max_tokens=1)
    assert answer.usage is not None and answer.usage.prompt_tokens == len(tokens[0])


def test_an_earlier_answer_can_be_sent_back_as_it_came(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model=MODEL, messages=STORY, max_tokens=8)
    turns = [*STORY, first.choices[0].message, {"role": "user", "content": "And then?"}]
    again = client.chat.completions.create(model=MODEL, messages=turns, max_tokens=4)
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) % 16 == 0
    refused = [
        *STORY,
        {
            "role": "assistant",
            "content": "No.",
            "refusal": None,
            "tool_calls": None,
            "annotations": [],
        },
        STORY[0],
    ]
    assert client.chat.completions.create(model=MODEL, messages=refused, max_tokens=1).choices


def test_the_context_is_used_to_its_last_token(client: openai.OpenAI) -> None:
    fits = client.completions.create(model=MODEL, prompt=[5] * 1023, max_tokens=1)
    assert fits.usage is not None and fits.usage.total_tokens == 1024
    default = client.completions.create(
        model=MODEL, prompt=[5] * 1020, extra_body={"ignore_eos": True}
    )
    assert default.usage is not None and default.usage.completion_tokens == 4
    for length in (1024, 1025):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model=MODEL, prompt=[5] * length, max_tokens=1)
        assert refused.value.code == "context_length_exceeded"


def test_tokenize_says_what_the_model_sees(server: Server, storyteller: LLM) -> None:
    answer = server.post("/tokenize", {"prompt": PROMPT}).json()
    assert answer == {
        "count": 5,
        "max_model_len": 1024,
        "tokens": storyteller.tokenizer.encode(PROMPT),
    }
    chat = server.post("/tokenize", {"messages": STORY, "add_generation_prompt": False}).json()
    assert chat["tokens"] == storyteller.tokenizer.encode_chat(STORY, add_generation_prompt=False)


def test_detokenize_is_the_way_back(server: Server, storyteller: LLM) -> None:
    tokens = server.post("/tokenize", {"messages": STORY}).json()["tokens"]
    text = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert text == storyteller.tokenizer.decode(tokens, skip_special_tokens=False)
    assert all(message["content"] in text for message in STORY)
    for wrong in ([4096], [-1], [5] * 1025):
        refused = server.post("/detokenize", {"tokens": wrong})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "tokens"


def test_the_state_of_the_server(server: Server) -> None:
    assert server.get("/health").json() == {"status": "ok", "engine": "ready"}
    assert server.get("/ready").status_code == 200
    assert server.get("/version").json() == {"version": "0.1.0"}
    before = server.metric("vllm:generation_tokens_total")
    server.post(
        "/v1/completions", {"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True, "temperature": 0}
    )
    assert server.metric("vllm:generation_tokens_total") == before + 3
    for name in (
        *(
            "time_to_first_token",
            "inter_token_latency",
            "request_time_per_output_token",
            "e2e_request_latency",
        ),
        *("request_queue_time", "request_prefill_time", "request_decode_time"),
    ):
        assert server.metric(f"vllm:{name}_seconds_count") > 0
    for name in (
        "request_prompt_tokens_count",
        "request_generation_tokens_count",
        "prompt_tokens_total",
    ):
        assert server.metric(f"vllm:{name}") > 0
    assert server.metric("vllm:prefix_cache_queries_total") >= server.metric(
        "vllm:prefix_cache_hits_total"
    )
    assert math.isfinite(server.metric("vllm:kv_cache_usage_perc"))
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "num_preemptions_total",
        "request_success_total",
    ):
        assert server.metric(f"vllm:{name}") >= 0
    assert server.get("/v1/models").headers["content-type"] == "application/json"
    assert server.get("/v1/models/").json() == server.get("/v1/models").json()
    assert "access-control-allow-origin" not in server.get("/v1/models").headers
