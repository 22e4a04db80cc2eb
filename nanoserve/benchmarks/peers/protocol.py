"""What a peer is, and the words that pass between the benchmark and a peer's process. No torch."""

from typing import Any, Protocol

import msgspec

from nanoserve.measures.metrics import RequestTiming


class Batch(msgspec.Struct, frozen=True):
    """Equal requests that are issued together.

    Attributes:
        prompts: token ids, all of one length.
        output_tokens: how many each gets, greedily; no token ends it early.
    """

    prompts: tuple[tuple[int, ...], ...]
    output_tokens: int


class Opening(msgspec.Struct, frozen=True):
    """How a peer is to be opened.

    Attributes:
        engine: nanoserve, or a name in PEERS (catalog.py).
        model: what the engine reads: a directory, a GGUF file, or a name as ``--model`` takes it.
        dtype: number format of weights and KV cache, as torch calls it.
        threads: for computing.
        max_batch, max_length: the most sequences at a time, and their longest total length in tokens.
        policy: nanoserve's scheduling policy.
        eager: run nanoserve's layers uncompiled.
    """

    engine: str
    model: str
    dtype: str
    threads: int
    max_batch: int
    max_length: int
    policy: str = "sarathi"
    eager: bool = False


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
