"""Measured times between and beyond the sizes that were measured."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.costs.curves import MeasuredCurve, MeasuredGrid
from tests.costs.profiles import curve, grid


def test_a_curve_against_a_table_worked_by_hand() -> None:
    measured = curve((2, 4, 10), (1, 3, 6))
    expected = {0: 0, 1: 1, 2: 1, 3: 2, 4: 3, 7: 4.5, 10: 6, 12: 7}
    assert {size: measured.at(size) for size in expected} == expected


def test_a_falling_end_is_not_drawn_on_below_what_was_measured() -> None:
    assert curve((1, 2), (5, 4)).at(100) == 4


def test_a_grid_against_a_table_worked_by_hand() -> None:
    cells = {(1, 10): 1.0, (1, 30): 3.0, (3, 10): 5.0, (3, 30): 11.0}
    measured = grid((1, 3), (10, 30), lambda batch, context: cells[batch, context])
    assert measured.at(2, 20) == (2 + 8) / 2
    assert measured.at(1, 20) == 2
    assert measured.at(3, 60) == 22  # twice as many keys as were measured
    assert measured.at(6, 10) == 10
    assert measured.at(6, 60) == 44
    assert measured.at(0, 10) == 0
    assert measured.at(1, 5) == 1


def test_a_grid_over_keys_averages_cells_with_as_many() -> None:
    by_keys = grid((1, 2), (10, 20), lambda batch, context: float(batch + context)).over_keys()
    assert by_keys.sizes == (10, 20, 40)
    assert by_keys.seconds == (11, (21 + 12) / 2, 22)
    assert by_keys.at(30) == (16.5 + 22) / 2


def test_a_grid_less_a_curve() -> None:
    cells = {(1, 16): 1.0, (1, 32): 2.0, (2, 16): 5.0, (2, 32): 6.0}
    found = grid((1, 2), (16, 32), lambda *cell: cells[cell]).less(curve((1, 2), (0.5, 5.5)))
    assert found.seconds == ((0.5, 1.5), (pytest.approx(0, abs=1e-6), 0.5))


def test_what_noise_has_turned_meets_half_way() -> None:
    assert curve((1, 2, 3, 4), (1, 5, 3, 6)).rising().seconds == (1, 4, 4, 6)
    cells = {(1, 10): 4.0, (1, 30): 2.0, (3, 10): 1.0, (3, 30): 5.0}
    assert grid((1, 3), (10, 30), lambda *cell: cells[cell]).rising().seconds == ((2, 3), (2, 5))


sizes = st.lists(st.integers(1, 10**6), min_size=2, max_size=8, unique=True).map(sorted)
times = st.floats(1e-9, 1e3)


@given(sizes, st.data())
def test_a_curve_is_exact_where_it_was_measured_and_monotone_if_that_is(
    found: list[int], data: st.DataObject
) -> None:
    seconds = sorted(data.draw(st.lists(times, min_size=len(found), max_size=len(found))))
    measured = curve(found, seconds)
    assert [measured.at(size) for size in found] == pytest.approx(seconds)
    asked = sorted(data.draw(st.lists(st.integers(0, 2 * 10**6), min_size=2, max_size=20)))
    answers = [measured.at(size) for size in asked]
    assert all(before <= after * (1 + 1e-9) for before, after in itertools.pairwise(answers))


@given(sizes, sizes, st.data())
def test_a_grid_is_exact_where_it_was_measured_and_never_negative(
    batches: list[int], contexts: list[int], data: st.DataObject
) -> None:
    cells = {cell: data.draw(times) for cell in itertools.product(batches, contexts)}
    measured = grid(batches, contexts, lambda batch, context: cells[batch, context])
    assert {cell: measured.at(*cell) for cell in cells} == pytest.approx(cells)
    asked = st.integers(0, 2 * 10**6)
    assert measured.at(data.draw(asked), data.draw(asked)) >= 0
    if len({batch * context for batch, context in cells}) > 1:
        assert measured.over_keys().at(data.draw(asked)) >= 0


@given(sizes, sizes, st.data())
def test_a_rising_grid_rises(batches: list[int], contexts: list[int], data: st.DataObject) -> None:
    cells = {cell: data.draw(times) for cell in itertools.product(batches, contexts)}
    measured = grid(batches, contexts, lambda batch, context: cells[batch, context]).rising()
    batch, context = data.draw(st.integers(1, 2 * 10**6)), data.draw(st.integers(1, 2 * 10**6))
    more = data.draw(st.integers(0, 10**6))
    least = measured.at(batch, context) * (1 - 1e-9)
    assert measured.at(batch + more, context) >= least
    assert measured.at(batch, context + more) >= least


@pytest.mark.parametrize(
    ("sizes", "seconds", "says"),
    [
        ((1,), (1.0,), "sizes must be two or more"),
        ((2, 1), (1.0, 1.0), "ascending, not [2, 1]"),
        ((0, 1), (1.0, 1.0), "Expected `int` >= 1 - at `$.sizes[0]`"),
        ((1, 2**51), (1.0, 1.0), "Expected `int` <= 1125899906842624 - at `$.sizes[1]`"),
        ((1, 2), (1.0,), "seconds must be 2 numbers, one for each size, not 1"),
        ((1, 2), (1.0, -1.0), "Expected `float` > 0.0 - at `$.seconds[1]`"),
        ((1, 2), (1.0, 4e7), "Expected `float` <= 30000000.0 - at `$.seconds[1]`"),
        ((1, 2), (1.0, float("nan")), "Expected `float` > 0.0 - at `$.seconds[1]`"),
    ],
)
def test_what_is_no_curve_is_refused(
    sizes: tuple[int, ...], seconds: tuple[float, ...], says: str
) -> None:
    fields = {"sizes": sizes, "seconds": seconds, "low": (1.0, 1.0), "high": (1.0, 1.0)}
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(fields, MeasuredCurve)
    assert says in str(refused.value)


def test_a_grid_needs_a_row_for_each_batch() -> None:
    row = ((1.0, 1.0),)
    with pytest.raises(ValueError, match="a row for each of 2 batches, not 1"):
        MeasuredGrid(batches=(1, 2), contexts=(1, 2), seconds=row, low=row, high=row)
