"""Arrivals, lengths, and the shipped tables of lengths."""

import statistics
from itertools import cycle, islice, pairwise
from pathlib import Path

import pytest

from nanoserve.errors import UsageError
from nanoserve.lab.simulator import (
    Workload,
    burst,
    fixed_lengths,
    gamma_arrivals,
    lognormal_lengths,
    poisson_arrivals,
)
from nanoserve.lab.simulator.workload import (
    NUM_QUANTILES,
    LengthTable,
    length_tables,
    named_lengths,
)
from nanoserve.lab.workloads import read_arrivals
from nanoserve.request import RequestShape


@pytest.mark.parametrize("variation", [0.2, 1.0, 3.0])
def test_gaps_have_the_mean_and_the_variation_that_were_asked_for(variation: float) -> None:
    times = list(islice(gamma_arrivals(5.0, variation, seed=1), 20000))
    gaps = [after - before for before, after in pairwise(times)]
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(0.2, rel=0.05)
    assert statistics.pstdev(gaps) / mean == pytest.approx(variation, rel=0.05)


def test_equal_seeds_give_equal_streams() -> None:
    assert list(islice(poisson_arrivals(1.0, 3), 5)) == list(islice(poisson_arrivals(1.0, 3), 5))
    assert list(islice(poisson_arrivals(1.0, 3), 5)) != list(islice(poisson_arrivals(1.0, 4), 5))


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_rates_above_zero(rate: float) -> None:
    with pytest.raises(UsageError, match="the request rate must be a number above 0"):
        poisson_arrivals(rate, 0)


@pytest.mark.parametrize(
    ("rate", "variation"), [(1e-300, 1.0), (1e300, 1.0), (1.0, 1e-200), (1.0, 1e200)]
)
def test_absurd_rates_are_refused_before_sums_of_gaps_go_astray(
    rate: float, variation: float
) -> None:
    with pytest.raises(UsageError, match=r"must lie between 1e-09 and 1e\+09"):
        gamma_arrivals(rate, variation, 0)


def test_arrival_times_of_a_trace_file_are_dates_or_seconds(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.5,1,1\n2023-11-16 "
        "18:15:48.0,1,1\n"
    )
    first, second = read_arrivals(trace)
    assert second - first == 1.5
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n3,1,1\nsoon,1,1\n")
    with pytest.raises(UsageError, match="row 3, arrived_at: 'soon' is no time"):
        read_arrivals(trace)


def test_lognormal_lengths_have_the_means_that_were_asked_for() -> None:
    shapes = list(islice(lognormal_lengths(222, 127, 1.2, 1.0, seed=0), 50000))
    assert statistics.fmean(shape.input_tokens for shape in shapes) == pytest.approx(222, rel=0.03)
    assert statistics.fmean(shape.output_tokens for shape in shapes) == pytest.approx(127, rel=0.03)
    assert min(shape.output_tokens for shape in shapes) == 1


def test_lengths_below_a_token_are_refused() -> None:
    with pytest.raises(UsageError, match="at least one token"):
        fixed_lengths(0, 5)
    with pytest.raises(UsageError, match="means of at least one token"):
        lognormal_lengths(222, 127, -1.0, 1.0, seed=0)


def test_a_workload_ends_with_its_arrivals_or_its_limit() -> None:
    shapes = [RequestShape(3, 2), RequestShape(5, 4)]
    requests = list(Workload([0.0, 1.0, 4.0], cycle(shapes)))
    assert [(one.arrival_time, len(one.prompt), one.seed) for one in requests] == [
        (0, 3, 2),
        (1, 5, 4),
        (4, 3, 2),
    ]
    assert len(list(Workload(burst(), fixed_lengths(1, 1), limit=7))) == 7


@pytest.mark.parametrize("name", length_tables())
def test_drawn_lengths_have_the_means_and_the_correlation_of_their_trace(name: str) -> None:
    table = length_tables()[name]
    assert len(table.input_quantiles) == len(table.output_quantiles) == NUM_QUANTILES
    shapes = list(islice(table.draw(seed=0), 20000))
    inputs, outputs = [one.input_tokens for one in shapes], [one.output_tokens for one in shapes]
    assert statistics.fmean(inputs) == pytest.approx(table.mean_input, rel=0.05)
    assert statistics.fmean(outputs) == pytest.approx(table.mean_output, rel=0.05)
    assert table.input_quantiles[0] <= min(inputs)
    assert max(inputs) <= table.input_quantiles[-1]
    correlation = statistics.correlation(_ranks(inputs), _ranks(outputs))
    assert correlation == pytest.approx(table.rank_correlation, abs=0.03)


def _ranks(values: list[int]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    for rank, index in enumerate(order):
        ranks[index] = rank
    return ranks


def test_a_strong_rank_correlation_is_drawn_as_it_is() -> None:
    line = tuple(range(1, 1002, 10))
    table = LengthTable(
        source="",
        licence="",
        requests=1,
        mean_input=501,
        mean_output=501,
        rank_correlation=-0.8,
        input_quantiles=line,
        output_quantiles=line,
    )
    shapes = list(islice(table.draw(seed=2), 20000))
    inputs, outputs = [one.input_tokens for one in shapes], [one.output_tokens for one in shapes]
    assert statistics.correlation(_ranks(inputs), _ranks(outputs)) == pytest.approx(-0.8, abs=0.02)


def test_an_unknown_table_is_refused_by_name() -> None:
    with pytest.raises(
        UsageError, match=r"or one of sharegpt-gllm, azure-conv, azure-code.*; not 'sharegpt'"
    ):
        named_lengths("sharegpt", seed=0)
