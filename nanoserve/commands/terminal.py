"""The terminal: whether there is one, text that is piped in, Ctrl-C."""

import os
import re
import shutil
import signal
import sys
import termios
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO, TypeVar

from nanoserve.errors import UsageError, one_line

REDRAW_SECONDS = 0.1  # nobody sees more
_CLEAR = "\x1b[K"  # erases the rest of the row, where a longer StateLine may stand
_FIRST_COLUMN = re.compile(r" *(?:\S+(?: \S+)* {2,})?")
T = TypeVar("T")


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether someone watches this stream and it understands cursor movements."""
    return (
        stream is not None
        and not stream.closed
        and stream.isatty()
        and os.environ.get("TERM") != "dumb"
    )


def visible(text: str) -> str:
    """Text without characters that would steer a terminal; a model's answer may hold escape
    sequences."""
    text = text.replace("\t", "    ")
    return "".join(
        char
        for char in text
        if char == "\n" or unicodedata.category(char) not in ("Cc", "Zl", "Zp")
    )


def wrapped(text: str, stream: IO[str]) -> str:
    """Text for a terminal: lines break between words, and go on below the second column of a list
    of commands."""
    width = shutil.get_terminal_size().columns
    is_narrow = all(line.isascii() and line.isprintable() for line in text.split("\n"))
    most = width if is_narrow else width // 2  # no character is wider than two
    if not is_terminal(stream) or max(map(len, text.split("\n"))) <= most:
        return text
    from rich.console import Console
    from rich.text import Text

    console, lines = Console(width=width), []
    for line in text.split("\n"):
        found, start = _FIRST_COLUMN.match(line), 0
        if found and found.end() <= width // 2:
            start = found.end()
        parts = [part.plain.rstrip() for part in Text(line[start:]).wrap(console, width - start)]
        lines.append(line[:start] + f"\n{' ' * start}".join(parts))
    return "\n".join(lines)


def remark(text: str) -> None:
    """One or more lines beside the answers, on stderr; in faint type on a terminal."""
    shown = wrapped(text, sys.stderr)
    if is_terminal(sys.stderr):
        shown = f"{_CLEAR}\x1b[2m{shown}\x1b[0m"
    print(shown, file=sys.stderr, flush=True)


def say(message: str) -> None:
    """Write one line to stderr, on a terminal broken between words; a stderr that is gone is no
    reason to fail."""
    # it may quote a model's files, and those may hold what steers a terminal
    line = one_line(message)
    try:
        sys.stdout.flush()
    except OSError:
        silence_stdout()
    shown = wrapped(f"nanoserve: {line}", sys.stderr)
    if is_terminal(sys.stderr):
        shown = _CLEAR + shown
    with suppress(OSError):
        print(shown, file=sys.stderr, flush=True)


def silence_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush cannot fail on a pipe that is
    closed."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with suppress(OSError):  # a stdout without a descriptor has no pipe that could be closed
        os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def read_stdin() -> str:
    """All that was piped in, without the line break at its end. Raises UsageError if it is not
    UTF-8."""
    if sys.stdin is None:
        return ""
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not valid UTF-8 (byte {error.start})") from None
    return text.removesuffix("\n").removesuffix("\r")


class StopOnInterrupt:
    """While active, a first Ctrl-C ends the steps that are gone through, after the step that runs;
    a second one interrupts the program at once."""

    def __enter__(self) -> "StopOnInterrupt":
        self.requested = False
        self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def steps(self, stream: Iterator[T]) -> Iterator[T]:
        """The stream until it ends or Ctrl-C is pressed."""
        while not self.requested:
            try:
                output = next(stream, None)
            except KeyboardInterrupt:  # of a step that waits for others, and does not wait on
                if self.requested:
                    raise
                self.requested = True
                return
            if output is None or self.requested:
                return
            yield output

    def _on_signal(self, _signal: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


@contextmanager
def without_echo() -> Iterator[None]:
    """Keys pressed meanwhile wait for the next prompt unseen, Ctrl-D among them: their echo would
    move the cursor under an answer."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    silent = before.copy()
    silent[3] &= ~termios.ECHO
    silent[6] = [*before[6]]
    silent[6][termios.VEOF] = b"\0"  # none: a terminal forgets which key ended the input
    termios.tcsetattr(descriptor, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextmanager
def when_continued(action: Callable[[], None]) -> Iterator[None]:
    """Call ``action`` whenever the process goes on after Ctrl-Z: a shell has written to the
    terminal meanwhile."""
    before = signal.signal(signal.SIGCONT, lambda *_: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGCONT, before)
