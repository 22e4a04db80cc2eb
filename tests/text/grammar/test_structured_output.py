"""JSON schemas through the Python API: on the bundled model, in company, after preemption and in
another engine."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from nanoserve import LLM, SamplingParams
from nanoserve.errors import UsageError
from nanoserve.request import MAX_JSON_SCHEMA_LENGTH, Request, SequenceUpdate
from tests.text.grammar.schemas import PERSON, meets

PROMPT = "Once upon a time there was a dog. His name was"
PERSON_TEXT = json.dumps(PERSON)


def person(**settings: Any) -> SamplingParams:
    return SamplingParams(json_schema=PERSON_TEXT, **settings)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_every_sample_is_a_person(storyteller: LLM, temperature: float) -> None:
    params = person(
        n=3, temperature=temperature, seed=4, logprobs=1, repetition_penalty=1.2, min_tokens=3
    )
    output = storyteller.generate(PROMPT, params)[0]
    for sample in output.outputs:
        assert meets(json.loads(sample.text), PERSON)
        assert sample.finish_reason == "stop" and sample.stop_reason is None
        assert sample.logprobs is not None and len(sample.logprobs) == len(sample.token_ids)
        # Under the model's raw distribution, in which the grammar's choice may be anything but the
        # likeliest.
        assert all(logprob.logprob <= logprob.top[0][1] for logprob in sample.logprobs)
    assert len({sample.text for sample in output.outputs}) == (1 if temperature == 0 else 3)


def test_the_pieces_of_a_stream_make_the_whole(storyteller: LLM) -> None:
    params = person(temperature=1.0, seed=5)
    text = "".join(delta.outputs[0].text for delta in storyteller.stream(PROMPT, params))
    assert text == storyteller.generate(PROMPT, params)[0].outputs[0].text


def test_a_text_that_is_cut_off_says_so(storyteller: LLM) -> None:
    whole = storyteller.generate(PROMPT, person(temperature=0))[0].outputs[0]
    assert whole.finish_reason == "stop"
    for length, reason in ((len(whole.token_ids) - 1, "length"), (len(whole.token_ids), "stop")):
        cut = storyteller.generate(PROMPT, person(temperature=0, max_tokens=length))[0].outputs[0]
        assert (cut.token_ids, cut.finish_reason) == (whole.token_ids[:length], reason)


def test_stop_strings_end_it_early(storyteller: LLM) -> None:
    sample = storyteller.generate(PROMPT, person(temperature=0, stop=('"age"',)))[0].outputs[0]
    assert sample.stop_reason == '"age"' and sample.text.endswith(", ")


def test_rows_with_and_without_a_schema_share_batches(storyteller: LLM) -> None:
    settings: list[SamplingParams] = [
        person(temperature=1.0, seed=1, n=2),
        SamplingParams(temperature=1.0, seed=2, max_tokens=30),
        SamplingParams(json_schema='{"type":"object"}', temperature=0.7, seed=3, max_tokens=25),
        SamplingParams(temperature=0, max_tokens=20, frequency_penalty=0.5),
        person(temperature=1.5, top_k=7, top_p=0.9, seed=4),
    ]
    together = storyteller.generate([PROMPT] * len(settings), settings)
    for params, crowd in zip(settings, together, strict=True):
        alone = storyteller.generate(PROMPT, params)[0]
        assert [sample.token_ids for sample in alone.outputs] == [
            sample.token_ids for sample in crowd.outputs
        ]


@pytest.fixture
def cramped() -> Iterator[LLM]:
    """Room for about two of the requests below."""
    with LLM(
        dtype="float32", kv_cache_memory=1 << 19, block_size=4, eager=True, max_model_len=96
    ) as llm:
        yield llm


def test_a_preempted_text_goes_on_as_if_nothing_had_happened(
    cramped: LLM, storyteller: LLM
) -> None:
    settings = [person(temperature=1.0, seed=seed, max_tokens=60) for seed in range(6)]
    outputs = cramped.generate([PROMPT] * len(settings), settings)
    assert cramped.engine.scheduler.table.preemptions > 0
    for params, output in zip(settings, outputs, strict=True):
        alone = storyteller.generate(PROMPT, params)[0].outputs[0]
        assert output.outputs[0].token_ids == alone.token_ids
        assert alone.finish_reason == "stop" and meets(json.loads(alone.text), PERSON)


def test_another_engine_goes_on_where_the_first_one_died(storyteller: LLM) -> None:
    prompt = tuple(storyteller.tokenizer.encode(PROMPT))
    request = Request(
        "r", prompt, person(temperature=1.0, n=2), seed=9, end_tokens=storyteller.end_tokens
    )
    whole = _run(storyteller, request)
    for done in (1, 7, min(len(tokens) for tokens in whole) - 1):
        rest = _run(storyteller, replace(request, resumed=tuple(tokens[:done] for tokens in whole)))
        assert [tokens[:done] + more for tokens, more in zip(whole, rest, strict=True)] == whole


def _run(llm: LLM, request: Request) -> list[tuple[int, ...]]:
    llm.engine.add(request)
    tokens: list[tuple[int, ...]] = [()] * request.params.n
    while llm.engine.has_work:
        update: SequenceUpdate
        for update in llm.engine.step():
            assert update.sequence.error is None
            tokens[update.index] += update.new_tokens
    return tokens


def test_a_schema_that_the_edge_would_have_refused_ends_its_own_sequence(storyteller: LLM) -> None:
    """Nothing that reaches the engine can end it."""
    prompt = tuple(storyteller.tokenizer.encode(PROMPT))
    params = SamplingParams(json_schema='{"type":"poem"}')
    storyteller.engine.add(Request("bad", prompt, params, seed=1))
    storyteller.engine.add(Request("good", prompt, SamplingParams(max_tokens=3), seed=1))
    errors, tokens = {}, 0
    while storyteller.engine.has_work:
        for update in storyteller.engine.step():
            errors[update.request_id] = update.sequence.error
            tokens += len(update.new_tokens)
    assert errors == {"bad": "JSON schema: Invalid type: poem", "good": None} and tokens == 3


def test_settings_that_make_no_sense(storyteller: LLM) -> None:
    with pytest.raises(UsageError, match="ignore_eos makes no sense"):
        person(ignore_eos=True)
    with pytest.raises(UsageError, match=r"json_schema must be a text: json.dumps\(schema\)"):
        SamplingParams(json_schema={"type": "object"})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=f"at most {MAX_JSON_SCHEMA_LENGTH} are taken"):
        SamplingParams(json_schema=json.dumps({"const": "x" * MAX_JSON_SCHEMA_LENGTH}))
    with pytest.raises(UsageError, match="does not fetch"):
        storyteller.generate(PROMPT, SamplingParams(json_schema='{"$ref":"http://127.0.0.1:9/"}'))
    assert not storyteller.engine.has_work


def test_a_row_of_a_file_may_hold_the_schema_itself() -> None:
    params = SamplingParams.from_mapping({"json_schema": PERSON})
    assert params.json_schema is not None and json.loads(params.json_schema) == PERSON
