"""Shares of time: of a pipeline's stages, and of moves between device and host memory beside computing. No torch."""

from collections.abc import Iterable, Sequence

import msgspec

from nanoserve.record.run_record import RunRecord
from nanoserve.record.times import Move, ReshardTimes, StageTimes, SwapTimes

_GIGA = 1e9
Span = tuple[float, float]

# ---- stages ---------------------------------------------------------------------------------------------------


class StageShares(msgspec.Struct, frozen=True, kw_only=True):
    """One stage's time with something in flight, divided; the four shares add up to 1."""

    computing: float
    """Share in which the device computed; 1 minus this is the stage's share of bubbles."""
    sending: float
    """Share from the end of computing until the activations, or the answer, were on their way."""
    metadata: float
    """Share in which only the inputs were missing, as ``metadata_seconds`` defines it."""
    waiting: float
    """Share in which the stage waited for activations, or for a plan: the rest."""
    metadata_of_step: float
    """Time waiting for inputs, as a share of the time waiting for inputs, computing and sending."""

    @property
    def bubbles(self) -> float:
        return 1 - self.computing


def working_seconds(record: RunRecord) -> float:
    """Seconds with anything in flight. Time without a request is no bubble."""
    seconds = end = 0.0
    for step, planned in record.planned.items():
        submitted, known = planned.time, record.known[step]
        seconds += max(0.0, known - max(end, submitted))
        end = max(end, known)
    return seconds


def metadata_seconds(record: RunRecord, stages: Sequence[Sequence[StageTimes]], stage: int) -> list[float]:
    """For each plan, how long the stage could have computed it already, had its inputs been prepared.

    A stage can compute a plan once it has finished the previous one and has its work: in the first stage the plan
    from the engine, in a later stage the activations of the stage before. The result is a little too large: it
    includes the transfer of the activations, if preparing took that long.
    """
    submitted = [record.planned[times.step].time for times in stages[0]]
    given = submitted if stage == 0 else [times.sent for times in stages[stage - 1]]
    free = [given[0], *(times.sent for times in stages[stage][:-1])]
    return [
        max(0.0, times.prepared - max(work, own)) for times, work, own in zip(stages[stage], given, free, strict=True)
    ]


def stage_shares(record: RunRecord, tensor_parallel: int = 1) -> list[StageShares]:
    """Shares of every stage; none if the executor reported no times."""
    stages, working = record.stages(tensor_parallel), working_seconds(record)
    shares = []
    for stage, parts in enumerate(stages):
        computing = sum(times.computed - times.started for times in parts)
        sending = sum(times.sent - times.computed for times in parts)
        metadata = sum(metadata_seconds(record, stages, stage))
        shares.append(
            StageShares(
                computing=computing / working,
                sending=sending / working,
                metadata=metadata / working,
                waiting=1 - (computing + sending + metadata) / working,
                metadata_of_step=metadata / (metadata + computing + sending),
            )
        )
    return shares


def engine_seconds(record: RunRecord) -> list[float]:
    """For each plan, the seconds that the engine took to apply the previous result and to decide."""
    seconds, done = [], 0.0
    for planned in record.planned.values():
        seconds.append(max(0.0, planned.time - max(planned.clock, done)))  # the clock is in ticks
        done = planned.time
    return seconds


# ---- moves ----------------------------------------------------------------------------------------------------


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


def reshard_metrics(record: RunRecord, link: float | None) -> MoveMetrics:
    """All transitions; ``link`` is the measured bandwidth of one worker's host link, in bytes per second."""
    moves = [move for move in record.moves if isinstance(move, ReshardTimes)]
    return _metrics(record, moves, len({move.step for move in moves}), link)


def swap_metrics(record: RunRecord, direction: str, link: float | None) -> MoveMetrics:
    """All swaps in one direction; ``link`` as for transitions."""
    moves = [move for move in record.moves if isinstance(move, SwapTimes) and move.direction == direction]
    return _metrics(record, moves, len({move.swap for move in moves}), link)


def _metrics(record: RunRecord, moves: Sequence[Move], count: int, link: float | None) -> MoveMetrics:
    spans = _spans(moves)
    busy = sum(map(_length, spans.values()))
    unhindered = [move for move in moves if isinstance(move, ReshardTimes) or not move.after_row]
    copying = sum(map(_length, _spans(unhindered).values()))
    speed = sum(move.num_bytes for move in unhindered) / copying if copying > 0 else None
    covered = 0.0
    for rank, of_rank in spans.items():
        steps = merged((times.started, times.computed) for times in record.stage_times if times.rank == rank)
        covered += overlap(of_rank, steps)
    return MoveMetrics(
        count=count,
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
