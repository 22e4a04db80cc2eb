"""Sampling parameters for the engine, from the fields of a client's request and within the limits of the model."""

import re
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from nanoserve.errors import UsageError
from nanoserve.request import SamplingParams
from nanoserve.server.http_bodies import ApiError
from nanoserve.server.messages import EngineFacts
from nanoserve.server.schemas import SAMPLING_NAMES, ChatRequest, CompletionRequest, ResponseFormat, SamplingFields

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions; a chat's answer may fill the context."""

MAX_LOGPROBS_PER_REQUEST = 1 << 22
"""Limit over all samples. Each takes about 100 bytes, here and in the engine, until the answer is sent."""

_ANY_OBJECT = '{"type":"object"}'
_FIELD = re.compile(r"\b(" + "|".join((*SAMPLING_NAMES, "max_tokens", "logprobs")) + r")\b")


def chat_params(asked: ChatRequest, facts: EngineFacts, prompt_length: int) -> SamplingParams:
    """The parameters of a chat completion.

    Raises:
        ApiError: 400, for values out of range and prompts that do not fit.
    """
    if asked.top_logprobs and not asked.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", code="invalid_value", param="top_logprobs")
    if asked.max_tokens is not None and asked.max_completion_tokens not in (None, asked.max_tokens):
        raise ApiError(400, "max_tokens and max_completion_tokens differ: give one of them", param="max_tokens")
    wanted = asked.max_completion_tokens if asked.max_tokens is None else asked.max_tokens
    logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    schema = _json_schema(asked.response_format)
    (params,) = _params(
        asked, facts, [prompt_length], max_tokens=wanted, default=None, logprobs=logprobs, json_schema=schema
    )
    return params


def _json_schema(asked: ResponseFormat | None) -> str | None:
    """The text of the JSON schema that the answer has to follow, if any."""
    if asked is None:
        return None
    field = "response_format.json_schema"
    if asked.type != "json_schema":
        if asked.json_schema is not None:
            raise ApiError(400, f"{field} needs response_format.type to be json_schema", param=field)
        return _ANY_OBJECT if asked.type == "json_object" else None
    if asked.json_schema is None:
        raise ApiError(400, f"{field} is missing", code="missing_required_parameter", param=field)
    try:
        return msgspec.json.encode(asked.json_schema.schema).decode()
    except RecursionError:
        raise ApiError(400, f"{field}.schema is nested too deeply", code="invalid_value", param=field) from None


def completion_params(
    asked: CompletionRequest, facts: EngineFacts, prompt_lengths: Sequence[int]
) -> Sequence[SamplingParams]:
    """The parameters of each prompt; prompts with the same max_tokens share theirs. Raises as ``chat_params`` does."""
    return _params(
        asked,
        facts,
        prompt_lengths,
        max_tokens=asked.max_tokens,
        default=DEFAULT_COMPLETION_TOKENS,
        logprobs=asked.logprobs,
    )


def _params(
    asked: SamplingFields,
    facts: EngineFacts,
    prompt_lengths: Sequence[int],
    *,
    max_tokens: int | None,
    default: int | None,
    logprobs: int | None,
    json_schema: str | None = None,
) -> Sequence[SamplingParams]:
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "stream_options needs stream to be true", code="invalid_value", param="stream_options")
    check_token_ids(asked.stop_token_ids or (), facts, "stop_token_ids")
    check_token_ids(asked.logit_bias or (), facts, "logit_bias")
    given: dict[str, Any] = {name: getattr(asked, name) for name in SAMPLING_NAMES}
    given = {name: value for name, value in given.items() if value is not None}
    given |= {"logprobs": logprobs, "json_schema": json_schema}
    settings = msgspec.structs.asdict(facts.default_params) | given
    tokens = [_max_tokens(max_tokens, default, facts.max_model_len, length) for length in prompt_lengths]
    try:
        shared = {most: SamplingParams.from_mapping(settings | {"max_tokens": most}) for most in dict.fromkeys(tokens)}
    except UsageError as error:
        message = str(error).removeprefix("sampling settings: ")
        raise ApiError(400, message, code="invalid_value", param=_named_field(message)) from None
    samples = shared[tokens[0]].n
    if logprobs is not None and (logprobs + 1) * samples * sum(tokens) > MAX_LOGPROBS_PER_REQUEST:
        message = (
            f"logprobs: {samples * sum(tokens)} tokens with {logprobs + 1} log probabilities each are more than "
            f"{MAX_LOGPROBS_PER_REQUEST} in one request; ask for a smaller max_tokens, n or logprobs, or fewer prompts"
        )
        raise ApiError(400, message, code="invalid_value", param="logprobs")
    return [shared[most] for most in tokens]


def _max_tokens(wanted: int | None, default: int | None, context: int, prompt_length: int) -> int:
    room = context - prompt_length
    if room < 1:
        raise ApiError(
            400,
            f"the prompt has {prompt_length} tokens, but the context holds {context} with at least one for the answer",
            code="context_length_exceeded",
            param="messages" if default is None else "prompt",
        )
    if wanted is None:
        return room if default is None else min(default, room)
    if wanted > room:
        raise ApiError(
            400,
            f"the prompt has {prompt_length} tokens, which leaves {room} of the context of {context}, "
            f"but max_tokens asks for {wanted}",
            code="context_length_exceeded",
            param="max_tokens",
        )
    return wanted


def check_token_ids(tokens: Collection[int], facts: EngineFacts, name: str) -> None:
    """Check every id against the width of the logits: a larger one would read outside the embedding.

    Raises:
        ApiError: 400, naming an id that is outside.
    """
    for token in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= token < facts.vocab_size:
            message = f"{name}: token id {token} is not in the vocabulary of {facts.vocab_size}"
            raise ApiError(400, message, code="invalid_value", param=name)


def _named_field(message: str) -> str | None:
    """The field that a message of SamplingParams names."""
    if message.startswith("json_schema"):
        return "response_format"
    found = _FIELD.search(message)
    return found.group() if found else None
