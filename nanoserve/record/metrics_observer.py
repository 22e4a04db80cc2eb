"""Metrics of a run while it goes on, in memory that does not grow with its length: observers of its
events."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from nanoserve.record.events import Arrived, Event, Gained, Planned, StepObserver
from nanoserve.record.metrics import MILLISECONDS, Slo
from nanoserve.record.sketches import Occupancy, Series, Sketch
from nanoserve.record.times import Beside, ReshardTimes, StageTimes, SwapTimes
from nanoserve.request import Sequence, SequenceUpdate

# of the arrivals of an open loop, before the window in which its rates are measured
FILLING_SHARE = 0.3


class CompletedRequest(NamedTuple):
    """Lengths and latencies of a finished request; TTFT and E2EL run from the arrival, in
    seconds."""

    request_id: str
    arrival: float
    input_tokens: int
    output_tokens: int
    ttft: float
    tpot: float | None
    """Mean time between its tokens; None if it has only one."""
    e2el: float


RequestObserver = Callable[[CompletedRequest], None]


class SloMeter:
    """A RequestObserver that counts the requests within the limits; several of them sweep the
    limits in one run."""

    def __init__(self, slo: Slo) -> None:
        self.slo = slo
        self.requests = self.attaining = 0

    def __call__(self, request: CompletedRequest) -> None:
        self.requests += 1
        self.attaining += self.slo.allows(request.ttft, request.tpot, request.e2el)

    @property
    def attainment(self) -> float | None:
        """The share within the limits; None without requests."""
        return self.attaining / self.requests if self.requests else None


class LatencyMetrics:
    """TTFT, TPOT, ITL and E2EL, in milliseconds, and counts; ``observers`` are shown every request
    that has ended."""

    def __init__(self, observers: Iterable[RequestObserver] = ()) -> None:
        self.ttft, self.tpot, self.itl, self.e2el = Sketch(), Sketch(), Sketch(), Sketch()
        self.requests = self.input_tokens = self.output_tokens = 0  # that have ended
        self._observers = tuple(observers)
        self._last_update: dict[str, float] = {}  # times by request that has not ended

    def __call__(self, event: Event) -> None:
        if not isinstance(event, Gained):
            return
        now, last_update = event.time, self._last_update
        requests = [update.request_id for update in event.updates]
        # most of a step have waited since the same moment
        previous = Counter(map(last_update.get, requests))
        if None in previous:
            for request in [
                one.sequence.request for one in event.updates if one.request_id not in last_update
            ]:
                self.input_tokens += len(request.prompt)
                self.ttft.add((now - request.arrival_time) * MILLISECONDS)
        last_update.update(dict.fromkeys(requests, now))
        for sequence in [
            one.sequence for one in event.updates if one.sequence.finish_reason is not None
        ]:
            self._finish(sequence, now)
        for last, times in previous.items():
            if last is not None:
                self.itl.add((now - last) * MILLISECONDS, times)

    def _finish(self, sequence: Sequence, now: float) -> None:
        del self._last_update[sequence.request.request_id]
        request, tokens = sequence.request, sequence.output_length
        first = now if sequence.first_token_time is None else sequence.first_token_time
        completed = CompletedRequest(
            request_id=request.request_id,
            arrival=request.arrival_time,
            input_tokens=len(request.prompt),
            output_tokens=tokens,
            ttft=first - request.arrival_time,
            tpot=(now - first) / (tokens - 1) if tokens > 1 else None,
            e2el=now - request.arrival_time,
        )
        self.requests += 1
        self.output_tokens += tokens
        self.e2el.add(completed.e2el * MILLISECONDS)
        if completed.tpot is not None:
            self.tpot.add(completed.tpot * MILLISECONDS)
        for observer in self._observers:
            observer(completed)


class SteadyRates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of an open loop between two arrivals: without the time in which it fills, and that in
    which it drains."""

    begin: float
    end: float
    """Seconds; the window ends with the last arrival."""
    arrivals_before: int  # requests that had come when the window began
    requests_per_second: float  # requests that ended
    output_tokens_per_second: float
    # input and output tokens; a prompt counts when its first token is known
    tokens_per_second: float
    goodput: float  # requests that ended within the limits, per second


class _Progress(NamedTuple):
    arrivals: int
    requests: int
    good: int
    input_tokens: int
    output_tokens: int


class ArrivalWindow:
    """Measures rates from a share of the arrivals to the last one. Several engines may share one
    window.

    Progress is kept at arrivals, thinned to a thousand of them.
    """

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        self._arrivals = self._requests = self._good = self._input_tokens = self._output_tokens = 0
        self._series = Series[_Progress]()
        self._last = (0.0, _Progress(0, 0, 0, 0, 0))

    def __call__(self, event: Event) -> None:
        if isinstance(event, Arrived):
            self._arrivals += 1
            counts = (
                self._arrivals,
                self._requests,
                self._good,
                self._input_tokens,
                self._output_tokens,
            )
            self._last = (event.time, _Progress(*counts))
            self._series.add(*self._last)
        elif isinstance(event, Gained):
            for update in event.updates:
                self._count(update)

    def _count(self, update: SequenceUpdate) -> None:
        sequence = update.sequence
        self._output_tokens += len(update.new_tokens)
        if sequence.output_length == len(update.new_tokens):
            self._input_tokens += len(sequence.request.prompt)

    def on_request(self, request: CompletedRequest) -> None:
        """Count a request that has ended: a RequestObserver."""
        self._requests += 1
        self._good += self._slo.allows(request.ttft, request.tpot, request.e2el)

    def rates(self) -> SteadyRates | None:
        """The rates; None if the requests came all at once."""
        points = self._series.points
        begin, before = points[int(FILLING_SHARE * len(points))]
        end, after = self._last
        seconds = end - begin
        if seconds <= 0:
            return None
        outputs = after.output_tokens - before.output_tokens
        inputs = after.input_tokens - before.input_tokens
        return SteadyRates(
            begin=begin,
            end=end,
            arrivals_before=before.arrivals - 1,
            requests_per_second=(after.requests - before.requests) / seconds,
            output_tokens_per_second=outputs / seconds,
            tokens_per_second=(inputs + outputs) / seconds,
            goodput=(after.good - before.good) / seconds,
        )


class LayoutTime(NamedTuple):
    """Time in one parallel layout: all of it, and that in which something was in flight."""

    seconds: float
    working: float


class StepMetrics(StepObserver):
    """Steps of a simulated run as they enter the pipeline, and what happens beside them."""

    def __init__(self, block_size: int, layouts: int = 1, groups: int = 1) -> None:
        self.tokens = Sketch()  # tokens of each step
        # number, decodes and prompt tokens of a step, over time
        self.counts = Series[tuple[int, int, int]]()
        self.occupancy, self.host_occupancy = Occupancy(), Occupancy()  # shares of KV blocks in use
        self.strategy_steps: Counter[str] = Counter()  # how many steps had which strategy
        # what the blocks moved in each direction hold
        self.swapped_tokens: Counter[str] = Counter()
        self.transitions = 0  # changes of the layout, from the reload's begin to its end
        self.transition_seconds = self.processor_seconds = 0.0  # in which the CPU attended
        self._block_size, self._groups = block_size, groups
        # time in which nothing was in flight, because there was no request
        self._idle_seconds = self._last_end = 0.0
        self._times = [LayoutTime(0.0, 0.0)] * layouts
        self._layout = 0
        self._since = self._idle_before = 0.0

    def on_step(self, planned: Planned, stages: tuple[StageTimes, ...]) -> None:
        now = planned.time
        self.tokens.add(planned.plan.decodes + planned.plan.prompt_tokens)
        self.counts.add(now, (planned.plan.step, planned.plan.decodes, planned.plan.prompt_tokens))
        self._keep_busy(now, stages[-1].computed)
        self.occupancy.add(now, planned.blocks.device_share)
        self.strategy_steps[planned.plan.host.strategy] += 1
        self._look_at_host(planned)

    def on_beside(self, planned: Planned, times: Beside) -> None:
        if isinstance(times, SwapTimes):
            blocks = next(
                swap.device_blocks for swap in planned.plan.host.swaps if swap.swap == times.swap
            )
            self.swapped_tokens[times.direction] += len(blocks) // self._groups * self._block_size
            self._keep_busy(planned.time, times.ended)
            self._look_at_host(planned)
        elif isinstance(times, ReshardTimes):
            self._change_layout(planned.time, times)
        else:
            self.processor_seconds += times.seconds

    def layout_times(self, now: float) -> list[LayoutTime]:
        """Times of every layout until now; transitions belong to none."""
        seconds, working = self._times[self._layout]
        passed, idle = now - self._since, self._idle_seconds - self._idle_before
        times = list(self._times)
        times[self._layout] = LayoutTime(seconds + passed, working + passed - idle)
        return times

    def _change_layout(self, now: float, reload: ReshardTimes) -> None:
        # The time between now and the begin of the reload belongs to the old layout.
        self._keep_busy(now, reload.ended)
        self._times = self.layout_times(reload.began)
        self._layout = reload.layout
        self._since, self._idle_before = reload.ended, self._idle_seconds
        self.transitions += 1
        self.transition_seconds += reload.ended - reload.began

    def _keep_busy(self, now: float, end: float) -> None:
        self._idle_seconds += max(0.0, now - self._last_end)
        self._last_end = max(self._last_end, end)

    def _look_at_host(self, planned: Planned) -> None:
        if planned.blocks.host:
            self.host_occupancy.add(planned.time, planned.blocks.host_share)
