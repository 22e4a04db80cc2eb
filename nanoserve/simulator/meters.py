"""What is measured while time passes, in memory that does not grow with the time that has passed."""

import math
from collections import Counter
from collections.abc import Sequence

from nanoserve.benchmarks.metrics import MILLISECONDS, Distribution
from nanoserve.costs.work import StepWork
from nanoserve.kv.block_pool import BlockPool
from nanoserve.request import SequenceUpdate
from nanoserve.scheduler.plan import StepPlan
from nanoserve.simulator.pipeline import Passage

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


class _Life:
    """The times of a request that is on its way."""

    __slots__ = ("arrival", "first", "last", "tokens")

    def __init__(self, arrival: float, now: float) -> None:
        self.arrival = arrival
        self.first = self.last = now
        self.tokens = 0


class RequestMeter:
    """TTFT, TPOT, ITL and E2EL, in milliseconds, and how many requests and tokens there were."""

    def __init__(self) -> None:
        self.ttft, self.tpot, self.itl, self.e2el = Sketch(), Sketch(), Sketch(), Sketch()
        self.requests = self.input_tokens = self.output_tokens = 0
        self._lives: dict[str, _Life] = {}

    def on_updates(self, now: float, updates: Sequence[SequenceUpdate]) -> None:
        """What sequences gained at this moment."""
        previous: list[float] = []
        for update in updates:
            life = self._lives.get(update.request_id)
            if life is None:
                request = update.sequence.request
                life = self._lives[update.request_id] = _Life(request.arrival_time, now)
                self.input_tokens += len(request.prompt)
                self.ttft.add((now - life.arrival) * MILLISECONDS)
            else:
                previous.append(life.last)
                life.last = now
            life.tokens += len(update.new_tokens)
            if update.finished:
                self._finish(self._lives.pop(update.request_id))
        for time, times in Counter(previous).items():  # most of a step have waited since the same moment
            self.itl.add((now - time) * MILLISECONDS, times)

    def _finish(self, life: _Life) -> None:
        self.requests += 1
        self.output_tokens += life.tokens
        self.e2el.add((life.last - life.arrival) * MILLISECONDS)
        if life.tokens > 1:
            self.tpot.add((life.last - life.first) / (life.tokens - 1) * MILLISECONDS)


class Series:
    """A curve over time, thinned as it grows: when it has too many points, every second one goes."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self._stride = self._skipped = 1

    def add(self, time: float, value: float) -> None:
        """One more point, later than all others."""
        if self._skipped < self._stride:
            self._skipped += 1
            return
        self._skipped = 1
        self.points.append((time, value))
        if len(self.points) > _KEPT_POINTS:
            del self.points[1::2]
            self._stride *= 2


class StepMeter:
    """Steps as they enter the pipeline: their tokens, the share of KV blocks in use, and time with nothing to do.

    Args:
        pool: the blocks.

    Attributes:
        idle_seconds: time in which no plan was in flight, because there was no request.
        last_end: when the last plan so far leaves the pipeline.
        occupancy_seconds: share of blocks in use, integrated over time.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.tokens = Sketch()
        self.occupancy = Series()
        self.peak_occupancy = self.occupancy_seconds = 0.0
        self.idle_seconds = self.last_end = 0.0
        self._pool = pool
        self._before: tuple[float, float] = (0.0, 0.0)

    def on_step(self, now: float, plan: StepPlan, work: StepWork, passages: Sequence[Passage]) -> None:
        """A plan enters the pipeline."""
        self.tokens.add(work.tokens)
        self.idle_seconds += max(0.0, now - self.last_end)
        self.last_end = passages[-1].end
        occupancy = 1 - self._pool.free_blocks / self._pool.num_blocks
        time, before = self._before
        self.occupancy_seconds += before * (now - time)
        self._before = (now, occupancy)
        self.peak_occupancy = max(self.peak_occupancy, occupancy)
        self.occupancy.add(now, occupancy)
