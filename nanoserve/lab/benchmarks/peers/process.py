"""The engines that are compared, each in a process of its own, so that threads, libraries and
crashes stay apart.

A peer is made from an Opening, and has a `description` and `run(prompts, output_tokens)`. No torch.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from nanoserve.errors import NanoserveError, RuntimeFailure
from nanoserve.lab.benchmarks.driving import EngineRun
from nanoserve.utils.installation import install_command
from nanoserve.utils.watchdog import LoggedChild

_LONGEST_COMPLAINT = 300
# token ids of requests that are issued together, all of one length
Prompts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How a peer is opened."""

    engine: str  # nanoserve, or a name in PEERS
    model: str  # what the engine reads: a directory, a GGUF file, or a name as ``--model`` takes it
    dtype: str  # number format of weights and KV cache, as torch calls it
    threads: int
    max_batch: int  # the most sequences at a time
    max_length: int  # of a sequence, in tokens, with its answer
    policy: str = "sarathi"  # of nanoserve
    eager: bool = False  # whether nanoserve's layers run uncompiled
    # how nanoserve rounds the weights; other engines read rounded ones
    quantization: str | None = None
    repacked: bool = True  # whether llama.cpp may lay weights out anew for its fastest operators


class PeerKind(NamedTuple):
    place: str  # its module and class below this package
    modules: tuple[str, ...]  # that must be importable
    install: str  # the command that installs them

    @property
    def missing(self) -> list[str]:
        return [module for module in self.modules if find_spec(module) is None]


_SERVER_MODULES = ("starlette", "uvicorn", "h11", "zmq", "prometheus_client")
PEERS: Mapping[str, PeerKind] = {
    "transformers": PeerKind(
        "engine_peers.TransformersPeer", ("transformers",), install_command("peers")
    ),
    "llama.cpp": PeerKind(
        "llama_cpp_peer.LlamaCppPeer", ("llama_cpp", "gguf"), install_command("peers")
    ),
    "server": PeerKind("server_peer.ServerPeer", _SERVER_MODULES, install_command("server")),
}
"""Choices of ``bench compare --peers``; the server is our own, asked over HTTP."""


class _IllegalInstruction(RuntimeFailure):
    """The child died of SIGILL: its engine uses instructions that this processor, or its system,
    does not have."""


_WITHOUT_REPACKING = (
    "died of SIGILL on its repacked weights and went on without them (use_extra_bufts=False)"
)
"""llama.cpp 0.3.36 does so on its own Q4_0 and Q8_0 on a processor with AMX."""


class PeerProcess:
    """A peer whose engine runs in a child process, which it tells what to run over a pipe of
    pickled objects.

    A child that dies of SIGILL is started once more, without repacked weights; the description has
    this as its "trouble". Raises RuntimeFailure if the child cannot open the engine, fails, or dies
    otherwise.
    """

    def __init__(
        self, opening: Opening, program: str = f"from {__name__} import main; main()"
    ) -> None:
        self.name = opening.engine
        self._opening, self._program = opening, program
        try:
            self._start()
        except _IllegalInstruction as death:
            self._start_without_repacking(death)

    def _start(self) -> None:
        opening = self._opening
        self._pipe, theirs = multiprocessing.Pipe()
        number = theirs.fileno()
        environment = os.environ | {"OMP_NUM_THREADS": str(opening.threads)}
        self._child = LoggedChild(
            self._program, str(number), environment=environment, descriptors=[number]
        )
        theirs.close()
        # tells the peer's own use of the processor from that of others
        self.process_id = self._child.process.pid
        try:
            self.description: dict[str, Any] = self._ask(opening)
        except BaseException:
            self.close()
            raise

    def run(self, prompts: Prompts, output_tokens: int) -> EngineRun:
        """Run the prompts from an empty cache; each gets `output_tokens` tokens, sampled
        greedily."""
        work = prompts, output_tokens
        try:
            result: EngineRun = self._ask(work)
        except _IllegalInstruction as death:
            self._start_without_repacking(death)
            result = self._ask(work)
        return result

    def _start_without_repacking(self, death: _IllegalInstruction) -> None:
        """Start another child in the place of one that died of SIGILL. Raises ``death`` if that one
        did without."""
        if not self._opening.repacked:
            raise death
        self.close()
        self._opening = replace(self._opening, repacked=False)
        self._start()
        self.description["trouble"] = _WITHOUT_REPACKING

    def _ask(self, question: object) -> Any:
        try:
            self._pipe.send(question)
            answer = self._pipe.recv()
        except (OSError, EOFError):
            words = f"{self.name} died: {self._child.last_words()[:_LONGEST_COMPLAINT]}"
            if self._child.process.returncode == -signal.SIGILL:
                raise _IllegalInstruction(words) from None
            raise RuntimeFailure(words) from None
        if isinstance(answer, str):
            raise RuntimeFailure(f"{self.name}: {answer}")
        return answer

    def close(self) -> None:
        """End the child, whatever it is doing."""
        self._child.end()


def open_engine(opening: Opening) -> Any:
    place = "engine_peers.NanoservePeer"
    if opening.engine in PEERS:
        place = PEERS[opening.engine].place
    module, _, kind = place.partition(".")
    return getattr(import_module(f"nanoserve.lab.benchmarks.peers.{module}"), kind)(opening)


def serve(pipe: Connection, opener: Callable[[Opening], Any] = open_engine) -> None:
    """The child's life: open the engine and run batches; what goes wrong is a text, after which it
    ends."""
    try:
        peer = opener(pipe.recv())
        pipe.send(peer.description)
        while True:
            pipe.send(peer.run(*pipe.recv()))
    except NanoserveError as error:
        pipe.send(str(error))
    except Exception as error:
        # Any error of a peer's library is the parent's to report: nobody reads what this process
        # prints.
        reason = (str(error).strip().splitlines() or [""])[0]
        pipe.send(f"{type(error).__name__}: {reason[:_LONGEST_COMPLAINT]}")


def main() -> None:
    """The child, which is given the number of its end of the pipe."""
    serve(Connection(int(sys.argv[3])))
