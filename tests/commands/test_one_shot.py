"""Without a terminal there is one answer, alone on stdout."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands.fake_llm import FakeLLM

Run = Callable[..., tuple[int, str, str]]


def test_the_message_is_an_argument_or_piped_in_or_both(command: Run, fake: list[FakeLLM]) -> None:
    assert command("chat", "hello") == (0, "You said: hello\n", "")
    assert command("chat", stdin=b"from a pipe\n") == (0, "You said: from a pipe\n", "")
    assert command("chat", "Summarize:", stdin="l’été\n".encode()) == (
        0,
        "You said: Summarize:\n\nl’été\n",
        "",
    )
    assert fake[2].prompts == [[{"role": "user", "content": "Summarize:\n\nl’été"}]]


def test_no_drafts_are_asked_for_where_nobody_watches(
    command: Run, fake: list[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    command("chat", "hello")
    monkeypatch.setattr("nanoserve.commands.chat_models.is_terminal", lambda stream: True)
    command("chat", "hello", "--json")
    command("chat", "hello")
    command("generate", "hello")
    assert [llm.asked_for_drafts for llm in fake] == [False, False, True, False]


def test_system_prompt(command: Run, fake: list[FakeLLM]) -> None:
    command("chat", "hello", "--system", "Be kind.")
    assert fake[0].prompts[0][0] == {"role": "system", "content": "Be kind."}


def test_generate_takes_the_text_as_it_is(command: Run, fake: list[FakeLLM]) -> None:
    assert command("generate", " a  b ") == (0, "You said:  a  b \n", "")
    assert command("generate", "-", stdin=b"  x\ny\n\n")[1] == "You said:   x\ny\n"
    assert fake[1].prompts == ["  x\ny\n"]


def test_json_envelope(command: Run) -> None:
    code, out, err = command("generate", "one two", "--json", "--model", "small")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "text": "You said: one two",
        "finish_reason": "stop",
        "model": "small",
        "usage": {
            "prompt_tokens": 2,
            "cached_tokens": 1,
            "completion_tokens": 4,
            "total_tokens": 6,
        },
        "timings": {
            "queue_s": 0.25,
            "ttft_s": 0.5,
            "tpot_s": 0.1,
            "total_s": 0.8,
            "prefill_tokens_per_s": 4.0,
            "decode_tokens_per_s": 10.0,
        },
    }


def test_reasoning_is_not_the_answer(command: Run) -> None:
    question = "<think>well now</think> so be it"
    assert command("chat", question) == (0, "so be it\n", "")
    result = json.loads(command("chat", question, "--json")[1])
    assert (result["text"], result["reasoning"]) == ("so be it", "well now")


def test_a_length_that_ends_it(command: Run) -> None:
    result = json.loads(command("chat", "one two three", "--json", "--max-tokens", "2")[1])
    assert (result["text"], result["finish_reason"]) == ("You said: ", "length")


def test_thinking_sets_the_switch_of_the_template(command: Run, fake: list[FakeLLM]) -> None:
    for given, told in (
        ((), {}),
        (("--thinking", "off"), {"enable_thinking": False}),
        (("--thinking", "on"), {"enable_thinking": True}),
    ):
        assert command("chat", "hello", *given)[0] == 0
        assert fake[-1].template_arguments == [told]
    code, _, err = command("chat", "hello", "--thinking", "perhaps")
    assert code == 2 and "on, off" in err


def test_one_answer_is_a_conversation_that_can_be_continued(
    command: Run, fake: list[FakeLLM], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    logs = tmp_path / "nanoserve" / "conversations"
    command("chat", "one")
    (name,) = (path.stem for path in logs.iterdir())
    command("chat", "two", "--json")
    command("chat", "three", "--no-history")
    assert len(list(logs.iterdir())) == 2
    assert command("chat", "--continue", name, stdin=b"and then?")[1] == "You said: and then?\n"
    asked = [[message["content"] for message in llm.prompts[0]] for llm in fake]
    assert asked[-1] == ["one", "You said: one", "and then?"]
    command("chat", "--continue", "and now?")  # a message, of the newest conversation
    assert [message["content"] for message in fake[-1].prompts[0]] == [
        *("one", "You said: one", "and then?", "You said: and then?", "and now?")
    ]
    code, _, err = command("chat", "--continue", "1999", stdin=b"x")
    assert (code, err) == (
        2,
        "nanoserve: no conversation is called 1999; in a chat, /conversations lists them\n",
    )
