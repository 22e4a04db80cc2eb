"""Servers and batches that are stopped, interrupted or left while the CPU attends: nothing stays
behind or is lost."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.commands.test_pair_faults import TIGHT, Batch, answers, rows_are_there
from tests.executor.cpu_attention.servers import BODIES, HYBRID, MODEL, busy, texts, whole_texts
from tests.server.starting import (
    NO_TLS,
    PATIENCE_SECONDS,
    Server,
    running,
    shared_memory,
    wait_until,
)
from tests.server.test_faults import COMPLETION, Reader

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole() -> list[str]:
    """Answers where the device has room for all."""
    return whole_texts()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(*HYBRID, *MODEL) as server:
        yield server


def test_answers_are_those_of_a_device_with_room_for_all(server: Server, whole: list[str]) -> None:
    readers = busy(server)
    assert texts(readers) == whole
    server.wait_idle()
    assert server.metric("nanoserve:host_kv_cache_usage_perc") == 0


def test_clients_that_leave_in_mid_token(server: Server, whole: list[str]) -> None:
    """Their blocks come back, on both tiers; who stays is answered."""
    stays = Reader(server, BODIES[0])
    for _ in range(3):
        for body in BODIES[1:]:
            with httpx.stream(
                "POST",
                server.url + COMPLETION,
                json=body | {"stream": True},
                timeout=PATIENCE_SECONDS,
                **NO_TLS,
            ) as answer:
                next(answer.iter_text())
    stays.join()
    assert stays.text == whole[0]
    server.wait_idle()
    wait_until(lambda: server.metric("nanoserve:host_kv_cache_usage_perc") == 0)


def test_an_engine_that_is_stopped_for_a_moment_goes_on(server: Server, whole: list[str]) -> None:
    readers, engine = busy(server), server.engine_process_id()
    os.kill(engine, signal.SIGSTOP)
    time.sleep(0.8)
    os.kill(engine, signal.SIGCONT)
    assert texts(readers) == whole
    assert (
        server.engine_process_id() == engine and server.metric("nanoserve:host_losses_total") == 0
    )


def test_an_engine_that_is_killed_is_replaced(server: Server, whole: list[str]) -> None:
    readers = busy(server)
    os.kill(server.engine_process_id(), signal.SIGKILL)
    assert texts(readers) == whole


def test_a_server_that_is_told_to_end_answers_what_it_has(server: Server, whole: list[str]) -> None:
    """The last test of this server. `tests/executor/workers/test_hybrid_engines` sends SIGTERM,
    once and twice."""
    readers, processes = busy(server), [server.process.pid, *server.descendants()]
    assert not any(shared_memory(process) for process in processes), (
        "nothing there could be left behind"
    )
    server.process.send_signal(signal.SIGINT)
    assert texts(readers) == whole
    assert server.process.wait(PATIENCE_SECONDS) == 0, server.log


def test_an_interrupted_batch_goes_on_and_says_the_same(tmp_path: Path) -> None:
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    for folder in (whole, torn):
        folder.mkdir()
    Batch(whole, *TIGHT, "--eager", layouts=()).end()
    small = (
        "--kv-cache-memory",
        "1MiB",
        "--host-kv-memory",
        "8MiB",
        "--policy",
        "overlap",
        "--eager",
    )
    batch = Batch(torn, *TIGHT, *small, layouts=())
    batch.wait_for(rows_are_there(8))
    batch.process.send_signal(signal.SIGINT)
    (line,) = batch.end()
    assert batch.process.returncode == 130, line
    assert line.startswith("nanoserve: interrupted: ") and line.endswith(
        "the same command goes on from here"
    )
    Batch(torn, *TIGHT, *small, layouts=()).end()
    assert answers(torn / "out.jsonl") == answers(whole / "out.jsonl")
    assert (
        json.loads((torn / "out.jsonl").read_text().splitlines()[0])["usage"]["completion_tokens"]
        > 0
    )
