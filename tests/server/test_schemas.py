"""Fields of a request that nanoserve does not carry out: values that ask for nothing, and no
others."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanoserve.errors import UsageError
from nanoserve.request import Request, SamplingParams
from nanoserve.server.endpoints import _begin
from nanoserve.server.http_bodies import ApiError
from nanoserve.server.messages import EngineFacts
from nanoserve.server.schemas import (
    ChatRequest,
    CompletionRequest,
    chat_params,
    completion_params,
    parse,
    template_arguments,
)
from nanoserve.text.answers.settings import thinking_switch
from nanoserve.text.chat_template import check_messages

FACTS = EngineFacts(1024, 4096, (0,), SamplingParams(), 256)
NULLS = (
    *(
        "metadata",
        "store",
        "service_tier",
        "parallel_tool_calls",
        "modalities",
        "prediction",
        "functions",
    ),
    *(
        "function_call",
        "audio",
        "reasoning_effort",
        "verbosity",
        "prompt_cache_key",
        "safety_identifier",
    ),
    *(
        "web_search_options",
        "tools",
        "tool_choice",
        "skip_special_tokens",
        "top_logprobs",
        "stream_options",
    ),
)


def _chat(**fields: Any) -> ChatRequest:
    return parse(
        json.dumps({"messages": [{"role": "user", "content": "a"}]} | fields).encode(), ChatRequest
    )


def _completion(**fields: Any) -> CompletionRequest:
    return parse(json.dumps({"prompt": "a"} | fields).encode(), CompletionRequest)


@pytest.mark.parametrize(
    "fields",
    [
        *({name: None} for name in NULLS),
        {"metadata": {}},
        {"store": False},
        {"service_tier": "auto"},
        {"service_tier": "default"},
        {"parallel_tool_calls": True},
        {"parallel_tool_calls": False},
        {"modalities": ["text"]},
        {"functions": []},
        {"function_call": "none"},
        {"tools": []},
        {"tool_choice": "auto"},
        {"top_logprobs": 0},
        {"skip_special_tokens": True},
        {"safety_identifier": "someone"},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
    ids=str,
)
def test_values_that_ask_for_nothing_change_nothing(fields: dict[str, Any]) -> None:
    assert chat_params(_chat(**fields), FACTS, 5) == chat_params(_chat(), FACTS, 5)


@pytest.mark.parametrize(
    "fields", [{"echo": False}, {"suffix": ""}, {"best_of": 1}, {"skip_special_tokens": True}]
)
def test_so_they_do_in_completions(fields: dict[str, Any]) -> None:
    assert completion_params(_completion(**fields), FACTS, [5]) == completion_params(
        _completion(), FACTS, [5]
    )


@pytest.mark.parametrize(
    ("fields", "accepted"),
    [
        ({"metadata": {"a": "b"}}, "{}"),
        ({"store": True}, "false"),
        ({"store": 0}, "false"),
        ({"service_tier": "flex"}, '"auto" or "default"'),
        ({"modalities": ["text", "audio"]}, '["text"]'),
        ({"functions": [{"name": "f"}]}, "[]"),
        ({"function_call": {"name": "f"}}, '"none"'),
        ({"prediction": {"type": "content", "content": "a"}}, "null"),
        ({"audio": {}}, "null"),
        ({"verbosity": "low"}, "null"),
        ({"prompt_cache_key": "a"}, "null"),
        ({"web_search_options": {}}, "null"),
        ({"skip_special_tokens": False}, "true"),
    ],
    ids=str,
)
def test_what_asks_for_something_that_is_not_there_is_refused_by_name(
    fields: dict[str, Any], accepted: str
) -> None:
    (name,) = fields
    with pytest.raises(ApiError) as caught:
        _chat(**fields)
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", name)
    assert error.message.startswith(f"{name} is not supported: leave it out, or give ")
    assert accepted in error.message and error.message.endswith("null")


def _tokenizer(template: str) -> Any:
    return SimpleNamespace(
        has_chat_template=bool(template), thinking_switch=thinking_switch(template)
    )


QWEN_SWITCH = (
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think></think>' }}{% "
    "endif %}"
)
EFFORT = "{{ 'Reasoning: ' + reasoning_effort }}"


@pytest.mark.parametrize(
    ("template", "fields", "arguments"),
    [
        (QWEN_SWITCH, {}, {}),
        (QWEN_SWITCH, {"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        (QWEN_SWITCH, {"reasoning_effort": "none"}, {"enable_thinking": False}),
        (QWEN_SWITCH, {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True, "a": 1.5}},
         {"enable_thinking": True, "a": 1.5}),
        (EFFORT, {"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        (EFFORT, {"reasoning_effort": "none"}, {"reasoning_effort": "low"}),
        ("", {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, {}),
    ],
)  # fmt: skip
def test_what_a_request_gives_to_the_chat_template(
    template: str, fields: dict[str, Any], arguments: dict[str, Any]
) -> None:
    assert template_arguments(_chat(**fields), _tokenizer(template)) == arguments


@pytest.mark.parametrize(
    "name", ["messages", "tools", "documents", "bos_token", "add_generation_prompt"]
)
def test_template_arguments_that_nanoserve_sets_are_refused(name: str) -> None:
    with pytest.raises(ApiError, match="is set by nanoserve") as caught:
        template_arguments(_chat(chat_template_kwargs={name: "x"}), _tokenizer(QWEN_SWITCH))
    assert caught.value.param == f"chat_template_kwargs.{name}" and caught.value.status == 400


@pytest.mark.parametrize("value", [[1], {"a": 1}])
def test_template_arguments_are_scalars(value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        _chat(chat_template_kwargs={"a": value})
    assert caught.value.status == 400 and "chat_template_kwargs" in str(caught.value.param)


def test_options_of_a_stream_are_named_with_their_path() -> None:
    with pytest.raises(ApiError) as caught:
        _completion(stream=True, stream_options={"include_obfuscation": True})
    assert caught.value.param == "stream_options.include_obfuscation"


@pytest.mark.parametrize("key", ["a", "1.5", ""])
def test_a_key_of_logit_bias_that_is_no_token_names_the_field(key: str) -> None:
    with pytest.raises(ApiError, match="a key of logit_bias") as caught:
        _completion(logit_bias={key: 1})
    assert caught.value.param == "logit_bias"


def test_the_error_about_roles_knows_all_of_them() -> None:
    with pytest.raises(UsageError, match="system, user, assistant, tool, developer"):
        check_messages([{"role": "king", "content": "a"}])


def test_the_document_names_every_field_that_is_taken_for_nothing() -> None:
    text = (Path(__file__).parents[2] / "docs/server.md").read_text()
    fields = {
        field for schema in (ChatRequest, CompletionRequest) for field in schema.__struct_fields__
    }
    assert not [field for field in fields if f"`{field}`" not in text]


def test_priority_and_user_reach_the_engine() -> None:
    def plain(name: str, prompt: list[int], params: SamplingParams, key: bytes | None) -> Request:
        return Request(name, tuple(prompt), params, seed=0)

    service = SimpleNamespace(request=plain, begin=list)
    http: Any = SimpleNamespace(
        app=SimpleNamespace(state=SimpleNamespace(service=service)), scope={}
    )
    answer: Any = SimpleNamespace(answer_id="a")
    for asked, expected in (
        (_chat(priority=-2, safety_identifier="me"), (-2, "me")),
        (_chat(user="you", safety_identifier="me"), (0, "you")),
        (_completion(user="you", priority=5), (5, "you")),
        (_completion(), (0, "")),
    ):
        streams: Any = _begin(http, asked, answer, [[1], [2]], [SamplingParams()] * 2).streams
        assert [(one.prompt, one.priority, one.user) for one in streams] == [
            ((1,), *expected),
            ((2,), *expected),
        ]
