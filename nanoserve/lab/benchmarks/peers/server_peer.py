"""nanoserve behind its own HTTP server, as one of the engines that are compared: what serving
costs."""

from nanoserve.lab.benchmarks.driving import EngineRun
from nanoserve.lab.benchmarks.peers.process import Opening, Prompts
from nanoserve.lab.benchmarks.serving.own_server import OwnServer
from nanoserve.lab.benchmarks.serving.records import RequestRecord
from nanoserve.lab.benchmarks.serving.requests import RequestStyle
from nanoserve.lab.benchmarks.serving.sending import Sender, send_at_once
from nanoserve.record.metrics import RequestTiming
from nanoserve.server.client.connection import ApiClient, served_model

_TIMEOUT_SECONDS = 3600.0


class ServerPeer:
    """``nanoserve serve`` on the same model, asked by streaming HTTP clients that live in this
    process."""

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
        if opening.quantization is not None:
            flags["--quantization"] = opening.quantization
        words = [str(word) for flag in flags.items() for word in flag]
        if opening.eager:
            words.append("--eager")
        self.server = OwnServer(words)
        client = ApiClient(self.server.address)
        self._style = RequestStyle(model=served_model(client, None, lambda _: None).id)
        self._sender = Sender(client, self._style.path, timeout=_TIMEOUT_SECONDS)
        self.description = {"dtype": opening.dtype, "threads": opening.threads, "streamed": True}

    def run(self, prompts: Prompts, output_tokens: int) -> EngineRun:
        requests = [self._style.completion(prompt, output_tokens) for prompt in prompts]
        run = send_at_once(self._sender, requests, "requests")
        return EngineRun(tuple(map(_timing, run.records)), ((),) * len(prompts))


def _timing(record: RequestRecord) -> RequestTiming:
    """A time for every token: where the pieces of text are fewer or more, evenly from the first
    piece to the end."""
    count, times = record.output_tokens, record.text_times
    if len(times) != count:
        step = (record.e2el - record.ttft) / max(1, count - 1)
        times = [record.ttft + place * step for place in range(count)]
    return RequestTiming(record.input_tokens, tuple(times))
