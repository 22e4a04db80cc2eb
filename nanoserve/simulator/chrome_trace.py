"""ChromeTrace: the stages' time as a file for chrome://tracing or ui.perfetto.dev, written as it passes."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from nanoserve.costs.work import StepWork
from nanoserve.errors import RuntimeFailure
from nanoserve.scheduler.plan import StepPlan
from nanoserve.simulator.pipeline import Passage

_MICROSECONDS = 1e6


class ChromeTrace:
    """A context in which every step becomes one bar per stage.

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
        for stage, passage in enumerate(passages):
            event = {
                "name": f"{work.decodes} decodes + {prompt} prompt tokens",
                "ph": "X",
                "ts": round(passage.start * _MICROSECONDS, 1),
                "dur": round((passage.end - passage.start) * _MICROSECONDS, 1),
                "pid": 0,
                "tid": stage,
                "args": {"step": plan.step, "decodes": work.decodes, "prompt_tokens": prompt},
            }
            self._file.write(self._separator + json.dumps(event))
            self._separator = ",\n"
