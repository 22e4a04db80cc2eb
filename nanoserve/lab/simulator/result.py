"""Results of simulations."""

import msgspec

from nanoserve.record.metrics import Distribution
from nanoserve.record.metrics_observer import SteadyRates


class ReplicaFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one engine of a fleet for the requests routed to it; None where it had none."""

    requests: int
    input_tokens: int
    output_tokens: int
    seconds: float  # the time until its last token was known
    ttft_ms: float | None
    tpot_ms: float | None
    e2el_ms: float | None
    """Means over its requests."""
    bubble_share: float | None  # mean over its stages
    kv_occupancy: float  # share of its KV blocks in use, averaged over the time of the whole fleet
    kv_peak: float  # the highest
    preemptions: int


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of one run, in virtual time, of all engines together; docs/benchmarks.md defines
    them."""

    requests: int
    input_tokens: int
    output_tokens: int
    seconds: float  # the time until the last token was known
    requests_per_second: float
    output_tokens_per_second: float
    tokens_per_second: float  # input and output tokens, as the papers count throughput
    steady: SteadyRates | None
    """These rates and the goodput without filling and draining; None if all requests came at
    once."""
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None  # time per output token, over requests with two tokens or more
    itl_ms: Distribution | None  # time between two tokens, over all gaps
    e2el_ms: Distribution | None
    """``ttft_ms``, ``e2el_ms``: over requests; from arrival to the first and to the last token."""
    bubble_shares: tuple[float, ...]
    """For each stage (of one layout after the other), the share of time in which it computed
    nothing though something was in flight."""
    steps: int
    tokens_per_step: Distribution | None  # decodes and prompt tokens of a step
    tokens_variation: float  # standard deviation of the tokens per step over their mean
    preemptions: int  # sequences that lost their blocks and were computed again
    forced_steps: int  # steps the scheduler made because the policy moved nothing
    draft_tokens: int
    accepted_draft_tokens: tuple[int, ...]
    accepted_share: float
    """Draft tokens that were checked; accepted draft tokens by their place in the row; their share
    of all."""
    kv_occupancy: float  # share of KV blocks in use, averaged over time
    kv_peak: float  # the highest
    # (seconds, share of KV blocks in use), a thousand points at most
    kv_series: tuple[tuple[float, float], ...]
    tokens_series: tuple[tuple[float, int, int, int], ...]
    """Steps over time, as (seconds, number of the step, decodes, prompt tokens), thinned likewise;
    of a fleet's first engine."""
    slo_attainment: float | None  # share of requests within the limits; None without limits
    goodput: float | None  # requests within the limits, per second
    replicas: tuple[ReplicaFigures, ...]
    strategy_steps: dict[str, int]  # how many steps had which strategy
    transitions: int  # changes of the parallel layout
    transition_seconds: float  # the time spent on reloading weights for them
    # for each layout, how long it was current; transitions belong to none
    layout_seconds: tuple[float, ...]
    swapped_out_tokens: int  # tokens in the KV blocks that moved to host memory
    swapped_in_tokens: int  # and back
    host_occupancy: float
    host_peak: float
    host_series: tuple[tuple[float, float], ...]
    """`kv_occupancy`, `kv_peak` and `kv_series` of the host's KV blocks, if there are any."""
    host_tokens: int  # tokens sampled for sequences in host memory
    # share of time in which the CPU computed attention for sequences in host memory
    processor_share: float

    @property
    def bubble_share(self) -> float:
        return sum(self.bubble_shares) / len(self.bubble_shares)

    @property
    def occupancies(self) -> dict[str, tuple[tuple[float, float], ...]]:
        """Share of blocks in use over time, for each tier of the KV cache."""
        if not self.host_series:
            return {"device": self.kv_series}
        return {"device": self.kv_series, "host": self.host_series}
