"""The engines that are compared, each in a process of its own: its threads, libraries and crashes are no one else's.

The parent writes one JSON line (an Opening, then one Batch after another) to the child's stdin and reads one back.
No torch.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, BinaryIO, Protocol

import msgspec

from nanoserve.errors import NanoserveError, RuntimeFailure
from nanoserve.measures.metrics import RequestTiming
from nanoserve.processes.children import follow_parent, python_command
from nanoserve.processes.installation import install_command

_LONGEST_COMPLAINT = 300


class Batch(msgspec.Struct, frozen=True):
    """Equal requests that are issued together."""

    prompts: tuple[tuple[int, ...], ...]
    """Token ids, all of one length."""
    output_tokens: int
    """Tokens that each prompt gets, sampled greedily; no token ends a request early."""


class Opening(msgspec.Struct, frozen=True):
    """How a peer is to be opened."""

    engine: str
    """Nanoserve, or a name in PEERS."""
    model: str
    """What the engine reads: a directory, a GGUF file, or a name as ``--model`` takes it."""
    dtype: str
    """Number format of weights and KV cache, as torch calls it."""
    threads: int
    """Threads that compute."""
    max_batch: int
    max_length: int
    """The most sequences at a time, and their longest total length in tokens."""
    policy: str = "sarathi"
    """Nanoserve's scheduling policy."""
    eager: bool = False
    """Run nanoserve's layers uncompiled."""


class BatchResult(msgspec.Struct, frozen=True):
    """When each request's tokens became known, and which tokens they were."""

    timings: tuple[RequestTiming, ...]
    tokens: tuple[tuple[int, ...], ...]


class Peer(Protocol):
    """An engine that is measured."""

    name: str
    description: dict[str, Any]

    def run(self, batch: Batch) -> BatchResult:
        """Run the batch from an empty cache."""

    def close(self) -> None:
        """Give everything back."""


@dataclass(frozen=True, slots=True)
class PeerKind:
    """A peer that may be compared with."""

    place: str
    """Module and class, below this package."""
    modules: tuple[str, ...]
    """What must be importable."""
    install: str
    """The command that makes it so."""

    @property
    def missing(self) -> list[str]:
        """Modules that are not installed."""
        return [module for module in self.modules if find_spec(module) is None]


PEERS: Mapping[str, PeerKind] = {
    "transformers": PeerKind("engine_peers.TransformersPeer", ("transformers",), "pip install 'transformers>=5.0'"),
    "llama.cpp": PeerKind("llama_cpp_peer.LlamaCppPeer", ("llama_cpp", "gguf"), "pip install llama-cpp-python gguf"),
    "server": PeerKind(
        "server_peer.ServerPeer",
        ("starlette", "uvicorn", "h11", "zmq", "prometheus_client"),
        install_command("server"),
    ),
}
"""Choices of ``bench compare --peers``; the server is our own, asked over HTTP."""


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The child's answer: what an opened peer is, the result of a batch, or what went wrong. It ends after the last."""

    facts: dict[str, Any] | None = None
    result: BatchResult | None = None
    complaint: str | None = None


class PeerProcess:
    """A Peer whose engine runs in a child process.

    Raises:
        RuntimeFailure: if the child cannot open the engine, fails, or dies.
    """

    def __init__(self, name: str, opening: Opening, command: Sequence[str] = ()) -> None:
        self.name = name
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the child)
        words = command or python_command(f"from {__name__} import main; main()", str(os.getpid()))
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
            self.description = self._ask(opening).facts or {}
        except BaseException:
            self.close()
            raise

    @property
    def process_id(self) -> int:
        """For telling the peer's own use of the processor from that of others."""
        return self._child.pid

    def run(self, batch: Batch) -> BatchResult:
        result = self._ask(batch).result
        if result is None:
            raise RuntimeFailure(f"{self.name} answered without a result")
        return result

    def _ask(self, question: Any) -> Reply:
        stdin, stdout = self._child.stdin, self._child.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(msgspec.json.encode(question) + b"\n")
            stdin.flush()
            reply = msgspec.json.decode(stdout.readline(), type=Reply)
        except (OSError, msgspec.DecodeError):
            raise RuntimeFailure(f"{self.name} died: {self._last_words()}") from None
        if reply.complaint is not None:
            raise RuntimeFailure(f"{self.name}: {reply.complaint}")
        return reply

    def _last_words(self) -> str:
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:_LONGEST_COMPLAINT] if lines else f"exit code {self._child.poll()}"

    def close(self) -> None:
        """End the child, whatever it is doing."""
        self._child.kill()
        self._child.communicate()
        self._complaints.close()


def open_engine(opening: Opening) -> Peer:
    """The engine of that name, in this process."""
    place = PEERS[opening.engine].place if opening.engine in PEERS else "engine_peers.NanoservePeer"
    module, _, kind = place.partition(".")
    peer: Peer = getattr(import_module(f"nanoserve.benchmarks.peers.{module}"), kind)(opening)
    return peer


def serve(stdin: BinaryIO, stdout: BinaryIO, opener: Any = open_engine) -> None:
    """The child's life: open the engine, run batches until stdin ends."""
    try:
        peer = opener(msgspec.json.decode(stdin.readline(), type=Opening))
        _say(stdout, Reply(facts=peer.description))
        while line := stdin.readline():
            _say(stdout, Reply(result=peer.run(msgspec.json.decode(line, type=Batch))))
        peer.close()
    except NanoserveError as error:
        _say(stdout, Reply(complaint=str(error)))
    except Exception as error:
        # Whatever a peer's library comes up with is for the parent to tell: this process has no one to tell it to.
        reason = (str(error).strip().splitlines() or [""])[0]
        _say(stdout, Reply(complaint=f"{type(error).__name__}: {reason[:_LONGEST_COMPLAINT]}"))


def _say(stdout: BinaryIO, message: Reply) -> None:
    stdout.write(msgspec.json.encode(message) + b"\n")
    stdout.flush()


def main() -> None:
    """The child, which is told its parent's process id."""
    follow_parent(int(sys.argv[2]))
    # What libraries print must not come between the answers: from here on their stdout is stderr.
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        serve(sys.stdin.buffer, answers)
