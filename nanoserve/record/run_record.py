"""RunRecord: every event of a run, and what can be computed from them when the run is over."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import TypeVar

from nanoserve.errors import RuntimeFailure
from nanoserve.measures.metrics import RequestTiming
from nanoserve.record.events import Arrived, Blocks, Collected, Event, Finished, Gained, Planned, Worked
from nanoserve.record.forecasts import Forecast
from nanoserve.record.phases import Phase, PhaseTracker
from nanoserve.record.times import HostTimes, Move, StageTimes
from nanoserve.request import Request
from nanoserve.scheduler.plan import StepPlan, StepResult, Tier

E = TypeVar("E")


class RunRecord:
    """An observer that keeps every event in order; everything else is read when the run is over."""

    def __init__(self, max_in_flight: int, events: Iterable[Event] = ()) -> None:
        self.max_in_flight = max_in_flight  # plans that the executor takes at a time
        self.events: list[Event] = list(events)

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type[E]) -> list[E]:
        """The events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]

    @cached_property
    def arrivals(self) -> list[Request]:
        """Requests, each with the time at which the engine took it in as its arrival time."""
        return [replace(event.request, arrival_time=event.time) for event in self.of(Arrived)]

    @cached_property
    def planned(self) -> dict[int, Planned]:
        """All plans by step, as events."""
        return {event.plan.step: event for event in self.of(Planned)}

    @cached_property
    def plans(self) -> list[StepPlan]:
        return [event.plan for event in self.planned.values()]

    @cached_property
    def collected(self) -> dict[float, tuple[StepResult, ...]]:
        """All results in order, grouped by their moment on the engine's clock."""
        return {event.clock: event.results for event in self.of(Collected)}

    @property
    def results(self) -> Iterator[StepResult]:
        """All results, in the order in which they became known."""
        return chain.from_iterable(event.results for event in self.of(Collected))

    @cached_property
    def known(self) -> dict[int, float]:
        """Time of each plan's result or loss on the engine's clock, by step; none for plans that only move KV."""
        return {step: moment for step, (moment, _) in self._answers.items()}

    @cached_property
    def result_of(self) -> dict[int, StepResult]:
        """The results by step. The death of workers belongs to the last plan that was lost; earlier ones have none."""
        return {step: result for step, (_, result) in self._answers.items() if result is not None}

    @cached_property
    def _answers(self) -> dict[int, tuple[float, StepResult | None]]:
        answers: dict[int, tuple[float, StepResult | None]] = {}
        in_flight: dict[int, None] = {}
        for event in self.events:
            if isinstance(event, Planned) and event.plan.ends:
                in_flight[event.plan.step] = None
            if not isinstance(event, Collected):
                continue
            for result in event.results:
                if result.lost is not None and in_flight:
                    answers |= dict.fromkeys(in_flight, (event.clock, None))
                    answers[list(in_flight)[-1]] = event.clock, result
                    in_flight.clear()
                elif result.step is not None:
                    answers[result.step] = event.clock, result
                    del in_flight[result.step]
        return answers

    @property
    def losses(self) -> list[str]:
        """Why workers died, each time."""
        return [result.lost for result in self.results if result.lost is not None]

    def check(self) -> None:
        """Raise RuntimeFailure if a request failed, workers died, or attention on the CPU was lost."""
        for event in self.of(Gained):
            for update in event.updates:
                if update.sequence.error is not None:
                    raise RuntimeFailure(update.sequence.error)
        unmeasured = "nothing can be measured of a run in which"
        if losses := self.losses:
            raise RuntimeFailure(f"{unmeasured} workers die: {losses[0]}")
        if losses := [result.host_lost for result in self.results if result.host_lost is not None]:
            raise RuntimeFailure(f"{unmeasured} attention on the CPU is lost: {losses[0]}")

    @cached_property
    def stage_times(self) -> list[StageTimes]:
        """What every worker took for every plan."""
        return [times for event in self.of(Worked) for times in event.stages]

    @cached_property
    def moves(self) -> list[Move]:
        """Every worker's moves between device and host memory."""
        return [move for event in self.of(Worked) for move in event.beside if not isinstance(move, HostTimes)]

    def stages(self, tensor_parallel: int = 1) -> list[list[StageTimes]]:
        """What the first rank of each stage did, in the order of the plans."""
        stages: dict[int, list[StageTimes]] = {}
        for times in sorted(self.stage_times, key=lambda times: times.step):
            if times.rank % tensor_parallel == 0:
                stages.setdefault(times.rank // tensor_parallel, []).append(times)
        return [stages[stage] for stage in sorted(stages)]

    @cached_property
    def forecasts(self) -> list[Forecast]:
        """Predictions of steps that were measured."""
        return self.of(Forecast)

    @cached_property
    def blocks(self) -> list[tuple[float, Blocks]]:
        """Times and blocks, at every plan and at the end."""
        return [(event.time, event.blocks) for event in self.events if isinstance(event, Planned | Finished)]

    @property
    def preemptions(self) -> int:
        return self.blocks[-1][1].preemptions if self.blocks else 0

    @cached_property
    def phases(self) -> list[Phase]:
        """Computing in each layout, draining and re-sharding, one after the other."""
        tracker = PhaseTracker()
        return [phase for event in self.events for phase in tracker.on_event(event)]

    @cached_property
    def timings(self) -> list[RequestTiming]:
        """Token times of each request, in order of arrival."""
        times: dict[str, list[float]] = {}
        for event in self.of(Gained):
            for update in event.updates:
                times.setdefault(update.request_id, []).extend([event.time] * len(update.new_tokens))
        return [
            RequestTiming(len(request.prompt), tuple(time - request.arrival_time for time in times[request.request_id]))
            for request in self._requests
        ]

    @property
    def _requests(self) -> list[Request]:
        """Requests in the order in which the engine took them in."""
        return [event.request for event in self.of(Arrived)]

    @property
    def makespan(self) -> float:
        """Seconds from the first arrival to the last token."""
        pairs = zip(self.rebased_requests, self.timings, strict=True)
        return max(request.arrival_time + timing.e2el for request, timing in pairs)

    @property
    def rebased_requests(self) -> list[Request]:
        """The same requests, with arrival times from 0 on."""
        first = self._requests[0].arrival_time
        return [replace(request, arrival_time=request.arrival_time - first) for request in self._requests]

    @property
    def tiers(self) -> list[tuple[Tier, ...]]:
        """For each request, the tier of the KV of each of its tokens."""
        tiers, updates = tiers_of_tokens(self.plans), (update for event in self.of(Gained) for update in event.updates)
        sequences = {update.request_id: update.sequence.sequence_id for update in updates}
        return [tiers[sequences[request.request_id]] for request in self._requests]


def tiers_of_tokens(plans: Iterable[StepPlan]) -> dict[int, tuple[Tier, ...]]:
    """For each sequence, the tier of the KV of each of its tokens: every sampled row begins one."""
    found: dict[int, list[Tier]] = {}
    for plan in plans:
        for row in plan.rows:
            if row.sample and row.tokens:  # a row of no tokens finishes what an earlier one began
                found.setdefault(row.sequence, []).append(row.tier)
    return {sequence: tuple(tiers) for sequence, tiers in found.items()}
