"""How far something is, with a clock that a test turns."""

import io

import pytest

from nanoserve.commands.progress import show_progress, watched


class Clock:
    """Seconds, as the test wants them."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("nanoserve.commands.progress.time", clock)
    return clock


def test_what_is_quick_is_silent(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in watched(range(10), "things"):
        clock.now += 0.49
    assert capsys.readouterr().err == ""


def test_lines_say_how_far_and_how_long(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in watched(range(10), "things"):
        clock.now += 4.0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "things: 20%, about 0:00:32 left"
    assert lines[-1] == "things: 80%, about 0:00:08 left"
    assert len(lines) == 4


def test_long_runs_have_few_lines(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in watched(range(3600), "seconds"):
        clock.now += 1.0
    assert len(capsys.readouterr().err.splitlines()) < 60


def test_every_stage_has_its_own_pace(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress() as progress:
        progress("one", 0, 2)
        clock.now += 50.0
        progress("two", 0, 2)
        clock.now += 6.0
        progress("two", 1, 2)
    assert capsys.readouterr().err == "two: 50%, about 0:00:06 left\n"


def test_a_download_shows_bytes_and_bytes_a_second(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with show_progress() as progress:
        progress("downloading", 1 << 20, 100 << 20)  # what is there from an earlier try
        clock.now += 10.0
        progress("downloading", 21 << 20, 100 << 20)
    assert capsys.readouterr().err == (
        "downloading: 21%, 21.0 MiB of 100.0 MiB, 2.0 MiB/s, about 0:00:40 left\n"
    )


class Terminal(io.StringIO):
    """Somebody watches."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_that_is_gone_at_the_end(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    for _ in watched(range(4), "things"):
        clock.now += 1.0
    shown = screen.getvalue()
    assert "things" in shown and "0:00:03 left" in shown and "75%" in shown
    assert shown.rindex("\x1b[2K") > shown.rindex("things")  # the line is erased
