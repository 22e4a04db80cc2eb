"""A peer in a process of its own: its threads, its libraries and its crashes are no one else's.

The parent writes one JSON line (an Opening, then one Batch after another) to the child's stdin and reads one back.
"""

import os
import subprocess
import sys
import tempfile
from importlib import import_module
from typing import Any, BinaryIO, TypeVar

import msgspec

from nanoserve.benchmarks.peers.protocol import Batch, BatchResult, Opening, Peer
from nanoserve.errors import NanoserveError, RuntimeFailure
from nanoserve.processes.children import follow_parent

_LONGEST_COMPLAINT = 300

T = TypeVar("T")


class Description(msgspec.Struct, frozen=True, tag=True):
    """The child's first answer: the peer is open."""

    facts: dict[str, Any]


class Complaint(msgspec.Struct, frozen=True, tag=True):
    """The child's answer when something went wrong; it ends then."""

    message: str


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The child's answer to a batch."""

    result: BatchResult


_ANSWERS = msgspec.json.Decoder(Description | Complaint | Answer)


class PeerProcess:
    """A Peer whose engine runs in a child process.

    Raises:
        RuntimeFailure: if the child cannot open the engine, fails, or dies.
    """

    def __init__(self, name: str, opening: Opening, command: tuple[str, ...] = ()) -> None:
        self.name = name
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the child)
        words = command or (sys.executable, "-m", "nanoserve.benchmarks.peers.process", str(os.getpid()))
        environment = os.environ | {"OMP_NUM_THREADS": str(opening.threads)}
        self._child = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the benchmark, which then ends its peers
        )
        try:
            self.description = self._ask(opening, Description).facts
        except BaseException:
            self.close()
            raise

    @property
    def process_id(self) -> int:
        """For telling the peer's own use of the processor from that of others."""
        return self._child.pid

    def run(self, batch: Batch) -> BatchResult:
        return self._ask(batch, Answer).result

    def _ask(self, question: Any, kind: type[T]) -> T:
        stdin, stdout = self._child.stdin, self._child.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(msgspec.json.encode(question) + b"\n")
            stdin.flush()
            line = stdout.readline()
            answer = _ANSWERS.decode(line)
        except (OSError, msgspec.DecodeError):
            raise RuntimeFailure(f"{self.name} died: {self._last_words()}") from None
        if isinstance(answer, Complaint):
            raise RuntimeFailure(f"{self.name}: {answer.message}")
        if not isinstance(answer, kind):
            raise RuntimeFailure(f"{self.name} answered {type(answer).__name__} where {kind.__name__} was due")
        return answer

    def _last_words(self) -> str:
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:_LONGEST_COMPLAINT] if lines else f"exit code {self._child.poll()}"

    def close(self) -> None:
        """End the child, whatever it is doing."""
        self._child.kill()
        self._child.communicate()
        self._complaints.close()


_ENGINES = {
    "nanoserve": ("engine_peers", "NanoservePeer"),
    "transformers": ("engine_peers", "TransformersPeer"),
    "llama.cpp": ("llama_cpp_peer", "LlamaCppPeer"),
    "server": ("server_peer", "ServerPeer"),
}


def open_engine(opening: Opening) -> Peer:
    """The engine of that name, in this process."""
    module, kind = _ENGINES[opening.engine]
    peer: Peer = getattr(import_module(f"nanoserve.benchmarks.peers.{module}"), kind)(opening)
    return peer


def serve(stdin: BinaryIO, stdout: BinaryIO, opener: Any = open_engine) -> None:
    """The child's life: open the engine, run batches until stdin ends."""
    try:
        peer = opener(msgspec.json.decode(stdin.readline(), type=Opening))
        _say(stdout, Description(peer.description))
        while line := stdin.readline():
            _say(stdout, Answer(peer.run(msgspec.json.decode(line, type=Batch))))
        peer.close()
    except NanoserveError as error:
        _say(stdout, Complaint(str(error)))
    except Exception as error:
        # Whatever a peer's library comes up with is for the parent to tell: this process has no one to tell it to.
        reason = (str(error).strip().splitlines() or [""])[0]
        _say(stdout, Complaint(f"{type(error).__name__}: {reason[:_LONGEST_COMPLAINT]}"))


def _say(stdout: BinaryIO, message: Any) -> None:
    stdout.write(msgspec.json.encode(message) + b"\n")
    stdout.flush()


if __name__ == "__main__":
    follow_parent(int(sys.argv[1]))
    # What libraries print must not come between the answers: from here on their stdout is stderr.
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        serve(sys.stdin.buffer, answers)
