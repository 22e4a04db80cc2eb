"""A batch under two layouts whose engine is killed, interrupted, or has no room: nothing stays
behind, nothing is lost.

Each is a process of its own, ``nanoserve generate``, with a temporary directory that nobody else
uses.
"""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from nanoserve.utils.temporary import choose_directory
from tests.processes import MARK, marked, new_mark

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = Path("/dev/shm")
PATIENCE = 600.0
PAIR = ("--prefill-parallel", "p2", "--decode-parallel", "t2", "--eager")
TIGHT = ("--dtype", "float32", "--seed", "3", "--max-model-len", "128", "--max-num-seqs", "4")
SMALL = ("--kv-cache-memory", "512KiB", "--host-kv-memory", "1MiB")
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 49152,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


class Batch:
    """A batch in a folder, and the process that answers it."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        rows: int = 24,
        layouts: Sequence[str] = PAIR,
        wrapped: str = "exec",
    ) -> None:
        self.target = folder / "out.jsonl"
        self._temporary = folder / "temporary"
        self._temporary.mkdir(exist_ok=True)
        self._names: set[str] = set()
        self._mark = new_mark()
        self._shared_seen = False
        command = [
            sys.executable,
            "-m",
            "nanoserve",
            "generate",
            "--file",
            str(_rows(folder, rows)),
        ]
        command += ["--output", str(self.target), *layouts, *options]
        self.process = subprocess.Popen(
            ["sh", "-c", f'{wrapped} "$@"', "sh", *command],
            cwd=ROOT,
            env=os.environ
            | {MARK: self._mark, "TMPDIR": str(self._temporary), "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def shared(self) -> list[str]:
        """Names of what its workers have together in memory."""
        self._names |= {path.name for path in self._temporary.glob("nanoserve-*")}
        found = [
            path.name for path in self._temporary.glob("nanoserve-*/**/*") if path.is_symlink()
        ]
        self._shared_seen |= bool(found)
        return found

    @property
    def left_in_file_systems(self) -> list[Path]:
        """List things that outlive all processes, but for temporary files: shared memory, and sockets."""
        shared = [path for name in self._names for path in SHARED_MEMORY.glob(f"{name}*")]
        return [*shared, *(path for path in self._temporary.rglob("*") if path.is_socket())]

    @property
    def started(self) -> bool:
        """Whether all workers have what they share, which then needs no name any more."""
        return not self.shared and self._shared_seen

    def wait_for(self, known: Callable[["Batch"], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not known(self):
            assert time.monotonic() < deadline and self.process.poll() is None, (
                self.process.communicate()
            )
            time.sleep(0.005)

    def kill_all(self) -> None:
        """Stopped first, so that none sees another's end."""
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in marked(self._mark):
                os.kill(process, number)
        self.process.communicate(timeout=PATIENCE)

    def end(self) -> list[str]:
        """Its lines but advice and progress, once it has ended and left nothing behind."""
        lines = self.process.communicate(timeout=PATIENCE)[1].splitlines()
        deadline = time.monotonic() + PATIENCE
        while left := [*marked(self._mark), *self._temporary.iterdir(), *self.left_in_file_systems]:
            assert time.monotonic() < deadline, left
            time.sleep(0.01)
        remarks = ("predicted: ", "nanoserve: compiling ")
        passing = re.compile(r": \d+%, about ")
        return [line for line in lines if not line.startswith(remarks) and not passing.search(line)]


def _rows(folder: Path, count: int) -> Path:
    choice, path = random.Random(1), folder / "in.jsonl"
    rows = [
        {
            "id": number,
            "prompt": "Once upon a time. " * choice.randint(1, 12),
            "max_tokens": choice.randint(2, 40),
        }
        | {"temperature": number % 2}
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answers(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        del row["usage"]["cached_tokens"]
    return sorted(rows, key=lambda row: row["index"])


def rows_are_there(count: int) -> Callable[[Batch], object]:
    return lambda batch: batch.target.exists() and batch.target.read_bytes().count(b"\n") >= count


MOMENTS: dict[str, Callable[[Batch], object]] = {
    "workers start": lambda batch: list((batch.target.parent / "temporary").iterdir()),
    "weights are written": lambda batch: {"blocks", "model.safetensors"} <= set(batch.shared),
    "workers load": lambda batch: list(
        (batch.target.parent / "temporary").glob("*/model/config.json")
    ),
    "all are ready": lambda batch: batch.started,
    "rows are answered": rows_are_there(1),
}


@pytest.mark.parametrize(
    "moment", ["workers start", "weights are written", "workers load", "rows are answered"]
)
def test_an_engine_that_is_killed_leaves_nothing_behind(tmp_path: Path, moment: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    batch = Batch(tmp_path, "--model", f"dummy:{tmp_path / 'config.json'}", *TIGHT, *SMALL)
    batch.wait_for(MOMENTS[moment])
    batch.process.kill()
    batch.end()


@pytest.mark.parametrize("moment", ["weights are written", "all are ready"])
def test_when_all_processes_are_killed_at_once_the_next_start_removes_the_rest(
    tmp_path: Path, moment: str
) -> None:
    """Kill all processes, as a service manager does that stops a whole control group: nobody is left to clean up."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    batch = Batch(tmp_path, "--model", f"dummy:{tmp_path / 'config.json'}", *TIGHT, *SMALL)
    batch.wait_for(MOMENTS[moment])
    batch.kill_all()
    assert batch.left_in_file_systems == []
    choose_directory(tmp_path / "temporary")
    batch.end()


def test_an_interrupted_batch_goes_on_and_says_the_same(tmp_path: Path) -> None:
    """Interrupted while the workers start, when they are ready, and between the layouts behind."""
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    for folder in (whole, torn):
        folder.mkdir()
    lines = Batch(whole, *TIGHT, *SMALL).end()
    assert len(lines) == 1, lines
    (line,) = lines
    transitions = re.search(r"(\d+) transitions", line)
    assert transitions is not None and int(transitions[1]) > 4, line
    for moment in (MOMENTS["workers start"], MOMENTS["all are ready"], rows_are_there(8)):
        batch = Batch(torn, *TIGHT, *SMALL)
        batch.wait_for(moment)
        before = batch.target.read_bytes() if batch.target.exists() else b""
        batch.process.send_signal(signal.SIGINT)
        lines = batch.end()
        assert batch.process.returncode == 130, lines
        assert len(lines) == 1, lines
        (line,) = lines
        assert line.startswith("nanoserve: interrupted: ") and line.endswith(
            "the same command goes on from here"
        )
        assert batch.target.read_bytes().startswith(before)
    Batch(torn, *TIGHT, *SMALL).end()
    assert answers(torn / "out.jsonl") == answers(whole / "out.jsonl")


mounting = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root mounts file systems"
)


@mounting
def test_the_file_system_of_shared_memory_is_not_needed(tmp_path: Path) -> None:
    """In a container it is 64 MB by default. What is shared there was limited by it, and could be
    left in it."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    mounted = "mount -t tmpfs -o size=4k,ro tmpfs /dev/shm && exec"
    options = ("--model", f"dummy:{tmp_path / 'config.json'}", *TIGHT, *SMALL)
    batch = Batch(
        tmp_path, *options, rows=6, wrapped=f"exec unshare --mount sh -c '{mounted} \"$@\"' sh"
    )
    lines = batch.end()
    assert batch.process.returncode == 0, lines


@mounting
def test_workers_that_do_not_share_memory(tmp_path: Path) -> None:
    """The second of torchrun's processes has temporary files of its own, as on another machine."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
    ]
    launch += ["--master-addr", "127.0.0.1", "--master-port", port]
    command = [
        "-m",
        "nanoserve",
        "generate",
        "--file",
        str(_rows(tmp_path, 6)),
        "--output",
        str(tmp_path / "out.jsonl"),
    ]
    command += [
        *PAIR,
        *SMALL,
        "--max-model-len",
        "128",
        "--model",
        f"dummy:{tmp_path / 'config.json'}",
    ]
    (temporary := tmp_path / "temporary").mkdir()
    elsewhere = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        f'mount -t tmpfs tmpfs {temporary} && exec "$@"',
        "sh",
    ]
    mark = new_mark()
    processes = [
        subprocess.Popen(
            [*place, *launch, "--node-rank", str(number), *command],
            cwd=ROOT,
            env=os.environ
            | {
                MARK: mark,
                "PYTHONPATH": str(ROOT),
                "GLOO_SOCKET_IFNAME": "lo",
                "TMPDIR": str(temporary),
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, place in enumerate(([], elsewhere))
    ]
    said = [process.communicate(timeout=PATIENCE)[1].splitlines() for process in processes]
    (line,) = [line for line in said[0] if line.startswith("nanoserve: ")]
    assert line.startswith(f"nanoserve: cannot open the host pool {temporary}/nanoserve-")
    assert line.endswith("so they must run on one machine, and in one container")
    assert "nanoserve: the command failed on the first machine, which says why" in said[1]
    assert all(process.returncode != 0 for process in processes) and marked(mark) == []
