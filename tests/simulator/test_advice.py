"""Advice on a machine of the hardware table: what was chosen beside what else there is."""

import random
from dataclasses import replace
from functools import partial

import pytest

from nanoserve.costs import DoesNotFit, ParallelLayout, StepCosts, load_machine, load_shape
from nanoserve.errors import UsageError
from nanoserve.measures.workloads import RequestShape
from nanoserve.simulator import advice
from nanoserve.simulator.advice import Advice, LayoutForecast, advise
from nanoserve.simulator.planning import CacheLimits

GENERATOR = random.Random(0)
SHAPES = [RequestShape(GENERATOR.randint(500, 1500), GENERATOR.randint(30, 80)) for _ in range(40)]
MACHINE = load_machine("seesaw-a10")
NO_LIMITS = CacheLimits()


def advice_for(
    layouts: str,
    shapes: list[RequestShape] = SHAPES,
    limits: CacheLimits = NO_LIMITS,
    model: str = "qwen2.5-32b",
    policy: str = "sarathi",
) -> Advice:
    return advise(
        partial(StepCosts, load_shape(model), MACHINE),
        [ParallelLayout.parse(name) for name in layouts.split("->")],
        shapes,
        limits=limits,
        policy=policy,
        token_budget=2048,
        max_num_seqs=256,
    )


def test_a_poor_choice_is_told_of_a_better_one_and_how_to_ask_for_it() -> None:
    poor = advice_for("T8")
    assert poor.better is not None
    assert poor.better.tokens_per_second > 1.05 * poor.chosen.tokens_per_second
    predicted, others, better = poor.text.splitlines()
    assert predicted.startswith(f"predicted: {poor.chosen.tokens_per_second:,.0f} tokens/s under T8")
    assert "if every answer is as long as it may be" in predicted
    assert all(f"{one.name} {one.tokens_per_second:,.0f}" in others for one in poor.others)
    assert better.startswith(f"{poor.better.name} is predicted to be")
    assert better.endswith(f"faster: {poor.better.options}")


def test_who_chose_the_best_is_left_in_peace() -> None:
    poor = advice_for("T8")
    assert poor.better is not None
    good = advice_for(poor.better.name)
    assert good.better is None
    assert len(good.text.splitlines()) == 2
    assert good.chosen.tokens_per_second == pytest.approx(poor.better.tokens_per_second)
    assert good.chosen.name not in [one.name for one in good.others]


def test_a_small_host_pool_spoils_a_pair() -> None:
    roomy, tight = advice_for("P8->T8"), advice_for("P8->T8", limits=CacheLimits(host_bytes=2**30))
    assert tight.chosen.tokens_per_second < 0.5 * roomy.chosen.tokens_per_second
    assert tight.better is not None
    assert len(tight.better.layouts) == 1


def test_single_layouts_are_not_judged_by_the_policy_of_pairs() -> None:
    assert advice_for("P8->T8", SHAPES[:4], policy="seesaw") == advice_for("P8->T8", SHAPES[:4], policy="sarathi")
    assert advice_for("P8->T8", SHAPES[:4], policy="prefill-first") != advice_for("P8->T8", SHAPES[:4])


def test_many_requests_are_sampled_and_their_number_counts_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a sample the forecast follows the estimate: a larger batch is faster where the memory holds it."""
    monkeypatch.setattr(advice, "_SAMPLED_REQUESTS", 10)
    few, many = advice_for("P8->T8", SHAPES[:10]), advice_for("P8->T8", SHAPES)
    assert many.chosen.tokens_per_second > 1.5 * few.chosen.tokens_per_second


def test_what_does_not_fit_says_why() -> None:
    with pytest.raises(UsageError, match=r"D8: the model does not fit: .* GiB more than"):
        advice_for("D8")
    with pytest.raises(UsageError, match=r"P8->T8: .* host memory hold"):
        advice_for("P8->T8", limits=CacheLimits(host_bytes=2**20))
    with pytest.raises(DoesNotFit):
        advice_for("P2", model="llama-3.1-100b")


@pytest.mark.parametrize(
    "names, options",
    [
        ("T2P4", "--pp 4 --tp 2"),
        ("P8", "--pp 8"),
        ("T2", "--tp 2"),
        ("D2T2", "--dp 2 --tp 2"),
        ("D2P4->D2T2P2", "--prefill-parallel d2p4 --decode-parallel d2t2p2"),
    ],
)
def test_every_layout_can_be_asked_for(names: str, options: str) -> None:
    layouts = tuple(ParallelLayout.parse(name) for name in names.split("->"))
    assert LayoutForecast(layouts, 1.0).options == options
    assert LayoutForecast(tuple(replace(layout) for layout in layouts), 1.0).name == names
