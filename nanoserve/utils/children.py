"""Child processes that run nanoserve's code, and children with limits for untrusted work.

If a `LimitedProcess` hangs, crashes or eats memory, nothing else is harmed. The child's side is a
module whose `main` sets its limits with `limit_resources`, calls `take_questions` when it has
loaded what it needs, and then `answer_requests`. Questions and answers are lines of JSON.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanoserve.errors import RuntimeFailure

# tries at a question whose process is killed from outside, as the system does when memory is short
ATTEMPTS = 2
SILENCE_SECONDS = 20.0
"""Limit for a child that neither computes nor answers, as if it is stopped. Its processor time is
limited inside it."""
START_SECONDS = 60.0  # processor time until it takes questions: large vocabularies take a second
_LOOKS = 20  # times that a silent child's processor time is read until it is given up
GRACE_SECONDS = 2.0  # time for a child to end by itself before it is killed
# a child's own limits end it by other signals
_KILLED_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
# Places in /proc/PID/stat, counted from after the program's name (proc(5)).
_USER_TICKS = 11
_SYSTEM_TICKS = 12
_PACKAGES = str(Path(__file__).parents[2])
"""The directory of the package. An editable installation is found by an import hook, which children
may lack."""


def python_command(program: str, *arguments: str, flags: Sequence[str] = ()) -> list[str]:
    """The command of a Python process that finds the same packages; `arguments` are its
    sys.argv[2:]."""
    prepare = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    search_path = [_PACKAGES] + sys.path
    return [sys.executable, *flags, "-c", prepare + program, json.dumps(search_path), *arguments]


def send_line(process: subprocess.Popen[bytes], line: bytes) -> None:
    """Send a line to a child's stdin; a dead child does not read it."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(line + b"\n")
        process.stdin.flush()


def run_module(
    module: str, *words: str, environment: Mapping[str, str], failing: str = ""
) -> dict[str, Any]:
    """Run a module with these arguments and variables. Returns the JSON object on the last line of
    its stdout.

    If it fails, raises RuntimeFailure with `failing` and the last line of its stderr.
    """
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeFailure(failing + lines[-1])
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


class ProcessUnavailable(RuntimeFailure):
    """The child cannot be started, is closed, or was killed from outside again and again: nothing
    is wrong with the question."""


class _Killed(Exception):
    """The child was killed from outside, or was stopped."""


class LimitedProcess:
    """A child that answers one line of JSON with another, one at a time. Safe to use from several
    threads.

    It runs the `main` of ``module`` and first reads the line ``greeting``; ``purpose`` is its name
    in messages.
    """

    def __init__(self, module: str, purpose: str, greeting: dict[str, Any]) -> None:
        # -I and -S: the child skips the start-up work of site.
        self._command = python_command(f"from {module} import main; main()", flags=("-I", "-S"))
        self._purpose = purpose
        self._greeting = json.dumps(greeting).encode()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._takes_questions = False
        self._closed = False

    def start(self) -> None:
        """Start the child now, so that it loads in the background; otherwise `ask` starts it."""
        with self._lock:
            self._running()

    def ask(self, line: str) -> dict[str, Any] | None:
        """Ask a question and return the answer, or None if the child died over it. Then the next
        question starts another child.

        Raises ProcessUnavailable if it cannot be started, was killed from outside or stopped in
        every attempt, or is closed, and RuntimeFailure if it dies before it takes questions.
        """
        with self._lock:
            for _ in range(ATTEMPTS):
                with contextlib.suppress(_Killed):
                    return self._ask(line)
        killed = f"{self._purpose} was killed {ATTEMPTS} times, or stopped"
        raise ProcessUnavailable(f"{killed}; is the machine short of memory?")

    def close(self) -> None:
        """End the process for good. The question that it is answering fails, and so does every
        later one."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()  # before waiting for the lock, which the question holds
        with self._lock:
            self._discard()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None and not self._closed:
            pipe = subprocess.PIPE
            try:
                self._process = subprocess.Popen(
                    self._command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
                )
            except OSError as error:
                raise ProcessUnavailable(
                    f"{self._purpose} cannot be started: {error.strerror or error}"
                ) from error
            self._finalizer = weakref.finalize(self, _end, self._process)
            send_line(self._process, self._greeting)
        if self._process is None or self._closed:
            raise ProcessUnavailable(f"{self._purpose} was ended")
        return self._process

    def _discard(self) -> None:
        if self._process is not None:
            self._finalizer()
            self._process = None
            self._takes_questions = False

    def _ask(self, line: str) -> dict[str, Any] | None:
        process = self._running()
        if not self._takes_questions:
            if not self._read_line(process):
                raise RuntimeFailure(
                    f"{self._purpose} does not start: it ended with code {process.returncode}"
                )
            self._takes_questions = True
        send_line(process, line.encode())
        line_of_answer = self._read_line(process)
        if not line_of_answer:
            return None
        answer: dict[str, Any] = json.loads(line_of_answer)
        return answer

    def _read_line(self, process: subprocess.Popen[bytes]) -> bytes:
        """The next line of the child; empty if it died without one, by its own limits. Raises
        _Killed if it was killed from outside, or was silent for too long."""
        assert process.stdout is not None
        try:
            with _killed_in_silence(process):
                line = process.stdout.readline()
        except BaseException:
            self._discard()  # otherwise the answer would be read as that of the next question
            raise
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
            self._discard()
            if process.returncode in _KILLED_FROM_OUTSIDE:
                raise _Killed
        return line


@contextlib.contextmanager
def _killed_in_silence(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill a process that uses no processor time for SILENCE_SECONDS inside the block. On a busy
    machine, seconds of work may take minutes, so a process that still computes is left alone."""
    answered = threading.Event()

    def watch() -> None:
        computed = processor_seconds(process.pid)
        looks = 0  # times in a row that it has computed nothing
        while looks < _LOOKS and not answered.wait(SILENCE_SECONDS / _LOOKS):
            before = computed
            computed = processor_seconds(process.pid)
            if computed == before:
                looks += 1
            else:
                looks = 0
        if not answered.is_set():
            process.kill()

    watcher = threading.Thread(target=watch, name="silence", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        answered.set()
        watcher.join()


def processor_seconds(process: int) -> float:
    """Processor time of a process so far. Always 0 where there is no /proc (macOS), so that it
    seems not to compute."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0.0
    fields = text.rpartition(")")[2].split()
    return (int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])) / os.sysconf("SC_CLK_TCK")


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError), process:  # which closes its pipes and waits
        process.kill()


def limit_resources(memory: int, stack: int | None = None) -> None:
    """Bound this process's memory and stack, in bytes, and the time until it takes questions.
    Ctrl-C at the terminal then reaches the parent alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit_time(START_SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if stack is not None:
        resource.setrlimit(resource.RLIMIT_STACK, (stack, stack))


def forbid_files_and_processes() -> None:
    """Let this process open no file or socket, write no file and start no process, whatever code
    runs in it.

    Its stdin and stdout stay open. A process of root could lift these limits again.
    """
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(limit, (0, 0))


def limit_time(seconds: float) -> None:
    """End this process when it has computed for `seconds`; 0 lifts the limit. Waiting does not
    count."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def take_questions() -> None:
    """Tell the parent that this process takes questions. From here on, its death answers the
    question."""
    _say({})


def answer_requests(answer: Callable[[dict[str, Any]], dict[str, str]]) -> None:
    """Answer the objects on stdin, one per line, until it closes. `seconds` of each is its
    processor time."""
    for line in sys.stdin.buffer:
        request = json.loads(line)
        limit_time(request["seconds"])
        result = answer(request)
        _say(result)


def _say(result: dict[str, str]) -> None:
    limit_time(0)
    sys.stdout.buffer.write(json.dumps(result).encode() + b"\n")
    sys.stdout.buffer.flush()
