"""Slash commands: what each says, and that none reaches the model."""

from pathlib import Path
from typing import Any

import pytest

from nanoserve.commands.chat import ChatCommands, CommandOutcome
from nanoserve.commands.chat_model import LocalModel
from tests.commands.fake_llm import FakeLLM
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
    for name in ["help", "reset", "system", "set", "show", "stats", "save", "load", "regen", "undo", "exit", "bye"]:
        assert f"/{name}" in commands.names


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("/hlep", "unknown command /hlep (did you mean /help?)"),
        ("/SET top_k=3", "unknown command /SET (did you mean /set?)"),
        ("/qiut", "unknown command /qiut (did you mean /quit?)"),
        ("/set temprature=1", "unknown setting 'temprature' (did you mean temperature?); there are temperature, top_k"),
        ("/set temp=1", "unknown setting 'temp' (did you mean temperature?)"),
        ("/set penalty=1", "unknown setting 'penalty'"),
        ("/usr/bin/env", "unknown command /usr/bin/env; /help lists them"),
    ],
)
def test_what_is_misspelt_gets_a_suggestion(commands: ChatCommands, line: str, meant: str) -> None:
    assert commands.run(line).text.startswith(meant)


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


NUMBER = "temperature must be a number from 0 to 100, not "


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "say /set NAME=VALUE; the names are temperature, top_k"),
        ("temperature", NUMBER),
        ("temperature=", NUMBER),
        ("temperature=warm", f"{NUMBER}'warm'"),
        ("temperature=NaN", f"{NUMBER}nan"),
        ("n=3", "unknown setting 'n'"),
        ("temperature=1e999", f"{NUMBER}inf"),
        ("top_k=1.5", "top_k must be a whole number from -1 to 2147483647, not 1.5"),
        ("seed=-1", "seed must be a whole number from 0 to"),
        ("max_tokens=0", "max_tokens must be a whole number from 1 to"),
        ("=3", "say /set NAME=VALUE"),
        ('stop=["a"', 'stop takes a text or a JSON list of texts, as ["a", "b"], not ["a"'),
        ("stop=[1]", "every stop string must have 1 to 1024 characters"),
    ],
)
def test_bad_settings_are_messages(session: ChatSession, commands: ChatCommands, line: str, says: str) -> None:
    assert commands.run(f"/set {line}").text.startswith(says)
    assert session.settings == {}


def test_a_seed_of_the_command_line_is_shown() -> None:
    llm: Any = FakeLLM()
    session = ChatSession(LocalModel(llm, seed=7), notify=print)
    commands = ChatCommands(session, edit=str)
    assert "seed = (another for each answer, drawn from --seed 7)\n" in commands.run("/show").text
    commands.run("/set seed=3")
    assert "seed = 3\n" in commands.run("/show").text


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
    assert "of 200 tokens, 1 turn\n" in shown
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
    loaded = commands.run(f"/load {path}")
    assert loaded.text == f"loaded 2 messages from {path}"
    assert [turn.content for turn in loaded.turns] == ["hello", "You said: hello"]
    commands.run("/reset")
    assert session.turns == []
    assert "cannot read" in commands.run("/load /nowhere").text


def test_figures_go_with_their_conversation(session: ChatSession, commands: ChatCommands, tmp_path: Path) -> None:
    for command in ("/clear", f"/load {tmp_path / 'chat.json'}"):
        answer(session, "hello")
        commands.run(f"/save {tmp_path / 'chat.json'}")
        commands.run(command)
        assert commands.run("/stats").text == "there is no answer yet"


def test_what_the_chat_must_do(session: ChatSession, commands: ChatCommands) -> None:
    assert commands.run("/regen") == CommandOutcome(regenerate=True)
    for name in ("exit", "quit", "bye"):
        assert commands.run(f"/{name}") == CommandOutcome(leave=True)
    answer(session, "hello")
    assert commands.run("/edit") == CommandOutcome(message="hello edited")
    commands.run("/think off")
    assert not commands.show_thinking
    assert "say /think" in commands.run("/think maybe").text
