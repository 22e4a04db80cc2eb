"""Seesaw's figures: what is searched for and simulated, at sizes that take a moment."""

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from nanoserve.costs import ParallelLayout
from nanoserve.costs.hardware import GIBI
from nanoserve.papers.cases import TOKEN_BUDGETS
from nanoserve.papers.charts import draw
from nanoserve.papers.framework import Scale
from nanoserve.papers.running import Runner
from nanoserve.papers.seesaw import PAPER, model, sensitivity
from nanoserve.papers.seesaw.estimate import BestBudget, Estimate, Shortlist
from nanoserve.papers.seesaw.runs import FREQUENT, RARE, BatchOutcome, ClosedBatch
from nanoserve.papers.seesaw.search import compare
from nanoserve.papers.seesaw.settings import LONGEST, RESHARDING, LayoutChoice, OfflineBatch

P4, T4, T2P2 = (
    ParallelLayout(pipeline_parallel=4),
    ParallelLayout(tensor_parallel=4),
    ParallelLayout(tensor_parallel=2, pipeline_parallel=2),
)
SMALL = OfflineBatch(model="llama-3-15b", machine="seesaw-a10", devices=4, lengths="1000+60", requests=24)
CHANGING = LayoutChoice(prefill=P4, decode=T4, policy=RESHARDING)


def outcome(choice: LayoutChoice, setting: OfflineBatch = SMALL) -> BatchOutcome:
    return ClosedBatch(setting=setting, choice=choice).run()


def test_all_layouts_that_fit_are_looked_at() -> None:
    seventy = OfflineBatch(model="llama-2-70b", machine="seesaw-a10", devices=8, lengths="arxiv", requests=50)
    assert {layout.name for layout in seventy.layouts()} == {"P8", "T2P4", "T4P2", "T8"}  # two replicas do not fit
    assert {layout.name for layout in SMALL.layouts()} == {"P4", "T2P2", "T4", "D2P2", "D2T2"}
    assert max(shape.total_tokens for shape in seventy.shapes()) <= LONGEST


def test_the_whole_time_of_an_all_reduce_is_scaled_and_the_hosts_link_is_not() -> None:
    ten_times = msgspec.structs.replace(SMALL, all_reduce_scale=10.0)
    slow, fast = SMALL.costs(T4), ten_times.costs(T4)
    work = slow.work([1000] * 8)
    assert slow.all_reduce_seconds(work, 0) == pytest.approx(10 * fast.all_reduce_seconds(work, 0))
    assert slow.reload_seconds(0) == fast.reload_seconds(0)


@pytest.mark.parametrize("choice", [LayoutChoice(prefill=T2P2, token_budget=512), LayoutChoice(prefill=T4), CHANGING])
def test_the_estimate_that_chooses_is_near_the_simulation(choice: LayoutChoice) -> None:
    assert Estimate(SMALL).seconds(choice) == pytest.approx(outcome(choice).seconds, rel=0.15)


def test_data_parallel_replicas_share_the_requests() -> None:
    twice = ParallelLayout(data_parallel=2, tensor_parallel=2)
    halves = outcome(LayoutChoice(prefill=twice))
    alone = ParallelLayout(tensor_parallel=2)
    half = msgspec.structs.replace(SMALL, devices=2, requests=SMALL.requests // 2)
    assert halves.seconds == pytest.approx(outcome(LayoutChoice(prefill=alone), half).seconds)


def test_both_sides_are_searched_over_the_same_budgets() -> None:
    found = Shortlist(setting=SMALL, candidates=6).run()
    for choices in (found.static, found.resharding):
        assert len(choices) == 6
        assert {choice.token_budget for choice in choices} <= set(TOKEN_BUDGETS)
        # Of two budgets of one configuration, the second is half of the first.
        assert all(
            after.token_budget * 2 == before.token_budget
            for before, after in pairwise(choices)
            if before.label == after.label
        )
    assert all(choice.decode is None for choice in found.static)
    assert all(choice.decode and choice.decode.data_parallel == choice.replicas for choice in found.resharding)
    static = LayoutChoice(prefill=T4)
    tuned = BestBudget(setting=SMALL, choice=static).run()
    estimate = Estimate(SMALL)
    assert estimate.seconds(tuned) <= estimate.seconds(static)


def test_a_run_is_made_of_its_parts() -> None:
    found = outcome(CHANGING)
    assert found.result.transitions == 1
    assert found.breakdown.total == pytest.approx(found.seconds)
    assert min(found.breakdown.prefill, found.breakdown.decode, found.breakdown.transition) > 0
    assert [layout for _, _, layout in found.phases] == [0, 1]
    assert found.phases[-1][1] == found.seconds


def test_without_tiered_buffering_transitions_are_frequent_or_batches_small() -> None:
    """Figure 2, with a pool that does not hold all prompts at once."""
    many = OfflineBatch(
        model="codellama-34b",
        machine="seesaw-a10",
        devices=4,
        lengths="3000+100",
        requests=150,
        host_bytes_per_device=10 * GIBI,
    )
    seesaw, frequent, rare = (
        outcome(msgspec.structs.replace(CHANGING, policy=policy), many) for policy in (RESHARDING, FREQUENT, RARE)
    )
    assert 3 <= seesaw.result.transitions < rare.result.transitions <= frequent.result.transitions
    assert seesaw.seconds < min(frequent.seconds, rare.seconds)
    assert seesaw.result.host_peak > 0.9


def test_the_best_of_both_kinds_are_compared_seed_by_seed() -> None:
    setting = msgspec.structs.replace(SMALL, lengths="sharegpt-gllm", requests=40)
    with Runner(1) as runner:
        (found,) = compare([setting], Scale(seeds=(0, 1)), runner.run)
        tried = Shortlist(setting=setting, candidates=3).run()
        seconds = {choice: runner.run([ClosedBatch(setting=setting, choice=choice)]) for choice in tried.static}
    assert found.static_outcomes[0].seconds == min(
        outcomes[ClosedBatch(setting=setting, choice=choice)].seconds for choice, outcomes in seconds.items()
    )
    assert found.gains[1] == found.static_outcomes[1].seconds / found.resharding_outcomes[1].seconds
    assert found.gain.low <= found.row()["gain"] <= found.gain.high  # type: ignore[operator]


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
        factor=1.0, static={"d1t1p8": 30.0, "d1t8p1": 24.0}, pairs={"d1p8->d1t8": 20.0, "d2p4->d2t4": 40.0}
    )
    assert (point.winner, point.stages, point.gain) == ("d1t8p1", 1, 1.2)


def test_the_figures_are_those_of_the_paper() -> None:
    assert [figure.number for figure in PAPER.figures] == ["1", "2", "4", "6", "10", "11", "12", "13", "14", "15"]


def test_who_gives_way_moves_to_the_host_also_from_a_pipeline() -> None:
    """Figure 13: computing a preempted prompt again would take two more transitions for one answer."""
    long_answers = OfflineBatch(model="llama-2-70b", machine="seesaw-a10", devices=8, lengths="3000+600", requests=60)
    pair = LayoutChoice(
        prefill=ParallelLayout(pipeline_parallel=8),
        decode=ParallelLayout(tensor_parallel=4, pipeline_parallel=2),
        policy=RESHARDING,
    )
    found = outcome(pair, long_answers).result
    assert (found.preemptions, found.transitions) == (0, 1)
    assert found.swapped_in_tokens > 60 * 3000  # some came in twice
