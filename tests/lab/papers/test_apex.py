"""APEX's figures: each with one small simulation in the place of its backlogs, and what stands
behind them for real."""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import pytest
from msgspec.structs import replace

from nanoserve.lab.papers.apex.decoding import DecodeCase
from nanoserve.lab.papers.apex.settings import (
    A10,
    DEVICE,
    HYBRID,
    NEO,
    SYSTEMS,
    T4,
    TOKEN_BUDGETS,
    HostBacklog,
    mean_lengths,
)
from nanoserve.lab.papers.cases import Case, Outcome, throughput, tuned
from nanoserve.lab.papers.framework import Scale, SimulationJob, load_paper

_SMALL = HostBacklog(T4, "osc:50", requests=20).case(NEO)


@cache
def _outcome() -> Outcome:
    return _SMALL.run()


class _Run:
    """Computes decodes alone, and notes the backlogs without running them: larger budgets are
    better, NEO is best."""

    def __init__(self) -> None:
        self.outcomes: dict[Any, Any] = {}

    def __call__(self, jobs: Iterable[SimulationJob]) -> Mapping[Any, Any]:
        for job in jobs:
            if job in self.outcomes:
                continue
            if isinstance(job, Case):
                speed = job.system.token_budget * (2 if job.system is NEO else 1)
                result = replace(_outcome().result, tokens_per_second=float(speed))
                self.outcomes[job] = replace(_outcome(), result=result)
            else:
                self.outcomes[job] = job.run()
        return self.outcomes


@pytest.mark.parametrize("number", [figure.number for figure in load_paper("apex").figures])
@pytest.mark.parametrize("size", ["reduced", "full"])
def test_every_figure_ends_in_claims(number: str, size: str) -> None:
    (figure,) = load_paper("apex").chosen(number)
    run = _Run()
    found = figure.make(Scale(seeds=(0, 1), full=size == "full"), run)
    assert found.claims
    assert all(claim.assumption and claim.paper and claim.says for claim in found.claims)
    assert all(
        len(curve.xs) == len(curve.ys) > 0
        for panel in _panels(found.chart)
        for curve in panel.curves
    )
    for row in found.rows:
        assert all(column.path in row for column in figure.columns)
    cases = {
        (one.machine, one.lengths, one.requests): one
        for one in run.outcomes
        if isinstance(one, Case)
    }
    for case in cases.values():
        longest = max(shape.total_tokens for shape in case.shapes())
        assert longest <= 16 * case.costs().memory.kv_blocks(16), "every request fits the device"


@pytest.mark.parametrize("size", ["reduced", "full"])
@pytest.mark.parametrize("number", ["5", "7"])
def test_claims_name_the_token_budgets_that_were_run(number: str, size: str) -> None:
    (figure,) = load_paper("apex").chosen(number)
    run = _Run()
    found = figure.make(Scale(full=size == "full"), run)
    budgets = sorted({case.system.token_budget for case in run.outcomes})
    said = [claim.assumption for claim in found.claims if "every system with" in claim.assumption]
    assert said
    assert {
        tuple(map(int, re.findall(r"\d+", text.partition("every system")[2]))) for text in said
    } == {(*budgets,)}


def test_the_gain_over_neo_is_taken_apart_beside_it() -> None:
    """Over the device alone, and what NEO loses against it: their ratio is the gain."""
    (figure,) = load_paper("apex").chosen("7")
    (claim,) = (
        one
        for one in figure.make(Scale(), _Run()).claims
        if one.says == "outputs of 1000: APEX over NEO"
    )
    over_device, neo = map(
        float, re.findall(r"([\d.]+) over the device alone times 1/([\d.]+),", claim.assumption)[0]
    )
    assert over_device / neo == pytest.approx(claim.ours.mean, rel=0.01)


def _panels(chart: Any) -> Any:
    return () if chart is None else chart.panels


def test_the_decodes_of_the_table_stay_within_the_bounds_and_take_a_step_more_than_layers() -> None:
    (figure,) = load_paper("apex").chosen("bounds")
    claims = figure.make(Scale(), _Run()).claims
    assert [
        claim.holds
        for claim in claims
        if claim.figure.startswith("3.2, 3.3") or claim.figure == "3.3"
    ] == ["yes"] * 3


def test_a_decode_case_by_hand() -> None:
    """A host as large as the device: twice the tokens in (2 Tlin + Tgatt) instead of (Tlin +
    Tgatt), about."""
    outcome = DecodeCase(platform=T4, decodes=7, host_sequences=7, context=500).run()
    # Tgatt is 0.14 of Tlin: 2.14 / 1.14 = 1.87
    assert outcome.pipelined == pytest.approx(2 / 1.87, rel=0.02)
    assert outcome.overlapped - 1 == pytest.approx(1 / 33, rel=0.05)
    assert outcome.steps_per_token == 33


def test_lengths_have_the_means_they_are_named_for() -> None:
    for name, mean in (
        ("osc:500", (372, 500)),
        ("1000:200", (1000, 200)),
        ("livebench", (600, 400)),
    ):
        assert mean_lengths(name) == pytest.approx(mean, rel=0.1)


def test_where_the_device_holds_everything_all_systems_are_equal() -> None:
    cases = [replace(_SMALL, system=system, rate=0.3) for system in SYSTEMS]
    speeds = [throughput(case.run()) for case in cases]
    assert speeds[1:] == [pytest.approx(speeds[0], rel=0.02)] * len(speeds[1:])


def test_a_batch_that_fits_the_device_is_not_held_up_on_the_host() -> None:
    """Its first answers end late, and until then growth is overestimated: some prompts are parked
    for nothing.

    Overlap begins a token of theirs at once, which takes as many steps as there are layers; the
    last of them may end last of all.
    """
    small = HostBacklog(A10, "1000:50", requests=30)
    cases = [small.case(replace(system, token_budget=2048), seed=1) for system in SYSTEMS]
    device, *others = (throughput(case.run()) for case in cases)
    gains = {
        case.system.label: speed / device for case, speed in zip(cases[1:], others, strict=True)
    }
    assert gains.pop("overlap") >= 0.9
    assert min(gains.values()) >= 0.98


def test_in_a_backlog_ours_is_as_good_as_any() -> None:
    cases = [
        replace(_SMALL, system=replace(system, token_budget=1024), requests=40)
        for system in SYSTEMS
    ]
    speeds = {case.system.label: throughput(case.run()) for case in cases}
    gains = [speeds[HYBRID.label] / speed for speed in speeds.values()]
    assert min(gains) >= 0.98
    assert gains[0] > 1.4  # over the device alone


def test_every_system_is_tuned_over_the_same_budgets() -> None:
    run = _Run()
    cases = [replace(_SMALL, system=system) for system in (DEVICE, HYBRID)]
    assert [case.system.token_budget for case in tuned(cases, run, throughput, TOKEN_BUDGETS)] == [
        max(TOKEN_BUDGETS)
    ] * 2
    assert {(case.system.label, case.system.token_budget) for case in run.outcomes} == {
        (system.label, budget) for system in (DEVICE, HYBRID) for budget in TOKEN_BUDGETS
    }


def test_slower_processors_are_put_in_for_the_sensitivity_alone() -> None:
    assert A10.costs().efficiency.processor == 0.6
    assert A10.costs(0.1).host_attention_seconds(1000) == pytest.approx(
        6 * A10.costs().host_attention_seconds(1000)
    )
