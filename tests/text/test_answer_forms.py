"""Answers in the forms of families, as transformers renders them and as tokens that arrive in
pieces of any size."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.engine.outputs import RequestTracker
from nanoserve.request import FinishReason, Request, SamplingParams, SequenceUpdate, Status
from nanoserve.request import Sequence as Sampled
from nanoserve.text.answers.reader import Piece
from nanoserve.text.answers.settings import thinking_switch
from nanoserve.text.answers.values import types_of, value_as_json
from nanoserve.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.building import PATIENT, make_byte_level
from tests.text.families import FAMILIES, GEMMA_4, GLM_45, GRANITE_33, HARMONY, MINISTRAL_3, Family

SPECIAL = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
ENDS = ("<|im_end|>", "<turn|>", "<|end_of_text|>")
TEXT = {"type": "string"}
SCHEMA = {
    "type": "object",
    "properties": {
        **dict.fromkeys(("city", "code", "empty", "digits", "truth"), TEXT),
        "days": {"type": "integer"},
        "warm": {"type": "boolean"},
        "ratio": {"type": ["number", "null"]},
        "list": {"type": "array"},
        "deep": {"$ref": "#/$defs/deep"},
        "either": {"anyOf": [TEXT, {"type": "integer"}]},
    },
    "$defs": {"deep": {"type": "object"}},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": schema}}
    for name, schema in (
        ("get_weather", SCHEMA),
        ("get_time", {"type": "object", "properties": {}}),
    )
]
PARIS = {
    "city": 'Paris "quoted" } \\ {brace, [1] <b> </parameter x <arg_key 🦊 日本語 naïve',
    "code": "def f():\n    return {'a': \"b\"}\n",
    "empty": "",
    "digits": "007",
    "truth": "true",
    "days": -3,
    "warm": True,
    "ratio": 0.5,
    "list": [1, "two", {"three": [3.5, False]}],
    "deep": {"a": {"b": {"c": "d, e: {f}"}}},
    "either": "5 o'clock",
}
CALLS = {
    "no call": [],
    "one call": [("get_weather", PARIS)],
    "without arguments": [("get_time", {})],
    "two calls": [("get_weather", {"city": "Rome", "days": 2}), ("get_time", {})],
}
Parsed = tuple[str, str, list[tuple[str, Any]]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Tokenizer]]:
    """The tokenizer of a family, with its template and its tokens."""

    @cache
    def load(name: str) -> Tokenizer:
        return load_family(tmp_path_factory.mktemp(name), FAMILIES[name])

    made = {name: load(name) for name in FAMILIES}
    yield load
    for tokenizer in made.values():
        tokenizer.close()


def load_family(directory: Path, family: Family) -> Tokenizer:
    tokens = [{"content": text, "special": True} for text in family.control]
    tokens += [{"content": text, "special": False} for text in family.plain]
    declared = {str(900 + place): token for place, token in enumerate(tokens)}
    return load_tokenizer(
        make_byte_level(directory, chat_template=family.template, added_tokens_decoder=declared)
    )


def assistant(
    calls: Sequence[tuple[str, Any]], content: str = "Well.", reasoning: str = ""
) -> dict[str, Any]:
    made = [
        {
            "id": f"call{place:05}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for place, (name, arguments) in enumerate(calls)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": content}
    message |= {"tool_calls": made} if made else {}
    return message | ({"reasoning_content": reasoning} if reasoning else {})


@dataclass(frozen=True)
class Answer:
    """The text that a model is trained to write after a prompt."""

    prompt: list[int]
    tokens: list[int]


def rendered(tokenizer: Tokenizer, message: dict[str, Any]) -> Answer:
    """An assistant's message as transformers renders it with the family's template, without the end
    of its turn."""
    from transformers.utils.chat_template_utils import render_jinja_template

    asked = [{"role": "user", "content": "Hi"}]
    written = dict(message)
    reasoning = written.get("reasoning_content")
    if reasoning and "message.thinking" in tokenizer._template.source:
        written["thinking"] = reasoning
    elif reasoning and "block['thinking']" in tokenizer._template.source:
        written["content"] = [
            {"type": "thinking", "thinking": reasoning},
            {"type": "text", "text": message["content"]},
        ]
    template: dict[str, Any] = {
        "tools": TOOLS,
        "chat_template": tokenizer._template.source,
        **SPECIAL,
    }
    template["enable_thinking"] = True
    (before,), _ = render_jinja_template([asked], add_generation_prompt=True, **template)
    (whole,), _ = render_jinja_template(
        [[*asked, written]], add_generation_prompt=False, **template
    )
    assert whole.startswith(before)
    answer = whole[len(before) :].rstrip("\n")
    for end in ENDS:
        answer = answer.removesuffix(end)
    return Answer(spelled(tokenizer, before), spelled(tokenizer, answer))


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text in which the spellings of markup are its tokens."""
    return tokenizer._backend.encode(tokenizer._markup.split(text), add_special_tokens=False)


def pieces_of(
    tokenizer: Tokenizer,
    answer: Answer,
    cuts: Sequence[int] = (),
    reason: FinishReason = FinishReason.STOP,
) -> list[Piece]:
    """The pieces of an answer whose tokens arrive in updates that end at these places."""
    request = Request("r", tuple(answer.prompt), SamplingParams(), seed=0)
    tracker = RequestTracker(request, tokenizer)
    sample = Sampled(0, request, 0, list(answer.prompt), status=Status.DECODE)
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    parser, pieces, start = tokenizer.answer_parser(answer.prompt, schemas), list[Piece](), 0
    for end in [*sorted(cuts), len(answer.tokens)]:
        new = tuple(answer.tokens[start:end])
        sample.tokens += new
        tracker.take(SequenceUpdate("r", 0, new, sample), 0.0)
        start = end
        if tracker.has_news:
            (delta,) = tracker.delta().outputs
            pieces += parser.push(delta.text, delta.marks)
    sample.move_to(Status.FINISHED)
    sample.finish_reason = reason
    tracker.take(SequenceUpdate("r", 0, (), sample), 0.0)
    (delta,) = tracker.delta().outputs
    (whole,) = tracker.whole().outputs
    pieces += parser.push(delta.text, delta.marks, ended=True)
    again = tokenizer.answer_parser(answer.prompt, schemas).push(
        whole.text, whole.marks, ended=True
    )
    assert joined(again) == joined(pieces), "the whole output holds the same as its deltas"
    return pieces


def joined(pieces: Sequence[Piece]) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, text, and the calls with the text of their arguments."""
    texts, calls = {"thinking": "", "answer": ""}, list[tuple[str, str]]()
    for part, text in pieces:
        assert text
        if part == "call":
            calls.append((text, ""))
        elif part == "arguments":
            calls[-1] = (calls[-1][0], calls[-1][1] + text)
        else:
            texts[part] += text
    return texts["thinking"], texts["answer"], calls


def parsed(pieces: Sequence[Piece]) -> Parsed:
    thinking, text, calls = joined(pieces)
    return thinking, text, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_template_renders_is_read_back(
    loaded: Callable[[str], Tokenizer], name: str, calls: list[tuple[str, Any]]
) -> None:
    tokenizer, reasoning = (
        loaded(name),
        "Is it <b>warm</b>?\nPerhaps." if FAMILIES[name].reasons else "",
    )
    # its template takes one of text and reasoning
    content = "" if name == "harmony" and calls else "Well, then."
    answer = rendered(tokenizer, assistant(calls, content, reasoning))
    assert parsed(pieces_of(tokenizer, answer)) == (reasoning, content, calls)
    assert parsed(pieces_of(tokenizer, answer, range(len(answer.tokens)))) == (
        reasoning,
        content,
        calls,
    )


@PATIENT
@given(data=st.data())
def test_no_cutting_of_the_tokens_changes_what_is_read(
    loaded: Callable[[str], Tokenizer], data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(list(FAMILIES)))
    tokenizer = loaded(name)
    values = st.one_of(
        st.text(max_size=8), st.integers(), st.booleans(), st.lists(st.text(max_size=3), max_size=2)
    )
    keys = st.sampled_from(["a", "b_c", "d"])
    calls = data.draw(
        st.lists(
            st.tuples(st.sampled_from(["get_time", "f"]), st.dictionaries(keys, values)), max_size=2
        )
    )
    text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
    content, reasoning = "x" + data.draw(text), data.draw(text) + "y"
    if name == "harmony" and calls:  # its template takes one of text and reasoning
        content = ""
    answer = rendered(tokenizer, assistant(calls, content, reasoning))
    junk = data.draw(
        st.lists(st.sampled_from(sorted(tokenizer._backend.markup_ids.values())), max_size=4)
    )
    for token in junk:
        answer.tokens.insert(data.draw(st.integers(0, len(answer.tokens))), token)
    cuts = data.draw(st.lists(st.integers(0, len(answer.tokens)), max_size=12))
    assert joined(pieces_of(tokenizer, answer, cuts)) == joined(pieces_of(tokenizer, answer))


def test_a_call_may_be_closed_twice(loaded: Callable[[str], Tokenizer]) -> None:
    tokenizer, calls = loaded("granite-4"), [("get_time", {}), ("get_weather", PARIS)]
    answer = rendered(tokenizer, assistant(calls, "Well, then."))
    answer.tokens.extend(spelled(tokenizer, "\n</tool_call>\n</tool_call>"))
    for cuts in ((), range(len(answer.tokens))):
        assert parsed(pieces_of(tokenizer, answer, cuts)) == ("", "Well, then.", calls)


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_cut_off_anywhere_are_taken_as_history(
    loaded: Callable[[str], Tokenizer], name: str
) -> None:
    """Pieces of a cut-off answer begin those of the whole one, and the next turn takes them
    back."""
    tokenizer, reasoning = loaded(name), "Is it warm?" if FAMILIES[name].reasons else ""
    content = "" if name == "harmony" else "Well."
    arguments = {"city": 'a "b" } {é', "days": 3, "list": [1]}
    answer = rendered(
        tokenizer, assistant([("get_weather", arguments), ("get_time", {})], content, reasoning)
    )
    whole = joined(pieces_of(tokenizer, answer))
    histories = list[list[dict[str, Any]]]()
    for length in range(1, len(answer.tokens) + 1):
        cut = Answer(answer.prompt, answer.tokens[:length])
        thinking, text, calls = joined(
            pieces_of(tokenizer, cut, range(length), FinishReason.LENGTH)
        )
        assert whole[0].startswith(thinking.rstrip())
        for (called, given_arguments), (name_, all_arguments) in zip(calls, whole[2], strict=False):
            assert called == name_ and all_arguments.startswith(given_arguments)
        sent = assistant(calls, text, thinking)
        if not text:
            sent["content"] = None if thinking or calls else ""
        results = [
            {"role": "tool", "content": "ok", "tool_call_id": f"call{place:05}"}
            for place in range(len(calls))
        ]
        if sent not in [history[1] for history in histories] and (text or thinking or calls):
            histories.append(
                [
                    {"role": "user", "content": "Hi"},
                    sent,
                    *results,
                    {"role": "user", "content": "Go on"},
                ]
            )
    for history in histories[:: max(1, len(histories) // 12)] + histories[-1:]:
        assert tokenizer.encode_chat(history, template_arguments={"tools": TOOLS})


@pytest.mark.parametrize("name", ["harmony", "ministral-3", "gemma-4"])
def test_a_marker_in_ordinary_tokens_is_text(loaded: Callable[[str], Tokenizer], name: str) -> None:
    tokenizer = loaded(name)
    marked = rendered(tokenizer, assistant([("get_time", {})], "", "hm"))
    text = tokenizer.decode(marked.tokens, skip_special_tokens=False)
    ordinary = Answer(marked.prompt, tokenizer._backend.encode([text], add_special_tokens=False))
    assert not set(ordinary.tokens) & set(tokenizer.markers)
    assert parsed(pieces_of(tokenizer, ordinary)) == ("", text, [])


def test_markers_are_tokens_only_where_the_tokenizer_has_them_as_control_tokens(
    loaded: Callable[[str], Tokenizer],
) -> None:
    assert not loaded("qwen3-coder").markers and not loaded("glm-4.5").markers
    assert set(loaded("ministral-3").markers.values()) == {
        "[THINK]",
        "[/THINK]",
        "[TOOL_CALLS]",
        "[ARGS]",
    }


def test_forms_that_hold_no_control_tokens_cost_nothing(loaded: Callable[[str], Tokenizer]) -> None:
    for name in ("qwen3-coder", "glm-4.5"):
        tokenizer = loaded(name)
        answer = rendered(tokenizer, assistant([("get_time", {})]))
        request = Request("r", tuple(answer.prompt), SamplingParams(), seed=0)
        tracker = RequestTracker(request, tokenizer)
        sample = Sampled(0, request, 0, [*answer.prompt, *answer.tokens], status=Status.DECODE)
        tracker.take(SequenceUpdate("r", 0, tuple(answer.tokens), sample), 0.0)
        assert tracker.whole().outputs[0].marks == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # the published examples of Harmony: a preamble, and a call whose recipient stands in the
        # channel
        (
            "<|channel|>analysis<|message|>Need the "
            "weather.<|end|><|start|>assistant<|channel|>commentary<|message|>"
            "I look it up.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
            "<|constrain|>json"
            '<|message|>{"city": "Tokyo"}<|call|>',
            ("Need the weather.", "I look it up.", [("get_weather", {"city": "Tokyo"})]),
        ),
        ("<|channel|>final<|message|>Yes.<|return|>", ("", "Yes.", [])),
        ("<|channel|>final<|message|>Yes", ("", "Yes", [])),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b",
            ("a\n\nb", "", []),
        ),
        ("<|channel|>commentary to=functions.nobody json<|message|>{}<|call|>", ("", "{}", [])),
        ("<|channel|>analysis", ("", "", [])),
        ("No header at all", ("", "No header at all", [])),
    ],
)
def test_harmony_as_it_is_published(
    loaded: Callable[[str], Tokenizer], text: str, expected: Parsed
) -> None:
    tokenizer = loaded("harmony")
    answer = Answer(spelled(tokenizer, "<|start|>assistant"), spelled(tokenizer, text))
    assert parsed(pieces_of(tokenizer, answer)) == expected


GRANITE_32 = GRANITE_33.replace(
    "Think between <think></think>, answer between <response></response>. ",
    "Think after Here is my thought process: and answer after Here is my response: ",
)


@pytest.mark.parametrize(
    ("template", "text", "expected"),
    [
        (GRANITE_33, "<think>hm</think>\n\n<response>Yes.</response>", ("hm", "Yes.", [])),
        (
            GRANITE_33,
            "Yes, <response> is a tag: </response>",
            ("", "Yes, <response> is a tag: </response>", []),
        ),
        (
            GRANITE_32,
            "Here is my thought process:\n\nhm\n\nHere is my response:\n\nHere is my answer.",
            ("hm", "Here is my answer.", []),
        ),
        (GRANITE_32, "Here is what I know.", ("", "Here is what I know.", [])),
        (
            GRANITE_33,
            '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Rome"}}, {"name": "get_time", '
            '"arguments": {}}]',
            ("", "", [("get_weather", {"city": "Rome"}), ("get_time", {})]),
        ),
    ],
)
def test_granite_as_it_is_published(
    tmp_path: Path, template: str, text: str, expected: Parsed
) -> None:
    tokenizer = load_family(
        tmp_path, Family(template, ("<|tool_call|>", "<|start_of_role|>", "<|end_of_role|>"))
    )
    answer = Answer(spelled(tokenizer, "<|end_of_role|>"), spelled(tokenizer, text))
    assert parsed(pieces_of(tokenizer, answer)) == expected
    assert parsed(pieces_of(tokenizer, answer, range(len(answer.tokens)))) == expected
    tokenizer.close()


FUNCTIONARY = (
    "{{ tools }}<|start_header_id|><function=example_function_name>{}</function>{{ "
    "messages[0].content }}"
)
COHERE = (
    "{{ tools }}<|START_THINKING|><|END_THINKING|><|START_ACTION|><|END_ACTION|>{{ "
    "messages[0].content }}"
)


@pytest.mark.parametrize(
    ("template", "text", "expected"),
    [
        (
            FUNCTIONARY,
            '<function=get_weather>{"city": "a } b"}</function><function=get_time>{}</function>',
            ("", "", [("get_weather", {"city": "a } b"}), ("get_time", {})]),
        ),
        (
            COHERE,
            "<|START_THINKING|>hm<|END_THINKING|><|START_ACTION|>[\n"
            '{"tool_call_id": "0", "tool_name": "get_weather", '
            '"parameters": {"city": "Rome"}},\n    {"tool_call_id": "1", "tool_name": "get_time", "parameters": {}}\n]'
            "<|END_ACTION|>",
            ("hm", "", [("get_weather", {"city": "Rome"}), ("get_time", {})]),
        ),
    ],
)
def test_other_published_forms(tmp_path: Path, template: str, text: str, expected: Parsed) -> None:
    control = ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>")
    tokenizer = load_family(tmp_path, Family(template, control))
    answer = Answer(spelled(tokenizer, "Hi"), spelled(tokenizer, text))
    assert parsed(pieces_of(tokenizer, answer)) == expected
    assert parsed(pieces_of(tokenizer, answer, range(len(answer.tokens)))) == expected
    tokenizer.close()


@pytest.mark.parametrize(
    ("template", "on", "off"),
    [
        (GLM_45, {"enable_thinking": True}, {"enable_thinking": False}),
        (GEMMA_4, {"enable_thinking": True}, {"enable_thinking": False}),
        (GRANITE_33, {"thinking": True}, {"thinking": False}),
        ("{% if not thinking is defined %}{% set thinking = 0 %}{% endif %}", {"thinking": True}, {"thinking": False}),
        (HARMONY, {}, {"reasoning_effort": "low"}),
        ("{{ reasoning_effort if reasoning_effort in ['none', 'high'] }}", {}, {"reasoning_effort": "none"}),
    ],
)  # fmt: skip
def test_the_switch_of_a_template(template: str, on: dict[str, Any], off: dict[str, Any]) -> None:
    switch = thinking_switch(template)
    assert switch is not None and (switch.on, switch.off) == (on, off)


@pytest.mark.parametrize(
    "template", [MINISTRAL_3, "{{ message.thinking }} enable_thinking {{ 'thinking' }}", ""]
)
def test_templates_without_a_switch(template: str) -> None:
    assert thinking_switch(template) is None


@pytest.mark.parametrize("name", ["glm-4.5", "glm-4.7", "gemma-4"])
def test_switched_off_the_answer_begins_outside_of_the_reasoning(
    loaded: Callable[[str], Tokenizer], name: str
) -> None:
    tokenizer = loaded(name)
    switch = tokenizer.thinking_switch
    assert switch is not None
    prompt = tokenizer.encode_chat(
        [{"role": "user", "content": "Hi"}], template_arguments=switch.off
    )
    assert tokenizer.answer_parser(prompt).push("Yes.", ended=True) == [("answer", "Yes.")]


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("harmony", "<|start|>assistant<|channel|>final<|message|>"),
        ("glm-4.7", "<|assistant|><think>\n</think>\n\n"),
        ("qwen3-coder", "<|im_start|>assistant\n"),
    ],
)
def test_where_an_answer_begins_that_has_to_be_json(
    loaded: Callable[[str], Tokenizer], name: str, end: str
) -> None:
    tokenizer = loaded(name)
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}], answer="")
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith(end)
    assert ids == spelled(tokenizer, tokenizer.decode(ids, skip_special_tokens=False)), (
        "markers are tokens"
    )


def test_text_and_reasoning_beside_a_call_are_taken_by_a_template_that_refuses_both(
    loaded: Callable[[str], Tokenizer],
) -> None:
    """gpt-oss's: what the user has seen stays."""
    tokenizer = loaded("harmony")
    sent = assistant([("get_time", {})], "I look it up.", "Need the time.")
    asked = {"role": "user", "content": "Hi"}
    text = tokenizer.decode(tokenizer.encode_chat([asked, sent, asked]), skip_special_tokens=False)
    assert "I look it up." in text and "Need the time." not in text


def test_reasoning_of_earlier_answers_stands_where_the_template_writes_it(
    loaded: Callable[[str], Tokenizer],
) -> None:
    asked = {"role": "user", "content": "Hi"}
    for name, written in (
        ("ministral-3", "[THINK]hm[/THINK]Yes."),
        ("harmony", "<|channel|>analysis<|message|>hm<|end|>"),
        ("glm-4.7", "<think>hm</think>Yes."),
    ):
        tokenizer = loaded(name)
        ids = tokenizer.encode_chat([asked, assistant([], "Yes.", "hm"), asked])
        assert written in tokenizer.decode(ids, skip_special_tokens=False)


def test_values_are_typed_by_the_schema_of_the_tool() -> None:
    cyclic = {
        "properties": {"a": {"$ref": "#/$defs/a"}},
        "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 9}},
    }
    schemas: list[tuple[Any, str, str]] = [
        (TEXT, "5", '"5"'),
        (TEXT, "null", '"null"'),
        ({"type": "integer"}, " 5\n", "5"),
        ({"type": "number"}, "5", "5"),
        ({"type": "boolean"}, "True", "true"),
        ({"type": ["string", "null"]}, "None", "null"),
        ({"type": ["string", "null"]}, "5", '"5"'),
        ({"type": ["string", "null"]}, '"quoted"', '"\\"quoted\\""'),
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"const": 1}, "1", "1"),
        ({"allOf": [{"anyOf": [TEXT, {"type": "integer"}]}, {"type": "string"}]}, "1", '"1"'),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "number"}, "1" * 5000, f'"{"1" * 5000}"'),
        ({"type": "object"}, '{"a": [1, "é"]}', '{"a": [1, "é"]}'),
        ({"type": "object"}, '{"a": ', '"{\\"a\\": "'),
        ({"type": "array"}, "[" * 100_000, f'"{"[" * 100_000}"'),
        ({}, "5", "5"),
        ({}, "five", '"five"'),
        ({"allOf": 5, "anyOf": {}, "type": 7, "enum": 3}, "5", "5"),
    ]
    for schema, text, expected in schemas:
        assert value_as_json(text, types_of({"properties": {"a": schema}}, "a")) == expected, (
            schema,
            text[:20],
        )
    assert types_of(cyclic, "a") == types_of(None, "a") == types_of({"properties": {}}, "b")
