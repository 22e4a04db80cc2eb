"""The command ``nanoserve``: a failure becomes a line on stderr and an exit code.

0 is success, 1 a failure while running, 2 a request that makes no sense, 3 a model that cannot be used, 130 Ctrl-C.
A reader that closes the pipe early (``| head``) got what it wanted: exit 0.
"""

import contextlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from nanoserve.commands.application import application
from nanoserve.commands.terminal import say, silence_stdout
from nanoserve.entry import interrupted
from nanoserve.errors import NanoserveError

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130
DEBUG_VARIABLE = "NANOSERVE_DEBUG"


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


def guarded(action: Callable[[], int | None]) -> int:
    """Run ``action`` and return the exit code: its own, 0 where it names none, or that of the error."""
    try:
        code = action()
        sys.stdout.flush()
        return EXIT_OK if code is None else code
    except BrokenPipeError:
        silence_stdout()
        return EXIT_OK
    except (Exception, KeyboardInterrupt) as error:  # everything ends here, in a line and a code; nothing goes on
        if os.environ.get(DEBUG_VARIABLE):
            traceback.print_exc()
        message, code = describe(error)
        say(message)
        return code


def describe(error: BaseException) -> tuple[str, int]:
    """One line for the user, and the exit code."""
    if _came_from_interrupt(error):
        state = f": {error}" if isinstance(error, KeyboardInterrupt) and error.args else ""
        return f"interrupted{state}", EXIT_INTERRUPTED
    if isinstance(error, NanoserveError):
        return str(error), error.exit_code
    if hasattr(error, "format_message"):  # a usage error of typer, whichever click it stands on
        command = getattr(getattr(error, "ctx", None), "command_path", "nanoserve")
        return f"{error.format_message()} ({command} --help lists what there is)", getattr(error, "exit_code", 2)
    if isinstance(error, MemoryError):
        return "out of memory: choose a smaller --max-model-len, --max-num-seqs or --kv-cache-memory", EXIT_FAILURE
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror, EXIT_FAILURE
    hint = f"set {DEBUG_VARIABLE}=1 to see where"
    return f"unexpected {type(error).__name__}: {error} ({hint})", EXIT_FAILURE


def _came_from_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C lies behind it: libraries turn a KeyboardInterrupt in the midst of an import into ImportError."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _replace_closed_streams() -> None:
    """A shell's ``>&-`` leaves None where a stream should be; and no character of an answer may fail to print."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (open until the process ends)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
