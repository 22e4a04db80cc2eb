"""Parameters of a request, and the states a sequence goes through."""

import math
from typing import Any

import pytest

from nanoserve.errors import UsageError
from nanoserve.request import (
    LEGAL_TRANSITIONS,
    FinishReason,
    Request,
    RequestMetrics,
    SamplingParams,
    Sequence,
    Status,
    TokenLogprob,
)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"n": 0}, "n must be a whole number from 1 to 16"),
        ({"n": 10**9}, "n must be"),
        ({"n": True}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": "5"}, "n"),
        ({"temperature": "warm"}, "temperature must be a number from 0 to 100, not 'warm'"),
        ({"temperature": None}, "temperature must be a number from 0 to 100, not None"),
        ({"top_k": 1.5}, "top_k must be a whole number from -1 to 2147483647, not 1.5"),
        ({"stop": [1]}, "every stop string must have 1 to 1024 characters"),
        ({"temperature": -0.1}, "temperature must be a number from 0 to 100"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": 1e308}, "temperature"),
        ({"top_p": 0}, "top_p must be a number above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"seed": -2}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"max_tokens": 0}, "max_tokens must be a whole number from 1"),
        (
            {"max_tokens": 0, "min_tokens": 1, "prompt_logprobs": 0},
            "min_tokens must be a whole number from 0 to 0",
        ),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2**63}, "max_tokens"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens must be a whole number from 0 to 3"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x" * 1025]}, "stop"),
        ({"stop": ["half \ud83d"]}, "not valid Unicode"),
        ({"stop_token_ids": [-1]}, "stop token id"),
        ({"stop_token_ids": [5] * 1025}, "stop_token_ids may name at most 1024"),
        ({"logit_bias": {1: 101}}, "logit_bias"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"logit_bias": {"one": 1}}, "every token id of logit_bias must be a whole number from 0"),
        ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "at most 1024"),
        ({"top_q": 1}, "top_q"),
    ],
)
def test_what_is_out_of_range_is_refused_in_one_line(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        SamplingParams.from_mapping(settings)
    assert "\n" not in str(caught.value)


def test_a_number_too_large_for_a_float_is_out_of_range() -> None:
    with pytest.raises(UsageError, match="temperature must be a number from 0 to 100"):
        SamplingParams(temperature=10**400)


def test_settings_from_json_are_read_as_they_come() -> None:
    params = SamplingParams.from_mapping({"stop": "end", "logit_bias": {"7": 1}, "temperature": 0})
    assert params == SamplingParams(stop=("end",), logit_bias={7: 1.0}, temperature=0)


def test_only_legal_transitions_are_made() -> None:
    for status in Status:
        for target in Status:
            sequence = Sequence(
                0, Request("r", (1,), SamplingParams(), seed=0), 0, [1], status=status
            )
            if target in LEGAL_TRANSITIONS[status]:
                sequence.move_to(target)
                assert sequence.status is target
            else:
                with pytest.raises(RuntimeError, match="illegal transition"):
                    sequence.move_to(target)


@pytest.mark.parametrize(
    ("answered", "taken", "reason"),
    [
        ((5, 6), (5, 6), None),
        ((5, 9, 6), (5, 9), FinishReason.STOP),
        ((9, 6), (9, 6), None),  # too early to stop
        ((9, 9, 9), (9, 9), FinishReason.STOP),
        ((5, 6, 7, 8, 4), (5, 6, 7, 8), FinishReason.LENGTH),
        # the end token is the reason, though the length ends it too
        ((5, 6, 7, 9), (5, 6, 7, 9), FinishReason.STOP),
    ],
)
def test_what_follows_the_token_that_ends_a_sequence_is_dropped(
    answered: tuple[int, ...], taken: tuple[int, ...], reason: FinishReason | None
) -> None:
    request = Request("r", (1, 2), SamplingParams(), seed=0)
    sequence = Sequence(
        0, request, 0, [1, 2], stop_tokens=frozenset({9}), min_length=3, max_length=6
    )
    logprobs = tuple(TokenLogprob(token, -1.0, 1) for token in answered)
    assert sequence.extend(answered, logprobs) == (taken, reason)
    assert (
        tuple(sequence.output_tokens)
        == tuple(logprob.token for logprob in sequence.logprobs)
        == taken
    )
    assert sequence.stop_token == (9 if reason is FinishReason.STOP else None)


def test_metrics_are_the_fields_definitions() -> None:
    metrics = RequestMetrics(
        arrival_time=10.0,
        first_scheduled_time=11.0,
        first_token_time=12.0,
        last_token_time=18.0,
        finished_time=18.0,
        output_tokens=4,
    )
    assert metrics.queue_time == 1.0
    assert metrics.time_to_first_token == 2.0
    assert metrics.latency == 8.0
    assert metrics.time_per_output_token == 2.0
    assert RequestMetrics(0.0, None, None, None, None, 0).time_per_output_token is None


def test_a_seed_of_minus_one_is_none_as_in_vllm() -> None:
    assert SamplingParams(seed=-1) == SamplingParams() == SamplingParams.from_mapping({"seed": -1})
