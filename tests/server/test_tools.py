"""Tools over HTTP, through OpenAI's own client: calls of the bundled model, with a template in the
style of Qwen's."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from nanoserve.models.hub import resolve_model
from nanoserve.request import CompletionOutput
from nanoserve.server.answers import ChatFormat, TokenText
from nanoserve.text.answers.forms import AnswerParser, answer_form
from nanoserve.text.answers.harmony import HarmonyAnswers
from tests.server.conftest import MODEL
from tests.server.starting import Server, running
from tests.text.templates import QWEN

CITY = {
    "$defs": {"City": {"enum": ["Paris", "Rome"]}},
    "properties": {"city": {"$ref": "#/$defs/City"}},
}
WEATHER = {
    "name": "get_weather",
    "description": "The weather.",
    "parameters": CITY | {"required": ["city"]},
}
TOOLS: list[Any] = [
    {"type": "function", "function": one} for one in (WEATHER, {"name": "get_time"})
]
ASKED: list[Any] = [{"role": "user", "content": "How is the weather in Rome?"}]
REQUIRED = {"tools": TOOLS, "tool_choice": "required"}
OPENS_REASONING = """{% if add_generation_prompt and "Think" in messages[0].content %}{{ "<think>\\n" }}{% endif %}"""


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.fixture(scope="module")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("model") / "caller"
    directory.mkdir()
    for file in resolve_model(None).tokenizer_directory.iterdir():
        (directory / file.name).symlink_to(file)
    (directory / "chat_template.jinja").write_text(QWEN + OPENS_REASONING)
    with running("-m", str(directory), *MODEL) as server:
        yield server


@pytest.fixture(scope="module")
def caller(tool_server: Server) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=tool_server.url + "/v1", api_key="none", max_retries=0, timeout=240
    )


def ask(client: openai.OpenAI, messages: list[Any] = ASKED, **settings: Any) -> Any:
    settings = {"seed": 3, "max_tokens": 60} | settings
    return client.chat.completions.create(model="caller", messages=messages, **settings)


def test_an_answer_by_a_schema_is_no_reasoning(caller: openai.OpenAI) -> None:
    """The prompt opens a reasoning block, but the schema leaves no room for one."""
    messages = [{"role": "user", "content": "Think of a story."}]
    plain = ask(caller, messages, max_tokens=8).choices[0].message
    assert plain.content is None and plain.reasoning_content
    schema = {
        "name": "answer",
        "schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}},
    }
    answer = (
        ask(caller, messages, response_format={"type": "json_schema", "json_schema": schema})
        .choices[0]
        .message
    )
    assert answer.content.startswith("{") and not hasattr(answer, "reasoning_content")


def test_arguments_for_the_chat_template(caller: openai.OpenAI) -> None:
    """Qwen's template writes an empty reasoning block where thinking is off."""

    def prompt_tokens(**fields: Any) -> int:
        tokens: int = ask(caller, max_tokens=1, extra_body=fields).usage.prompt_tokens
        return tokens

    plain = prompt_tokens(chat_template_kwargs={"unknown": "x"}, reasoning_effort="high")
    off = prompt_tokens(chat_template_kwargs={"enable_thinking": False})
    assert plain == prompt_tokens() < off == prompt_tokens(reasoning_effort="none")
    with pytest.raises(
        openai.BadRequestError, match=r"chat_template_kwargs\.messages is set by nanoserve"
    ):
        prompt_tokens(chat_template_kwargs={"messages": "x"})


def test_the_loop_of_a_client_with_tools(caller: openai.OpenAI) -> None:
    """Call, result, answer: the model's own message goes back as the client's object."""
    answer = ask(caller, tools=TOOLS, tool_choice=named("get_weather")).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    (call,) = answer.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather") and len(call.id) == 9
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    history = [
        *ASKED,
        answer.message,
        {"role": "tool", "tool_call_id": call.id, "content": "31 degrees"},
    ]
    for settings in ({"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}, {}):
        last = ask(caller, history, max_tokens=5, **settings).choices[0]
        assert (
            last.finish_reason == "length" and last.message.content and not last.message.tool_calls
        )


def test_answers_that_were_cut_off_go_back_as_they_came(caller: openai.OpenAI) -> None:
    question = {"role": "user", "content": "Think of a story."}
    reasoning = ask(caller, [question], max_tokens=8).choices[0].message
    assert reasoning.content is None and reasoning.reasoning_content
    function = {"name": "get_weather", "arguments": '{"city": "Par'}
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "a", "type": "function", "function": function}],
    }
    for history in (
        [question, reasoning, question],
        [question, call, {"role": "tool", "content": "no city"}],
    ):
        assert ask(caller, history, max_tokens=3).choices[0].finish_reason == "length"


@pytest.mark.parametrize("choice", ["required", named("get_time")], ids=str)
def test_a_stream_has_the_same_call(caller: openai.OpenAI, choice: Any) -> None:
    whole = ask(caller, tools=TOOLS, tool_choice=choice, n=2, temperature=1.5).choices
    chunks = list(ask(caller, tools=TOOLS, tool_choice=choice, n=2, temperature=1.5, stream=True))
    for choice_of_answer in whole:
        mine = [
            one for chunk in chunks for one in chunk.choices if one.index == choice_of_answer.index
        ]
        parts = [call for one in mine for call in one.delta.tool_calls or ()]
        assert mine[0].delta.role == "assistant" and mine[-1].finish_reason == "tool_calls"
        assert (
            {part.index for part in parts} == {0}
            and parts[0].id
            and not any(part.id for part in parts[1:])
        )
        (call,) = choice_of_answer.message.tool_calls
        assert parts[0].function.name == call.function.name
        assert "".join(part.function.arguments for part in parts) == call.function.arguments
        assert isinstance(json.loads(call.function.arguments), dict)


@pytest.mark.parametrize(
    ("settings", "param", "message"),
    [
        ({"tools": TOOLS, "tool_choice": named("nobody")}, "tool_choice", "none of the tools"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": TOOLS * 500}, "tools", "length <= 128"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "two tools have the same name"),
        ({"tools": [named("a b")]}, "tools[0].function.name", "regex"),
        ({"tools": [named("a\n")]}, "tools[0].function.name", "regex"),
        (
            {"tools": [{"type": "custom", "function": {"name": "a"}}]},
            "tools[0].type",
            "not supported",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
        (
            {**REQUIRED, "response_format": {"type": "json_object"}},
            "response_format",
            "does not go with tools",
        ),
        ({"functions": [{"name": "a"}]}, "functions", "not supported"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}},
            "tool_choice.type",
            "not supported",
        ),
        *(
            (
                {
                    "tools": [
                        {"type": "function", "function": {"name": "a", "parameters": schema}}
                    ],
                    **more,
                },
                "tools",
                said,
            )
            for more in ({"tool_choice": "required"}, {"tool_choice": named("a")})
            for schema, said in (
                ({"type": "string"}, "must have the type object"),
                ({"properties": {"a": {"$ref": "http://127.0.0.1:9/x.json"}}}, "does not fetch"),
                ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "without end"),
                (
                    {"properties": {"a": {"multipleOf": 123_456_789, "type": "integer"}}},
                    "too complex",
                ),
                (
                    {"properties": {"a": {"enum": [f"value {i}" for i in range(9_000)]}}},
                    "far more tokens than the context",
                ),
            )
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "a",
                            "parameters": json.loads('{"a":' * 70 + "1" + "}" * 70),
                        },
                    }
                ]
            },
            None,
            "nested more than 64",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_tools_that_cannot_be_used(
    caller: openai.OpenAI, settings: Any, param: str | None, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        ask(caller, **settings)
    if "context" not in message:
        assert caught.value.param == param
    assert "\n" not in caught.value.message


def test_a_template_without_tools(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="takes no tools"):
        client.chat.completions.create(model="storyteller", messages=ASKED, tools=TOOLS)
    kept = client.chat.completions.create(
        model="storyteller", messages=ASKED, tools=TOOLS, tool_choice="none", max_tokens=3
    )
    assert kept.choices[0].message.content


def test_reasoning_text_and_calls_of_one_answer() -> None:
    """Each in its own field, whole and streamed."""
    text = '<think>\nhm\n</think>\n\nLet me see.\n<tool_call>\n{"name": "get_time", "arguments": {"a": 1}}\n</tool_call>'

    def answer() -> ChatFormat:
        return ChatFormat(
            "m", no_text, lambda: AnswerParser(answer_form(QWEN), {}, {"get_time": {}})
        )

    def output(text: str, reason: str | None) -> CompletionOutput:
        return CompletionOutput(0, text, (), None, reason, None, None)

    request: Any = None
    whole = asyncio.run(answer().choice(0, request, output(text, "stop")))
    call = whole["message"].pop("tool_calls")[0]
    assert whole["message"] == {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning_content": "hm",
    }
    assert call["function"] == {"name": "get_time", "arguments": '{"a": 1}'} and "index" not in call
    assert whole["finish_reason"] == "tool_calls"
    streamed = answer()
    pieces = [*(output(one, None) for one in text), output("", "stop")]
    choices = [asyncio.run(streamed.choice(0, request, piece, "delta")) for piece in pieces]
    deltas = [choice["delta"] for choice in choices if choice["delta"]]
    assert deltas[0] == {"role": "assistant", "content": None, "reasoning_content": "h"}
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me see."
    parts = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [part["index"] for part in parts] == [0] * len(parts) and parts[0]["type"] == "function"
    assert "".join(part["function"]["arguments"] for part in parts) == '{"a": 1}'
    assert choices[-1]["finish_reason"] == "tool_calls"


def no_text(token: int) -> TokenText:
    raise AssertionError("no log probabilities are asked for")


def test_one_call_alone() -> None:
    """``parallel_tool_calls`` false: the calls after the first are not sent."""
    request: Any = None
    first = '<tool_call>\n{"name": "get_time", "arguments": {"a": 1}}\n</tool_call>'
    late = '<tool_call>{"arguments": {}, "name": "get_time"}</tool_call>'
    for answer in (first + "\n" + first, late + first):
        form = ChatFormat(
            "m",
            no_text,
            lambda: AnswerParser(answer_form(QWEN), {}, {"get_time": {}}),
            parallel=False,
        )
        outputs = [CompletionOutput(0, one, (), None, None, None, None) for one in answer]
        streamed = [
            asyncio.run(form.choice(0, request, output, "delta"))["delta"] for output in outputs
        ]
        parts = [part for delta in streamed for part in delta.get("tool_calls", ())]
        assert {part["index"] for part in parts} == {0} and len(
            [part for part in parts if "id" in part]
        ) == 1
        assert not any(delta.get("content") for delta in streamed)


def test_marker_tokens_of_an_answer_reach_the_client_as_fields() -> None:
    """The text of a Harmony answer comes without its markers, and their places beside it."""
    markers = {1: "<|channel|>", 2: "<|message|>", 3: "<|end|>", 4: "<|start|>", 5: "<|constrain|>"}
    parts: list[Any] = [
        1,
        "analysis",
        2,
        "hm",
        3,
        4,
        "assistant",
        1,
        "commentary to=functions.get_time ",
        5,
        "json",
    ]
    parts += [2, '{"a": 1}']
    text, marks = "", list[tuple[int, int]]()
    for part in parts:
        if isinstance(part, int):
            marks.append((len(text), part))
        else:
            text += part
    request: Any = None
    answer = ChatFormat(
        "m", no_text, lambda: AnswerParser(HarmonyAnswers(), markers, {"get_time": {}})
    )
    output = CompletionOutput(0, text, (), None, "stop", None, None, marks=tuple(marks))
    choice = asyncio.run(answer.choice(0, request, output))
    (call,) = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": None, "reasoning_content": "hm"}
    assert call["function"] == {"name": "get_time", "arguments": '{"a": 1}'}
    assert choice["finish_reason"] == "tool_calls"
