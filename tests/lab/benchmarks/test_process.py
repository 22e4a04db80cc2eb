"""A peer in another process: what passes between them, and every way in which it can go wrong."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanoserve.errors import RuntimeFailure
from nanoserve.lab.benchmarks.peers.process import Opening, PeerProcess
from nanoserve.lab.commands.bench_compare import sentence
from tests.lab.benchmarks.fakes import FakePeer

OPENING = Opening(
    engine="fake", model="model", dtype="float32", threads=1, max_batch=2, max_length=8
)
PROMPTS = ((1, 2), (3, 4))
ROOT = Path(__file__).parents[3]
CHILD = (
    "from multiprocessing.connection import Connection\n"
    "from nanoserve.lab.benchmarks.peers.process import serve\n"
    "from tests.lab.benchmarks.fakes import FakePeer\n"
    "print('noise')\n"
    "serve(Connection(int(sys.argv[3])), lambda opening: FakePeer('fake', 0.25))\n"
)
# The peer waits for its Opening at a pipe that stays open as long as someone holds the other end:
# it holds both.
PARENT = (
    "import multiprocessing, os, subprocess, sys, time\n"
    "from nanoserve.utils.watchdog import LoggedChild\n"
    "ours, theirs = multiprocessing.Pipe()\n"
    "number, both = theirs.fileno(), [theirs.fileno(), ours.fileno()]\n"
    "program = 'from nanoserve.lab.benchmarks.peers.process import main; main()'\n"
    "peer = LoggedChild(program, str(number), environment=os.environ, descriptors=both)\n"
    "print(peer.process.pid, flush=True)\n"
    "time.sleep(60)\n"
)


def child(program: str = CHILD) -> PeerProcess:
    return PeerProcess(OPENING, f"sys.path.insert(0, {str(ROOT)!r})\n{program}")


def test_a_batch_goes_there_and_comes_back() -> None:
    peer = child()
    try:
        assert peer.description == {"pace": 0.25}
        assert peer.run(PROMPTS, 3) == FakePeer("fake", 0.25).run(PROMPTS, 3)
        assert peer.run(PROMPTS, 4) == FakePeer("fake", 0.25).run(PROMPTS, 4)
    finally:
        peer.close()


def test_a_peer_that_fails_says_why() -> None:
    peer = child()
    try:
        with pytest.raises(RuntimeFailure, match="fake: thirteen tokens are too many"):
            peer.run(((1,),), 13)
    finally:
        peer.close()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("print('library missing', file=sys.stderr); sys.exit(3)", "fake died: library missing"),
        ("import os; os.read(int(sys.argv[3]), 1); os._exit(5)", "fake died: exit code 5"),
    ],
)
def test_a_peer_that_dies_is_told_with_its_last_words(program: str, message: str) -> None:
    with pytest.raises(RuntimeFailure, match=message):
        child(program)


_DYING = (
    "import os, signal\n"
    "from multiprocessing.connection import Connection\n"
    "from nanoserve.lab.benchmarks.peers.process import serve\n"
    "from tests.lab.benchmarks.fakes import FakePeer\n"
    "def die(*_):\n"
    "    os.kill(os.getpid(), signal.SIGILL)\n"
    "def opened(opening):\n"
    "    peer = FakePeer('fake', 0.25)\n"
    "    if opening.repacked:\n"
    "        {death}\n"
    "    return peer\n"
    "serve(Connection(int(sys.argv[3])), opened)\n"
)


@pytest.mark.parametrize("death", ["die()", "peer.run = die"])
def test_a_peer_that_dies_of_sigill_goes_on_without_repacked_weights(death: str) -> None:
    """Die as llama.cpp does on a processor with AMX, while it opens its file or when it first
    computes."""
    peer = child(_DYING.format(death=death))
    try:
        assert peer.run(PROMPTS, 3) == FakePeer("fake", 0.25).run(PROMPTS, 3)
        trouble = (
            "died of SIGILL on its repacked weights and went on without them "
            "(use_extra_bufts=False)"
        )
        assert peer.description == {"pace": 0.25, "trouble": trouble}
        assert sentence([], {"fake": trouble}).endswith(f"; fake {trouble}.")
    finally:
        peer.close()


def test_a_peer_that_dies_of_sigill_again_is_lost() -> None:
    with pytest.raises(RuntimeFailure, match="fake died: exit code -4"):
        child(
            _DYING.format(death="pass").replace(
                "if opening.repacked", "die()\n    if opening.repacked"
            )
        )


def test_an_engine_that_cannot_be_opened_is_one_line() -> None:
    failing = CHILD.replace("FakePeer('fake', 0.25)", "open('/no/such/file\\nand more')")
    with pytest.raises(RuntimeFailure, match=r"fake: FileNotFoundError: .*/no/such/file[^\n]*$"):
        child(failing)


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
