"""The command ``nanoserve``: one way in for all its sub-commands."""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from nanoserve.commands.application import application
from nanoserve.commands.failures import EXIT_INTERRUPTED, EXIT_OK, guarded
from nanoserve.entry import interrupted


def run(*first: str) -> NoReturn:
    """Entry point of the console script; ``first`` are words put before the process's arguments."""
    code = EXIT_INTERRUPTED
    with contextlib.suppress(KeyboardInterrupt):  # one that comes when the last line is written already
        code = main([*first, *sys.argv[1:]])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to interrupt but the interpreter's own end
    sys.exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse ``arguments`` (default: the process's), do what they say, return the exit code."""
    _replace_closed_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    return guarded(partial(_parse_and_act, words))


def _parse_and_act(words: list[str]) -> int:
    if signal.getsignal(signal.SIGINT) is interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # from now on `guarded` says it
    try:
        parsed: Any = application().main(args=words, prog_name="nanoserve", standalone_mode=False)
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # the parser's answer to ``--help | head``; ours is another
            raise error.__context__ from None
        raise
    if callable(parsed):
        parsed = parsed()
    elif parsed == EXIT_INTERRUPTED:  # the parser swallows Ctrl-C
        raise KeyboardInterrupt
    return parsed if isinstance(parsed, int) else EXIT_OK  # --help and --version end in the parser


def _replace_closed_streams() -> None:
    """A shell's ``>&-`` leaves None where a stream should be; and no character of an answer may fail to print."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (open until the process ends)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
