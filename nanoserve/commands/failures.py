"""The one place where a failure becomes a line on stderr and an exit code.

0 is success, 1 a failure while running, 2 a request that makes no sense, 3 a model that cannot be used, 130 Ctrl-C.
A reader that closes the pipe early (``| head``) got what it wanted: exit 0.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable

from nanoserve.commands.terminal import wrapped
from nanoserve.errors import NanoserveError

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130
DEBUG_VARIABLE = "NANOSERVE_DEBUG"
_LONGEST_MESSAGE = 1000


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


def say(message: str) -> None:
    """Write one line to stderr, on a terminal broken between words; a stderr that is gone is no reason to fail."""
    line = " ".join(message.split())[:_LONGEST_MESSAGE]
    # A message may quote a model's files, and those may hold what steers a terminal.
    line = "".join(character if character.isprintable() else "\ufffd" for character in line)
    try:
        sys.stdout.flush()
    except OSError:
        silence_stdout()
    with contextlib.suppress(OSError):
        print(wrapped(f"nanoserve: {line}", sys.stderr), file=sys.stderr, flush=True)


def silence_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush cannot fail on a pipe that is closed."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError):  # a stdout without a descriptor has no pipe that could be closed
        os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _came_from_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C lies behind it: libraries turn a KeyboardInterrupt in the midst of an import into ImportError."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False
