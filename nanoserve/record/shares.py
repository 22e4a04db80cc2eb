"""Shares of time: of a pipeline's stages, and of moves between device and host memory beside computing. No torch."""

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from nanoserve.record.run_record import RunRecord
from nanoserve.record.times import Move, ReshardTimes, StageTimes, SwapTimes

_GIGA = 1e9
Span = tuple[float, float]


class StageShares(msgspec.Struct, frozen=True, kw_only=True):
    """One stage's time with something in flight, divided; the four shares add up to 1."""

    computing: float
    """Share in which the device computed; 1 minus this is the stage's share of bubbles."""
    sending: float
    """Share from the end of computing until the activations, or the answer, were on their way."""
    metadata: float
    """Share in which only the inputs were missing."""
    waiting: float
    """Share in which the stage waited for activations, or for a plan: the rest."""
    metadata_of_step: float
    """Time waiting for inputs, as a share of the time waiting for inputs, computing and sending."""

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
        shares.append(
            StageShares(
                computing=computing / working,
                sending=sending / working,
                metadata=metadata / working,
                waiting=1 - (computing + sending + metadata) / working,
                metadata_of_step=metadata / (metadata + computing + sending),
            )
        )
        given = [times.sent for times in parts]
    return shares


def _metadata_seconds(parts: Sequence[StageTimes], given: Sequence[float]) -> float:
    """How long a stage could have computed its plans already, had their inputs been prepared.

    A stage can compute a plan once it has finished the previous one and has its work: in the first stage the plan from
    the engine, in a later stage the activations of the stage before. The result is a little too large: it includes the
    transfer of the activations, if preparing took that long.
    """
    free = [given[0], *(times.sent for times in parts[:-1])]
    return sum(max(0.0, times.prepared - max(moments)) for times, *moments in zip(parts, given, free, strict=True))


def engine_seconds(record: RunRecord) -> list[float]:
    """For each plan, the seconds that the engine took to apply the previous result and to decide."""
    seconds, done = [], 0.0
    for planned in record.planned.values():
        seconds.append(max(0.0, planned.time - max(planned.clock, done)))  # the clock is in ticks
        done = planned.time
    return seconds


class MoveMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Moves of one kind."""

    count: int
    """Transitions, or swaps in one direction."""
    num_bytes: int
    """Bytes moved by all workers together."""
    seconds: float
    """Time in which any worker was moving."""
    gb_per_s: float | None
    """Mean bandwidth of one worker while it was moving; None if nothing was moved. Swaps that follow the row of a step
    mostly wait for its layers and do not count."""
    share_of_link: float | None
    """``gb_per_s`` over the measured bandwidth between device and host memory of one worker."""
    hidden: float | None
    """Share of the workers' moving time in which the same worker also computed a step."""


def move_metrics(record: RunRecord, kind: Literal["reshard", "out", "in"], link: float | None) -> MoveMetrics:
    """All transitions, or all swaps in one direction; ``link`` is one worker's host link in bytes per second."""
    if kind == "reshard":
        moves: list[Move] = [move for move in record.moves if isinstance(move, ReshardTimes)]
    else:
        moves = [move for move in record.moves if isinstance(move, SwapTimes) and move.direction == kind]
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
    """Times in which each worker was moving, merged."""
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
    return max(0.0, _length(first) + _length(second) - _length(merged((*first, *second))))


def _length(spans: Iterable[Span]) -> float:
    return sum(ended - began for began, ended in spans)
