"""Workers as the engine sees them: started, spoken to, watched and ended. Those here have no model,
nor torch."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanoserve.engine_config import EngineConfig
from nanoserve.errors import RuntimeFailure, WorkersFailed
from nanoserve.executor.workers import group as groups
from nanoserve.executor.workers.executor import WorkersExecutor
from nanoserve.layout import ParallelLayout
from nanoserve.models.hub import ResolvedModel, dummy_config
from nanoserve.scheduler.plan import Row, StepPlan, StepResult

ROOT = Path(__file__).parents[3]
WORKER = """
import json, os, sys, time
sys.path[:] = json.loads(sys.argv[1])
from pathlib import Path
import msgspec
from nanoserve.utils.watchdog import ParentWatchdog
from nanoserve.executor.workers.messages import *
from nanoserve.executor.workers.endpoint import WorkerEndpoint

watchdog = ParentWatchdog.of_this_process()
start = WorkerStart.read(watchdog.read_line())
watchdog.start()
endpoint = WorkerEndpoint(start)
endpoint.report(Loaded(start.rank, "memory", (1000,), 10**9))
endpoint.introduce(Hello(start.rank))
while True:
    match endpoint.hear():
        case Allocate():
            endpoint.report(Ready(start.rank))
        case Rejoin(start):
            endpoint.move(start)
            endpoint.report(Loaded(start.rank, "memory", (1000,), 10**9))
            endpoint.introduce(Hello(start.rank))
        case RunPlan(plan) if start.rank == 1:
            endpoint.report(Answered(StepResult(plan.step)))
        case Prepare() if start.rank == 1:
            os.kill(os.getpid(), 9)
        case Prepare():
            endpoint.report(Prepared(start.rank, True))
"""


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr("nanoserve.executor.workers.process._PROGRAM", WORKER)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield


def two_workers() -> WorkersExecutor:
    config = EngineConfig(pipeline_parallel=2, kv_cache_memory=1 << 20, max_model_len=64)
    return WorkersExecutor(
        ResolvedModel("none", None, Path()), config, model=dummy_config("smollm2-135m")
    )


def processes(workers: WorkersExecutor) -> list[int]:
    assert workers._group is not None
    return [child.process.pid for _, child in sorted(workers._group._children.items())]


def answer(workers: WorkersExecutor, step: int) -> StepResult:
    workers.submit(StepPlan(step, rows=(Row(0, 0, (1,), True),)))
    (result,) = workers.collect(None)
    return result


def loss(workers: WorkersExecutor) -> str | None:
    (result,) = workers.collect(workers.now() + 20)
    return result.lost


def mine() -> tuple[int, int, int]:
    """Descriptors, threads and directories of this process."""
    return (
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        len(os.listdir(tempfile.gettempdir())),
    )


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_deaths_and_ends_leave_nothing_behind() -> None:
    with closing(two_workers()):
        pass  # what ZeroMQ makes once
    before = mine()
    with closing(two_workers()) as workers:
        running = mine()
        for rank in range(2):
            assert answer(workers, rank) == StepResult(rank)
            os.kill(processes(workers)[rank], signal.SIGKILL)
            assert loss(workers) == f"worker {rank} was killed by SIGKILL"
            assert answer(workers, 11) == StepResult(11)
            assert mine() == running
    assert mine() == before


def test_a_worker_that_dies_while_somebody_waits_for_its_layers() -> None:
    """Nobody but `collect` can tell the scheduler that all is lost."""
    with closing(two_workers()) as workers:
        workers.layers.start()
        workers.layers.wait()
        assert not workers.layers.loaded
        assert loss(workers) == "worker 1 was killed by SIGKILL"


def test_workers_that_are_stopped_are_not_ready_long_before_they_are_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(groups, "_QUIET_SECONDS", 1.0)

    def wait_until(ready: bool) -> None:  # noqa: FBT001
        until = workers.now() + 20
        while workers.ready is not ready:
            assert workers.now() < until
            assert workers.collect(workers.now() + 0.1) == []

    with closing(two_workers()) as workers:
        assert workers.ready
        os.kill(processes(workers)[0], signal.SIGSTOP)
        wait_until(ready=False)
        os.kill(processes(workers)[0], signal.SIGCONT)
        wait_until(ready=True)
        assert workers.deaths == 0


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="elsewhere it is in files")
def test_what_workers_share_has_a_name_until_all_are_ready(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The blocks of the host tier, and with two layouts the weights of a model that has none in
    files."""
    monkeypatch.setattr(
        "nanoserve.executor.workers.process._PROGRAM", WORKER.replace("(1000,)", "(1000, 1000)")
    )
    shape = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 16,
        "hidden_size": 8,
    }
    shape |= {
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "rms_norm_eps": 1e-5,
    }
    (tmp_path / "small.json").write_text(json.dumps(shape | {"max_position_embeddings": 64}))
    name = f"dummy:{tmp_path / 'small.json'}"
    decode = ParallelLayout(tensor_parallel=2)
    config = EngineConfig(
        pipeline_parallel=2, decode_layout=decode, kv_cache_memory=1 << 20, max_model_len=64
    )
    named: list[str] = []
    end_of_loading = groups.WorkerGroup.end_of_loading

    def files(group: groups.WorkerGroup) -> list[str]:
        assert group._directory is not None
        return sorted(path.name for path in group._directory.rglob("*") if path.is_symlink())

    def ending(group: groups.WorkerGroup) -> None:
        named.extend(files(group))
        end_of_loading(group)

    monkeypatch.setattr(groups.WorkerGroup, "end_of_loading", ending)
    workers = WorkersExecutor(
        ResolvedModel(name, None, Path()), config, model=dummy_config(name), host_blocks=3
    )
    with closing(workers):
        assert named == ["blocks", "model.safetensors"]
        assert workers._group is not None and files(workers._group) == []


def test_workers_that_cannot_be_started_again_are_not_tried_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The files of the model are gone since the first ones read them, say."""
    with closing(two_workers()) as workers:
        gone = "endpoint.report(WorkerFailed(start.rank, 'small: no such model directory', 3))"
        refusing = WORKER.replace(
            "endpoint.report(Loaded", f"{gone}\ntime.sleep(9)\nendpoint.report(Loaded", 1
        )
        monkeypatch.setattr("nanoserve.executor.workers.process._PROGRAM", refusing)
        os.kill(processes(workers)[0], signal.SIGKILL)
        assert loss(workers) == "worker 0 was killed by SIGKILL"
        expected = "^the workers died and cannot be started again: small: no such model directory$"
        with pytest.raises(WorkersFailed, match=expected):
            answer(workers, 0)
        assert workers.deaths == 2


def test_the_first_worker_ends_if_the_second_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = []

    class OnlyOnce(subprocess.Popen[bytes]):
        def __init__(self, *arguments: object, **settings: object) -> None:
            if started:
                raise OSError(11, "Resource temporarily unavailable")
            started.append(self)
            super().__init__(*arguments, **settings)

    monkeypatch.setattr(subprocess, "Popen", OnlyOnce)
    with pytest.raises(
        RuntimeFailure, match="the workers cannot be started: Resource temporarily unavailable"
    ):
        two_workers()
    assert started[0].returncode is not None, "nobody has waited for it"


def test_workers_that_slept_with_the_engine_are_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of a machine that is paused as a whole do that: the engine may be the first to
    wake up."""
    with closing(two_workers()) as workers:
        for process in processes(workers):
            os.kill(process, signal.SIGSTOP)
        for _ in range(2):
            assert workers.collect(workers.now()) == []
        later = time.monotonic() + 2 * groups.SILENCE_SECONDS
        with monkeypatch.context() as patch:
            patch.setattr(groups, "time", SimpleNamespace(monotonic=lambda: later))
            assert workers.collect(workers.now()) == []
        for process in processes(workers):
            os.kill(process, signal.SIGCONT)
        assert answer(workers, 0) == StepResult(0)


@pytest.mark.slow
def test_an_engine_that_is_stopped_for_a_while_keeps_its_workers(tmp_path: Path) -> None:
    """Ctrl-Z and fg: the plan that it sends at once finds them."""
    program = (
        "import sys; from tests.executor.workers import test_group as test\n"
        "import nanoserve.executor.workers.process as process; process._PROGRAM = test.WORKER\n"
        "test.groups.SILENCE_SECONDS = 2.0\n"
        "workers = test.two_workers(); print('started', flush=True); sys.stdin.readline()\n"
        "print(test.answer(workers, 0).step, flush=True); workers.close()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as engine:
        assert engine.stdin is not None and engine.stdout is not None
        assert engine.stdout.readline() == "started\n"
        engine.send_signal(signal.SIGSTOP)
        time.sleep(3)
        engine.stdin.write("\n")
        engine.stdin.flush()
        engine.send_signal(signal.SIGCONT)
        watch = threading.Timer(240, engine.kill)
        watch.start()
        assert engine.stdout.readline() == "0\n"
        watch.cancel()
