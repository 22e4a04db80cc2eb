"""How long tokens take, apart for those whose KV was on the device and in host memory. No torch."""

from collections.abc import Iterable

import msgspec

from nanoserve.measures.metrics import MILLISECONDS, Distribution
from nanoserve.record.run_record import RunRecord
from nanoserve.scheduler.plan import Tier


class TierFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that were computed with their KV in one memory."""

    tokens: int
    """How many, those behind a request's first."""
    itl_ms: Distribution | None
    """From the token before to each of them."""


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run, in milliseconds."""

    ttft_ms: Distribution | None
    """Over requests."""
    token_ms: Distribution | None
    """A request's whole latency over its output tokens (APEX, figure 6)."""
    device: TierFigures
    host: TierFigures
    """By where the KV of each token's sequence was."""

    @classmethod
    def of(cls, record: RunRecord) -> "Latencies":
        timings = record.timings
        return cls(
            ttft_ms=_distribution(timing.ttft for timing in timings),
            token_ms=_distribution(timing.e2el / timing.output_tokens for timing in timings),
            device=_of_tier(record, "device"),
            host=_of_tier(record, "host"),
        )


def _of_tier(record: RunRecord, tier: Tier) -> TierFigures:
    """A token follows the one before in the same request; the first one, computed with the prompt, follows none."""
    gaps = [
        gap
        for timing, tiers in zip(record.timings, record.tiers, strict=True)
        for gap, where in zip(timing.itls, tiers[1:], strict=True)
        if where == tier
    ]
    return TierFigures(tokens=len(gaps), itl_ms=_distribution(gaps))


def _distribution(seconds: Iterable[float]) -> Distribution | None:
    return Distribution.of(value * MILLISECONDS for value in seconds)
