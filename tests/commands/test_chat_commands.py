"""Slash commands: what each says, and that none reaches the model."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from nanoserve.commands import chat
from nanoserve.commands.chat import ChatOptions, Conversation
from nanoserve.commands.conversations import Message, SavedTurns
from tests.commands.test_chat_session import ChatSession, Models, answer, fake, first, make_session

Said = Callable[[str], str]


@pytest.fixture
def session() -> ChatSession:
    return make_session()[0]


def saying(
    session: ChatSession, capsys: pytest.CaptureFixture[str], models: Models | None = None
) -> Said:
    """Runs a command; returns what it says beside answers."""
    conversation = Conversation(session, ChatOptions(plain=True), models or Models())

    def run(line: str) -> str:
        conversation.obey(line)
        return capsys.readouterr().err.removesuffix("\n")

    return run


@pytest.fixture
def said(session: ChatSession, capsys: pytest.CaptureFixture[str]) -> Said:
    return saying(session, capsys)


@pytest.mark.parametrize(
    "line", ["/bogus", "/", "/SET x=1", "/bogus\nsecond line", "//help", "/usr/bin/env is here"]
)
def test_unknown_commands_are_messages(session: ChatSession, said: Said, line: str) -> None:
    text = said(line)
    assert text.startswith("unknown command /")
    assert "/help" in text
    assert "\n" not in text
    assert fake(session).prompts == []


def test_help_names_every_command(session: ChatSession, said: Said) -> None:
    names, text = Conversation(session, ChatOptions(), Models()).names, said("/help")
    assert all(name in text for name in names)
    for name in [
        "help",
        "reset",
        "system",
        "set",
        "show",
        "stats",
        "save",
        "load",
        "regen",
        "undo",
        "exit",
        "bye",
    ]:
        assert f"/{name}" in names


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("/hlep", "unknown command /hlep (did you mean /help?)"),
        ("/SET top_k=3", "unknown command /SET (did you mean /set?)"),
        ("/qiut", "unknown command /qiut (did you mean /quit?)"),
        (
            "/set temprature=1",
            "unknown setting 'temprature' (did you mean temperature?); there are temperature, "
            "top_k",
        ),
        ("/set temp=1", "unknown setting 'temp' (did you mean temperature?)"),
        ("/set penalty=1", "unknown setting 'penalty'"),
        ("/usr/bin/env", "unknown command /usr/bin/env; /help lists them"),
    ],
)
def test_what_is_misspelt_gets_a_suggestion(said: Said, line: str, meant: str) -> None:
    assert said(line).startswith(meant)


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
def test_set(
    session: ChatSession, said: Said, line: str, name: str, value: object, says: str
) -> None:
    assert said(line) == says
    assert session.settings == {name: value}
    said(f"/set {name}=none")
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
        ("seed=-2", "seed must be a whole number from -1 to"),
        ("max_tokens=0", "max_tokens must be a whole number from 1 to"),
        ("=3", "say /set NAME=VALUE"),
        ('stop=["a"', 'stop takes a text or a JSON list of texts, as ["a", "b"], not ["a"'),
        ("stop=[1]", "every stop string must have 1 to 1024 characters"),
    ],
)
def test_bad_settings_are_messages(session: ChatSession, said: Said, line: str, says: str) -> None:
    assert said(f"/set {line}").startswith(says)
    assert session.settings == {}


def test_a_seed_of_the_command_line_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    said = saying(make_session(seed=7)[0], capsys)
    assert "seed = (another for each answer, drawn from --seed 7)\n" in said("/show")
    said("/set seed=3")
    assert "seed = 3\n" in said("/show")


def test_system_show_and_stats(session: ChatSession, said: Said) -> None:
    assert said("/stats") == "there is no answer yet"
    said("/system Be kind.\nAlways.")
    said("/set top_k=3")
    answer(session, "hello")
    shown = said("/show")
    assert "storyteller" in shown
    assert "Be kind.\nAlways." in shown
    assert "top_k = 3\n" in shown
    assert "seed = none  (the model's default)\n" in shown
    assert "temperature = 0.8  (the model's default)" in shown
    assert "of 200 tokens, 1 turn\n" in shown
    assert said("/stats").splitlines() == [
        "prompt       7 tokens, 1 of them cached, 24 tokens/s",
        "answer       3 tokens, 10.0 tokens/s",
        "first token  0.50 s in the engine",
        "context      10 of 200 tokens",
    ]
    said("/system")
    assert session.system is None


def test_save_load_undo_reset(session: ChatSession, said: Said, tmp_path: Path) -> None:
    assert "name a file" in said("/save")
    answer(session, "hello")
    path = tmp_path / "my chat.json"
    assert said(f"/save {path}") == f"saved 2 messages to {path}"
    assert said("/undo") == "took back: hello"
    assert said("/undo") == "there is no answer yet"
    assert said(f"/load {path}") == f"loaded 2 messages from {path}\n>>> hello"
    assert [turn.content for turn in session.turns] == ["hello", "You said: hello"]
    said("/reset")
    assert session.turns == []
    assert "cannot read" in said("/load /nowhere")


def test_a_loaded_conversation_steers_no_terminal(
    session: ChatSession, said: Said, tmp_path: Path
) -> None:
    path = tmp_path / "chat.json"
    for question, shown in (("\x1b]0;x\x07hi\nthere", "]0;xhi there"), ("", "")):
        turns = [Message("user", question), Message("assistant", "")]
        path.write_bytes(msgspec.json.encode(SavedTurns(turns, system="\x1b[2J")))
        said(f"/load {path}")
        assert "system   [2J\n" in said("/show")
        assert said("/undo") == f"took back: {shown}"


def test_figures_go_with_their_conversation(
    session: ChatSession, said: Said, tmp_path: Path
) -> None:
    for command in ("/clear", f"/load {tmp_path / 'chat.json'}"):
        answer(session, "hello")
        said(f"/save {tmp_path / 'chat.json'}")
        said(command)
        assert said("/stats") == "there is no answer yet"


def test_commands_that_ask_the_model(
    session: ChatSession,
    said: Said,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(chat, "edit_text", lambda text: text and f"{text} edited")
    assert said("/edit") == "nothing to send"
    answer(session, "hello")
    assert "4 tokens" in said("/edit")
    assert "4 tokens" in said("/regen")
    assert [turn.content for turn in session.turns[::2]] == ["hello", "hello edited"]
    assert len(fake(session).prompts) == 3


def test_reasoning_is_switched_and_shown(
    session: ChatSession, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "has no reasoning" in said("/think")
    assert said("/think off") == "reasoning is off"
    assert session.model.thinking is False
    assert said("/think on") == "reasoning is on"
    assert session.model.thinking is True
    assert "say /think" in said("/think maybe")
    answer(session, "<think>well now</think> so be it")
    assert said("/think") == "well now"
    monkeypatch.setattr(fake(session).tokenizer, "thinking_switch", None, raising=False)
    assert (
        said("/think off") == "reasoning is hidden: the model's chat template has no switch for it"
    )


def test_another_model_goes_on_with_the_conversation(
    session: ChatSession, capsys: pytest.CaptureFixture[str]
) -> None:
    models = Models(max_model_len=500)
    said = saying(session, capsys, models)
    session.model.thinking = False
    answer(session, "one")
    before = fake(session)
    assert said("/model") == "this is storyteller; /models lists others"
    assert said("/model other") == "this is other; the conversation goes on"
    assert before.closed
    answer(session, "two")
    other = fake(session)
    assert other is not before and session.model.context == 500
    assert [message["content"] for message in other.prompts[-1]] == ["one", "You said: one", "two"]
    assert other.template_arguments == [{"enable_thinking": False}]


def test_a_model_that_cannot_be_had_leaves_the_one_that_is_there(
    session: ChatSession, said: Said
) -> None:
    answer(session, "one")
    before = fake(session)
    assert said("/model missing") == "no model is called missing"
    assert fake(session) is before and not before.closed
    assert said("/model broken") == "the weights are cut short; this is still storyteller"
    for name in ("unwanted", "unloaded"):
        assert said(f"/model {name}") == "stopped; this is still storyteller"
    assert session.model.name == "storyteller"
    answer(session, "two")  # it is loaded again
    assert len(session.turns) == 4


def test_models_are_listed_with_a_mark_at_this_one(said: Said) -> None:
    assert said("/models").splitlines() == [
        "* storyteller  8.3 MiB, bundled",
        "  other        1.0 GiB, hub cache",
    ]


def test_a_file_goes_with_the_next_message(
    session: ChatSession, said: Said, tmp_path: Path
) -> None:
    notes, more = tmp_path / "notes.txt", tmp_path / "more.txt"
    notes.write_text("five words in a file")
    more.write_text("x")
    # the file's name is a word, too
    assert said(f"/file {notes}") == f"{notes}, 6 tokens, goes with the next message"
    said(f"/file {notes}")  # once more is still once
    assert said(f"/file {more}") == (
        f"{more}, 2 tokens, goes with the next message, and so do {notes}"
    )
    list(session.send("what?", first(0)))  # stopped before the answer: the files stay
    text = "what?\n\nnotes.txt:\n\nfive words in a file\n\nmore.txt:\n\nx"
    assert [piece for _, piece in session.send("what?")]
    assert fake(session).prompts[-1] == [{"role": "user", "content": text}]
    list(session.send("and?"))
    assert fake(session).prompts[-1][-1]["content"] == "and?"
    said(f"/file {notes}")
    said("/reset")
    list(session.send("new"))
    assert fake(session).prompts[-1] == [{"role": "user", "content": "new"}]


def test_a_file_that_cannot_fit_is_refused(
    said: Said, session: ChatSession, tmp_path: Path
) -> None:
    """The context holds 200 tokens; a word is a token, and so are the name and the two roles."""
    path = tmp_path / "long.txt"
    for number, says in (
        (197, "the message would have 200 tokens, the context holds 200"),
        (900, "the prompt has more than 200 tokens"),
    ):
        path.write_text("word " * number)
        assert said(f"/file {path}") == f"{path} cannot fit: {says}"
        assert session.files == {}
    path.write_text("word " * 196)
    assert said(f"/file {path}") == f"{path}, 197 tokens, goes with the next message"
    assert session.files.keys() == {path}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff\xfe\x00", "{path} is not UTF-8 text"),
        (b" " * ((16 << 20) + 1), "{path} is larger than 16.0 MiB, for which no context has room"),
        (None, "cannot read {path}: No such file or directory"),
    ],
)
def test_what_is_no_text_is_refused(
    said: Said, session: ChatSession, tmp_path: Path, content: bytes | None, says: str
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    assert said(f"/file {path}") == says.format(path=path)
    assert session.files == {} and "name a file" in said("/file")


def test_conversations_are_listed_and_loaded_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    logs = tmp_path / "nanoserve" / "conversations"
    session, _ = make_session(logs=logs)
    said = saying(session, capsys)
    assert said("/conversations") == "no conversation is kept"
    answer(session, "the first\nof two " + "words " * 20)
    answer(session, "more")
    said("/reset")
    answer(session, "hello")
    newer, older = sorted((path.stem for path in logs.iterdir()), reverse=True)
    assert said("/conversations").splitlines() == [
        f"{newer}    2 messages  hello",
        f"{older}    4 messages  the first of two words words words words wor…",
        "/load NAME goes on with one, and so does chat --continue NAME",
    ]
    assert said(f"/load {older}").startswith("loaded 4 messages from ")
    assert [turn.content for turn in session.turns][2] == "more"
    assert said("/load 1999") == (
        "no conversation is called 1999; in a chat, /conversations lists them"
    )
