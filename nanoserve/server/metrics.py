"""Metrics for Prometheus, under vLLM's names where it has them."""

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nanoserve.record.counters import RecentStep
from nanoserve.request import FinishReason
from nanoserve.server.engine_client import EngineClient
from nanoserve.server.streams import RequestStream

# Upper bounds of the buckets; prometheus_client adds a last bucket without one.
_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_COUNTERS = {
    "vllm:prompt_tokens": "Prompt tokens of ended requests.",
    "vllm:prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Prompt tokens found there.",
    "vllm:admission_rejections": "Requests without a place or an engine.",
}
_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("From arrival to the first token.", _SECONDS),
    "vllm:request_time_per_output_token_seconds": (
        "Mean time per token after the first.",
        _SECONDS,
    ),
    "vllm:inter_token_latency_seconds": ("From one token to the next.", _SECONDS),
    "vllm:request_queue_time_seconds": ("From arrival to the first plan.", _SECONDS),
    "vllm:request_prefill_time_seconds": ("From the first plan to the first token.", _SECONDS),
    "vllm:request_decode_time_seconds": ("From the first token to the last.", _SECONDS),
    "vllm:e2e_request_latency_seconds": ("From arrival to the last token.", _SECONDS),
    "vllm:request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "vllm:request_generation_tokens": ("Tokens of a sample.", _TOKENS),
    "vllm:iteration_tokens_total": ("Tokens of a step.", _TOKENS),
    "nanoserve:step_time_seconds": ("Time of a step on the device.", _SECONDS),
}


NamedValue = tuple[str, str, float]


class Metrics(Collector):
    """Counts how requests ended; the engine's gauges are read at each scrape."""

    def __init__(self, model_name: str, engine: EngineClient) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self._model = model_name
        self._engine = engine
        labels = ("model_name",)
        self._counters = {
            name: Counter(name, text, labels, registry=registry).labels(model_name)
            for name, text in _COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(name, text, labels, registry=registry, buckets=bounds).labels(
                model_name
            )
            for name, (text, bounds) in _HISTOGRAMS.items()
        }
        self._ended = Counter(
            "vllm:request_success",
            "Ended samples by the reason.",
            ("model_name", "finished_reason"),
            registry=registry,
        )
        engine.on_step = self._on_step
        registry.register(self)

    def _observe(self, name: str, value: float | None) -> None:
        if value is not None:
            self._histograms[name].observe(max(0.0, value))

    def passed(self, gaps: Sequence[float]) -> None:
        """Count these seconds from one token to the next."""
        for gap in gaps:
            self._observe("vllm:inter_token_latency_seconds", gap)

    def ended(self, stream: RequestStream) -> None:
        """Count a request that has ended, for any reason, without its gaps; a sample that never
        ended counts as aborted."""
        output = stream.tracker.whole()
        prompt_tokens = len(output.prompt_token_ids)
        self._counters["vllm:prompt_tokens"].inc(prompt_tokens)
        self._observe("vllm:request_prompt_tokens", prompt_tokens)
        self._counters["vllm:prefix_cache_queries"].inc(prompt_tokens)
        self._counters["vllm:prefix_cache_hits"].inc(output.cached_tokens)
        for sample in output.outputs:
            self._ended.labels(self._model, sample.finish_reason or FinishReason.ABORT.value).inc()
            self._observe("vllm:request_generation_tokens", len(sample.token_ids))
            times = sample.metrics
            self._observe("vllm:request_queue_time_seconds", times.queue_time)
            scheduled, first, last = (
                times.first_scheduled_time,
                times.first_token_time,
                times.last_token_time,
            )
            if scheduled is not None and first is not None and last is not None:
                self._observe("vllm:time_to_first_token_seconds", times.time_to_first_token)
                self._observe("vllm:request_prefill_time_seconds", first - scheduled)
                self._observe("vllm:request_decode_time_seconds", last - first)
                self._observe("vllm:e2e_request_latency_seconds", last - times.arrival_time)
                self._observe(
                    "vllm:request_time_per_output_token_seconds", times.time_per_output_token
                )

    def _on_step(self, step: RecentStep) -> None:
        self._observe("vllm:iteration_tokens_total", step.decodes + step.prompt_tokens)
        self._observe("nanoserve:step_time_seconds", step.seconds)

    def rejected(self) -> None:
        self._counters["vllm:admission_rejections"].inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _gauges(self) -> tuple[NamedValue, ...]:
        """Name, help text and value of each gauge."""
        status = self._engine.last.status
        used = _share_in_use(status.free_blocks, status.total_blocks)
        used_on_host = _share_in_use(status.free_host_blocks, status.total_host_blocks)
        used_states = _share_in_use(status.free_state_slots, status.total_state_slots)
        return (
            ("vllm:num_requests_running", "Sequences that hold KV blocks.", status.running),
            ("vllm:num_requests_waiting", "Sequences that wait for a place.", status.waiting),
            ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", used),
            ("nanoserve:num_sequences_on_host", "Sequences in host memory.", status.on_host),
            ("nanoserve:host_kv_cache_usage_perc", "Share of its blocks in use.", used_on_host),
            ("nanoserve:state_slots_usage_perc", "Share of states in use.", used_states),
            ("nanoserve:engine_ready", "1 if requests run at once.", self._engine.serving),
        )

    def _totals(self) -> tuple[NamedValue, ...]:
        """Name, help text and value of each counter."""
        engine = self._engine
        total = engine.total
        drafts = total.drafts
        checked = "vllm:spec_decode_num_draft_tokens"
        accepted = "vllm:spec_decode_num_accepted_tokens"
        return (
            ("vllm:generation_tokens", "Generated tokens.", engine.generated_tokens),
            ("vllm:num_preemptions", "Preemptions.", total.preemptions),
            ("nanoserve:worker_losses", "Times that workers died.", total.losses),
            ("nanoserve:host_losses", "Losses of attention on the CPU.", total.host_losses),
            ("nanoserve:engine_steps", "Steps.", total.steps),
            ("nanoserve:engine_restarts", "Engines started after the first.", len(engine.past)),
            ("nanoserve:dropped_messages", "Messages that made no sense.", engine.dropped),
            ("vllm:spec_decode_num_drafts", "Rows with draft tokens.", drafts.rows),
            (checked, "Draft tokens that were checked.", drafts.draft_tokens),
            (accepted, "Draft tokens that were right.", sum(drafts.accepted)),
        )

    def collect(self) -> Iterator[Metric]:
        """The engine's metrics, from its last report."""
        kinds: tuple[
            tuple[type[GaugeMetricFamily | CounterMetricFamily], tuple[NamedValue, ...]], ...
        ]
        kinds = ((GaugeMetricFamily, self._gauges()), (CounterMetricFamily, self._totals()))
        for kind, values in kinds:
            for name, text, value in values:
                family = kind(name, text, labels=("model_name",))
                family.add_metric((self._model,), value)
                yield family
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that were right, by their place in the row, from 0.",
            labels=("model_name", "position"),
        )
        for place, accepted in enumerate(self._engine.total.drafts.accepted):
            family.add_metric((self._model, f"{place}"), accepted)
        yield family


def _share_in_use(free: int, total: int) -> float:
    """The share of blocks that are not free; 0 without blocks."""
    if total == 0:
        return 0.0
    return 1 - free / total
