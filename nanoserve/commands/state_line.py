"""The line that says what is being waited for, drawn again in its place until there is something
else to show."""

import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from nanoserve.commands.terminal import REDRAW_SECONDS, is_terminal, remark
from nanoserve.utils.waiting import Waiting

_FIRST_SECONDS = 0.05  # what takes no longer is not shown: it would only flicker
_LINE_SECONDS = 5.0  # between two lines where there is no terminal, or a share of the time so far
_LINE_SHARE = 0.1


class StateLine:
    """While active, says on stderr what is being waited for, and the seconds since the wait began.

    A thread asks ``state`` ten times a second, so that the line goes on while the caller computes;
    None shows nothing. On a terminal the line is drawn again in its place and is gone at the end;
    elsewhere there is a line now and then. The cursor stays at the line's start: what somebody else
    writes stands in the line's place.
    """

    def __init__(self, state: Callable[[], Waiting | None], began: float | None = None) -> None:
        self._state = state
        self._began = time.monotonic() if began is None else began
        self._is_watched = is_terminal(sys.stderr)
        self._shown = ""
        self._last_line = self._began  # when it was written, where there is no terminal
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep_showing, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Take the line away: from now on the caller writes. Ending it again does nothing."""
        self._over.set()
        self._thread.join()
        self._draw("")

    def change(self, state: Callable[[], Waiting | None]) -> None:
        """Show another state from now on."""
        self._state = state

    def _keep_showing(self) -> None:
        pause = _FIRST_SECONDS
        while not self._over.wait(pause):
            pause = REDRAW_SECONDS
            state = self._state()
            text = ""
            if state is not None:
                text = state.after(time.monotonic() - self._began)
            if self._is_watched:
                self._draw(text)
            elif text:
                self._write_line(text)

    def _draw(self, text: str) -> None:
        """Put the text in the line's place, if it is another one."""
        if text == self._shown:
            return
        self._shown = text
        fits = text[: shutil.get_terminal_size().columns - 1]
        with suppress(OSError):  # a terminal that is gone is no reason to fail
            sys.stderr.write(f"\r\x1b[2m{fits}\x1b[0m\x1b[K\r")
            sys.stderr.flush()

    def _write_line(self, text: str) -> None:
        now = time.monotonic()
        if now - self._last_line < max(_LINE_SECONDS, _LINE_SHARE * (now - self._began)):
            return
        self._last_line = now
        with suppress(OSError):
            remark(text)
