"""Processes of our own for work that strangers ask for: what hangs, crashes or eats memory takes no one else along.

The child's side is a module with a `main` that sets its own limits (`process_limits`) and then answers lines of JSON.
"""

import contextlib
import json
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from nanoserve.errors import RuntimeFailure

# Processor time is limited inside the process; this only catches one that neither computes nor answers.
SILENCE_SECONDS = 20.0
GRACE_SECONDS = 2.0
"""For a process that has closed its stdout to end."""
_FROM_OUTSIDE = (-9, -15)  # SIGKILL and SIGTERM: its own limits end it by other signals, or it says so

ATTEMPTS = 2
"""At a question whose process is killed from outside, as the system does where memory is short."""

# Where nanoserve itself is: an editable installation is found by a hook of the site, not on the path.
_PACKAGES = str(Path(__file__).parents[2])
_COMMAND = "import json, sys; sys.path[:] = json.loads(sys.argv[1]);from {module} import main; main()"


class ProcessKilled(RuntimeFailure):
    """The child was killed from outside, again and again: nothing is wrong with the question."""


class LimitedProcess:
    """A child that answers one line of JSON with another, one at a time. Safe to use from several threads.

    Args:
        module: whose `main` the child runs.
        purpose: what the child is, for people.
        greeting: the first line that the child reads.
    """

    def __init__(self, module: str, purpose: str, greeting: dict[str, Any]) -> None:
        self._command = _COMMAND.format(module=module)
        self._purpose = purpose
        self._greeting = json.dumps(greeting)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Have the child load while something else goes on; `ask` starts it too."""
        with self._lock:
            self._running()

    def ask(self, line: str) -> dict[str, Any] | None:
        """The child's answer; None if it died over the question. The next question starts another one.

        Raises:
            ProcessKilled: if it was killed from outside, and the one that was started for another attempt too.
        """
        with self._lock:
            for _ in range(ATTEMPTS):
                with contextlib.suppress(ProcessKilled):
                    return self._ask(line)
        raise ProcessKilled(f"{self._purpose} was killed {ATTEMPTS} times; is the machine short of memory?")

    def close(self) -> None:
        """End the process; a later question would start another."""
        with self._lock:
            self._discard()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None:
            return self._process
        # -I and -S: the process needs none of the site's start-up work, only the paths on which we found our packages.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", self._command, json.dumps([_PACKAGES, *sys.path])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._process = process
        self._finalizer = weakref.finalize(self, _end, process)
        _send(process, self._greeting)
        return process

    def _discard(self) -> None:
        if self._process is not None:
            self._finalizer()
            self._process = None

    def _ask(self, line: str) -> dict[str, Any] | None:
        process = self._running()
        assert process.stdout is not None
        _send(process, line)
        silent = threading.Event()

        def give_up() -> None:
            silent.set()
            process.kill()

        watchdog = threading.Timer(SILENCE_SECONDS, give_up)
        watchdog.start()
        try:
            answer = process.stdout.readline()
        except BaseException:
            # Interrupted: the answer is still to come, and must not be taken for that of the next request.
            self._discard()
            raise
        finally:
            watchdog.cancel()
        if not answer:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
            self._discard()
            if process.returncode in _FROM_OUTSIDE and not silent.is_set():
                raise ProcessKilled
            return None
        result: dict[str, Any] = json.loads(answer)
        return result


def _send(process: subprocess.Popen[bytes], line: str) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died; the missing answer will tell
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
