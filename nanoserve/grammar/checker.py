"""The parent's side of `check_process`: whether a JSON schema may be sent to the engine."""

import json
import threading
from collections import OrderedDict
from pathlib import Path

from nanoserve.errors import UsageError
from nanoserve.processes.children import LimitedProcess

SECONDS = 0.25
"""Processor time of one check. The engine spends as much once, while others wait. Most schemas take milliseconds."""
MAX_REMEMBERED = 256
"""Number of passed schemas that are remembered; each has at most 64 KiB."""


class GrammarChecker:
    """Tries JSON schemas in a process with bounded memory and time. Safe to use from several threads.

    The process starts with the first schema.

    Args:
        directory: the directory of the model's tokenizer.
    """

    def __init__(self, directory: Path) -> None:
        self._process = LimitedProcess(
            "nanoserve.grammar.check_process", "the process that tries JSON schemas", {"directory": str(directory)}
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
