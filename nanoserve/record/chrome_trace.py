"""ChromeTraceFile: bars and counters over time as a file for ui.perfetto.dev or
chrome://tracing."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Self

from nanoserve.utils.files import unwritable_as_failure

_MICROSECONDS = 1e6


class Track(NamedTuple):
    """A line of bars in a group: a thread of a process, as the format calls them."""

    group: str
    name: str


class ChromeTraceFile:
    """A context that writes events to a JSON array in the trace event format. The array may end
    anywhere: what is in the file after a ``flush`` can be looked at, even if nothing follows it.
    Every method raises RuntimeFailure if the file cannot be written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._separator = "[\n"
        self._groups: dict[str, int] = {}
        self._tracks: dict[Track, int] = {}
        with unwritable_as_failure(path):
            self._file = path.open("w", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def bar(
        self,
        track: Track,
        name: str,
        start: float,
        end: float,
        arguments: Mapping[str, object] | None = None,
    ) -> None:
        """Something that lasts from `start` to `end`, in seconds; bars of a track lie within each
        other or apart."""
        begin, duration = round(start * _MICROSECONDS, 1), round((end - start) * _MICROSECONDS, 1)
        place = {"pid": self._group(track.group), "tid": self._track(track)}
        self._write(
            {
                "name": name,
                "ph": "X",
                "ts": begin,
                "dur": duration,
                **place,
                "args": arguments or {},
            }
        )

    def counter(self, group: str, name: str, time: float, values: Mapping[str, float]) -> None:
        """Values that hold from this moment on, in seconds; they are drawn on top of each other."""
        moment = round(time * _MICROSECONDS, 1)
        self._write(
            {"name": name, "ph": "C", "ts": moment, "pid": self._group(group), "args": values}
        )

    def flush(self) -> None:
        with unwritable_as_failure(self._path):
            self._file.flush()

    def close(self) -> None:
        """End the array; closing again does nothing."""
        if self._file.closed:
            return
        with unwritable_as_failure(self._path):
            self._file.write("[]\n" if self._separator == "[\n" else "\n]\n")
            self._file.close()

    def _group(self, name: str) -> int:
        if name not in self._groups:
            self._groups[name] = number = len(self._groups)
            self._write({"name": "process_name", "ph": "M", "pid": number, "args": {"name": name}})
            self._write(
                {
                    "name": "process_sort_index",
                    "ph": "M",
                    "pid": number,
                    "args": {"sort_index": number},
                }
            )
        return self._groups[name]

    def _track(self, track: Track) -> int:
        if track not in self._tracks:
            self._tracks[track] = number = len(self._tracks)
            place = {"pid": self._group(track.group), "tid": number}
            self._write({"name": "thread_name", "ph": "M", **place, "args": {"name": track.name}})
        return self._tracks[track]

    def _write(self, event: Mapping[str, object]) -> None:
        with unwritable_as_failure(self._path):
            self._file.write(self._separator + json.dumps(event))
        self._separator = ",\n"
