"""Tool calls as each family publishes them, whole and cut at every place."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.errors import UsageError
from nanoserve.text.answers.forms import REQUIRED_CALL, AnswerForm, AnswerParser, answer_form
from nanoserve.text.answers.reader import Piece
from tests.text.templates import CHATML, GLM, LLAMA_3, MISTRAL, QWEN

NAMES = ("get_weather", "get_time", "add")
Read = tuple[str, list[tuple[str, Any]]]
PARIS = {"city": "Paris", "unit": 'a "quoted" } \\ {brace', "days": [1, {"deep": []}]}
ROME: dict[str, Any] = {}


def spelled(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)


HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {spelled(PARIS)}}}\n</tool_call>'
CASES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    (QWEN, "It is warm.\n", "It is warm.\n", []),
    (QWEN, HERMES, "", [("get_weather", PARIS)]),
    (QWEN, f"Let me look. \n\n{HERMES}\n", "Let me look.", [("get_weather", PARIS)]),
    (
        QWEN,
        HERMES + '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call> Done <b>.',
        "Done <b>.",
        [("get_weather", PARIS), ("get_time", ROME)],
    ),
    (
        QWEN,
        HERMES.replace('"get_weather"', '"nobody"'),
        HERMES.replace('"get_weather"', '"nobody"'),
        [],
    ),
    (
        QWEN,
        f'<tool_call>{{"arguments": {spelled(PARIS)}, "name": "get_weather"}}</tool_call>',
        "",
        [("get_weather", PARIS)],
    ),
    (QWEN, "a < b <tool_ <tool_call> {1} is text", "a < b <tool_ <tool_call> {1} is text", []),
    (QWEN, '<tool_call>\n{"name": "get_ti', '<tool_call>\n{"name": "get_ti', []),
    (QWEN, '{"name": "get_time", "arguments": {}}', '{"name": "get_time", "arguments": {}}', []),
    (
        LLAMA_3,
        f'{{"name": "get_weather", "parameters": {spelled(PARIS)}}}',
        "",
        [("get_weather", PARIS)],
    ),
    (
        LLAMA_3,
        f'<|python_tag|>{{"name": "get_weather", "parameters": {spelled(PARIS)}}}',
        "",
        [("get_weather", PARIS)],
    ),
    (
        LLAMA_3,
        '{"type": "function", "name": "add", "parameters": {"a": "1"}}; {"name": "get_time", "parameters": {}}',
        "",
        [("add", {"a": "1"}), ("get_time", {})],
    ),
    (
        LLAMA_3,
        '{"name": "Ada", "parameters": {"a": 1}} is JSON',
        '{"name": "Ada", "parameters": {"a": 1}} is JSON',
        [],
    ),
    (LLAMA_3, '{"answer": [{"name": "add"}]}', '{"answer": [{"name": "add"}]}', []),
    (LLAMA_3, " Hello {there}", " Hello {there}", []),
    (
        MISTRAL,
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {spelled(PARIS)}}}]',
        "",
        [("get_weather", PARIS)],
    ),
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "Vvv}EtCK"}, {"name": "get_time", "arguments": {}}]',
        "",
        [("add", {"a": 1}), ("get_time", {})],
    ),
    (MISTRAL, "[TOOL] [1, 2]", "[TOOL] [1, 2]", []),
    (GLM, f"get_weather\n{spelled(PARIS)}", "", [("get_weather", PARIS)]),
    (GLM, "\nget_time\n{}", "", [("get_time", {})]),
    (GLM, "get_weather is a tool", "get_weather is a tool", []),
    (GLM, "add\nnothing", "add\nnothing", []),
    (GLM, "Hello,\nthere", "Hello,\nthere", []),
]


def pieces_of(form: AnswerForm, parts: list[str]) -> list[Piece]:
    parser = AnswerParser(form, {}, {name: {} for name in NAMES})
    pieces = list[Piece]()
    for number, part in enumerate(parts, 1):
        pieces += parser.push(part, ended=number == len(parts))
    return pieces


def raw(form: AnswerForm, parts: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The text of an answer that came in these parts, and its calls with the text of their
    arguments."""
    shown, calls = "", list[tuple[str, str]]()
    for kind, text in pieces_of(form, parts):
        if kind == "call":
            calls.append((text, ""))
        elif kind == "arguments":
            calls[-1] = (calls[-1][0], calls[-1][1] + text)
        else:
            assert kind == "answer"
            shown += text
    return shown, calls


def read(form: AnswerForm, parts: list[str]) -> Read:
    shown, calls = raw(form, parts)
    return shown, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize(("template", "answer", "text", "calls"), CASES)
def test_each_family_cut_at_every_place(
    template: str, answer: str, text: str, calls: list[tuple[str, Any]]
) -> None:
    form = answer_form(template)
    assert read(form, [answer]) == (text, calls)
    assert read(form, [*answer]) == (text, calls), "one character at a time"
    for cut in range(len(answer)):
        assert read(form, [answer[:cut], answer[cut:]]) == (text, calls), cut


PARTS = (
    *(
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        '{"name": "add", "arguments": ',
        '{"a": "}"}',
    ),
    *(
        "}",
        "{",
        "add\n",
        '"name": "add"',
        '"parameters": {}',
        ", ",
        "[",
        "]",
        "\n",
        " ",
        '"',
        "\\",
        "x",
        "<",
        "é",
    ),
)


@given(
    template=st.sampled_from([QWEN, LLAMA_3, MISTRAL, GLM]),
    parts=st.lists(
        st.sampled_from(PARTS),
        max_size=12,
    ),
    size=st.integers(1, 5),
)
def test_pieces_of_any_size_give_the_same(template: str, parts: list[str], size: int) -> None:
    answer, form = "".join(parts), answer_form(template)
    assert raw(form, [answer]) == raw(
        form, [answer[at : at + size] for at in range(0, len(answer), size)] or [""]
    )


@pytest.mark.parametrize("template", [QWEN, LLAMA_3, MISTRAL, GLM])
def test_a_demanded_call_is_json_alone(template: str) -> None:
    answer = f'{{"name": "get_weather", "{answer_form(template).call_key}": {spelled(PARIS)}}}'
    assert read(REQUIRED_CALL, [*answer]) == ("", [("get_weather", PARIS)])


def test_arguments_arrive_as_they_are_written() -> None:
    parser = AnswerParser(answer_form(QWEN), {}, {name: {} for name in NAMES})
    assert parser.push('Well. <tool_call>{"name": "add"') == [("answer", "Well.")]
    assert parser.push(', "arguments": {"a": ') == [("call", "add"), ("arguments", '{"a": ')]
    assert parser.push("1, ") == [("arguments", "1, ")]
    assert parser.push('"b": 2}}</tool') == [("arguments", '"b": 2}')]
    assert parser.push("_call>", ended=True) == []


@pytest.mark.parametrize("template", [CHATML, "", "{{ tools }}<|odd_call|>"])
def test_templates_without_a_form_that_is_read(template: str) -> None:
    with pytest.raises(UsageError, match="takes no tools") as caught:
        answer_form(template).check_calls()
    assert "\n" not in str(caught.value)
