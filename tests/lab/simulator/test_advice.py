"""Advice on a machine of the hardware table: what was chosen beside what else there is."""

import random
import re
from functools import partial

import pytest

from nanoserve.config.published_shapes import load_shape
from nanoserve.costs.hardware import load_machine
from nanoserve.costs.step_costs import DoesNotFit, StepCosts
from nanoserve.errors import UsageError
from nanoserve.lab.simulator import advice
from nanoserve.lab.simulator.advice import LayoutForecast, advise, choose
from nanoserve.lab.simulator.planning import CacheLimits, PlannedWork
from nanoserve.layout import ParallelLayout
from nanoserve.request import RequestShape

GENERATOR = random.Random(0)
SHAPES = [RequestShape(GENERATOR.randint(500, 1500), GENERATOR.randint(30, 80)) for _ in range(40)]
MACHINE = load_machine("seesaw-a10")
NO_LIMITS = CacheLimits()


def parsed(layouts: str) -> list[ParallelLayout]:
    return [ParallelLayout.parse(name) for name in layouts.split("->")]


def forecast(
    layouts: str,
    shapes: list[RequestShape] = SHAPES,
    limits: CacheLimits = NO_LIMITS,
    model: str = "qwen2.5-32b",
) -> LayoutForecast:
    costs_of, chosen = partial(StepCosts, load_shape(model), MACHINE), parsed(layouts)
    work, sizes = PlannedWork(tuple(shapes)), {"token_budget": 2048, "max_num_seqs": 256}
    return choose(costs_of, chosen[0].devices, work, limits=limits, layouts=chosen, **sizes)[0]


def advice_for(layouts: str) -> str:
    costs_of, work = (
        partial(StepCosts, load_shape("qwen2.5-32b"), MACHINE),
        PlannedWork(tuple(SHAPES)),
    )
    return advise(
        costs_of, parsed(layouts), work, limits=NO_LIMITS, token_budget=2048, max_num_seqs=256
    )


def test_a_poor_choice_is_told_of_a_better_one_and_who_chose_that_is_left_in_peace() -> None:
    poor = forecast("T8").tokens_per_second
    said = re.fullmatch(
        rf"predicted: {poor:,.0f} tokens/s under T8, prompts and answers together; (\S+) with (\w+) ([\d,]+), which"
        " --parallel auto --devices 8 would choose",
        advice_for("T8"),
    )
    assert said is not None
    name, _, better = said.groups()
    assert int(better.replace(",", "")) > 1.05 * poor
    assert (
        advice_for(name)
        == f"predicted: {better} tokens/s under {name}, prompts and answers together"
    )


def test_a_small_host_pool_spoils_a_pair() -> None:
    roomy, tight = forecast("P8->T8"), forecast("P8->T8", limits=CacheLimits(host_bytes=2**30))
    assert tight.tokens_per_second < 0.5 * roomy.tokens_per_second


def test_many_requests_are_sampled_and_their_number_counts_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beyond a sample the forecast follows the estimate: a larger batch is faster where the memory
    holds it."""
    monkeypatch.setattr(advice, "_SAMPLED_REQUESTS", 10)
    few, many = forecast("P8->T8", SHAPES[:10]), forecast("P8->T8", SHAPES)
    assert many.tokens_per_second > 1.5 * few.tokens_per_second


def test_what_does_not_fit_says_why() -> None:
    with pytest.raises(UsageError, match=r"D8: the model does not fit: .* GiB more than"):
        forecast("D8")
    with pytest.raises(UsageError, match=r"P8->T8: .* host memory hold"):
        forecast("P8->T8", limits=CacheLimits(host_bytes=2**20))
    with pytest.raises(DoesNotFit):
        forecast("P2", model="llama-3.1-100b")
