"""Progress of the start of workers; no process is started."""

from pathlib import Path
from typing import ClassVar, NoReturn

import pytest

from nanoserve.engine_config import EngineConfig
from nanoserve.errors import ModelError, WorkersFailed
from nanoserve.executor.workers import executor
from nanoserve.executor.workers.group import WorkersDied
from nanoserve.executor.workers.messages import (
    FromWorker,
    Hello,
    HostLost,
    Loading,
    Prepare,
    Ready,
    ToWorker,
)
from nanoserve.models.hub import ResolvedModel, dummy_config


class FakeGroup:
    """Workers that load and become ready one after the other."""

    quiet = False

    def __init__(self, *_: object) -> None:
        self._said: list[FromWorker] = [
            Loading(0, "load", 2, 5),
            Ready(1),
            Loading(0, "load", 5, 5),
            Ready(0),
        ]

    def end_of_loading(self) -> None:
        """Nothing is shared."""

    def hear(self, _: float | None) -> list[FromWorker]:
        return [self._said.pop(0)]


def test_the_start_is_shown_before_anything_loads_and_until_all_are_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executor, "WorkerGroup", FakeGroup)
    told: list[tuple[str, int, int]] = []
    executor.WorkersExecutor(
        ResolvedModel("small", None, Path("small")),
        EngineConfig(pipeline_parallel=2),
        model=dummy_config("smollm2-135m"),
        progress=lambda stage, done, total: told.append((stage, done, total)),
    )
    start = "starting workers"
    assert told == [(start, 0, 2), ("load", 2, 5), (start, 1, 2), ("load", 5, 5), (start, 2, 2)]


class DyingGroup(FakeGroup):
    """Both are ready, then one dies; the next ones come by and by."""

    lives: ClassVar[int] = 0
    sent: ClassVar[list[ToWorker]] = []

    def __init__(self, *_: object) -> None:
        DyingGroup.lives += 1
        ready: list[FromWorker] = [Ready(0), Ready(1)]
        self._said = ready if DyingGroup.lives == 1 else [Hello(0), *ready]

    def hear(self, _: float | None) -> list[FromWorker]:
        if not self._said:
            raise WorkersDied("worker 1 was killed", 1)
        return [self._said.pop(0)]

    def send(self, message: ToWorker, ranks: object = None) -> None:
        self.sent.append(message)

    def bury(self, rank: int) -> bool:
        """Nothing is left."""
        return False


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> executor.WorkersExecutor:
    monkeypatch.setattr(DyingGroup, "lives", 0)
    monkeypatch.setattr(DyingGroup, "sent", [])
    monkeypatch.setattr(executor, "WorkerGroup", DyingGroup)
    return executor.WorkersExecutor(
        ResolvedModel("small", None, Path("small")),
        EngineConfig(pipeline_parallel=2),
        model=dummy_config("smollm2-135m"),
    )


def test_workers_that_are_started_anew_compile_no_sooner_than_they_run(
    dying: executor.WorkersExecutor,
) -> None:
    (result,) = dying.collect(None)
    assert result.lost is not None
    dying.collect(dying.now())  # the first word of one of the new ones
    dying.layers.start()
    assert DyingGroup.sent == []
    for _ in "01":
        dying.collect(dying.now())
    assert DyingGroup.sent == [Prepare()]


def test_workers_that_are_started_anew_have_lost_nothing(dying: executor.WorkersExecutor) -> None:
    dying._host_losses.tell([0])
    dying._take(HostLost(0, "it died", forgotten=1))
    assert dying.has_news
    (result,) = dying.collect(None)
    assert result.lost == "worker 1 was killed"
    assert not dying.has_news
    dying._take(HostLost(0, "it died", forgotten=0))
    assert dying.has_news


def test_how_long_workers_ran_is_told_without_the_time_of_their_start(
    dying: executor.WorkersExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 100.0
    monkeypatch.setattr(dying, "now", lambda: clock)
    monkeypatch.setattr(dying, "_running_since", clock)
    assert dying.ready
    clock += 7.5
    (first,) = dying.collect(None)
    assert (first.lost, first.ran, dying.ready) == ("worker 1 was killed", 7.5, False)
    for _ in range(3):  # words of the next ones, which take their time
        assert not dying.ready
        clock += 100
        assert dying.collect(clock) == []
    assert dying.ready
    clock += 5
    (second,) = dying.collect(None)
    assert second.ran == 5
    monkeypatch.setattr(DyingGroup, "hear", _die)
    clock += 100
    (third,) = dying.collect(None)
    assert third.ran == 0, "plans have not reached those that were starting"


def _die(*_: object) -> NoReturn:
    raise WorkersDied("worker 1 was killed", 1)


def test_a_model_that_is_gone_when_workers_are_started_anew_is_told_in_one_line(
    dying: executor.WorkersExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise ModelError("small.json: no such file")

    monkeypatch.setattr(executor, "WorkerGroup", missing)
    (result,) = dying.collect(None)
    assert result.lost == "worker 1 was killed"
    with pytest.raises(WorkersFailed, match=r"worker 1 was killed, and small\.json: no such file"):
        dying.collect(None)
    assert dying.failed
