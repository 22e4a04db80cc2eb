"""nanoserve behind its own HTTP server, as one of the engines that are compared: what serving costs."""

import asyncio
from typing import Any

from nanoserve.benchmarks.peers.process import Batch, BatchResult, Opening
from nanoserve.benchmarks.serving.own_server import OwnServer
from nanoserve.benchmarks.serving.records import RequestRecord
from nanoserve.benchmarks.serving.requests import RequestStyle
from nanoserve.benchmarks.serving.sending import RequestLoad, Sender
from nanoserve.errors import RuntimeFailure
from nanoserve.measures.metrics import RequestTiming

_TIMEOUT_SECONDS = 3600.0


class ServerPeer:
    """``nanoserve serve`` on the same model, asked by streaming HTTP clients that live in this process."""

    name = "server"

    def __init__(self, opening: Opening) -> None:
        flags = {
            "--model": opening.model,
            "--dtype": opening.dtype,
            "--threads": opening.threads,
            "--max-model-len": opening.max_length + 1,
            "--max-num-seqs": opening.max_batch,
            "--max-queue": opening.max_batch,
            "--policy": opening.policy,
        }
        words = [str(word) for flag in flags.items() for word in flag]
        self._server = OwnServer([*words, "--eager"] if opening.eager else words)
        self._style = RequestStyle.of(self._server.model)
        self.description: dict[str, Any] = {"dtype": opening.dtype, "threads": opening.threads, "streamed": True}

    def run(self, batch: Batch) -> BatchResult:
        requests = [self._style.completion(prompt, batch.output_tokens) for prompt in batch.prompts]
        sender = Sender(self._server.address, self._style.path, timeout=_TIMEOUT_SECONDS)
        load = RequestLoad(sender, requests)
        asyncio.run(load.open_loop([0.0] * len(requests)))
        records = load.run().records
        if failures := [record.failure for record in records if record.failure is not None]:
            raise RuntimeFailure(f"{len(failures)} of {len(records)} requests failed: {failures[0]}")
        return BatchResult(tuple(_timing(record) for record in records), tuple(() for _ in records))

    def close(self) -> None:
        self._server.close()


def _timing(record: RequestRecord) -> RequestTiming:
    """A time for every token: where the pieces of text are fewer or more, evenly from the first piece to the end."""
    count, times = record.output_tokens, record.text_times
    if len(times) != count:
        step = (record.e2el - record.ttft) / max(1, count - 1)
        times = tuple(record.ttft + place * step for place in range(count))
    return RequestTiming(record.input_tokens, times)
