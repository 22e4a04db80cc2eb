"""When requests come: Poisson processes and traces."""

import math
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from nanoserve.errors import UsageError
from nanoserve.lab.benchmarks.serving.requests import (
    offered_rate,
    parse_rates,
    poisson_arrivals,
    stretched_arrivals,
)
from nanoserve.lab.workloads import read_arrivals


def test_gaps_of_a_poisson_process_have_its_mean_and_its_spread() -> None:
    arrivals = [0.0, *poisson_arrivals(4.0, 20_000, seed=1)]
    gaps = [after - before for before, after in pairwise(arrivals)]
    # Of 20,000 exponential gaps the mean is within 3 % of 1/4 but once in 40,000 draws; this is one
    # draw.
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.05)
    assert sum(gap > 0.5 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-2), rel=0.1)
    assert min(gaps) >= 0


def test_arrivals_are_those_of_the_seed_and_the_rate_only_stretches_them() -> None:
    slow = poisson_arrivals(1.0, 50, seed=3)
    assert slow == poisson_arrivals(1.0, 50, seed=3) != poisson_arrivals(1.0, 50, seed=4)
    assert poisson_arrivals(2.0, 50, seed=3) == pytest.approx([time / 2 for time in slow])
    assert poisson_arrivals(math.inf, 3, seed=3) == [0.0, 0.0, 0.0]


def test_a_trace_begins_at_zero_and_can_be_stretched_to_a_rate() -> None:
    times = [100.0, 101.0, 101.0, 110.0]
    assert stretched_arrivals(times) == [0.0, 1.0, 1.0, 10.0]
    assert stretched_arrivals(times, rate=3.0) == pytest.approx([0.0, 0.1, 0.1, 1.0])
    assert offered_rate(stretched_arrivals(times, rate=3.0)) == pytest.approx(3.0)
    assert stretched_arrivals(times, rate=math.inf) == [0.0] * 4
    assert stretched_arrivals([5.0]) == [0.0]
    with pytest.raises(UsageError, match="come all at once"):
        stretched_arrivals([7.0, 7.0], rate=2.0)
    assert offered_rate([0.0, 0.0]) is None


@pytest.mark.parametrize(
    ("header", "rows", "seconds"),
    [
        ("TIMESTAMP", ["2023-11-16 18:15:46.6805900", "2023-11-16 18:15:50.9305900"], 4.25),
        ("TIMESTAMP", ["2023-11-16T23:59:59", "2023-11-17T00:00:01.5"], 2.5),
        ("arrived_at", ["0.25", "3"], 2.75),
        ("arrival_time", ["1e3", "1001"], 1.0),
    ],
)
def test_times_of_known_traces(
    tmp_path: Path, header: str, rows: list[str], seconds: float
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "\n".join([f"{header},input_tokens,output_tokens", *(f"{row},5,6" for row in rows)])
    )
    first, second = read_arrivals(trace)
    assert second - first == pytest.approx(seconds, abs=1e-5)
    assert len(read_arrivals(trace, limit=1)) == 1


@pytest.mark.parametrize("row", ["", "soon", "nan", "inf", "2023-13-01 00:00:00"])
def test_a_time_that_is_none_is_named(tmp_path: Path, row: str) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(f"TIMESTAMP,input_tokens,output_tokens\n2023-11-16 18:00:00,5,6\n{row},7,8\n")
    with pytest.raises(UsageError, match=r"trace\.csv, row 3, TIMESTAMP: .* is no time in seconds"):
        read_arrivals(trace)
    trace.write_text("input_tokens,output_tokens\n5,6\n")
    with pytest.raises(UsageError, match="tells no arrival times"):
        read_arrivals(trace)


def test_rates_as_they_are_typed() -> None:
    assert parse_rates("0.5, 2,inf,2", "--rate") == (0.5, 2.0, math.inf)
    for text in ("", "0", "-1", "nan", "1,,2", "two", "1e9"):
        with pytest.raises(UsageError, match="--rate takes requests per second such as"):
            parse_rates(text, "--rate")
