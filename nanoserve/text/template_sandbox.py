"""The parent's side of `template_process`: start it, ask it, end it."""

import contextlib
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoserve.errors import ModelError, UsageError

# A rendering of a long conversation takes a few milliseconds; bombs are the only ones to meet these.
SECONDS = 0.5
FUEL = 500_000
FUEL_PER_CHARACTER = 20
MAX_CHARACTERS = 1 << 20
MAX_GROWTH = 4
# Processor time is limited inside the process; this only catches one that neither computes nor answers.
SILENCE_SECONDS = 20.0

# Where nanoserve itself is: an editable installation is found by a hook of the site, not on the path.
_PACKAGES = str(Path(__file__).parents[2])
_COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);from nanoserve.text.template_process import main; main()"
)


class TemplateSandbox:
    """Renders one template in a process with bounded memory and time. Safe to use from several threads."""

    def __init__(self, template: str, origin: str) -> None:
        self._template = template
        self._origin = origin
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def render(self, context: Mapping[str, Any]) -> str:
        """The rendered text.

        Raises UsageError with the template's own words when it refuses the conversation, ModelError when it is broken
        or wants more time, memory or output than any conversation needs.
        """
        request = json.dumps({"context": context})
        limits = {
            "fuel": FUEL + FUEL_PER_CHARACTER * len(request),
            "max_characters": MAX_CHARACTERS + MAX_GROWTH * len(request),
            "seconds": SECONDS,
        }
        with self._lock:
            answer = self._ask(request[:-1] + ", " + json.dumps(limits)[1:])
        if "refusal" in answer:
            raise UsageError(f"the model's chat template refuses these messages: {answer['refusal']}")
        if "error" in answer:
            raise ModelError(f"the chat template in {self._origin} fails: {answer['error']}")
        return answer["text"]

    def close(self) -> None:
        """End the process; a later rendering would start another."""
        with self._lock:
            self._discard()

    def _start(self) -> subprocess.Popen[bytes]:
        # -I and -S: the process needs none of the site's start-up work, only the paths on which we found our packages.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _COMMAND, json.dumps([_PACKAGES, *sys.path])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._process = process
        self._finalizer = weakref.finalize(self, _end, process)
        self._send(process, json.dumps({"template": self._template}))
        return process

    def _discard(self) -> None:
        if self._process is not None:
            self._finalizer()
            self._process = None

    @staticmethod
    def _send(process: subprocess.Popen[bytes], line: str) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died; the missing answer will tell
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()

    def _ask(self, line: str) -> dict[str, str]:
        process = self._process or self._start()
        assert process.stdout is not None
        self._send(process, line)
        watchdog = threading.Timer(SILENCE_SECONDS, process.kill)
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
            self._discard()
            return {"error": "it needs more memory or time than a template may have"}
        result: dict[str, str] = json.loads(answer)
        return result


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
