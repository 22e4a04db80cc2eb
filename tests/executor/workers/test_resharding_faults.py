"""Workers that change their layout are killed, stopped and robbed of their files: every request
answers what it does alone, or one line says why it cannot."""

import os
import shutil
import signal
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanoserve.engine.engine import Engine
from nanoserve.errors import RuntimeFailure, WorkersFailed
from nanoserve.executor.workers.group import WorkerGroup
from nanoserve.executor.workers.messages import Allocate, ToWorker
from nanoserve.request import Place, SequenceUpdate
from nanoserve.scheduler.optional import LayoutPlan
from nanoserve.scheduler.plan import StepPlan
from nanoserve.scheduler.scheduler import Scheduler
from tests.executor.workers.disturbances import CASE, PHASES, Pair
from tests.executor.workers.loads import RESHARDING, TIGHT_BLOCKS, Case, Reference, pairwise
from tests.executor.workers.test_resharding import HOST_BLOCKS, start_pair
from tests.processes import MARK, new_mark, workers

pytestmark = pytest.mark.slow

MANY_LIVES = [
    Case(num_blocks=TIGHT_BLOCKS, host_blocks=HOST_BLOCKS, seed=seed, **chosen)
    for seed, chosen in enumerate(
        pairwise(policy=tuple(RESHARDING), token_budget=(7, 24), prefix_caching=(True, False))
    )
]


@contextmanager
def marked_as(mark: str) -> Iterator[None]:
    """Processes that are started meanwhile have that mark."""
    with pytest.MonkeyPatch().context() as patch:
        patch.setenv(MARK, mark)
        yield


@pytest.fixture(scope="module")
def pair(reference: Reference) -> Iterator[Pair]:
    with pytest.MonkeyPatch().context() as patch:
        patch.setattr("nanoserve.utils.quarantine.DEATHS_SECONDS", 0.0)
        mark = new_mark()
        with marked_as(mark), closing(start_pair(reference, "P2", "T2")) as executor:
            yield Pair(executor, reference)
        assert workers(mark) == []


@pytest.mark.parametrize(
    ("phase", "rank"),
    [(phase, number % 2) for number, phase in enumerate(PHASES) if phase != "to decode"],
)
def test_a_worker_dies_in_any_phase(pair: Pair, phase: str, rank: int) -> None:
    """While the layout changes to that of decodes, a worker stops and a worker dies in the next two
    tests."""
    pair.live_while(phase, lambda: pair.send(rank, signal.SIGKILL))


def test_a_stopped_worker_is_treated_like_a_dead_one(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanoserve.executor.workers.group.SILENCE_SECONDS", 5.0)
    pair.live_while("to decode", lambda: pair.send(0, signal.SIGCONT))


@contextmanager
def dying_before_they_open_the_pool() -> Iterator[None]:
    """Once worker 1 is killed when it is to be told how large its cache is, the last thing before
    that."""
    send, dead = WorkerGroup.send, False

    def sending(group: WorkerGroup, message: ToWorker, *ranks: Iterable[int]) -> None:
        nonlocal dead
        if not dead and isinstance(message, Allocate):
            dead = True
            for child in group._children.values():
                child.process.send_signal(signal.SIGSTOP)
            group._children[1].process.send_signal(signal.SIGKILL)
        send(group, message, *ranks)

    with pytest.MonkeyPatch().context() as patch:
        patch.setattr(WorkerGroup, "send", sending)
        yield
    assert dead


def test_workers_that_die_again_before_they_have_opened_the_pool(pair: Pair) -> None:
    with dying_before_they_open_the_pool():
        pair.live_while("to decode", lambda: pair.send(0, signal.SIGKILL), losses=2)


def test_a_start_in_which_a_worker_dies_before_it_has_opened_the_pool(reference: Reference) -> None:
    mark = new_mark()
    told = pytest.raises(
        RuntimeFailure, match=r"^worker 1 was killed by SIGKILL while it was starting$"
    )
    with told, marked_as(mark), dying_before_they_open_the_pool():
        start_pair(reference, "P2", "T2")
    assert workers(mark) == []


def test_requests_are_given_up_in_every_phase(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop strings end a sequence in the same way."""
    given_up: set[str] = set()
    stop, submit = Scheduler.stop, Engine.submit

    def stopping(
        scheduler: Scheduler, request_id: str, *arguments: Any, **settings: Any
    ) -> list[SequenceUpdate]:
        family = scheduler.table.unfinished(request_id)
        places = {sequence.index: sequence.place.value for sequence in family}
        updates = stop(scheduler, request_id, *arguments, **settings)
        for update in updates:
            layouts = scheduler.extensions.layouts
            given_up.add("draining" if layouts.changing else f"layout {layouts.current}")
            given_up.add(places[update.index])
        return updates

    def submitting(engine: Engine) -> list[SequenceUpdate]:
        """Give up a request while the device is drained: the arrivals decide when the others
        are."""
        updates = []
        if engine.status.changing[0] and "draining" not in given_up:
            updates = engine.stop(next(iter(engine.scheduler.table.requests)))
        return updates or submit(engine)

    monkeypatch.setattr(Scheduler, "stop", stopping)
    monkeypatch.setattr(Engine, "submit", submitting)
    seen = pair.reference.check(pair.executor, MANY_LIVES)
    assert seen.transitions > 4 * len(MANY_LIVES), seen
    # a move may be over before anyone stops it
    lasting = {place.value for place in Place} - {Place.MOVING.value}
    assert given_up >= {"layout 0", "layout 1", "draining", *lasting}, given_up


def test_without_its_files_the_layout_changes_and_a_death_is_the_end(
    reference: Reference, tmp_path: Path
) -> None:
    """The weights stay mapped, but new workers would have nothing to read."""
    mark, directory = new_mark(), tmp_path / "model"
    resolved = reference.resolved
    assert resolved.directory is not None
    shutil.copytree(resolved.directory, directory)
    moved = copy(reference)
    moved.resolved = replace(resolved, directory=directory)
    with marked_as(mark), closing(start_pair(moved, "P2", "T2")) as executor:
        shutil.rmtree(directory)
        assert moved.check(executor, [CASE]).transitions >= 2
        os.kill(workers(mark)[1], signal.SIGKILL)
        (result,) = executor.collect(executor.now() + 20)
        assert result.lost == "worker 1 was killed by SIGKILL"
        executor.submit(StepPlan(0, layouts=LayoutPlan(transition=1 - executor.layout)))
        with pytest.raises(
            WorkersFailed,
            match=r"^the workers died and cannot be started again: .*no such model dir",
        ):
            executor.collect(None)
    assert workers(mark) == []
