"""ChromeTrace: the time of stages, host link and CPU as a file for chrome://tracing or ui.perfetto.dev."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from nanoserve.costs.work import StepWork
from nanoserve.errors import RuntimeFailure
from nanoserve.scheduler.plan import StepPlan, Swap
from nanoserve.simulator.pipeline import Passage

_MICROSECONDS = 1e6
_DEVICES, _HOST = 0, 1
"""Processes of the trace: one whose threads are the stages, one for host link and CPU."""


class ChromeTrace:
    """A context in which every step becomes one bar per stage, with swaps, transitions and host attention beside them.

    Args:
        path: of the JSON file.

    Raises:
        RuntimeFailure: if it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise RuntimeFailure(f"cannot write {path}: {error.strerror or error}") from error
        self._separator = "[\n"
        self._host_tracks: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.write("[]\n" if self._separator == "[\n" else "\n]\n")
        self._file.close()

    def on_step(self, now: float, plan: StepPlan, work: StepWork, passages: Sequence[Passage]) -> None:
        """Write one step."""
        prompt = work.tokens - work.decodes
        name = f"{work.decodes} decodes + {prompt} prompt tokens"
        arguments = {"step": plan.step, "decodes": work.decodes, "prompt_tokens": prompt}
        for stage, passage in enumerate(passages):
            self._bar(name, passage, _DEVICES, stage, arguments)

    def on_swap(self, now: float, swap: Swap, tokens: int, passage: Passage) -> None:
        """Write the move of a sequence's blocks over the host link."""
        arguments = {"swap": swap.swap, "sequence": swap.sequence}
        self._host_bar(f"{tokens} tokens {swap.direction}", passage, f"link {swap.direction}", arguments)

    def on_transition(self, now: float, plan: StepPlan, passage: Passage) -> None:
        """Write the reload of another layout's weights over the host link."""
        self._host_bar(f"weights of layout {plan.transition}", passage, "link in", {"step": plan.step})

    def on_host_attention(self, passage: Passage, seconds: float, rows: int) -> None:
        """Write what the CPU computes."""
        self._host_bar(f"attention of {rows}", passage, "CPU", {"rows": rows, "seconds": seconds})

    def _host_bar(self, name: str, passage: Passage, track: str, arguments: Mapping[str, object]) -> None:
        """A bar beside the stages; what a track is called is written before its first one."""
        if track not in self._host_tracks:
            self._host_tracks.append(track)
            number = self._host_tracks.index(track)
            title = {"name": "thread_name", "ph": "M", "pid": _HOST, "tid": number, "args": {"name": track}}
            self._write(title)
        self._bar(name, passage, _HOST, self._host_tracks.index(track), arguments)

    def _bar(self, name: str, passage: Passage, process: int, track: int, arguments: Mapping[str, object]) -> None:
        start, end = (moment * _MICROSECONDS for moment in passage)
        times = {"ts": round(start, 1), "dur": round(end - start, 1)}
        self._write({"name": name, "ph": "X", **times, "pid": process, "tid": track, "args": arguments})

    def _write(self, event: Mapping[str, object]) -> None:
        self._file.write(self._separator + json.dumps(event))
        self._separator = ",\n"
