"""The whole chat on a terminal: a pseudo-terminal with a process behind it."""

import codecs
import errno
import logging
import os
import pty
import re
import select
import signal
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nanoserve.commands import chat as chat_command
from nanoserve.commands.printers import AnswerPrinter
from nanoserve.commands.terminal import StopOnInterrupt, remark, say
from tests.commands.conftest import ROOT
from tests.commands.screen import Screen
from tests.commands.test_chat_session import ChatSession, Models, fake, make_session

PATIENCE = 240.0  # seconds; a busy machine starts processes slowly


class Terminal:
    """A process on a pseudo-terminal of 24 rows; the command with the fake LLM, unless another
    module is named."""

    def __init__(
        self,
        *arguments: str,
        state: Path,
        module: str = "tests.commands.fake_llm",
        columns: int = 80,
    ) -> None:
        self.shown = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        """Waits for the rest of a character whose bytes come in two reads."""
        words = [sys.executable, "-m", module, *arguments]
        self.process, self.descriptor = pty.fork()
        if self.process == 0:
            os.chdir(ROOT)
            termios.tcsetwinsize(0, (24, columns))
            settings = {
                "XDG_STATE_HOME": str(state),
                "TERM": "xterm",
                "PROMPT_TOOLKIT_NO_CPR": "1",
                "COLUMNS": str(columns),
            }
            os.execve(sys.executable, words, os.environ | settings)

    def type(self, keys: str) -> None:
        os.write(self.descriptor, keys.encode())

    def wait_for(self, text: str) -> str:
        """Return the output until this text was shown."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.shown:
            assert time.monotonic() < deadline, f"{text!r} does not come after {self.shown!r}"
            self._read()
        before, _, self.shown = self.shown.partition(text)
        return before

    def wait_for_match(self, pattern: str) -> None:
        """Until something that the pattern fits was shown."""
        deadline = time.monotonic() + PATIENCE
        while not (found := re.search(pattern, self.shown)):
            assert time.monotonic() < deadline, f"{pattern!r} does not come after {self.shown!r}"
            self._read()
        self.shown = self.shown[found.end() :]

    def exit_code(self) -> int:
        deadline = time.monotonic() + PATIENCE
        while not (status := os.waitpid(self.process, os.WNOHANG))[0]:
            assert time.monotonic() < deadline
            self._read()
        return os.waitstatus_to_exitcode(status[1])

    def _read(self) -> None:
        if select.select([self.descriptor], [], [], 0.1)[0]:
            try:
                self.shown += self._decoder.decode(os.read(self.descriptor, 65536))
            except OSError as error:  # how Linux says that the other side is closed
                assert error.errno == errno.EIO
                time.sleep(0.05)


@pytest.fixture
def chat(tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal("chat", state=tmp_path)
    yield terminal
    os.close(terminal.descriptor)


def test_a_conversation(chat: Terminal, tmp_path: Path) -> None:
    chat.wait_for(">>>")
    chat.type("some **bold** words\r")
    chat.wait_for("You said: some \x1b[1mbold\x1b[0m words")  # rendered in place
    chat.wait_for_match(r"5 tokens · 10.0 tokens/s · the first after \d+.\d\d s")
    chat.type("slowly\r")
    chat.wait_for("You said: slowly")
    chat.type("\x03")
    chat.wait_for("interrupted")
    chat.wait_for(">>>")
    chat.type("half\x03")
    chat.wait_for("the line was cleared")
    chat.type("/bogus\r")
    chat.wait_for("unknown command /bogus")
    chat.type("fail\r")
    chat.wait_for("\x1b[2mthe executor died\x1b[0m")  # as all notices: no name before it
    chat.wait_for(">>>")
    chat.type("\x04")
    assert chat.exit_code() == 0
    assert "+some **bold** words" in (tmp_path / "nanoserve" / "history").read_text()


@pytest.mark.parametrize(
    ("model", "steps", "code"),
    [
        ("missing", ["no model at missing"], 3),
        ("broken", ["unexpected ZeroDivisionError"], 1),
        ("loading", [">>>", "\x04"], 0),
        ("loading", [">>>", "/help\r", "this list", "/exit\r"], 0),
        ("loading", [">>>", "hi\r", "loading ", "\x03", "nanoserve: interrupted"], 130),
    ],
)
def test_a_chat_ends_while_its_model_loads(
    tmp_path: Path, model: str, steps: list[str], code: int
) -> None:
    """Texts to wait for and keys to type, in turn."""
    terminal = Terminal("chat", "--no-history", "-m", model, state=tmp_path)
    for place, step in enumerate(steps):
        (terminal.type if place % 2 else terminal.wait_for)(step)
    assert terminal.exit_code() == code
    assert "Traceback" not in terminal.shown
    os.close(terminal.descriptor)


def test_remarks_and_errors_break_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error, help_line = (
        "a message that is longer than the window is wide",
        "  /set NAME=VALUE  change a setting of the model",
    )
    say(error)
    remark(help_line)
    assert capsys.readouterr().err == f"nanoserve: {error}\n{help_line}\n"  # no terminal: as it is
    screen = watched(monkeypatch)
    say(error)
    remark(f"{help_line}\n\n日本語日本語日本語日本語日本語日本語日本語")
    assert [line.rstrip() for line in screen.lines] == [
        "nanoserve: a message that is longer than",
        "the window is wide",
        "  /set NAME=VALUE  change a setting of",
        "                   the model",
        "",
        "日本語日本語日本語日本語日本語日本語日本",
        "語",
        "",
    ]


def test_a_second_interrupt_ends_the_program(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), StopOnInterrupt() as stop:
        for _ in stop.steps(iter([1])):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("inside_step", [True, False])
def test_an_interrupt_ends_the_steps(*, inside_step: bool) -> None:
    def stream() -> Iterator[int]:
        for step in range(5):
            if inside_step and step == 2:
                signal.raise_signal(signal.SIGINT)
            yield step

    taken = []
    with StopOnInterrupt() as stop:
        for step in stop.steps(stream()):
            taken.append(step)
            if not inside_step and step == 1:
                signal.raise_signal(signal.SIGINT)
    assert taken == [0, 1]


def converse(
    monkeypatch: pytest.MonkeyPatch, session: ChatSession, *lines: str, plain: bool = False
) -> None:
    """The interactive chat in this process, with these lines typed."""
    chat_with(monkeypatch, session, iter(lines), plain=plain)


def chat_with(
    monkeypatch: pytest.MonkeyPatch, session: ChatSession, typed: Iterator[str], *, plain: bool
) -> None:

    class Typed:
        def __init__(self, *_: object) -> None:
            pass

        def on_drawn(self, action: object) -> None:
            pass

        def fail(self, error: BaseException) -> None:
            pass

        def read(self) -> str:
            if (line := next(typed, None)) is None:
                raise EOFError
            return line

    monkeypatch.setattr(chat_command, "ChatPrompt", Typed)
    session.notify = chat_command.notice
    chat_command.Conversation(
        session, chat_command.ChatOptions(model="fake", plain=plain, no_history=True), Models()
    ).run()


def watched(monkeypatch: pytest.MonkeyPatch, width: int = 40, height: int = 10) -> Screen:
    """A terminal that both streams are written to from now on."""
    both: Any = Screen(width, height)
    settings = {"COLUMNS": str(width), "LINES": str(height), "TERM": "xterm"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", both)
    monkeypatch.setattr(sys, "stderr", both)
    screen: Screen = both
    return screen


@pytest.mark.parametrize("plain", [True, False])
def test_a_notice_stands_below_the_answer(monkeypatch: pytest.MonkeyPatch, *, plain: bool) -> None:
    screen, (session, _) = watched(monkeypatch), make_session(max_model_len=14)
    converse(monkeypatch, session, "a b c d e f g", plain=plain)
    assert screen.text.replace("\n\n", "\n").splitlines()[2:5] == [
        "You said: a b c",
        "the answer was cut where the context",
        "ends",
    ]
    assert screen.text.count("You said") == 1


def test_a_warning_waits_until_the_line_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, (session, _) = watched(monkeypatch), make_session()
    log = logging.getLogger("nanoserve").warning

    def lines() -> Iterator[str]:
        log("nanoserve: layers run %s", "uncompiled")
        assert "layers" not in screen.text
        yield "one"

    fake(session).before_answer = lambda: log("nanoserve: that is slower")
    chat_with(monkeypatch, session, lines(), plain=True)
    assert "\nlayers run uncompiled\nthat is slower\nYou said: one\n" in screen.text
    assert logging.getLogger("nanoserve").handlers == []


def test_an_answer_goes_on_below_what_a_shell_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(AnswerPrinter):
        def answer(self, text: str) -> None:
            super().answer(text)
            if text == "two ":
                screen.write("\nStopped\n")
                signal.raise_signal(signal.SIGCONT)

    screen, (session, _) = watched(monkeypatch), make_session()
    monkeypatch.setattr(
        chat_command, "_printer", lambda **_: Stopped(Console(file=sys.stdout), markdown=True)
    )
    converse(monkeypatch, session, "one two three")
    assert "You said: one two\nStopped\nthree\n" in screen.text


def test_a_loaded_conversation_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    screen, (session, _) = watched(monkeypatch), make_session()
    converse(
        monkeypatch,
        session,
        "one",
        "**two**",
        f"/save {tmp_path / 'c'}",
        "/clear",
        f"/load {tmp_path / 'c'}",
    )
    shown = screen.text.partition("loaded 4 messages")[2]
    assert shown.endswith(">>> **two**\nYou said: two")


def test_an_interrupt_as_the_answer_ends_does_not_end_the_conversation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class InterruptedAtTheEnd(AnswerPrinter):
        def finish(self) -> None:
            super().finish()
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(
        chat_command, "_printer", lambda **_: InterruptedAtTheEnd(Console(file=sys.stdout))
    )
    session, _ = make_session()
    converse(monkeypatch, session, "one", "two", plain=True)
    assert [turn.content for turn in session.turns] == [
        "one",
        "You said: one",
        "two",
        "You said: two",
    ]


@pytest.mark.parametrize("word", ["exit", "quit", "bye"])
def test_what_leaves(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    session, _ = make_session()
    converse(monkeypatch, session, "one", f"/{word}", "two")
    assert [turn.content for turn in session.turns[::2]] == ["one"]


def test_the_last_conversation_goes_on(tmp_path: Path) -> None:
    for arguments, question in [([], "one"), (["--continue"], "two")]:
        terminal = Terminal("chat", "--plain", *arguments, state=tmp_path)
        if arguments:
            terminal.wait_for(">>> one")
            terminal.wait_for("You said: one")
        terminal.wait_for(">>>")
        terminal.type(f"{question}\r")
        terminal.wait_for(f"You said: {question}")
        terminal.wait_for("the first after")
        os.kill(terminal.process, signal.SIGKILL)  # nothing is lost
        assert terminal.exit_code() == -signal.SIGKILL
        os.close(terminal.descriptor)
    terminal = Terminal("chat", "--continue", "three", state=tmp_path)  # one answer, logged as well
    assert terminal.exit_code() == 0
    os.close(terminal.descriptor)
    logs = (tmp_path / "nanoserve" / "conversations").iterdir()
    newest = max(logs, key=lambda path: path.stem).read_text()
    assert all(f"You said: {word}" in newest for word in ("one", "two", "three"))


def test_ctrl_d_in_an_answer_leaves_behind_it(tmp_path: Path) -> None:
    terminal = Terminal("chat", "--max-tokens", "40", state=tmp_path)
    terminal.wait_for(">>>")
    terminal.type("slowly\r")
    terminal.wait_for("You said: slowly")
    terminal.type("\x04")
    assert terminal.exit_code() == 0
    assert "40 tokens" in terminal.shown
    os.close(terminal.descriptor)


def test_no_history(tmp_path: Path) -> None:
    terminal = Terminal("chat", "--no-history", "--plain", state=tmp_path)
    terminal.wait_for(">>>")
    terminal.type("**bold**\r")
    terminal.wait_for("You said: **bold**\r\n")
    terminal.type("/exit\r")
    assert terminal.exit_code() == 0
    os.close(terminal.descriptor)
    assert list(tmp_path.iterdir()) == []


def test_progress_and_answer_on_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("one\ntwo\nthree\n")
    out = tmp_path / "out.jsonl"
    terminal = Terminal(
        "generate", "--file", str(tmp_path / "rows.txt"), "--output", str(out), state=tmp_path
    )
    terminal.wait_for("load")
    terminal.wait_for("3/3")
    terminal.wait_for("tokens/s")
    terminal.wait_for("3 rows written")
    assert terminal.exit_code() == 0
    os.close(terminal.descriptor)
