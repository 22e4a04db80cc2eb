"""A benchmark's results on disk: one JSON object, rewritten after every row so that nothing
measured is lost."""

import json
from pathlib import Path
from typing import Any

import msgspec

from nanoserve.errors import UsageError
from nanoserve.lab.benchmarks.machine import describe_run
from nanoserve.lab.benchmarks.rounds import busy_note
from nanoserve.utils.files import read_bytes, replace_file

SCHEMA = "nanoserve-bench/1"


class Report:
    """Rows of one benchmark of this kind and settings, with where and how they were measured, in
    the JSON file at ``path`` or in memory alone. Raises RuntimeFailure at once if that file cannot
    be written."""

    def __init__(self, kind: str, settings: dict[str, Any], path: Path | None) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.document: dict[str, Any] = {
            "schema": SCHEMA,
            "kind": kind,
            "complete": False,
            **describe_run(),
        }
        self.document |= {"settings": settings, "rows": self.rows, "notes": []}
        self._write()

    @property
    def busy_note(self) -> str | None:
        """Whether other programs were at work beside any row, in a sentence."""
        parts = [row.get("round", row) for row in self.rows]
        return busy_note(max((part.get("foreign_cores") or 0.0 for part in parts), default=None))

    def titled(self, title: str) -> str:
        """The title of a picture, with that sentence below it."""
        return "\n".join(filter(None, (title, self.busy_note)))

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row, on disk too."""
        self.rows.append(msgspec.to_builtins(row))
        self._write()

    def update(self, place: int, fields: dict[str, Any]) -> None:
        """Put fields into the row at that place."""
        self.rows[place] |= msgspec.to_builtins(fields)
        self._write()

    def note(self, text: str) -> None:
        """Keep a remark that belongs to the results."""
        self.document["notes"].append(text)
        self._write()

    def put(self, name: str, value: Any) -> None:
        """Keep something that is no row, such as a summary."""
        self.document[name] = msgspec.to_builtins(value)
        self._write()

    def finish(self) -> None:
        self.put("complete", True)

    def _write(self) -> None:
        if self.path is not None:
            replace_file(self.path, json.dumps(self.document, indent=1) + "\n")


def read_report(
    path: Path, *, schema: str = SCHEMA, content: str = "a report of nanoserve bench"
) -> dict[str, Any]:
    """A document of this schema, read from its file. Raises UsageError if the file is not one."""
    try:
        document: Any = json.loads(read_bytes(path, UsageError))
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    found: dict[str, Any] = {}
    if isinstance(document, dict):
        found = document
    if found.get("schema") != schema or (
        schema == SCHEMA and not isinstance(found.get("rows"), list)
    ):
        raise UsageError(f"{path} is not {content} ({schema})")
    return found
