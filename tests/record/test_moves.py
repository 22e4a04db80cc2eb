"""Moves: bytes, speed, and the share that was hidden behind computing."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.record.events import Worked
from nanoserve.record.run_record import RunRecord, merged, move_metrics, overlap
from nanoserve.record.times import ReshardTimes, StageTimes, SwapTimes

SPANS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (min(pair), max(pair)))
)


def _run(*moves: Any, steps: tuple[StageTimes, ...] = ()) -> RunRecord:
    return RunRecord(1, [Worked(steps, moves)])


def _computing(rank: int, began: float, ended: float) -> StageTimes:
    return StageTimes(0, rank, 1, began, began, began, began, ended, ended)


@given(SPANS, SPANS)
def test_overlap_is_what_both_cover(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    def covered(spans: list[tuple[int, int]]) -> set[int]:
        return {moment for began, ended in spans for moment in range(began, ended)}

    assert sum(ended - began for began, ended in merged(first)) == len(covered(first))
    assert overlap(merged(first), merged(second)) == len(covered(first) & covered(second))


def test_swaps_are_hidden_where_the_same_worker_computes() -> None:
    steps = (_computing(0, 0.0, 3.0), _computing(1, 10.0, 20.0))
    moves = [SwapTimes(0, 0, "out", 600, 1.0, 4.0), SwapTimes(0, 1, "out", 400, 1.0, 2.0)]
    metrics = move_metrics(
        _run(*moves, SwapTimes(1, 0, "in", 7, 0.0, 1.0), steps=steps), "out", 1000.0
    )
    assert (metrics.count, metrics.num_bytes, metrics.seconds) == (1, 1000, 3.0)
    assert metrics.gb_per_s == pytest.approx(1000 / 4 / 1e9)
    assert metrics.share_of_link == pytest.approx(0.25)
    assert metrics.hidden == pytest.approx(2 / 4), (
        "two of the three seconds of worker 0, nothing of worker 1"
    )


def test_what_waits_for_layers_is_moved_and_hidden_but_has_no_speed() -> None:
    steps = (_computing(0, 0.0, 6.0),)
    behind_row = SwapTimes(3, 0, "out", 500, 2.0, 7.0, after_row=True)
    metrics = move_metrics(
        _run(SwapTimes(0, 0, "out", 600, 0.0, 2.0), behind_row, steps=steps), "out", 1000.0
    )
    assert (metrics.count, metrics.num_bytes, metrics.seconds) == (2, 1100, 7.0)
    assert metrics.gb_per_s == pytest.approx(600 / 2 / 1e9)
    assert metrics.hidden == pytest.approx(6 / 7)
    assert move_metrics(_run(behind_row, steps=steps), "out", 1000.0).share_of_link is None


def test_transitions_are_counted_by_their_plans() -> None:
    moves = [
        ReshardTimes(step, rank, 1, 50, step, step + 1.0 + rank)
        for step in (3, 9)
        for rank in (0, 1)
    ]
    metrics = move_metrics(_run(*moves), "reshard", None)
    assert (metrics.count, metrics.num_bytes, metrics.seconds) == (2, 200, 4.0)
    assert (metrics.share_of_link, metrics.hidden) == (None, 0.0)


def test_nothing_moved_has_no_speed() -> None:
    metrics = move_metrics(_run(), "in", 5.0)
    assert (metrics.count, metrics.gb_per_s, metrics.share_of_link, metrics.hidden) == (
        0,
        None,
        None,
        None,
    )
