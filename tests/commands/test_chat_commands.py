"""Slash commands: what each says, and that none reaches the model."""

from pathlib import Path

import pytest

from nanoserve.commands.chat_commands import ChatCommands, Outcome
from tests.commands.test_chat_session import ChatSession, answer, make_session


@pytest.fixture
def session() -> ChatSession:
    return make_session()[0]


@pytest.fixture
def commands(session: ChatSession) -> ChatCommands:
    return ChatCommands(session, edit=lambda text: text + " edited")


@pytest.mark.parametrize("line", ["/bogus", "/", "/SET x=1", "/bogus\nsecond line", "//help", "/usr/bin/env is here"])
def test_unknown_commands_are_messages(commands: ChatCommands, line: str) -> None:
    outcome = commands.run(line)
    assert outcome.text.startswith("unknown command /")
    assert "/help" in outcome.text
    assert outcome.message is None
    assert "\n" not in outcome.text


def test_help_names_every_command(commands: ChatCommands) -> None:
    text = commands.run("/help").text
    assert all(name in text for name in commands.names)
    for name in ["help", "reset", "system", "set", "show", "stats", "save", "load", "regen", "undo", "exit"]:
        assert f"/{name}" in commands.names


@pytest.mark.parametrize(
    ("line", "name", "value", "says"),
    [
        ("/set temperature=0.7", "temperature", 0.7, "temperature = 0.7"),
        ("/set temperature 1", "temperature", 1, "temperature = 1.0"),
        ("/set  top-k = 40", "top_k", 40, "top_k = 40"),
        ("/set stop=THE END", "stop", ["THE END"], 'stop = ["THE END"]'),
        ('/set stop=["a", "b"]', "stop", ["a", "b"], 'stop = ["a", "b"]'),
        ("/set seed=3", "seed", 3, "seed = 3"),
        ("/set max_tokens=9", "max_tokens", 9, "max_tokens = 9"),
        ("/set min_p=0.1", "min_p", 0.1, "min_p = 0.1"),
        ("/set presence_penalty=-0.5", "presence_penalty", -0.5, "presence_penalty = -0.5"),
    ],
)
def test_set(session: ChatSession, commands: ChatCommands, line: str, name: str, value: object, says: str) -> None:
    assert commands.run(line).text == says
    assert session.settings == {name: value}
    commands.run(f"/set {name}=none")
    assert session.settings == {}


@pytest.mark.parametrize(
    "line",
    [
        "",
        "temperature",
        "temperature=",
        "temperature=warm",
        "temperature=NaN",
        "n=3",
        "temperature=1e999",
        "top_k=1.5",
        "seed=-1",
        "max_tokens=0",
        "=3",
        'stop=["a"',
    ],
)
def test_bad_settings_are_messages(session: ChatSession, commands: ChatCommands, line: str) -> None:
    assert commands.run(f"/set {line}").text
    assert session.settings == {}


def test_system_show_and_stats(session: ChatSession, commands: ChatCommands) -> None:
    assert commands.run("/stats").text == "there is no answer yet"
    commands.run("/system Be kind.\nAlways.")
    commands.run("/set top_k=3")
    answer(session, "hello")
    shown = commands.run("/show").text
    assert "storyteller" in shown
    assert "Be kind.\nAlways." in shown
    assert "top_k = 3\n" in shown
    assert "seed = none  (the model's default)\n" in shown
    assert "temperature = 0.8  (the model's default)" in shown
    assert "of 200 tokens, 1 turns" in shown
    assert commands.run("/stats").text == (
        "7 prompt (1 cached) · 3 new · TTFT 0.50 s · prefill 24 t/s · decode 10.0 t/s · context 10/200"
    )
    commands.run("/system")
    assert session.system is None


def test_save_load_undo_reset(session: ChatSession, commands: ChatCommands, tmp_path: Path) -> None:
    assert "name a file" in commands.run("/save").text
    answer(session, "hello")
    path = tmp_path / "my chat.json"
    assert commands.run(f"/save {path}").text == f"saved 2 messages to {path}"
    assert commands.run("/undo").text == "took back: hello"
    assert commands.run("/undo").text == "there is no answer yet"
    assert commands.run(f"/load {path}").text == f"loaded 2 messages from {path}"
    commands.run("/reset")
    assert session.turns == []
    assert "cannot read" in commands.run("/load /nowhere").text


def test_what_the_chat_must_do(session: ChatSession, commands: ChatCommands) -> None:
    assert commands.run("/regen") == Outcome(regenerate=True)
    assert commands.run("/exit") == Outcome(leave=True)
    answer(session, "hello")
    assert commands.run("/edit") == Outcome(message="hello edited")
    commands.run("/think off")
    assert not commands.show_thinking
    assert "say /think" in commands.run("/think maybe").text
