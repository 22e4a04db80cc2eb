"""What a simulation found."""

import msgspec

from nanoserve.benchmarks.metrics import Distribution


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one run, in virtual time; docs/benchmarks.md defines the metrics.

    Attributes:
        requests: how many ran, all to their ends.
        input_tokens, output_tokens: of all of them.
        seconds: until the last token was known.
        requests_per_second, output_tokens_per_second: over that time.
        tokens_per_second: input and output tokens, as the papers count throughput.
        ttft_ms, e2el_ms: over requests; from arrival to the first and to the last token.
        tpot_ms: over requests with two tokens or more.
        itl_ms: over all gaps between tokens.
        bubble_shares: for each stage, the share of time in which it computed nothing though some plan was in flight.
        steps: how many.
        tokens_per_step: decodes and prompt tokens of a step.
        tokens_variation: their standard deviation over their mean.
        preemptions: sequences that lost their blocks and were computed again.
        forced_steps: steps the scheduler made because the policy moved nothing.
        kv_occupancy: share of KV blocks in use, averaged over time.
        kv_peak: the highest.
        kv_series: the share over time, as (seconds, share), thinned to a thousand points at most.
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

    @property
    def bubble_share(self) -> float:
        """The mean over stages."""
        return sum(self.bubble_shares) / len(self.bubble_shares)
