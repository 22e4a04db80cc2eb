"""Seesaw's figures: what is searched for and simulated, at sizes that take a moment."""

from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from nanoserve.costs.hardware import GIBI
from nanoserve.lab.charts import draw
from nanoserve.lab.papers.cases import (
    FREQUENT,
    RARE,
    TOKEN_BUDGETS,
    Case,
    Outcome,
    System,
    with_budget,
)
from nanoserve.lab.papers.framework import Scale
from nanoserve.lab.papers.running import Runner
from nanoserve.lab.papers.seesaw import PAPER, model, sensitivity
from nanoserve.lab.papers.seesaw.search import (
    BestBudget,
    Estimate,
    Shortlist,
    compare,
    gains,
    seconds,
)
from nanoserve.lab.papers.seesaw.settings import (
    LONGEST,
    RESHARDING,
    STATIC,
    closed_batch,
    fitting_layouts,
)
from nanoserve.layout import ParallelLayout

P4, T4, T2P2 = map(ParallelLayout.parse, ("P4", "T4", "T2P2"))
SMALL = closed_batch("llama-3-15b", "seesaw-a10", 4, "1000+60", requests=24)


def with_layouts(setting: Case, *layouts: ParallelLayout, system: System = STATIC) -> Case:
    return replace(setting, layouts=layouts, system=RESHARDING if len(layouts) == 2 else system)


CHANGING = with_layouts(SMALL, P4, T4)


def test_all_layouts_that_fit_are_looked_at() -> None:
    seventy = closed_batch("llama-2-70b", "seesaw-a10", 8, "arxiv", requests=50)
    assert {layout.name for layout in fitting_layouts(seventy)} == {
        "P8",
        "T2P4",
        "T4P2",
        "T8",
    }  # two replicas do not fit
    assert {layout.name for layout in fitting_layouts(SMALL)} == {
        "P4",
        "T2P2",
        "T4",
        "D2P2",
        "D2T2",
    }
    assert max(shape.total_tokens for shape in seventy.shapes()) <= LONGEST


def test_the_bandwidth_figure_has_all_layouts_that_fit() -> None:
    setting = closed_batch("codellama-34b", "seesaw-a10", 8, "arxiv", requests=50)
    assert sorted(sensitivity.ALL_STATIC.values()) == sorted(
        layout.name for layout in fitting_layouts(setting)
    )


def test_the_whole_time_of_an_all_reduce_is_scaled_and_the_hosts_link_is_not() -> None:
    ten_times = replace(SMALL, all_reduce_scale=10.0)
    slow, fast = SMALL.costs(T4), ten_times.costs(T4)
    work = slow.work([1000] * 8)
    assert slow.all_reduce_seconds(work, 0) == pytest.approx(10 * fast.all_reduce_seconds(work, 0))
    assert slow.reload_seconds(0) == fast.reload_seconds(0)


@pytest.mark.parametrize(
    "case", [with_budget(with_layouts(SMALL, T2P2), 512), with_layouts(SMALL, T4), CHANGING]
)
def test_the_estimate_that_chooses_is_near_the_simulation(case: Case) -> None:
    assert Estimate(SMALL).seconds(case) == pytest.approx(seconds(case.run()), rel=0.15)


def test_data_parallel_replicas_share_the_requests() -> None:
    halves = with_layouts(SMALL, ParallelLayout(data_parallel=2, tensor_parallel=2)).run()
    half = with_layouts(
        replace(SMALL, requests=SMALL.requests // 2), ParallelLayout(tensor_parallel=2)
    )
    assert seconds(halves) == pytest.approx(seconds(half.run()))


def test_both_sides_are_searched_over_the_same_budgets() -> None:
    found = Shortlist(setting=SMALL, candidates=6).run()
    for cases in (found["static"], found["resharding"]):
        assert len(cases) == 6
        assert {case.system.token_budget for case in cases} <= set(TOKEN_BUDGETS)
        # Of two budgets of one configuration, the second is half of the first.
        assert all(
            after.system.token_budget * 2 == before.system.token_budget
            for before, after in pairwise(cases)
            if before.layout_name == after.layout_name
        )
    assert all(len(case.layouts) == 1 for case in found["static"])
    assert all(
        len({layout.data_parallel for layout in case.layouts}) == 1 for case in found["resharding"]
    )
    assert all(
        len(case.layouts) == 2 and case.system.policy == RESHARDING.policy
        for case in found["resharding"]
    )
    static = with_layouts(SMALL, T4)
    tuned = BestBudget(case=static).run()
    estimate = Estimate(SMALL)
    assert estimate.seconds(tuned) <= estimate.seconds(static)


def test_a_run_is_made_of_its_parts() -> None:
    found: Outcome = CHANGING.run()
    assert found.result.transitions == 1
    assert found.breakdown.total == pytest.approx(seconds(found))
    assert min(found.breakdown.prefill, found.breakdown.decode, found.breakdown.transition) > 0
    assert [layout for _, _, layout in found.phases] == [0, 1]
    assert found.phases[-1][1] == seconds(found)


def test_without_tiered_buffering_transitions_are_frequent_or_batches_small() -> None:
    """Figure 2, with a pool that does not hold all prompts at once."""
    many = closed_batch("codellama-34b", "seesaw-a10", 4, "3000+100", 150, host_bytes=10 * GIBI)
    seesaw, frequent, rare = (
        replace(with_layouts(many, P4, T4), system=replace(RESHARDING, policy=policy)).run()
        for policy in (RESHARDING.policy, FREQUENT, RARE)
    )
    assert 3 <= seesaw.result.transitions < rare.result.transitions <= frequent.result.transitions
    assert seconds(seesaw) < min(seconds(frequent), seconds(rare))
    assert seesaw.result.host_peak > 0.9


def test_the_best_of_both_kinds_are_compared_seed_by_seed() -> None:
    setting = replace(SMALL, lengths="sharegpt-gllm", requests=40)
    with Runner(1) as runner:
        found = compare([setting], Scale(seeds=(0, 1)), runner.run)
        tried = Shortlist(setting=setting, candidates=3).run()
        outcomes = runner.run(tried["static"])
    static, resharding = (
        found.values((setting, kind), seconds) for kind in ("static", "resharding")
    )
    assert static[0] == min(seconds(outcomes[case]) for case in tried["static"])
    assert gains(found, setting)[1] == static[1] / resharding[1]
    assert [case.seed for case in found.cases[setting, "resharding"]] == [0, 1]


def test_what_needs_no_simulation_holds(tmp_path: Path) -> None:
    """Figures 1, 4 and 15, from the cost model alone."""
    pytest.importorskip("matplotlib")
    with Runner(1) as runner:
        for figure in PAPER.figures:
            if figure.number not in ("1", "4", "15"):
                continue
            found = figure.make(Scale(), runner.run)
            assert [claim.says for claim in found.claims if claim.holds != "yes"] == []
            assert found.chart is not None
            draw(found.chart, tmp_path / f"{figure.number}.png")


def test_where_the_time_goes_adds_up() -> None:
    """Figure 1: the parts of a stage are its time."""
    costs = SMALL.costs(T2P2)
    work = costs.work([800] * 4, [(0, 500)])
    parts = model.stage_parts(costs, work, 0)
    assert parts.total == pytest.approx(costs.stage_seconds(work, 0) + costs.send_seconds(work, 0))
    assert parts.communication > costs.all_reduce_seconds(work, 0)


def test_the_gain_at_a_bandwidth_is_over_the_best_static_one() -> None:
    point = sensitivity.BandwidthPoint(
        factor=1.0,
        static={"d1t1p8": 30.0, "d1t8p1": 24.0},
        pairs={"d1p8->d1t8": 20.0, "d2p4->d2t4": 40.0},
    )
    assert (point.winner, point.stages, point.gain) == ("d1t8p1", 1, 1.2)


def test_the_figures_are_those_of_the_paper() -> None:
    assert [figure.number for figure in PAPER.figures] == [
        "1",
        "2",
        "4",
        "6",
        "10",
        "11",
        "12",
        "13",
        "14",
        "15",
    ]


def test_who_gives_way_moves_to_the_host_also_from_a_pipeline() -> None:
    """Figure 13: computing a preempted prompt again would take two more transitions for one
    answer."""
    long_answers = closed_batch("llama-2-70b", "seesaw-a10", 8, "3000+600", 60)
    pair = with_layouts(long_answers, ParallelLayout.parse("P8"), ParallelLayout.parse("T4P2"))
    found = pair.run().result
    assert (found.preemptions, found.transitions) == (0, 1)
    assert found.swapped_in_tokens > 60 * 3000  # some came in twice
