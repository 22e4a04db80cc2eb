"""LLM with a policy that attends in host memory: texts are those of a device with room for all."""

import json
from collections.abc import Iterator

import pytest

from nanoserve import LLM, SamplingParams
from tests.fakes.linear_predictor import LinearPredictor

SCHEMA = (
    '{"type":"object","properties":{"name":{"type":"string","maxLength":20}},"required":["name"],'
    '"additionalProperties":false}'
)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=40, stop=(" and", " was a"), logprobs=1),
    SamplingParams(temperature=1, max_tokens=30, seed=3, n=3, stop=(".",)),
    SamplingParams(temperature=0.7, max_tokens=60, seed=4, json_schema=SCHEMA),
]
PROMPTS = ["Once upon a time", "A little girl", "The dog and the cat", "One day, Tom"]


@pytest.fixture(autouse=True)
def by_a_predictor_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """To it the CPU attends in no time, and it does not learn that this is not so."""
    fast = LinearPredictor(num_layers=4, row=0.01, host_key=1e-5)
    monkeypatch.setattr("nanoserve.executor.start.predictors.hybrid_profile", lambda *_: None)
    monkeypatch.setattr("nanoserve.executor.start.predictors.hybrid_predictors", lambda _: (fast,))


def texts(**settings: object) -> tuple[list[list[str]], int]:
    """Answers to every prompt with all parameters, and the most sequences in host memory at a
    time."""
    with LLM(dtype="float32", eager=True, max_model_len=96, **settings) as llm:
        on_host, step = 0, llm.engine.step

        def watched(*values: object) -> object:
            nonlocal on_host
            on_host = max(on_host, llm.status.on_host)
            return step(*values)

        llm.engine.step = watched  # type: ignore[method-assign, assignment]
        params = [one for one in PARAMS for _ in PROMPTS]
        answers = llm.generate(PROMPTS * len(PARAMS), params)
        return [[sample.text for sample in answer.outputs] for answer in answers], on_host


@pytest.fixture(scope="module")
def alone() -> Iterator[list[list[str]]]:
    yield texts()[0]


@pytest.mark.parametrize("policy", ["overlap", "neo"])
def test_stop_strings_samples_and_schemas(policy: str, alone: list[list[str]]) -> None:
    found, on_host = texts(
        policy=policy, kv_cache_memory=700_000, host_kv_memory=16_000_000, host_threads=1
    )
    assert found == alone
    assert on_host > 2
    for (text,) in found[-len(PROMPTS) :]:
        json.loads(text)
    stopped = found[len(PROMPTS) : 2 * len(PROMPTS)]
    assert not any(stop in text for (text,) in stopped for stop in PARAMS[1].stop)
