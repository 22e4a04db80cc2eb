"""Layers are divided over stages in order, and no division has a cheaper dearest stage."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.config.model_parts import LayerDifferences, MoeConfig
from nanoserve.config.published_shapes import load_shape, published_shapes
from nanoserve.costs.counts import divide, divide_layers
from nanoserve.costs.hardware import load_machine
from nanoserve.costs.step_costs import StepCosts
from nanoserve.layout import ParallelLayout, stage_layers

MODEL = load_shape("llama-3.2-1b")


def stage_costs(costs: list[int], sizes: tuple[int, ...]) -> list[int]:
    remaining = iter(costs)
    return [sum(next(remaining) for _ in range(size)) for size in sizes]


def all_divisions(count: int, stages: int) -> list[tuple[int, ...]]:
    return [
        tuple(after - first for first, after in pairwise((0, *cuts, count)))
        for cuts in combinations(range(1, count), stages - 1)
    ]


@given(st.data())
def test_the_dearest_stage_is_as_cheap_as_can_be(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=8))
    stages = data.draw(st.integers(1, len(costs)))

    def worth(sizes: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        found = stage_costs(costs, sizes)
        return max(found), sum(cost**2 for cost in found), sizes

    assert divide(costs, stages) == min(all_divisions(len(costs), stages), key=worth)


@given(st.sampled_from(sorted(published_shapes())), st.integers(1, 9))
def test_stages_cover_all_layers_in_order(name: str, stages: int) -> None:
    model = load_shape(name)
    layers = stage_layers(model, stages, None, divide_layers)
    assert [layer for stage in layers for layer in stage] == list(range(model.num_layers))
    assert len(layers) == stages
    assert all(layers)


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen3-0.6b", "llama-3.1-8b"])
def test_the_cost_model_divides_layers_as_the_engine_does(name: str) -> None:
    model, layout = load_shape(name), ParallelLayout(pipeline_parallel=4)
    counts = StepCosts(model, load_machine("l4"), layout).counts
    assert tuple(counts.layers(stage) for stage in range(4)) == divide_layers(model, 4)
    assert divide_layers(model, 4)[-1] < model.num_layers // 4  # the last stage has the head
    split = (1, 2, 3, model.num_layers - 6)
    counts = StepCosts(model, load_machine("l4"), layout, pipeline_split=split).counts
    assert tuple(counts.layers(stage) for stage in range(4)) == split


def test_a_split_is_taken_as_it_is() -> None:
    assert stage_layers(MODEL, 3, (1, 5, 10), divide_layers) == (
        range(1),
        range(1, 6),
        range(6, 16),
    )


def test_one_stage_has_all_layers_and_as_many_stages_as_layers_one_each() -> None:
    assert divide_layers(MODEL, 1) == (16,)
    assert divide_layers(MODEL, 16) == (1,) * 16


def test_the_last_stage_has_fewer_layers_where_the_head_is_large() -> None:
    small_head = replace(MODEL, vocab_size=1000)
    assert divide_layers(small_head, 2) == (8, 8)
    assert divide_layers(MODEL, 2) == (9, 7)
    assert divide_layers(replace(MODEL, vocab_size=1_000_000), 2)[0] > 9


def test_layers_that_cost_more_make_a_stage_of_fewer() -> None:
    moe = MoeConfig(
        64,
        8,
        MODEL.intermediate_size,
        normalize_weights=True,
        sparse_layers=frozenset(range(12, 16)),
    )
    sizes = divide_layers(replace(MODEL, vocab_size=1000, moe=moe), 2)
    assert sizes[0] > sizes[1]
    windows = (0,) * 8 + (16,) * 8  # the second half reads fewer keys
    assert (
        divide_layers(
            replace(MODEL, vocab_size=1000, layers=LayerDifferences(sliding_windows=windows)), 2
        )[0]
        < 8
    )


@pytest.mark.parametrize(("stages", "expected"), [(2, (2, 2)), (3, (1, 1, 2)), (4, (1, 1, 1, 1))])
def test_of_equal_divisions_the_first_stages_are_the_smaller(
    stages: int, expected: tuple[int, ...]
) -> None:
    assert divide([5, 5, 5, 5], stages) == expected


def test_an_equally_even_division_with_a_dearer_stage_is_not_taken() -> None:
    assert stage_costs([2, 2, 4, 1], (1, 1, 2)) == [2, 2, 5]  # squares add up to 33
    assert stage_costs([2, 2, 4, 1], (2, 1, 1)) == [4, 4, 1]  # also to 33
    assert divide([2, 2, 4, 1], 3) == (2, 1, 1)
