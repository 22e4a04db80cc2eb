"""What a peer is, and the words that pass between the benchmark and a peer's process. No torch."""

from typing import Any, Protocol

import msgspec

from nanoserve.measures.metrics import RequestTiming


class Batch(msgspec.Struct, frozen=True):
    """Equal requests that are issued together."""

    prompts: tuple[tuple[int, ...], ...]
    """Token ids, all of one length."""
    output_tokens: int
    """Tokens that each prompt gets, sampled greedily; no token ends a request early."""


class Opening(msgspec.Struct, frozen=True):
    """How a peer is to be opened."""

    engine: str
    """Nanoserve, or a name in PEERS (catalog.py)."""
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
