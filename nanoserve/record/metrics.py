"""The field's metrics, under the field's names; docs/benchmarks.md spells the definitions out."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Protocol, Self

import msgspec
import numpy as np

from nanoserve.errors import UsageError, shown

MILLISECONDS = 1000.0


class RequestTiming(msgspec.Struct, frozen=True):
    """When the tokens of one request became known."""

    input_tokens: int
    # seconds from the request's issue to each output token, one at least, in order
    token_times: tuple[float, ...]

    @property
    def output_tokens(self) -> int:
        return len(self.token_times)

    @property
    def ttft(self) -> float:
        """Time to first token, in seconds."""
        return self.token_times[0]

    @property
    def e2el(self) -> float:
        """End-to-end latency, in seconds."""
        return self.token_times[-1]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first: (E2EL - TTFT) / (output - 1); None with fewer than
        two tokens."""
        return (
            None if self.output_tokens < 2 else (self.e2el - self.ttft) / (self.output_tokens - 1)
        )

    @property
    def itls(self) -> tuple[float, ...]:
        """Inter-token latencies: the gap before each token after the first."""
        return tuple(after - before for before, after in pairwise(self.token_times))


class Distribution(msgspec.Struct, frozen=True):
    """Some values in brief. Percentiles interpolate linearly between neighbours, as numpy does by
    default."""

    n: int
    mean: float
    std: float
    min: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Self | None:
        """Summarize the values that are not None; None if there are none."""
        known = np.array([value for value in values if value is not None], dtype=np.float64)
        if not known.size:
            return None
        found = known.mean(), known.std(), *np.percentile(known, (0, 50, 90, 99, 100))
        return cls(known.size, *map(float, found))


class Spread(msgspec.Struct, frozen=True):
    """A metric over repeated runs, such as seeds: mean, lowest and highest."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Raises ValueError without values."""
        found = list(values)
        if not found:
            raise ValueError("a spread takes one value at least")
        return cls(sum(found) / len(found), min(found), max(found))

    def text(self, form: str) -> str:
        """Format as "1.84x [1.79x..1.90x]", or the mean alone where all seeds agree; ``form`` is
        for str.format."""
        mean, low, high = (form.format(value) for value in (self.mean, self.low, self.high))
        return mean if low == high else f"{mean} [{low}..{high}]"


class BatchRates(msgspec.Struct, frozen=True):
    """Tokens per second of requests that were issued together."""

    prefill: float  # prompt tokens of all over the time until every request had its first token
    # tokens after the first of all, over the time from there to the end; None if there are none
    decode: float | None
    output: float  # all output tokens over the whole time
    total: float  # prompt and output tokens over the whole time

    @classmethod
    def of(cls, timings: Sequence[RequestTiming]) -> Self:
        prefilled = max(timing.ttft for timing in timings)
        ended = max(timing.e2el for timing in timings)
        inputs = sum(timing.input_tokens for timing in timings)
        outputs = sum(timing.output_tokens for timing in timings)
        late = sum(sum(time > prefilled for time in timing.token_times) for timing in timings)
        decode = late / (ended - prefilled) if late else None
        return cls(inputs / prefilled, decode, outputs / ended, (inputs + outputs) / ended)


class TimedRequest(Protocol):
    """A request whose answer is complete; times in seconds."""

    @property
    def ttft(self) -> float: ...

    @property
    def tpot(self) -> float | None: ...

    @property
    def e2el(self) -> float: ...

    @property
    def itls(self) -> tuple[float, ...]: ...


def request_distributions(requests: Sequence[TimedRequest]) -> dict[str, Distribution | None]:
    """TTFT, TPOT and E2EL over requests, and ITL over the pooled gaps of all requests; all in
    milliseconds."""
    return {
        "ttft_ms": in_milliseconds(request.ttft for request in requests),
        "tpot_ms": in_milliseconds(request.tpot for request in requests),
        "itl_ms": in_milliseconds(gap for request in requests for gap in request.itls),
        "e2el_ms": in_milliseconds(request.e2el for request in requests),
    }


def in_milliseconds(seconds: Iterable[float | None]) -> Distribution | None:
    return Distribution.of(None if value is None else value * MILLISECONDS for value in seconds)


def mean_of_known(values: Iterable[float | None]) -> float:
    """The mean of the values that are not None; 0 if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0


SLO_NAMES = ("ttft", "tpot", "e2el")


class Slo(msgspec.Struct, frozen=True):
    """Latency limits of a good answer, in milliseconds; None where there is no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    def allows(self, ttft: float, tpot: float | None, e2el: float) -> bool:
        """Whether times in seconds are within all of the limits; a TPOT that does not exist breaks
        none."""
        pairs = ((self.ttft, ttft), (self.tpot, tpot), (self.e2el, e2el))
        return not any(
            limit is not None and time is not None and time * MILLISECONDS > limit
            for limit, time in pairs
        )


def parse_slo(text: str | None) -> Slo | None:
    """``ttft=2000,tpot=100,e2el=30000``, any of them, in milliseconds. Raises UsageError for
    anything else."""
    if text is None:
        return None
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = (piece.strip() for piece in part.partition("="))
        try:
            limit = float(number)
        except ValueError:
            limit = -1.0
        if name not in SLO_NAMES or name in limits or not 0 < limit < float("inf"):
            raise UsageError(
                f"--slo takes milliseconds such as ttft=2000,tpot=100,e2el=30000, not {shown(text)}"
            )
        limits[name] = limit
    return Slo(**limits)
