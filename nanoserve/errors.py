"""Errors that a user may see: one clear line each, with the exit code of the command."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from subprocess import CalledProcessError, TimeoutExpired

LONGEST_MESSAGE = 1000  # characters of an error's message; more than nanoserve's own words have
LONGEST_LINE = 300  # characters of the first line of an error from elsewhere
LONGEST_VALUE = 80  # characters of a value from a file or a client within a message


def one_line(text: str, longest: int = LONGEST_MESSAGE) -> str:
    """A text from outside, as a message shows it: on one line, without what a terminal would obey.
    A text longer than ``longest`` characters loses its middle: the end often says what to
    change."""
    if len(text) > longest:
        kept = (longest - 3) // 2
        text = f"{text[:kept]}...{text[-kept:]}"
    return "".join(
        character if character.isprintable() else "\ufffd" for character in " ".join(text.split())
    )


def shown(value: object, longest: int = LONGEST_VALUE) -> str:
    """A value from outside, as a message shows it: as Python writes it, on one line and
    shortened."""
    return one_line(repr(value), longest)


def did_you_mean(word: str, known: Iterable[str], most: int = 1) -> str:
    """A guess at a misspelt word, or as many as `most`, in parentheses; nothing if it is like no
    known word."""
    close = get_close_matches(word.lower(), known, n=most, cutoff=0.5)
    if not close:
        return ""
    return f" (did you mean {' or '.join(close)}?)"


class NanoserveError(Exception):
    """Base of every error worded for a user; the command line prints it as one line, without a
    traceback."""

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message))


class RuntimeFailure(NanoserveError):
    """Something failed while running (out of memory, an unwritable file, an executor that died)."""


class WorkersFailed(RuntimeFailure):
    """The processes that run the model died again and again, and the engine gave up; the message
    says why."""


class PolicyFailed(RuntimeFailure):
    """A scheduling policy from a user's file raised an error, or answered nonsense."""


class UsageError(NanoserveError, ValueError):
    """The caller asked for something that is not allowed; the message says what to change."""

    exit_code = 2


class ModelError(NanoserveError):
    """The model directory is missing, incomplete or not supported."""

    exit_code = 3


def error_of(exit_code: int, message: str) -> NanoserveError:
    """The error that another process reported with the exit code of its class."""
    kinds = {kind.exit_code: kind for kind in (RuntimeFailure, UsageError, ModelError)}
    return kinds.get(exit_code, RuntimeFailure)(message)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, cut where it is very long; empty if it has none.

    Of a command that failed, it is the first line that the command wrote, or how it ended: a
    compiler's command alone may have a thousand characters.
    """
    message = str(error)
    if isinstance(error, CalledProcessError):
        said = error.stderr or error.stdout or b""
        message = said.decode("utf-8", "replace") if isinstance(said, bytes) else said
        message = (
            message.strip() or f"{_program(error.cmd)} ended with exit code {error.returncode}"
        )
    elif isinstance(error, TimeoutExpired):
        message = f"{_program(error.cmd)} took more than {error.timeout:g} s"
    return (message.strip().splitlines() or [""])[0][:LONGEST_LINE]


def _program(command: str | Sequence[str]) -> str:
    return command.split()[0] if isinstance(command, str) else command[0]
