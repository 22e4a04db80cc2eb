"""Moves between device and host memory: bytes, bandwidth, and overlap with computing. No torch."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from nanoserve.record.run_record import RunRecord
from nanoserve.record.times import Move, ReshardTimes, StageTimes, SwapTimes

_GIGA = 1e9
Span = tuple[float, float]


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


def reshard_metrics(record: RunRecord, host_link_bandwidth: float | None) -> MoveMetrics:
    """All transitions."""
    moves = [move for move in record.moves if isinstance(move, ReshardTimes)]
    return _metrics(moves, len({move.step for move in moves}), record.stage_times, host_link_bandwidth)


def swap_metrics(record: RunRecord, direction: str, host_link_bandwidth: float | None) -> MoveMetrics:
    """All swaps in one direction."""
    moves = [move for move in record.moves if isinstance(move, SwapTimes) and move.direction == direction]
    return _metrics(moves, len({move.swap for move in moves}), record.stage_times, host_link_bandwidth)


def _metrics(moves: Sequence[Move], count: int, steps: Sequence[StageTimes], link: float | None) -> MoveMetrics:
    spans = _spans(moves)
    busy = sum(_length(of_rank) for of_rank in spans.values())
    unhindered = [move for move in moves if isinstance(move, ReshardTimes) or not move.after_row]
    copying = sum(_length(of_rank) for of_rank in _spans(unhindered).values())
    speed = sum(move.num_bytes for move in unhindered) / copying if copying > 0 else None
    computed = {
        rank: merged((times.started, times.computed) for times in steps if times.rank == rank) for rank in spans
    }
    covered = sum(overlap(of_rank, computed[rank]) for rank, of_rank in spans.items())
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
    starts = [(began, 1) for began, _ in (*first, *second)]
    edges = sorted([*starts, *((ended, -1) for _, ended in (*first, *second))])
    total, depth = 0.0, 0
    for (moment, step), (following, _) in pairwise(edges):
        depth += step
        total += following - moment if depth == 2 else 0.0
    return total


def _length(spans: Iterable[Span]) -> float:
    return sum(ended - began for began, ended in spans)
