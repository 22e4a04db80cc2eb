"""What is measured while time passes, in memory that does not grow with the time that has passed."""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, Self, TypeVar

from nanoserve.costs.work import StepWork
from nanoserve.kv import BlockPool
from nanoserve.measures.metrics import MILLISECONDS, Distribution
from nanoserve.measures.slo import Slo
from nanoserve.request import SequenceUpdate
from nanoserve.scheduler.plan import StepPlan
from nanoserve.simulator.pipeline import Passage

Value = TypeVar("Value")

_RESOLUTION = 1.01
"""Percentiles are right to half a percent."""
_LOG_RESOLUTION = math.log(_RESOLUTION)
_SMALLEST = 1e-9
_KEPT_POINTS = 1000


class Sketch:
    """Many positive values in brief: count, mean, deviation and ends exactly, percentiles by logarithmic classes."""

    def __init__(self) -> None:
        self._count = 0
        self._sum = self._sum_of_squares = 0.0
        self._min, self._max = math.inf, -math.inf
        self._classes: Counter[int] = Counter()

    def add(self, value: float, times: int = 1) -> None:
        """One more value, not negative, or so many of them."""
        self._count += times
        self._sum += value * times
        self._sum_of_squares += value * value * times
        self._min = min(self._min, value)
        self._max = max(self._max, value)
        self._classes[round(math.log(max(value, _SMALLEST)) / _LOG_RESOLUTION)] += times

    @classmethod
    def merged(cls, sketches: Iterable[Self]) -> Self:
        """What one would hold that had been given all their values."""
        whole = cls()
        for sketch in sketches:
            whole._count += sketch._count
            whole._sum += sketch._sum
            whole._sum_of_squares += sketch._sum_of_squares
            whole._min, whole._max = min(whole._min, sketch._min), max(whole._max, sketch._max)
            whole._classes += sketch._classes
        return whole

    @property
    def mean(self) -> float | None:
        """None without values."""
        return self._sum / self._count if self._count else None

    def distribution(self) -> Distribution | None:
        """None without values."""
        if not self._count:
            return None
        mean = self._sum / self._count
        deviation = math.sqrt(max(0.0, self._sum_of_squares / self._count - mean * mean))
        p50, p90, p99 = (self._percentile(share) for share in (0.5, 0.9, 0.99))
        return Distribution(self._count, mean, deviation, self._min, p50, p90, p99, self._max)

    def _percentile(self, share: float) -> float:
        wanted, passed = share * (self._count - 1), 0
        for number in sorted(self._classes):
            passed += self._classes[number]
            if passed > wanted:
                return min(max(math.exp(number * _LOG_RESOLUTION), self._min), self._max)
        raise AssertionError("the classes hold every value")


class CompletedRequest(NamedTuple):
    """What became of one request; times in seconds."""

    request_id: str
    arrival: float
    """When it came."""
    input_tokens: int
    output_tokens: int
    ttft: float
    tpot: float | None
    """Between its tokens, on average; None if it has but one."""
    e2el: float
    """``ttft``, ``e2el``: from then to its first and to its last token."""


RequestObserver = Callable[[CompletedRequest], None]
"""Is shown every request when it has ended."""


class SloMeter:
    """A RequestObserver that counts the requests within the limits; several of them sweep the limits in one run."""

    def __init__(self, slo: Slo) -> None:
        self.slo = slo
        self.requests = self.attaining = 0

    def __call__(self, request: CompletedRequest) -> None:
        """One more request has ended."""
        self.requests += 1
        self.attaining += self.slo.allows(request.ttft, request.tpot, request.e2el)

    @property
    def attainment(self) -> float | None:
        """The share within the limits; None without requests."""
        return self.attaining / self.requests if self.requests else None


class _Life:
    """What is known of a request that is on its way."""

    __slots__ = ("arrival", "first", "input_tokens", "last", "tokens")

    def __init__(self, arrival: float, input_tokens: int, now: float) -> None:
        self.arrival = arrival
        self.input_tokens = input_tokens
        self.first = self.last = now
        self.tokens = 0

    def completed(self, request_id: str) -> CompletedRequest:
        """With the last token it ends."""
        ttft, e2el = self.first - self.arrival, self.last - self.arrival
        tpot = (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else None
        return CompletedRequest(request_id, self.arrival, self.input_tokens, self.tokens, ttft, tpot, e2el)


class RequestMeter:
    """TTFT, TPOT, ITL and E2EL, in milliseconds, and how many requests and tokens there were.

    Args:
        observers: are shown every request that has ended.
    """

    def __init__(self, observers: Sequence[RequestObserver] = ()) -> None:
        self.ttft, self.tpot, self.itl, self.e2el = Sketch(), Sketch(), Sketch(), Sketch()
        self.requests = self.input_tokens = self.output_tokens = 0  # that have ended
        self._observers = observers
        self._lives: dict[str, _Life] = {}

    def on_updates(self, now: float, updates: Sequence[SequenceUpdate]) -> None:
        """What sequences gained at this moment."""
        previous: list[float] = []
        for update in updates:
            life = self._lives.get(update.request_id)
            if life is None:
                request = update.sequence.request
                life = _Life(request.arrival_time, len(request.prompt), now)
                self._lives[update.request_id] = life
                self.input_tokens += life.input_tokens
                self.ttft.add((now - life.arrival) * MILLISECONDS)
            else:
                previous.append(life.last)
                life.last = now
            gained = len(update.new_tokens)
            life.tokens += gained
            if update.finished:
                self._finish(self._lives.pop(update.request_id).completed(update.request_id))
        for time, times in Counter(previous).items():  # most of a step have waited since the same moment
            self.itl.add((now - time) * MILLISECONDS, times)

    def _finish(self, request: CompletedRequest) -> None:
        self.requests += 1
        self.output_tokens += request.output_tokens
        self.e2el.add(request.e2el * MILLISECONDS)
        if request.tpot is not None:
            self.tpot.add(request.tpot * MILLISECONDS)
        for observer in self._observers:
            observer(request)


class Series(Generic[Value]):
    """A curve over time, thinned as it grows: when it has too many points, every second one goes."""

    def __init__(self) -> None:
        self.points: list[tuple[float, Value]] = []
        self._stride = self._skipped = 1

    def add(self, time: float, value: Value) -> None:
        """One more point, not earlier than any other."""
        if self._skipped < self._stride:
            self._skipped += 1
            return
        self._skipped = 1
        self.points.append((time, value))
        if len(self.points) > _KEPT_POINTS:
            del self.points[1::2]
            self._stride *= 2


def mean_series(curves: Sequence[Series[float]]) -> Series[float]:
    """The mean of curves that begin at 0 and keep each value until the next."""
    if len(curves) == 1:
        return curves[0]
    mean = Series[float]()
    values, total = [0.0] * len(curves), 0.0
    tagged = [[(time, number, value) for time, value in curve.points] for number, curve in enumerate(curves)]
    for time, number, value in heapq.merge(*tagged):
        total += value - values[number]
        values[number] = value
        mean.add(time, total / len(curves))
    return mean


class Occupancy:
    """The share of KV blocks in use over time."""

    def __init__(self) -> None:
        self.series = Series[float]()  # the curve, thinned
        self.seconds = self.peak = 0.0  # the share, integrated over time; the highest
        self._time = self._share = 0.0

    def add(self, time: float, share: float) -> None:
        """From this moment on it is so much."""
        self.seconds += self._share * (time - self._time)
        self._time, self._share = time, share
        self.peak = max(self.peak, share)
        self.series.add(time, share)


class StepMeter:
    """Steps as they enter the pipeline: their tokens, the share of KV blocks in use, and time with nothing to do.

    Args:
        pool: the blocks.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.tokens = Sketch()  # of a step
        self.counts = Series[tuple[int, int, int]]()  # number, decodes and prompt tokens of a step, over time
        self.occupancy = Occupancy()  # share of blocks in use
        self.idle_seconds = self.last_end = 0.0  # time in which nothing was in flight, because there was no request
        self._pool = pool

    def on_step(self, now: float, plan: StepPlan, work: StepWork, passages: Sequence[Passage]) -> None:
        """A plan enters the pipeline."""
        tokens = work.tokens
        self.tokens.add(tokens)
        self.counts.add(now, (plan.step, work.decodes, tokens - work.decodes))
        self.keep_busy(now, passages[-1].end)
        self.occupancy.add(now, 1 - self._pool.free_blocks / self._pool.num_blocks)

    def keep_busy(self, now: float, end: float) -> None:
        """From now until then something is in flight."""
        self.idle_seconds += max(0.0, now - self.last_end)
        self.last_end = max(self.last_end, end)
