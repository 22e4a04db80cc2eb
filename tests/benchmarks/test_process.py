"""A peer in another process: what passes between them, and every way in which it can go wrong."""

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from nanoserve.benchmarks.peers.process import Batch, Opening, PeerProcess, Reply, serve
from nanoserve.errors import RuntimeFailure
from tests.benchmarks.fakes import FakePeer

OPENING = Opening("fake", "model", "float32", threads=1, max_batch=2, max_length=8)
BATCH = Batch(((1, 2), (3, 4)), 3)
CHILD = (
    "import os, sys\n"
    "from nanoserve.benchmarks.peers.process import serve\n"
    "from tests.benchmarks.fakes import FakePeer\n"
    "out = os.fdopen(os.dup(1), 'wb'); os.dup2(2, 1)\n"
    "print('noise')\n"
    "serve(sys.stdin.buffer, out, lambda opening: FakePeer('fake', 0.25))\n"
)
ROOT = Path(__file__).parents[2]
# The peer waits for its Opening, with a stdin that stays open as long as someone holds the other end: we do.
PARENT = (
    "import os, subprocess, sys, time\n"
    "reader, writer = os.pipe()\n"
    "from nanoserve.processes.children import python_command\n"
    "words = python_command('from nanoserve.benchmarks.peers.process import main; main()', str(os.getpid()))\n"
    "peer = subprocess.Popen(words, stdin=reader, stdout=subprocess.DEVNULL, pass_fds=(writer,))\n"
    "print(peer.pid, flush=True)\n"
    "time.sleep(60)\n"
)


def child(program: str = CHILD) -> PeerProcess:
    return PeerProcess("fake", OPENING, (sys.executable, "-c", program))


def test_a_batch_goes_there_and_comes_back() -> None:
    peer = child()
    try:
        assert peer.description == {"pace": 0.25}
        result = peer.run(BATCH)
        assert result == FakePeer("fake", 0.25).run(BATCH)
    finally:
        peer.close()


def test_a_peer_that_fails_says_why() -> None:
    peer = child()
    try:
        with pytest.raises(RuntimeFailure, match="fake: thirteen tokens are too many"):
            peer.run(Batch(((1,),), 13))
    finally:
        peer.close()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; print('library missing', file=sys.stderr); sys.exit(3)", "fake died: library missing"),
        ("import sys; sys.stdin.readline(); print('not JSON', flush=True)", "fake died"),
    ],
)
def test_a_peer_that_dies_is_told_with_its_last_words(program: str, message: str) -> None:
    with pytest.raises(RuntimeFailure, match=message):
        child(program)


def test_an_engine_that_cannot_be_opened_is_one_line() -> None:
    def failing(_opening: Opening) -> FakePeer:
        raise OSError("no such file\nand more")

    answers = io.BytesIO()
    serve(io.BytesIO(msgspec.json.encode(OPENING) + b"\n"), answers, failing)
    assert msgspec.json.decode(answers.getvalue(), type=Reply).complaint == "OSError: no such file"


def test_the_child_ends_with_its_stdin() -> None:
    log: list[str] = []
    questions = b"\n".join(msgspec.json.encode(question) for question in (OPENING, BATCH)) + b"\n"
    answers = io.BytesIO()
    serve(io.BytesIO(questions), answers, lambda _opening: FakePeer("fake", 1.0, log))
    first, second = answers.getvalue().splitlines()
    assert msgspec.json.decode(first, type=Reply).facts == {"pace": 1.0}
    result = msgspec.json.decode(second, type=Reply).result
    assert result is not None and len(result.timings) == 2
    assert log == ["fake", "fake closed"]


def test_a_peer_ends_with_a_benchmark_that_is_killed() -> None:
    """The child of a child watches its parent: kill that one, and the grandchild goes, too."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    peer = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 120
    while _alive(peer):
        assert time.monotonic() < deadline, "the peer lives on"
        time.sleep(0.05)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{process}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"
