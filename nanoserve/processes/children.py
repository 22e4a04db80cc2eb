"""Child processes that run nanoserve's code, and those among them that do untrusted work.

If a `LimitedProcess` hangs, crashes or eats memory, nothing else is harmed. The child's side is a module whose `main`
sets its limits with `limit_resources` and then calls `answer_requests`. Questions and answers are lines of JSON.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanoserve.errors import RuntimeFailure

ATTEMPTS = 2  # tries at a question whose process is killed from outside, as the system does when memory is short
SILENCE_SECONDS = 20.0  # limit for a child that neither computes nor answers; its processor time is limited inside it
GRACE_SECONDS = 2.0  # time for a child to end by itself before it is killed
_KILLED_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)  # a child's own limits end it by other signals
_PACKAGES = str(Path(__file__).parents[2])
"""The directory of the package. An editable installation is found by an import hook, which children may lack."""


def python_command(program: str, *arguments: str, flags: Sequence[str] = ()) -> list[str]:
    """The command of a Python process that finds the same packages; `arguments` are its sys.argv[2:]."""
    prepare = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    return [sys.executable, *flags, "-c", prepare + program, json.dumps([_PACKAGES, *sys.path]), *arguments]


def send_line(process: subprocess.Popen[bytes], line: bytes) -> None:
    """Send a line to a child's stdin; a dead child does not read it."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(line + b"\n")
        process.stdin.flush()


def run_module(module: str, *words: str, environment: Mapping[str, str], failing: str = "") -> dict[str, Any]:
    """Run a module with these arguments and variables; the JSON object on the last line of its stdout.

    Raises RuntimeFailure with the last line of its stderr, behind `failing`, if it fails.
    """
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeFailure(failing + lines[-1])
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


class ProcessUnavailable(RuntimeFailure):
    """The child cannot be started, is closed, or was killed from outside again and again: nothing is wrong with the
    question."""


class _Killed(Exception):
    """The child was killed from outside."""


class LimitedProcess:
    """A child that answers one line of JSON with another, one at a time. Safe to use from several threads.

    It runs the `main` of ``module`` and first reads the line ``greeting``; ``purpose`` is its name in messages.
    """

    def __init__(self, module: str, purpose: str, greeting: dict[str, Any]) -> None:
        # -I and -S: the child skips the start-up work of site.
        self._command = python_command(f"from {module} import main; main()", flags=("-I", "-S"))
        self._purpose = purpose
        self._greeting = json.dumps(greeting).encode()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def start(self) -> None:
        """Start the child now, so that it loads in the background; otherwise `ask` starts it."""
        with self._lock:
            self._running()

    def ask(self, line: str) -> dict[str, Any] | None:
        """The child's answer; None if it died over the question, and the next question starts another child.

        Raises ProcessUnavailable if it cannot be started, was killed from outside in every attempt, or is closed.
        """
        with self._lock:
            for _ in range(ATTEMPTS):
                with contextlib.suppress(_Killed):
                    return self._ask(line)
        raise ProcessUnavailable(f"{self._purpose} was killed {ATTEMPTS} times; is the machine short of memory?")

    def close(self) -> None:
        """End the process for good. The question that it is answering fails, and so does every later one."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()  # before waiting for the lock, which the question holds
        with self._lock:
            self._discard()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None and not self._closed:
            pipe = subprocess.PIPE
            try:
                self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
            except OSError as error:
                raise ProcessUnavailable(f"{self._purpose} cannot be started: {error.strerror or error}") from error
            self._finalizer = weakref.finalize(self, _end, self._process)
            send_line(self._process, self._greeting)
        if self._process is None or self._closed:
            raise ProcessUnavailable(f"{self._purpose} was ended")
        return self._process

    def _discard(self) -> None:
        if self._process is not None:
            self._finalizer()
            self._process = None

    def _ask(self, line: str) -> dict[str, Any] | None:
        process = self._running()
        assert process.stdout is not None
        send_line(process, line.encode())
        deadline = time.monotonic() + SILENCE_SECONDS
        watchdog = threading.Timer(SILENCE_SECONDS, process.kill)
        watchdog.start()
        try:
            answer = process.stdout.readline()
        except BaseException:
            self._discard()  # otherwise the answer would be read as that of the next question
            raise
        finally:
            watchdog.cancel()
        if not answer:
            silent = time.monotonic() >= deadline
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
            self._discard()
            if process.returncode in _KILLED_FROM_OUTSIDE and not silent:
                raise _Killed
            return None
        result: dict[str, Any] = json.loads(answer)
        return result


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError), process:  # which closes its pipes and waits
        process.kill()


def limit_resources(memory: int, stack: int | None = None) -> None:
    """Bound this process's memory and stack, in bytes. Ctrl-C at the terminal then reaches the parent alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if stack is not None:
        resource.setrlimit(resource.RLIMIT_STACK, (stack, stack))


def forbid_files_and_processes() -> None:
    """Let this process open no file or socket, write no file and start no process, whatever code runs in it.

    Its stdin and stdout stay open. A process of root could lift these limits again.
    """
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(limit, (0, 0))


def limit_time(seconds: float) -> None:
    """End this process when it has computed for `seconds`; 0 lifts the limit. Waiting does not count."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def answer_requests(answer: Callable[[dict[str, Any]], dict[str, str]]) -> None:
    """Answer the objects on stdin, one per line, until it closes. `seconds` of each is its processor time."""
    for line in sys.stdin.buffer:
        request = json.loads(line)
        limit_time(request["seconds"])
        result = answer(request)
        limit_time(0)
        sys.stdout.buffer.write(json.dumps(result).encode() + b"\n")
        sys.stdout.buffer.flush()
