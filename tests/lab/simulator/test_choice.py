"""A choice of layouts on made-up machines, held against closed forms that know only bytes,
operations and the link."""

from collections.abc import Callable
from functools import partial

import pytest

from nanoserve.config.published_shapes import load_shape
from nanoserve.costs.hardware import MachineSpeeds
from nanoserve.costs.step_costs import StepCosts
from nanoserve.errors import UsageError
from nanoserve.lab.simulator.advice import LayoutForecast, choice_text, choose, usual_work
from nanoserve.lab.simulator.planning import CacheLimits, PlannedWork
from nanoserve.layout import ParallelLayout
from nanoserve.request import RequestShape

MODEL = load_shape("qwen3-0.6b")
BANDWIDTH, FLOPS = 7e9, 5e11
# parameters: q, k, v; output; feed-forward
LAYER = 1024 * (16 + 8 + 8) * 128 + 16 * 128 * 1024 + 3 * 1024 * 3072
HEAD = 151936 * 1024
HIDDEN = 2 * 1024  # bytes of a token


def costs_on(link: float) -> Callable[[ParallelLayout], StepCosts]:
    """Costs of two devices that a link of so many bytes per second joins."""
    speeds = MachineSpeeds(
        memory_bandwidth=BANDWIDTH,
        flops=FLOPS,
        host_link_bandwidth=BANDWIDTH,
        link_bandwidth=link,
        link_latency=2e-5,
    )
    return partial(
        StepCosts, MODEL, speeds.machine(devices=2, memory_bytes=8e9, host_memory_bytes=16e9)
    )


def chosen(link: float, work: PlannedWork, **settings: str) -> list[LayoutForecast]:
    return choose(
        costs_on(link),
        2,
        work,
        limits=CacheLimits(),
        token_budget=2048,
        max_num_seqs=256,
        layouts=(),
        **settings,
    )


def batch(requests: int, inputs: int, outputs: int) -> PlannedWork:
    return PlannedWork((RequestShape(inputs, outputs),) * requests)


def floors(link: float, requests: int, inputs: int, outputs: int) -> dict[str, float]:
    """Seconds of all prompts and all answers at least, by layout; caches, hosts and empty stages
    are left out."""
    tokens, weights = requests * inputs, 2 * (28 * LAYER + HEAD)
    computing, reading = 2 * 28 * LAYER * tokens / FLOPS / 2, outputs * weights / BANDWIDTH
    filled = computing * (1 + 2048 / tokens)  # the second stage waits for the first step's prompts
    reduced = 56 * HIDDEN / link  # seconds of a token's all-reduces
    prompts = {
        "D2": computing,
        "P2": filled + tokens * HIDDEN / link,
        "T2": computing + tokens * reduced,
    }
    # Halves of the batch read all weights in two places; one batch reads half of them on each
    # device.
    answers = {
        "D2": reading,
        "P2": reading,
        "T2": reading / 2 + outputs * (requests * reduced + 57 * 2 * 2e-5),
    }
    whole = {name: prompts[name] + answers[name] for name in prompts}
    return whole | {"P2->T2": prompts["P2"] + answers["T2"] + weights / 2 / BANDWIDTH}


@pytest.mark.parametrize(
    "link, best",
    [(1e6, "D2"), (1e7, "D2"), (1.5e8, "P2->T2"), (2e8, "P2->T2"), (1e9, "T2"), (1e10, "T2")],
)
def test_the_choice_is_that_of_arithmetic(link: float, best: str) -> None:
    """On a slow link nothing is divided within layers, on a fast one everything, and between them
    only answers."""
    seconds = floors(link, 16, 512, 64)
    assert min(seconds, key=seconds.__getitem__) == best
    assert chosen(link, batch(16, 512, 64))[0].name == best


def test_a_single_request_is_computed_by_all_devices() -> None:
    assert chosen(1e10, batch(1, 64, 64))[0].name == "T2"


def test_the_line_says_what_the_next_one_loses_by() -> None:
    best, *others = chosen(1e7, batch(16, 512, 64))
    other = next(one for one in others if one.name == "T2")
    tokens, lost = 16 * 512, other.parts["prompts"] - best.parts["prompts"]
    assert lost == pytest.approx(tokens * 56 * HIDDEN / 1e7, rel=0.1)
    assert choice_text([best, other]) == (
        f"D2 with sarathi: predicted {best.tokens_per_second:,.0f} tokens/s;"
        f" next T2 with sarathi {other.tokens_per_second:,.0f}: its prompts take {lost:.2g} s "
        "longer"
    )
    assert (
        choice_text([best]) == f"D2 with sarathi: predicted {best.tokens_per_second:,.0f} tokens/s"
    )


def test_what_a_batch_takes_is_the_sum_of_its_parts() -> None:
    work = batch(16, 512, 64)
    for one in chosen(1e8, work):
        assert sum(one.parts.values()) == pytest.approx(work.tokens / one.tokens_per_second), (
            one.name
        )


def test_a_given_policy_is_kept_and_leaves_out_what_it_cannot_run() -> None:
    work = batch(16, 512, 64)
    assert {
        (one.name, one.policy) for one in chosen(2e8, work, policy="throttling:iterations=4")
    } == {(name, "throttling:iterations=4") for name in ("P2", "T2", "D2")}
    assert {one.policy for one in chosen(2e8, work) if one.name == "P2"} == {
        "sarathi",
        "throttling",
        "adaptive",
    }


def test_given_layouts_are_kept() -> None:
    ask = partial(
        choose,
        costs_on(2e8),
        2,
        batch(8, 64, 8),
        limits=CacheLimits(),
        token_budget=512,
        max_num_seqs=64,
    )
    stages, pair = ParallelLayout(pipeline_parallel=2), ParallelLayout(tensor_parallel=2)
    assert {one.name for one in ask(layouts=[stages])} == {"P2"}
    assert [(one.name, one.policy) for one in ask(layouts=[stages, pair])] == [("P2->T2", "seesaw")]
    with pytest.raises(UsageError, match="D3"):
        ask(layouts=[ParallelLayout(data_parallel=3)])


def test_a_server_is_chosen_for_by_latency_at_half_of_what_the_best_bears() -> None:
    costs = costs_on(1e10)
    work = usual_work(costs, 2, 4096)
    ranked = chosen(1e10, work)
    assert [one.latency for one in ranked] == sorted(one.latency for one in ranked)
    assert not any("->" in one.name for one in ranked)
    assert f"s an answer at {work.rate:.2g} requests/s" in choice_text(ranked, work.rate)
    best = max(one.tokens_per_second for one in chosen(1e10, PlannedWork(work.shapes)))
    assert work.rate == pytest.approx(best * len(work.shapes) / work.tokens / 2, rel=0.3)


def test_usual_requests_fit_into_a_short_context() -> None:
    shapes = usual_work(costs_on(1e10), 2, 64).shapes
    assert max(shape.total_tokens for shape in shapes) == 64
    assert min(min(shape.input_tokens, shape.output_tokens) for shape in shapes) >= 1
