"""What a simulation found."""

import msgspec

from nanoserve.measures.metrics import Distribution


class ReplicaFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine of a fleet did; None where it had no request to do it with.

    Attributes:
        requests: how many came to it.
        input_tokens, output_tokens: of all of them.
        seconds: until its last token was known.
        ttft_ms, tpot_ms, e2el_ms: means over its requests.
        bubble_share: the mean over its stages.
        kv_occupancy: share of its KV blocks in use, averaged over the time of the whole fleet.
        kv_peak: the highest.
        preemptions: its sequences that lost their blocks and were computed again.
    """

    requests: int
    input_tokens: int
    output_tokens: int
    seconds: float
    ttft_ms: float | None
    tpot_ms: float | None
    e2el_ms: float | None
    bubble_share: float | None
    kv_occupancy: float
    kv_peak: float
    preemptions: int


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one run, in virtual time; docs/benchmarks.md defines the metrics.

    Of a fleet they are those of all engines together.

    Attributes:
        requests: how many ran, all to their ends.
        input_tokens, output_tokens: of all of them.
        seconds: until the last token was known.
        requests_per_second, output_tokens_per_second: over that time.
        tokens_per_second: input and output tokens, as the papers count throughput.
        ttft_ms, e2el_ms: over requests; from arrival to the first and to the last token.
        tpot_ms: over requests with two tokens or more.
        itl_ms: over all gaps between tokens.
        bubble_shares: for each stage (of one layout after the other), the share of time in which it computed nothing
            though something was in flight.
        steps: how many.
        tokens_per_step: decodes and prompt tokens of a step.
        tokens_variation: their standard deviation over their mean.
        preemptions: sequences that lost their blocks and were computed again.
        forced_steps: steps the scheduler made because the policy moved nothing.
        kv_occupancy: share of KV blocks in use, averaged over time.
        kv_peak: the highest.
        kv_series: the share over time, as (seconds, share), thinned to a thousand points at most.
        tokens_series: steps over time, as (seconds, number of the step, decodes, prompt tokens), thinned likewise; of
            a fleet's first engine.
        slo_attainment: share of requests within the limits that were given; None without limits.
        goodput: such requests per second.
        replicas: what each engine did.
        strategy_steps: how many steps had which strategy.
        transitions: changes of the parallel layout.
        transition_seconds: in which weights were reloaded for them.
        layout_seconds: for each layout, how long it was current; transitions belong to none.
        swapped_out_tokens, swapped_in_tokens: what the blocks hold that moved to host memory and back.
        host_occupancy: share of the host's KV blocks in use, averaged over time; 0 without any.
        host_peak: the highest.
        host_series: the share over time, as kv_series.
        host_tokens: sampled for sequences in host memory.
        processor_share: share of time in which the CPU attended for them.
    """

    requests: int
    input_tokens: int
    output_tokens: int
    seconds: float
    requests_per_second: float
    output_tokens_per_second: float
    tokens_per_second: float
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2el_ms: Distribution | None
    bubble_shares: tuple[float, ...]
    steps: int
    tokens_per_step: Distribution | None
    tokens_variation: float
    preemptions: int
    forced_steps: int
    kv_occupancy: float
    kv_peak: float
    kv_series: tuple[tuple[float, float], ...]
    tokens_series: tuple[tuple[float, int, int, int], ...]
    slo_attainment: float | None
    goodput: float | None
    replicas: tuple[ReplicaFigures, ...]
    strategy_steps: dict[str, int]
    transitions: int
    transition_seconds: float
    layout_seconds: tuple[float, ...]
    swapped_out_tokens: int
    swapped_in_tokens: int
    host_occupancy: float
    host_peak: float
    host_series: tuple[tuple[float, float], ...]
    host_tokens: int
    processor_share: float

    @property
    def bubble_share(self) -> float:
        """The mean over stages."""
        return sum(self.bubble_shares) / len(self.bubble_shares)

    @property
    def occupancies(self) -> dict[str, tuple[tuple[float, float], ...]]:
        """Share of blocks in use over time, for each tier of the KV cache."""
        return {"device": self.kv_series} | ({"host": self.host_series} if self.host_series else {})

    def spread(self, name: str) -> Distribution | None:
        """A field of ReplicaFigures over the engines."""
        return Distribution.of(getattr(replica, name) for replica in self.replicas)
