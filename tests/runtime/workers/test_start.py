"""What is told of the start of workers; no process is started."""

from pathlib import Path

import pytest

from nanoserve.config import EngineConfig
from nanoserve.models.hub import ResolvedModel
from nanoserve.runtime.workers import executor
from nanoserve.runtime.workers.messages import FromWorker, Loading, Ready


class FakeGroup:
    """Workers that load and become ready one after the other."""

    def __init__(self, _: object) -> None:
        self.loading = True
        self._said: list[FromWorker] = [Loading(0, "load", 2, 5), Ready(1), Loading(0, "load", 5, 5), Ready(0)]

    def hear(self, _: float | None) -> list[FromWorker]:
        return [self._said.pop(0)]


def test_the_start_is_shown_before_anything_loads_and_until_all_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "WorkerGroup", FakeGroup)
    told: list[tuple[str, int, int]] = []
    executor.WorkersExecutor(
        ResolvedModel("small", None, Path("small")),
        EngineConfig(pipeline_parallel=2),
        longest=64,
        progress=lambda stage, done, total: told.append((stage, done, total)),
    )
    start = "start workers"
    assert told == [(start, 0, 2), ("load", 2, 5), (start, 1, 2), ("load", 5, 5), (start, 2, 2)]
