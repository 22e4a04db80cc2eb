"""A server whose engine has two worker processes, and what is done to these.

The quick tests do the same to the parts: `test_faults` to a server whose fake engine loses workers,
and `tests/executor/test_worker_faults` and `tests/executor/workers/test_group` to real workers.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.processes import MARK, kill, marked, new_mark, wait_for_processes, workers
from tests.server.conftest import MODEL
from tests.server.starting import NO_TLS, Server, running, shared_memory, wait_until
from tests.server.test_faults import COMPLETION, LONG, Reader, whole_text

SAMPLED = LONG | {"temperature": 1, "seed": 4, "max_tokens": 200}
pytestmark = pytest.mark.slow
REASON = "the workers died 3 times within"


@pytest.fixture(scope="module")
def mark() -> str:
    return new_mark()


@pytest.fixture(scope="module")
def two_stages(mark: str) -> Iterator[Server]:
    """All tests but the last leave it as it was."""
    with running("--pp", "2", *MODEL, module="tests.server.hasty_serve", **{MARK: mark}) as server:
        yield server
    assert marked(mark) == []


@pytest.fixture(scope="module")
def whole(two_stages: Server) -> dict[str, str]:
    """Answers when nothing happens."""
    return {
        name: whole_text(two_stages, body)
        for name, body in (("greedy", LONG), ("sampled", SAMPLED))
    }


def _begin(server: Server) -> dict[str, Reader]:
    readers = {"greedy": Reader(server, LONG), "sampled": Reader(server, SAMPLED)}
    for reader in readers.values():
        reader.wait_begun()
    return readers


def _check(readers: dict[str, Reader], whole: dict[str, str]) -> None:
    for name, reader in readers.items():
        reader.join()
        assert reader.text == whole[name]


def _hang_up(server: Server) -> None:
    """Ask for something, and go away before the answer."""
    with suppress(httpx.TimeoutException):
        httpx.post(server.url + COMPLETION, json=LONG | {"seed": 9}, timeout=0.3, **NO_TLS)


def test_streams_go_on_when_a_worker_is_killed(
    two_stages: Server, mark: str, whole: dict[str, str]
) -> None:
    readers = _begin(two_stages)
    first = workers(mark)
    assert len(first) == 2
    restarts = two_stages.metric("nanoserve:engine_restarts_total")
    kill(first[1])
    killed = time.monotonic()
    wait_until(lambda: "worker 1 was killed by SIGKILL; it is restarted" in two_stages.log)
    print(f"told on stderr {1000 * (time.monotonic() - killed):.0f} ms after the kill")
    wait_until(lambda: two_stages.get("/ready").status_code == 503)
    _hang_up(two_stages)  # while new workers are being started
    assert whole_text(two_stages, LONG) == whole["greedy"], (
        "who comes while there are no workers waits for them"
    )
    _check(readers, whole)
    assert two_stages.get("/ready").status_code == 200
    assert two_stages.metric("nanoserve:worker_losses_total") == 1
    assert two_stages.metric("nanoserve:engine_restarts_total") == restarts
    now = workers(mark)
    assert len(now) == 2 and now[0] == first[0] and now[1] != first[1], (
        "the other one keeps its weights"
    )
    two_stages.wait_idle()


def test_workers_that_die_while_there_is_nothing_to_do_are_replaced(
    two_stages: Server, mark: str
) -> None:
    losses = two_stages.metric("nanoserve:worker_losses_total")
    kill(workers(mark)[0])
    wait_until(lambda: "worker 0 was killed by SIGKILL" in two_stages.log)
    two_stages.post(COMPLETION, LONG | {"max_tokens": 1})  # after which the front end knows
    assert two_stages.metric("nanoserve:worker_losses_total") == losses + 1


def test_workers_end_with_their_engine_and_streams_go_on_in_the_next(
    two_stages: Server, mark: str, whole: dict[str, str]
) -> None:
    losses = two_stages.metric("nanoserve:worker_losses_total")
    assert losses > 0
    readers = _begin(two_stages)
    processes = [two_stages.process.pid, *marked(mark)]
    assert not any(shared_memory(process) for process in processes), (
        "nothing there could be left behind"
    )
    first = workers(mark)
    kill(two_stages.engine_process_id())
    wait_until(lambda: not set(first) & set(marked(mark)))
    _check(readers, whole)
    two_stages.wait_idle()
    assert two_stages.metric("nanoserve:worker_losses_total") == losses, (
        "also those of the engine before"
    )


def test_after_three_deaths_within_a_minute_the_server_says_why_and_tries_again_later(
    two_stages: Server, mark: str, whole: dict[str, str]
) -> None:
    reader = _begin(two_stages)["greedy"]
    # the second and the third time while they are starting
    while two_stages.get("/health").status_code == 200:
        for process in workers(mark)[:1]:
            with suppress(ProcessLookupError):
                kill(process)
        time.sleep(0.05)
    for answer in (
        two_stages.post(COMPLETION, LONG),
        two_stages.get("/health"),
        two_stages.get("/ready"),
    ):
        assert answer.status_code == 503, answer.text
        assert REASON in answer.json()["error"]["message"]
    reader.join()
    assert REASON in reader.data and reader.data.endswith("data: [DONE]\n\n")
    wait_until(lambda: two_stages.get("/ready").status_code == 200)
    assert whole_text(two_stages, LONG) == whole["greedy"]


def test_workers_that_are_killed_just_before_the_end_leave_no_compiler(tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\ncase "$*" in *--version*) exit 0;; esac\nsleep 600\n')
    compiler.chmod(0o755)
    variables = {MARK: new_mark(), "CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path)}
    server = Server("--port", "0", "--pp", "2", *MODEL, **variables)
    try:
        server.wait_ready()
        # The front end, its templates, the engine, two workers, two builders; one compiles, which
        # sleeps.
        wait_for_processes(variables[MARK], 9)
        for process in workers(variables[MARK]):
            kill(process)
    finally:
        assert server.end() == 0
    wait_for_processes(variables[MARK], 0)


def test_nothing_is_left_of_a_front_end_that_was_killed(two_stages: Server, mark: str) -> None:
    _begin(two_stages)
    assert len(workers(mark)) == 2
    two_stages.process.kill()
    two_stages.process.wait()
    wait_until(lambda: marked(mark) == [])
    assert two_stages.left_behind() == []


def test_nothing_is_left_of_workers_that_die_just_before_the_end() -> None:
    mark = new_mark()
    with running("--pp", "2", *MODEL, **{MARK: mark}):  # which looks for what is left
        for worker in workers(mark):
            kill(worker)
    assert marked(mark) == []
