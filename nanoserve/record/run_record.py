"""RunRecord: every event of a run, and what can be computed from them when it is over: requests,
stages, moves."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Literal, TypeVar

import msgspec

from nanoserve.errors import RuntimeFailure
from nanoserve.record.events import (
    Arrived,
    Blocks,
    Collected,
    Event,
    Finished,
    Gained,
    Planned,
    Worked,
)
from nanoserve.record.metrics import RequestTiming
from nanoserve.record.phases import Phase, PhaseTracker
from nanoserve.record.times import HostTimes, Move, StageTimes, SwapTimes
from nanoserve.request import Request, SequenceUpdate
from nanoserve.scheduler.optional import Tier, tier_of
from nanoserve.scheduler.plan import StepPlan, StepResult

_GIGA = 1e9
Span = tuple[float, float]
E = TypeVar("E")


class RunRecord:
    """An observer that keeps every event in order; everything else is read when the run is over."""

    def __init__(
        self, max_in_flight: int, events: Iterable[Event] = (), *, keeps_tables: bool = False
    ) -> None:
        self.max_in_flight = max_in_flight  # plans that the executor takes at a time
        # whether the recorder is to add the block tables to every plan
        self.keeps_tables = keeps_tables
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
        """Time of each plan's result or loss on the engine's clock, by step; none for plans that
        only move KV."""
        return {step: moment for step, (moment, _) in self._answers.items()}

    @cached_property
    def result_of(self) -> dict[int, StepResult]:
        """The results by step. The death of workers belongs to the last plan that was lost; earlier
        ones have none."""
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
                    for step in in_flight:
                        answers[step] = event.clock, None
                    last_lost = in_flight[-1]
                    answers[last_lost] = event.clock, result
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
        """Raise RuntimeFailure if a request failed, workers died, or attention on the CPU was
        lost."""
        for update in self._updates:
            if update.sequence.error is not None:
                raise RuntimeFailure(update.sequence.error)
        for reason in self.losses:
            raise RuntimeFailure(f"nothing can be measured of a run in which workers die: {reason}")
        for result in self.results:
            if result.host.lost:
                raise RuntimeFailure(
                    "nothing can be measured of a run in which attention on the CPU is lost: "
                    f"{result.host.lost}"
                )

    @cached_property
    def stage_times(self) -> list[StageTimes]:
        return [times for event in self.of(Worked) for times in event.stages]

    @cached_property
    def moves(self) -> list[Move]:
        """Every worker's moves between device and host memory."""
        return [
            move
            for event in self.of(Worked)
            for move in event.beside
            if not isinstance(move, HostTimes)
        ]

    def stages(self, tensor_parallel: int = 1) -> list[list[StageTimes]]:
        """Times of the first rank of each stage, in the order of the plans."""
        ordered = sorted(self.stage_times, key=attrgetter("step"))
        ranks = sorted({times.rank for times in ordered if times.rank % tensor_parallel == 0})
        return [[times for times in ordered if times.rank == rank] for rank in ranks]

    @cached_property
    def blocks(self) -> list[tuple[float, Blocks]]:
        """Times and blocks, at every plan and at the end."""
        return [
            (event.time, event.blocks)
            for event in self.events
            if isinstance(event, Planned | Finished)
        ]

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
                of_request = times.setdefault(update.request_id, [])
                of_request.extend([event.time] * len(update.new_tokens))
        timings = []
        for request in self._requests:
            latencies = tuple(time - request.arrival_time for time in times[request.request_id])
            timings.append(RequestTiming(len(request.prompt), latencies))
        return timings

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
        return [
            replace(request, arrival_time=request.arrival_time - first)
            for request in self._requests
        ]

    @property
    def tiers(self) -> list[list[Tier]]:
        """For each request, the tier of the KV of each of its tokens: every sampled row begins
        one."""
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
    # time waiting for inputs, as a share of the time waiting for inputs, computing and sending
    metadata_of_step: float

    @property
    def bubbles(self) -> float:
        return 1 - self.computing


def working_seconds(record: RunRecord) -> float:
    """Seconds with anything in flight. Time without a request is no bubble."""
    in_flight = merged(
        (planned.time, record.known[step]) for step, planned in record.planned.items()
    )
    return _length(in_flight)


def stage_shares(record: RunRecord, tensor_parallel: int = 1) -> list[StageShares]:
    """Shares of every stage; none if the executor reported no times."""
    working = working_seconds(record)
    shares: list[StageShares] = []
    given: list[float] = []  # when the stage before, or the engine, was done with each plan
    for parts in record.stages(tensor_parallel):
        if not given:
            given = [record.planned[times.step].time for times in parts]
        computing = sum(times.computed - times.started for times in parts)
        sending = sum(times.sent - times.computed for times in parts)
        metadata = _metadata_seconds(parts, given)
        busy = computing + sending + metadata
        stage = StageShares(
            computing=computing / working,
            sending=sending / working,
            metadata=metadata / working,
            waiting=1 - busy / working,
            metadata_of_step=metadata / busy,
        )
        shares.append(stage)
        given = [times.sent for times in parts]
    return shares


def _metadata_seconds(parts: Sequence[StageTimes], given: Sequence[float]) -> float:
    """How long a stage could have computed its plans already, had their inputs been prepared.

    A stage can compute a plan once it has finished the previous one and has its work: the engine's
    plan, or the stage before's activations. The result includes the transfer of the activations, if
    preparing took that long.
    """
    seconds, free = 0.0, given[0]
    for times, begin in zip(parts, given, strict=True):
        could_begin = max(begin, free)
        seconds += max(0.0, times.prepared - could_begin)
        free = times.sent
    return seconds


def engine_seconds(record: RunRecord) -> list[float]:
    """For each plan, the seconds that the engine took to apply the previous result and to
    decide."""
    found, before = [], 0.0
    for planned in record.planned.values():
        began = max(planned.clock, before)
        # the clock is in ticks, so a difference may be below 0
        found.append(max(0.0, planned.time - began))
        before = planned.time
    return found


class MoveMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Moves of one kind."""

    count: int
    num_bytes: int
    """Bytes moved by all workers together."""
    seconds: float  # time in which any worker was moving
    gb_per_s: float | None
    """Mean bandwidth of one worker while it was moving; swaps that follow a step's row mostly wait
    and do not count."""
    # ``gb_per_s`` over the measured bandwidth between device and host memory of one worker
    share_of_link: float | None
    # share of the workers' moving time in which the same worker also computed a step
    hidden: float | None


def move_metrics(
    record: RunRecord, kind: Literal["reshard", "out", "in"], link: float | None
) -> MoveMetrics:
    """All transitions, or all swaps in one direction; ``link`` is one worker's host link in bytes
    per second."""
    moves: list[Move] = []
    copies: list[Move] = []  # all but the swaps that follow a step's row
    identities = set()
    for move in record.moves:
        if isinstance(move, SwapTimes):
            is_wanted, identity, is_copy = move.direction == kind, move.swap, not move.after_row
        else:
            is_wanted, identity, is_copy = kind == "reshard", move.step, True
        if not is_wanted:
            continue
        moves.append(move)
        identities.add(identity)
        if is_copy:
            copies.append(move)
    moving = merged((move.began, move.ended) for move in moves)
    speed = _speed(copies)
    gb_per_s = share_of_link = None
    if speed is not None:
        gb_per_s = speed / _GIGA
        if link is not None:
            share_of_link = speed / link
    return MoveMetrics(
        count=len(identities),
        num_bytes=sum(move.num_bytes for move in moves),
        seconds=_length(moving),
        gb_per_s=gb_per_s,
        share_of_link=share_of_link,
        hidden=_hidden_share(record, moves),
    )


def _speed(copies: Sequence[Move]) -> float | None:
    """Bytes per second of one worker while it was moving; None without any move."""
    seconds = sum(map(_length, _spans(copies).values()))
    if seconds <= 0:
        return None
    return sum(move.num_bytes for move in copies) / seconds


def _hidden_share(record: RunRecord, moves: Sequence[Move]) -> float | None:
    busy = covered = 0.0
    for rank, moving in _spans(moves).items():
        steps = merged(
            (times.started, times.computed) for times in record.stage_times if times.rank == rank
        )
        busy += _length(moving)
        covered += overlap(moving, steps)
    if busy <= 0:
        return None
    return covered / busy


def _spans(moves: Sequence[Move]) -> dict[int, list[Span]]:
    spans: dict[int, list[Span]] = {}
    for move in moves:
        spans.setdefault(move.rank, []).append((move.began, move.ended))
    return {rank: merged(of_rank) for rank, of_rank in spans.items()}


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
    either = merged((*first, *second))
    return max(0.0, _length(first) + _length(second) - _length(either))


def _length(spans: Iterable[Span]) -> float:
    return sum(ended - began for began, ended in spans)
