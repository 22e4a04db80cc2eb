"""The requests that clients may send, and the sampling parameters that follow within the limits of
the model.

A field that is not listed is refused, never ignored; so is a value of another type. OpenAI and vLLM
document some fields that nanoserve does not support. Their values that ask for nothing are
accepted, because clients send them too.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_origin, get_type_hints

import msgspec

from nanoserve.errors import UsageError
from nanoserve.request import SamplingParams
from nanoserve.server.http_bodies import ApiError
from nanoserve.server.messages import EngineFacts
from nanoserve.text.chat_template import RESERVED_ARGUMENTS
from nanoserve.text.tokenizer import Tokenizer

T = TypeVar("T", bound=msgspec.Struct)

# OpenAI's default for /v1/completions; a chat's answer may fill the context
DEFAULT_COMPLETION_TOKENS = 16
MAX_TOOLS = 128
MAX_LOGPROBS_PER_REQUEST = 1 << 22
"""Limit over all samples. Each takes about 100 bytes, here and in the engine, until the answer is
sent."""
_Name = Annotated[str, msgspec.Meta(max_length=256)]
_PATH = re.compile(r" - at (`key` in )?`\$\.?([^`]*)`$")
_UNKNOWN_OR_MISSING = re.compile(r"Object (contains unknown|missing required) field `([^`]*)`")


def _nothing(*values: str) -> msgspec.Meta:
    """The type of an unsupported field: it accepts null and these values, as JSON, which ask for
    nothing."""
    return msgspec.Meta(extra={"nothing": values})


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request object that refuses unknown fields."""


class StreamOptions(_Strict, frozen=True, kw_only=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Annotated[Any, _nothing("false")] = None


class ModelField(_Strict, frozen=True, kw_only=True):
    """A request that may name the model; None is the same as absent, in all fields."""

    model: str | None = None


class SamplingFields(ModelField, frozen=True, kw_only=True):
    """The fields that both kinds of completion share."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: _Name | None = None
    """For policies that share between users; it does not change the answer."""
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31)] | None = None
    """vLLM's: lower goes first, under a policy that orders by it."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: Annotated[Any, _nothing("true")] = None


SAMPLING_NAMES = tuple(
    name for name in SamplingFields.__struct_fields__ if hasattr(SamplingParams, name)
)
"""Fields that are passed to SamplingParams, all but max_tokens unchanged."""


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """``/v1/completions``. ``prompt`` is a text, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    """Each answer begins with its prompt, and its log probabilities begin with the prompt's."""
    suffix: Annotated[Any, _nothing('""')] = None
    best_of: Annotated[Any, _nothing("1")] = None


class JsonSchemaFormat(_Strict, frozen=True, kw_only=True):
    name: str
    schema: dict[str, Any]
    description: str | None = None
    """For the client's own use, like ``name``."""
    strict: bool | None = None  # every answer follows its schema, whatever this says


class ResponseFormat(_Strict, frozen=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class Function(_Strict, frozen=True, kw_only=True, omit_defaults=True):
    name: Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")]
    description: str | None = None
    parameters: dict[str, Any] | None = None  # the JSON schema of its arguments
    strict: bool | None = None
    """A required call follows its schema, whatever this says. A call that the model chose to make
    may not."""


class Tool(_Strict, frozen=True, kw_only=True):
    type: Literal["function"]
    function: Function  # of ``tool_choice`` only the name is read


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """``/v1/chat/completions``. Messages are checked by text.chat_template."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    safety_identifier: _Name | None = None
    """OpenAI's new name for ``user``."""

    tools: Annotated[list[Tool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[_Name, bool | int | float | str | None] | None = None
    """vLLM's: arguments for the model's chat template. An argument that the template does not know
    changes nothing."""
    functions: Annotated[Any, _nothing("[]")] = None
    function_call: Annotated[Any, _nothing('"none"', '"auto"')] = None
    modalities: Annotated[Any, _nothing('["text"]')] = None
    audio: Annotated[Any, _nothing()] = None
    prediction: Annotated[Any, _nothing()] = None
    verbosity: Annotated[Any, _nothing()] = None
    web_search_options: Annotated[Any, _nothing()] = None
    store: Annotated[Any, _nothing("false")] = None
    metadata: Annotated[Any, _nothing("{}")] = None
    service_tier: Annotated[Any, _nothing('"auto"', '"default"')] = None
    prompt_cache_key: Annotated[Any, _nothing()] = None


class TokenizeRequest(ModelField, frozen=True, kw_only=True):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(ModelField, frozen=True, kw_only=True):
    tokens: list[int]


def parse(body: bytes, schema: type[T]) -> T:
    """The request in a body of JSON. Raises ApiError (400), which names the field that is wrong."""
    try:
        asked = msgspec.json.decode(body, type=schema)
        _refuse_unsupported(asked)
        return asked
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None


@cache
def _nothings(schema: type) -> dict[str, tuple[str, ...]]:
    """The values that ask for nothing, by the name of each unsupported field."""
    hints = get_type_hints(schema, include_extras=True)
    return {
        name: hint.__metadata__[0].extra["nothing"]
        for name, hint in hints.items()
        if get_origin(hint) is Annotated
    }


def _refuse_unsupported(asked: msgspec.Struct, within: str = "") -> None:
    """Raise ApiError (400) for a field that asks for something that is not supported."""
    for name, values in _nothings(type(asked)).items():
        value = getattr(asked, name)
        if value is not None and msgspec.json.encode(value).decode() not in values:
            harmless = " or ".join(values + ("null",))
            message = f"{within}{name} is not supported: leave it out, or give {harmless}"
            raise ApiError(400, message, code="unsupported_parameter", param=within + name)
    if isinstance(asked, SamplingFields) and asked.stream_options is not None:
        _refuse_unsupported(asked.stream_options, "stream_options.")


def _explained(message: str) -> ApiError:
    """The error for a message of msgspec, which names the wrong field in its text."""
    path = _PATH.search(message)
    param = None
    named = None
    if path is not None:
        param = path[2]
        named = param
        if path[1]:
            named = f"a key of {param}"
    if message.startswith("Invalid enum value"):
        return ApiError(400, f"{param} is not supported", code="unsupported_parameter", param=param)
    field = _UNKNOWN_OR_MISSING.search(message)
    if field is not None:
        name = field[2]
        if param:
            name = f"{param}.{name}"
        if field[1] == "missing required":
            return ApiError(
                400, f"{name} is missing", code="missing_required_parameter", param=name
            )
        return ApiError(400, f"{name} is not supported", code="unsupported_parameter", param=name)
    text = _PATH.sub("", message).replace("`", "")
    if named:
        text = f"{named}: {text}"
    return ApiError(400, text, code="invalid_type", param=param)


_SET_BY_NANOSERVE = RESERVED_ARGUMENTS + ("tools", "documents", "raise_exception", "strftime_now")


def template_arguments(asked: ChatRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    """The arguments that a request has for the chat template. Raises ApiError (400) for arguments
    that nanoserve sets."""
    given = asked.chat_template_kwargs or {}
    reserved = sorted(set(given) & set(_SET_BY_NANOSERVE))
    if reserved:
        name = f"chat_template_kwargs.{reserved[0]}"
        raise ApiError(
            400, f"{name} is set by nanoserve: leave it out", code="invalid_value", param=name
        )
    if not tokenizer.has_chat_template:
        return {}
    effort: Mapping[str, Any] = {}
    if asked.reasoning_effort == "none":
        switch = tokenizer.thinking_switch
        if switch is not None:
            effort = switch.off
    elif asked.reasoning_effort is not None:
        effort = {"reasoning_effort": asked.reasoning_effort}
    return {**effort, **given}


def wants_json(asked: ChatRequest) -> bool:
    """Whether the answer has to be JSON."""
    return asked.response_format is not None and asked.response_format.type != "text"


_ANY_OBJECT = '{"type":"object"}'
_FIELD = re.compile(r"\b(" + "|".join(SAMPLING_NAMES) + r"|logprobs)\b")


def chat_params(
    asked: ChatRequest, facts: EngineFacts, length: int, call: str | None = None
) -> SamplingParams:
    """The parameters of a chat completion whose prompt has this length, and whose answer has to be
    a tool call if ``call`` is its JSON schema. Raises ApiError (400) for values out of range and
    prompts too long."""
    if asked.top_logprobs and not asked.logprobs:
        raise ApiError(
            400,
            "top_logprobs needs logprobs to be true",
            code="invalid_value",
            param="top_logprobs",
        )
    if asked.max_tokens is not None and asked.max_completion_tokens not in (None, asked.max_tokens):
        raise ApiError(
            400, "max_tokens and max_completion_tokens differ: give one of them", param="max_tokens"
        )
    wanted = asked.max_tokens
    if wanted is None:
        wanted = asked.max_completion_tokens
    logprobs = None
    if asked.logprobs:
        logprobs = asked.top_logprobs or 0
    schema = call
    if schema is None:
        schema = _json_schema(asked.response_format)
    return _params(asked, facts, [length], wanted, None, logprobs=logprobs, json_schema=schema)[0]


def _json_schema(asked: ResponseFormat | None) -> str | None:
    """The text of the JSON schema that the answer has to follow, if any."""
    if asked is None:
        return None
    field = "response_format.json_schema"
    if asked.type != "json_schema":
        if asked.json_schema is not None:
            raise ApiError(
                400, f"{field} needs response_format.type to be json_schema", param=field
            )
        if asked.type == "json_object":
            return _ANY_OBJECT
        return None
    if asked.json_schema is None:
        raise ApiError(400, f"{field} is missing", code="missing_required_parameter", param=field)
    try:
        return msgspec.json.encode(asked.json_schema.schema).decode()
    except RecursionError:
        raise ApiError(
            400, f"{field}.schema is nested too deeply", code="invalid_value", param=field
        ) from None


def completion_params(
    asked: CompletionRequest, facts: EngineFacts, lengths: Sequence[int]
) -> list[SamplingParams]:
    """The parameters of each prompt; prompts with the same max_tokens share theirs. Raises as
    ``chat_params`` does."""
    if asked.max_tokens == 0 and not asked.echo:
        raise ApiError(
            400, "max_tokens 0 needs echo to be true", code="invalid_value", param="max_tokens"
        )
    prompt_logprobs = None
    if asked.echo and (asked.logprobs is not None or asked.max_tokens == 0):
        prompt_logprobs = asked.logprobs or 0
    return _params(
        asked,
        facts,
        lengths,
        asked.max_tokens,
        DEFAULT_COMPLETION_TOKENS,
        logprobs=asked.logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _params(
    asked: SamplingFields,
    facts: EngineFacts,
    prompt_lengths: Sequence[int],
    max_tokens: int | None,
    default: int | None,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    json_schema: str | None = None,
) -> list[SamplingParams]:
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(
            400,
            "stream_options needs stream to be true",
            code="invalid_value",
            param="stream_options",
        )
    check_token_ids(asked.stop_token_ids or (), facts, "stop_token_ids")
    check_token_ids(asked.logit_bias or (), facts, "logit_bias")
    settings = msgspec.structs.asdict(facts.default_params)
    for name in SAMPLING_NAMES:
        value = getattr(asked, name)
        if value is not None:
            settings[name] = value
    settings |= {
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "json_schema": json_schema,
    }
    tokens = [
        _max_tokens(max_tokens, default, facts.max_model_len, length) for length in prompt_lengths
    ]
    try:
        shared = {
            most: SamplingParams.from_mapping(settings | {"max_tokens": most})
            for most in dict.fromkeys(tokens)
        }
    except UsageError as error:
        raise _sampling_error(asked, str(error)) from None
    told = sum(tokens)
    if prompt_logprobs is not None:
        told += sum(prompt_lengths)
    told *= shared[tokens[0]].n
    if logprobs is not None and (logprobs + 1) * told > MAX_LOGPROBS_PER_REQUEST:
        message = (
            f"logprobs: {told} tokens with {logprobs + 1} log probabilities each are more than "
            f"{MAX_LOGPROBS_PER_REQUEST} in one request; ask for a smaller max_tokens, n or "
            "logprobs, or fewer prompts"
        )
        raise ApiError(400, message, code="invalid_value", param="logprobs")
    return [shared[most] for most in tokens]


def _sampling_error(asked: SamplingFields, error: str) -> ApiError:
    """The error for a message of SamplingParams, with the field of the request that it is about."""
    message = error.removeprefix("sampling settings: ")
    field = _FIELD.search(message)
    param = None
    if message.startswith("json_schema"):
        param = "response_format"
        if getattr(asked, "tools", None):
            param = "tools"
    elif field is not None:
        param = field.group()
    return ApiError(400, message, code="invalid_value", param=param)


def _max_tokens(wanted: int | None, default: int | None, context: int, prompt_length: int) -> int:
    """The most tokens of an answer: the wanted number, else `default` within the context, else all
    that is left of the context. Raises ApiError (400) if the context is too small."""
    room = context - prompt_length
    fewest = 1
    if wanted == 0:  # only the prompt is scored
        fewest = 0
    has = f"the prompt has {prompt_length} tokens"
    if room < fewest:
        message = f"{has}, but the context holds {context} with at least one for the answer"
        param = "prompt"
        if default is None:  # a chat
            param = "messages"
        raise ApiError(400, message, code="context_length_exceeded", param=param)
    if wanted is None:
        if default is None:
            return room
        return min(default, room)
    if wanted > room:
        message = (
            f"{has}, which leaves {room} of the context of {context}, but max_tokens asks for "
            f"{wanted}"
        )
        raise ApiError(400, message, code="context_length_exceeded", param="max_tokens")
    return wanted


def check_token_ids(tokens: Collection[int], facts: EngineFacts, name: str) -> None:
    """Raise ApiError (400) for an id beyond the width of the logits, which would read outside the
    embedding."""
    for token in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= token < facts.vocab_size:
            message = f"{name}: token id {token} is not in the vocabulary of {facts.vocab_size}"
            raise ApiError(400, message, code="invalid_value", param=name)
