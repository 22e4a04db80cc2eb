"""RunRecord: every event of a run, and what can be computed from them when it is over: requests, stages, moves."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Literal, TypeVar

import msgspec

from nanoserve.errors import RuntimeFailure
from nanoserve.record.events import Arrived, Blocks, Collected, Event, Finished, Gained, Planned, Worked
from nanoserve.record.metrics import RequestTiming
from nanoserve.record.phases import Phase, PhaseTracker
from nanoserve.record.times import HostTimes, Move, ReshardTimes, StageTimes, SwapTimes
from nanoserve.request import Request, SequenceUpdate
from nanoserve.scheduler.optional import Tier, tier_of
from nanoserve.scheduler.plan import StepPlan, StepResult

_GIGA = 1e9
Span = tuple[float, float]
E = TypeVar("E")


class RunRecord:
    """An observer that keeps every event in order; everything else is read when the run is over."""

    def __init__(self, max_in_flight: int, events: Iterable[Event] = (), *, keeps_tables: bool = False) -> None:
        self.max_in_flight = max_in_flight  # plans that the executor takes at a time
        self.keeps_tables = keeps_tables  # whether the recorder is to add the block tables to every plan
        self.events: list[Event] = list(events)

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    @cached_property
    def arrivals(self) -> list[Request]:
        """Requests, each with the time at which the engine took it in as its arrival time."""
        return [replace(event.request, arrival_time=event.time) for event in self.of(Arrived)]

    @cached_property
    def planned(self) -> dict[int, Planned]:
        return {event.plan.step: event for event in self.of(Planned)}

    @cached_property
    def plans(self) -> list[StepPlan]:
        return [event.plan for event in self.planned.values()]

    @cached_property
    def collected(self) -> dict[float, tuple[StepResult, ...]]:
        """All results in order, by their moments on the engine's clock."""
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
        in_flight: list[int] = []
        for event in self.events:
            if isinstance(event, Planned) and event.plan.ends:
                in_flight.append(event.plan.step)
            if not isinstance(event, Collected):
                continue
            for result in event.results:
                if result.lost is not None and in_flight:
                    answers |= dict.fromkeys(in_flight, (event.clock, None)) | {in_flight[-1]: (event.clock, result)}
                    in_flight.clear()
                elif result.step is not None:
                    answers[result.step] = event.clock, result
                    in_flight.remove(result.step)
        return answers

    @property
    def losses(self) -> list[str]:
        """Why workers died, each time."""
        return [result.lost for result in self.results if result.lost is not None]

    def check(self) -> None:
        """Raise RuntimeFailure if a request failed, workers died, or attention on the CPU was lost."""
        for update in self._updates:
            if update.sequence.error is not None:
                raise RuntimeFailure(update.sequence.error)
        lost = [f"workers die: {reason}" for reason in self.losses]
        lost += [f"attention on the CPU is lost: {result.host.lost}" for result in self.results if result.host.lost]
        if lost:
            raise RuntimeFailure(f"nothing can be measured of a run in which {lost[0]}")

    @cached_property
    def stage_times(self) -> list[StageTimes]:
        return [times for event in self.of(Worked) for times in event.stages]

    @cached_property
    def moves(self) -> list[Move]:
        """Every worker's moves between device and host memory."""
        return [move for event in self.of(Worked) for move in event.beside if not isinstance(move, HostTimes)]

    def stages(self, tensor_parallel: int = 1) -> list[list[StageTimes]]:
        """Times of the first rank of each stage, in the order of the plans."""
        ordered = sorted(self.stage_times, key=attrgetter("step"))
        ranks = sorted({times.rank for times in ordered if times.rank % tensor_parallel == 0})
        return [[times for times in ordered if times.rank == rank] for rank in ranks]

    @cached_property
    def blocks(self) -> list[tuple[float, Blocks]]:
        """Times and blocks, at every plan and at the end."""
        return [(event.time, event.blocks) for event in self.events if isinstance(event, Planned | Finished)]

    @cached_property
    def phases(self) -> list[Phase]:
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
        return [event.request for event in self.of(Arrived)]

    @property
    def _updates(self) -> Iterator[SequenceUpdate]:
        return (update for event in self.of(Gained) for update in event.updates)

    @property
    def makespan(self) -> float:
        """Seconds from the first arrival to the last token."""
        pairs = zip(self.rebased_requests, self.timings, strict=True)
        return max(request.arrival_time + timing.e2el for request, timing in pairs)

    @property
    def rebased_requests(self) -> list[Request]:
        """The requests, with arrival times from 0 on."""
        first = self._requests[0].arrival_time
        return [replace(request, arrival_time=request.arrival_time - first) for request in self._requests]

    @property
    def tiers(self) -> list[list[Tier]]:
        """For each request, the tier of the KV of each of its tokens: every sampled row begins one."""
        tiers: dict[int, list[Tier]] = {}
        for row in chain.from_iterable(plan.rows for plan in self.plans):
            if row.sample and row.tokens:  # a row of no tokens finishes what an earlier one began
                tiers.setdefault(row.sequence, []).append(tier_of(row))
        sequences = {update.request_id: update.sequence.sequence_id for update in self._updates}
        return [tiers[sequences[request.request_id]] for request in self._requests]


class StageShares(msgspec.Struct, frozen=True):
    """One stage's time with something in flight, divided; the first four shares add up to 1."""

    computing: float
    sending: float
    """Share from the end of computing until the activations, or the answer, were on their way."""
    metadata: float  # share in which only the inputs were missing
    waiting: float  # share in which the stage waited for activations, or for a plan: the rest
    metadata_of_step: float  # time waiting for inputs, as a share of the time waiting for inputs, computing and sending

    @property
    def bubbles(self) -> float:
        return 1 - self.computing


def working_seconds(record: RunRecord) -> float:
    """Seconds with anything in flight. Time without a request is no bubble."""
    return _length(merged((planned.time, record.known[step]) for step, planned in record.planned.items()))


def stage_shares(record: RunRecord, tensor_parallel: int = 1) -> list[StageShares]:
    """Shares of every stage; none if the executor reported no times."""
    working, shares = working_seconds(record), []
    given: list[float] = []  # when the stage before, or the engine, was done with each plan
    for parts in record.stages(tensor_parallel):
        given = given or [record.planned[times.step].time for times in parts]
        computing = sum(times.computed - times.started for times in parts)
        sending = sum(times.sent - times.computed for times in parts)
        metadata = _metadata_seconds(parts, given)
        busy = computing + sending + metadata
        of_working = computing / working, sending / working, metadata / working
        shares.append(StageShares(*of_working, waiting=1 - busy / working, metadata_of_step=metadata / busy))
        given = [times.sent for times in parts]
    return shares


def _metadata_seconds(parts: Sequence[StageTimes], given: Sequence[float]) -> float:
    """How long a stage could have computed its plans already, had their inputs been prepared.

    A stage can compute a plan once it has finished the previous one and has its work: the engine's plan, or the stage
    before's activations. The result includes the transfer of the activations, if preparing took that long.
    """
    free = [given[0], *(times.sent for times in parts[:-1])]
    return sum(max(0.0, times.prepared - max(moments)) for times, *moments in zip(parts, given, free, strict=True))


def engine_seconds(record: RunRecord) -> list[float]:
    """For each plan, the seconds that the engine took to apply the previous result and to decide."""
    plans = list(record.planned.values())
    done = [0.0, *(planned.time for planned in plans[:-1])]
    # The clock is in ticks, so a difference may be below 0.
    return [max(0.0, one.time - max(one.clock, before)) for one, before in zip(plans, done, strict=True)]


class MoveMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Moves of one kind."""

    count: int
    num_bytes: int
    """Bytes moved by all workers together."""
    seconds: float  # time in which any worker was moving
    gb_per_s: float | None
    """Mean bandwidth of one worker while it was moving; swaps that follow a step's row mostly wait and do not count."""
    share_of_link: float | None  # ``gb_per_s`` over the measured bandwidth between device and host memory of one worker
    hidden: float | None  # share of the workers' moving time in which the same worker also computed a step


def move_metrics(record: RunRecord, kind: Literal["reshard", "out", "in"], link: float | None) -> MoveMetrics:
    """All transitions, or all swaps in one direction; ``link`` is one worker's host link in bytes per second."""
    moves = [move for move in record.moves if (move.direction if isinstance(move, SwapTimes) else "reshard") == kind]
    copies = [move for move in moves if isinstance(move, ReshardTimes) or not move.after_row]
    spans = _spans(moves)
    busy, copying = sum(map(_length, spans.values())), sum(map(_length, _spans(copies).values()))
    speed = sum(move.num_bytes for move in copies) / copying if copying > 0 else None
    covered = 0.0
    for rank, of_rank in spans.items():
        steps = merged((times.started, times.computed) for times in record.stage_times if times.rank == rank)
        covered += overlap(of_rank, steps)
    return MoveMetrics(
        count=len({move.step if isinstance(move, ReshardTimes) else move.swap for move in moves}),
        num_bytes=sum(move.num_bytes for move in moves),
        seconds=_length(merged((move.began, move.ended) for move in moves)),
        gb_per_s=None if speed is None else speed / _GIGA,
        share_of_link=None if speed is None or link is None else speed / link,
        hidden=covered / busy if busy > 0 else None,
    )


def _spans(moves: Sequence[Move]) -> dict[int, list[Span]]:
    ranks = {move.rank for move in moves}
    return {rank: merged((move.began, move.ended) for move in moves if move.rank == rank) for rank in ranks}


def merged(spans: Iterable[Span]) -> list[Span]:
    """The union of the spans, as disjoint spans in order."""
    found: list[Span] = []
    for began, ended in sorted(spans):
        if found and began <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], ended)
        else:
            found.append((began, ended))
    return found


def overlap(first: Sequence[Span], second: Sequence[Span]) -> float:
    """Seconds covered by both; each is merged."""
    return max(0.0, _length(first) + _length(second) - _length(merged((*first, *second))))


def _length(spans: Iterable[Span]) -> float:
    return sum(ended - began for began, ended in spans)
