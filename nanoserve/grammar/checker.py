"""Whether a JSON schema may be sent to the engine, and the process that finds out.

A schema is a small program from an untrusted client. llguidance limits most of what it may cost, but not everything:
one with a few thousand references in a row overflows the stack, and one with a large `multipleOf` computes for minutes.
In a process of its own, either ends that process and nothing else. A schema that passes there is cheap enough for the
engine.

The process runs `main`. It reads one JSON object per line: first {"directory": the tokenizer's}, then {"schema": text,
"seconds": t} for each check. It answers each check with {} or {"error": why not}.
"""

import json
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from nanoserve.errors import NanoserveError, UsageError
from nanoserve.grammar.schema import check_schema
from nanoserve.processes.children import LimitedProcess, answer_requests, limit_resources, limit_time

if TYPE_CHECKING:
    from nanoserve.grammar.compiler import GrammarCompiler

SECONDS = 0.25
"""Processor time of one check. The engine spends as much once, while others wait. Most schemas take milliseconds."""
MAX_REMEMBERED = 256
"""Number of passed schemas that are remembered; each has at most 64 KiB."""
MEMORY_LIMIT = 2 << 30
STACK_LIMIT = 2 << 20
"""A quarter of the engine's stack."""


class GrammarChecker:
    """Tries JSON schemas in a process with bounded memory and time. Safe to use from several threads.

    The process starts with the first schema.

    Args:
        directory: the directory of the model's tokenizer.
    """

    def __init__(self, directory: Path) -> None:
        self._process = LimitedProcess(
            "nanoserve.grammar.checker", "the process that tries JSON schemas", {"directory": str(directory)}
        )
        self._passed: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def knows(self, schema: str) -> bool:
        """Whether the schema has passed recently; answers at once."""
        with self._lock:
            if schema in self._passed:
                self._passed.move_to_end(schema)
                return True
            return False

    def check(self, schema: str) -> None:
        """Check that text can follow a schema.

        Raises:
            UsageError: if it cannot; the message says why.
        """
        if self.knows(schema):
            return
        answer = self._process.ask(json.dumps({"schema": schema, "seconds": SECONDS}))
        if answer is None:
            raise UsageError(f"the JSON schema is too complex: trying it took more than {SECONDS} s or too much memory")
        if "error" in answer:
            raise UsageError(answer["error"])
        with self._lock:
            self._passed[schema] = None
            if len(self._passed) > MAX_REMEMBERED:
                self._passed.popitem(last=False)

    def close(self) -> None:
        """End the process; a later check would start another."""
        self._process.close()


# ---- in the process


def check(compiler: "GrammarCompiler", request: dict[str, Any]) -> dict[str, str]:
    """Compile a schema and take the first step; {} if that works."""
    schema = request["schema"]
    try:
        limit_time(0)
        assert compiler.vocabulary  # the time to load it does not count
        limit_time(request["seconds"])
        matcher = compiler.matcher(schema)
        compiler.forget(schema)
        check_schema(msgspec.json.decode(schema))
        matcher.allowed()
    except (NanoserveError, msgspec.DecodeError) as error:
        return {"error": str(error)}
    return {}


def main() -> None:
    """Serve checks until stdin closes."""
    from nanoserve.grammar.compiler import GrammarCompiler  # numpy and the tokenizer: for this process alone

    limit_resources(MEMORY_LIMIT, STACK_LIMIT)
    compiler = GrammarCompiler(Path(json.loads(sys.stdin.buffer.readline())["directory"]))
    answer_requests(lambda request: check(compiler, request))
