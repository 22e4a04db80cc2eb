"""The line that says what is being waited for."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanoserve.commands.state_line import StateLine
from nanoserve.commands.terminal import remark
from nanoserve.utils.waiting import Waiting
from tests.commands.test_chat_session import fake, make_session
from tests.commands.test_terminal import Terminal, converse, watched

PATIENCE = 60.0  # seconds; a busy machine runs threads late


def wait_until(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Clock:
    """Seconds, as the test wants them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
        self.now = 1000.0
        for module in modules:
            monkeypatch.setattr(f"{module}.time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.mark.parametrize(
    ("waiting", "seconds", "said"),
    [
        (Waiting("loading"), 4.9, "loading 4 s"),
        (Waiting.for_stage("loading", 9, 20), 4.0, "loading 45%, 4 s"),
        (Waiting.for_stage("compiling layers", 0, 1), 12.0, "compiling layers 12 s"),
        (Waiting("prompt", "512 of 2,048"), 3.2, "prompt 512 of 2,048, 3 s"),
    ],
)
def test_what_it_says(waiting: Waiting, seconds: float, said: str) -> None:
    assert waiting.after(seconds) == said


def test_it_is_drawn_in_its_place_and_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = watched(monkeypatch)
    with StateLine(lambda: Waiting("prompt", "512 of 2,048")) as line:
        wait_until(lambda: screen.text.startswith("prompt 512 of 2,048, "))
        line.change(lambda: Waiting("thinking"))
        wait_until(lambda: screen.text.startswith("thinking "))
        assert "prompt" not in screen.text and screen.column == 0
        line.change(lambda: None)
        wait_until(lambda: screen.text == "")
        line.change(lambda: Waiting("a state that is far longer than the window is wide"))
        wait_until(lambda: screen.text == "a state that is far longer than the win")
    assert screen.text == "" and len(screen.lines) == 1
    line.end()
    assert screen.text == ""


def test_a_notice_takes_its_place_and_it_goes_on_below(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = watched(monkeypatch)
    with StateLine(lambda: Waiting("a long state of something")) as line:
        wait_until(lambda: screen.text.startswith("a long state"))
        remark("short")
        line.change(lambda: Waiting("another state"))
        wait_until(lambda: "another" in screen.text)
        assert screen.lines[0] == "short" and screen.lines[1].startswith("another state")
    assert screen.text == "short"


def test_without_a_terminal_there_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, shown = Clock(monkeypatch, "nanoserve.commands.state_line"), ""
    with StateLine(lambda: Waiting("loading")):
        for seconds in (6.0, 12.0):
            clock.now = 1000.0 + seconds
            while f"loading {seconds:.0f} s\n" not in shown:
                captured = capsys.readouterr()
                assert captured.out == ""
                shown += captured.err
    assert shown + capsys.readouterr().err == "loading 6 s\nloading 12 s\n"


def test_what_is_quick_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    asked = []
    with StateLine(lambda: asked.append(1) or Waiting("loading")):  # type: ignore[func-returns-value]
        wait_until(lambda: len(asked) > 1)
    assert capsys.readouterr() == ("", "")


def test_a_chat_shows_how_far_the_prompt_is(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = watched(monkeypatch)
    clock = Clock(monkeypatch, "nanoserve.commands.state_line", "nanoserve.commands.chat")
    session, _ = make_session()
    seen = []

    def prompt_is_long() -> None:
        fake(session).progress = (512, 2048)
        wait_until(lambda: "prompt 512 of 2,048, 0 s" in screen.text)
        clock.now += 2.5
        wait_until(lambda: "prompt 512 of 2,048, 2 s" in screen.text)
        seen.append(screen.text)

    fake(session).before_answer = prompt_is_long
    converse(monkeypatch, session, "hello", plain=True)
    assert seen and "prompt" not in screen.text
    assert "You said: hello\n3 tokens · 10.0 tokens/s · the first\nafter 2.50 s" in screen.text


def test_a_chat_says_that_it_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = watched(monkeypatch)
    session, _ = make_session()

    def ctrl_c() -> None:
        fake(session).progress = (0, 2048)
        wait_until(lambda: "prompt 0 of 2,048" in screen.text)
        signal.raise_signal(signal.SIGINT)
        wait_until(lambda: "stopping" in screen.text)

    fake(session).before_answer = ctrl_c
    converse(monkeypatch, session, "hello", plain=True)
    assert "stopped before the answer began" in screen.text and "stopping" not in screen.text
    assert session.turns == []


def test_reasoning_that_is_hidden_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = watched(monkeypatch)
    session, _ = make_session()
    seen = []

    def while_it_thinks(step: int) -> None:
        if step == 2:
            wait_until(lambda: "thinking 0 s" in screen.text)
            seen.append(step)

    Clock(monkeypatch, "nanoserve.commands.state_line", "nanoserve.commands.chat")
    fake(session).before_step = while_it_thinks
    converse(monkeypatch, session, "/think off", "<think>well now</think> so be it", plain=True)
    assert seen and "thinking" not in screen.text and "so be it" in screen.text


@pytest.mark.parametrize(
    ("arguments", "steps", "code"),
    [
        (["chat", "-m", "endless"], [">>>", "\x04"], 0),
        (["chat", "-m", "endless"], [">>>", "hi\r", "loading ", "\x03", "interrupted"], 130),
        (["chat", "-m", "endless", "hi"], ["loading ", "\x03", "interrupted"], 130),
        (["generate", "-m", "endless", "hi"], ["loading ", "\x03", "interrupted"], 130),
    ],
)
def test_nothing_is_waited_for_when_a_command_is_left(
    tmp_path: Path, arguments: list[str], steps: list[str], code: int
) -> None:
    """Opening this model never ends."""
    terminal = Terminal(*arguments, state=tmp_path)
    for place, step in enumerate(steps):
        (terminal.type if place % 2 else terminal.wait_for)(step)
    assert terminal.exit_code() == code
    assert "Traceback" not in terminal.shown and "Fatal" not in terminal.shown
