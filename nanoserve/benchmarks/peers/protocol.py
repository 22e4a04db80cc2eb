"""What a peer is, which ones there are, and what passes between the benchmark and a peer's process. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import msgspec

from nanoserve.measures.metrics import RequestTiming
from nanoserve.processes.installation import install_command


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

    modules: tuple[str, ...]
    """What must be importable."""
    install: str
    """The command that makes it so."""

    @property
    def missing(self) -> list[str]:
        """Modules that are not installed."""
        return [module for module in self.modules if find_spec(module) is None]


PEERS: Mapping[str, PeerKind] = {
    "transformers": PeerKind(("transformers",), "pip install 'transformers>=5.0'"),
    "llama.cpp": PeerKind(("llama_cpp", "gguf"), "pip install llama-cpp-python gguf"),
    "server": PeerKind(("starlette", "uvicorn", "h11", "zmq", "prometheus_client"), install_command("server")),
}
"""Choices of ``bench compare --peers``; the server is our own, asked over HTTP."""
