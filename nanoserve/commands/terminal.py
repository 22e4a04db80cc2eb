"""What the commands ask of the terminal: is there one, read what was piped in, notice Ctrl-C."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO, TypeVar

from nanoserve.commands.printers import DIM, NORMAL
from nanoserve.errors import UsageError

REDRAW_SECONDS = 0.1
"""Nobody sees more."""

T = TypeVar("T")


def is_terminal(stream: TextIO | None) -> bool:
    """Whether someone watches this stream and it understands cursor movements."""
    return stream is not None and not stream.closed and stream.isatty() and os.environ.get("TERM") != "dumb"


def dim(text: str, stream: TextIO) -> str:
    """Text in faint type where the stream is a terminal."""
    return f"{DIM}{text}{NORMAL}" if is_terminal(stream) else text


def remark(text: str) -> None:
    """One or more lines beside the answers, on stderr."""
    print(dim(text, sys.stderr), file=sys.stderr, flush=True)


def read_stdin() -> str:
    """All that was piped in, without the line break at its end.

    Raises:
        UsageError: if it is not UTF-8.
    """
    if sys.stdin is None:
        return ""
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not valid UTF-8 (byte {error.start})") from None
    return text.removesuffix("\n").removesuffix("\r")


class StopOnInterrupt:
    """While active, a first Ctrl-C ends the steps that are gone through; a second one interrupts the program."""

    def __enter__(self) -> "StopOnInterrupt":
        self._requested = False
        self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def steps(self, stream: Iterator[T]) -> Iterator[T]:
        """The stream until it ends or Ctrl-C is pressed.

        While the engine works the default handler is in place, which it defers to the end of a step.
        """
        while not self._requested:
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                output = next(stream, None)
            except KeyboardInterrupt:
                self._requested = True
                return
            finally:
                signal.signal(signal.SIGINT, self._on_signal)
            if output is None:
                return
            yield output

    def _on_signal(self, _signal: int, _frame: FrameType | None) -> None:
        if self._requested:
            raise KeyboardInterrupt
        self._requested = True


@contextmanager
def without_echo() -> Iterator[None]:
    """Keys pressed meanwhile wait for the next prompt unseen: their echo would move the cursor under an answer."""
    if sys.platform == "win32" or sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    import termios

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    silent = before.copy()
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(descriptor, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
