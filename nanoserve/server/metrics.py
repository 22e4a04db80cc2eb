"""Metrics for Prometheus, under vLLM's names where it has them."""

import math

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nanoserve.record.counters import RecentStep
from nanoserve.request import Sequence
from nanoserve.server.engine_client import EngineClient
from nanoserve.server.streams import RequestStream

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """Counts how requests ended; the engine's gauges are read at each scrape."""

    def __init__(self, model_name: str, engine: EngineClient) -> None:
        self._registry = CollectorRegistry()
        self._model = model_name
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of ended requests.")
        self._looked_up = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._found = self._counter("vllm:prefix_cache_hits", "Prompt tokens found there.")
        self._rejected = self._counter("vllm:admission_rejections", "Requests without a place or an engine.")
        self._ended = Counter(
            "vllm:request_success",
            "Ended samples by the reason.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self._first_token = self._histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.")
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per token after the first."
        )
        self._between_tokens = self._histogram("vllm:inter_token_latency_seconds", "From one token to the next.")
        self._queue = self._histogram("vllm:request_queue_time_seconds", "From arrival to the first plan.")
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", "From the first plan to the first token.")
        self._decode = self._histogram("vllm:request_decode_time_seconds", "From the first token to the last.")
        self._latency = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.")
        self._prompt_length = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._answer_length = self._histogram("vllm:request_generation_tokens", "Tokens of a sample.", _TOKENS)
        self._step_tokens = self._histogram("vllm:iteration_tokens_total", "Tokens of a step.", _TOKENS)
        self._step_time = self._histogram("nanoserve:step_time_seconds", "Time of a step on the device.")
        engine.on_step = self._on_step
        self._registry.register(_EngineCollector(model_name, engine))

    def ended(self, stream: RequestStream) -> None:
        """Count a request that has ended, for any reason."""
        prompt_tokens = len(stream.request.prompt)
        self._prompt_tokens.inc(prompt_tokens)
        self._prompt_length.observe(prompt_tokens)
        self._looked_up.inc(prompt_tokens)
        self._found.inc(stream.cached_tokens)
        for gap in stream.gaps:
            self._between_tokens.observe(gap)
        for index, (sample, reason) in enumerate(zip(stream.samples, stream.finish_reasons(), strict=True)):
            self._ended.labels(self._model, reason).inc()
            self._answer_length.observe(sample.output_length)
            self._observe_times(sample, stream.request.arrival_time, stream.last_token_times.get(index))

    def _observe_times(self, sample: Sequence, arrival: float, last_token: float | None) -> None:
        """Observe the times of the phases that the sample has reached."""
        scheduled, first_token = sample.first_scheduled_time, sample.first_token_time
        if scheduled is not None:
            self._queue.observe(max(0.0, scheduled - arrival))
        if scheduled is None or first_token is None or last_token is None:
            return
        self._first_token.observe(first_token - arrival)
        self._prefill.observe(max(0.0, first_token - scheduled))
        self._decode.observe(last_token - first_token)
        self._latency.observe(last_token - arrival)
        if sample.output_length > 1:
            self._per_token.observe((last_token - first_token) / (sample.output_length - 1))

    def _on_step(self, step: RecentStep) -> None:
        self._step_tokens.observe(step.decodes + step.prompt_tokens)
        self._step_time.observe(step.seconds)

    def rejected(self) -> None:
        """Count a request that was turned away."""
        self._rejected.inc()

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(name, help_text, ("model_name",), registry=self._registry).labels(self._model)

    def _histogram(self, name: str, help_text: str, bounds: tuple[float, ...] = _SECONDS) -> Histogram:
        buckets = (*bounds, math.inf)
        histogram = Histogram(name, help_text, ("model_name",), registry=self._registry, buckets=buckets)
        return histogram.labels(self._model)


class _EngineCollector(Collector):
    """Reads the engine's last report."""

    def __init__(self, model_name: str, engine: EngineClient) -> None:
        self._model = model_name
        self._engine = engine

    def collect(self) -> list[Metric]:
        status, total = self._engine.last.status, self._engine.total
        used = _share_in_use(status.free_blocks, status.total_blocks)
        used_on_host = _share_in_use(status.free_host_blocks, status.total_host_blocks)
        return [
            self._gauge("vllm:num_requests_running", "Sequences that hold KV blocks.", status.running),
            self._gauge("vllm:num_requests_waiting", "Sequences that wait for a place.", status.waiting),
            self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", used),
            self._gauge("nanoserve:num_sequences_on_host", "Sequences whose KV is in host memory.", status.on_host),
            self._gauge("nanoserve:host_kv_cache_usage_perc", "Share of KV blocks there in use.", used_on_host),
            self._gauge("nanoserve:engine_ready", "1 if requests run at once.", self._engine.serving),
            self._counter("vllm:generation_tokens", "Generated tokens.", self._engine.generated_tokens),
            self._counter("vllm:num_preemptions", "Preemptions.", total("preemptions")),
            self._counter("nanoserve:worker_losses", "Times that workers died.", total("losses")),
            self._counter("nanoserve:host_losses", "Times that attention on the CPU was lost.", total("host_losses")),
            self._counter("nanoserve:engine_steps", "Steps.", total("steps")),
            self._counter("nanoserve:engine_restarts", "Engines started after the first.", self._engine.restarts),
            self._counter("nanoserve:dropped_messages", "Messages that made no sense.", self._engine.dropped),
        ]

    def _gauge(self, name: str, help_text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, help_text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _counter(self, name: str, help_text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, help_text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family


def _share_in_use(free: int, blocks: int) -> float:
    """The share of blocks that are not free; 0 if there are no blocks."""
    return 1 - free / blocks if blocks else 0.0
