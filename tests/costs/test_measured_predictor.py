"""Times that a profile tells policies, and that they may rely on its order."""

import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.costs.predictor import MeasuredPredictor
from nanoserve.scheduler.predictor import Predictor
from nanoserve.scheduler.work import Strategy
from tests.costs.profiles import curve, grid, made_up_profile


def test_a_predictor_worked_by_hand() -> None:
    predictor: Predictor = MeasuredPredictor(made_up_profile())
    assert predictor.num_layers == 2
    assert predictor.linear_seconds(5) == 5
    assert predictor.linear_seconds(0) == 0
    assert predictor.attention_seconds(40) == pytest.approx(0.4)
    assert predictor.prefill_attention_seconds(30) == pytest.approx(1.0)
    assert predictor.step_overhead_seconds() == 3.5
    assert predictor.step_overhead_seconds(11) == 3 + 11 + 1.5
    assert predictor.host_attention_seconds(2, 100) == pytest.approx(2 * 50 / 10 + 0.5)
    assert predictor.host_attention_seconds(0, 0) == 0
    assert predictor.swap_seconds(10) == pytest.approx(0.001 * 10 * 2 * 2 * 4 * 2)
    assert predictor.transition_seconds(0) == 0
    assert predictor.transition_seconds(1) == float("inf")


def test_steps_that_use_the_host_take_longer_where_both_read_the_same_memory() -> None:
    predictor = MeasuredPredictor(made_up_profile(beside_host=1.5))
    assert [predictor.slowdown(strategy) for strategy in get_args(Strategy)] == [1, 1.5, 1.5]


noise = st.floats(1e-7, 10)


@given(st.data())
def test_more_never_takes_less_and_all_is_finite_however_noisy_the_profile(
    data: st.DataObject,
) -> None:
    def noisy(*sizes: int) -> object:
        return curve(sizes, [data.draw(noise) for _ in sizes])

    def noisy_grid() -> object:
        cells = {
            (batch, context): data.draw(noise) for batch in (1, 4, 32) for context in (16, 256)
        }
        return grid((1, 4, 32), (16, 256), lambda *cell: cells[cell])

    predictor = MeasuredPredictor(
        made_up_profile(
            **{name: noisy_grid() for name in ("decode_attention", "host_attention")},
            **{
                name: noisy(1, 8, 64)
                for name in ("linear", "inputs", "head", "engine", "host_exchange", "copy")
            },
            prefill_attention=noisy(16, 128),
        )
    )
    less, more = sorted(data.draw(st.lists(st.integers(0, 10**6), min_size=2, max_size=2)))
    keys = data.draw(st.integers(1, 4096))
    pairs = [
        (ask(less), ask(more))
        for ask in (
            predictor.linear_seconds,
            predictor.step_overhead_seconds,
            predictor.attention_seconds,
            predictor.prefill_attention_seconds,
            predictor.swap_seconds,
            lambda sequences: predictor.host_attention_seconds(sequences, sequences * keys),
            lambda context: predictor.host_attention_seconds(7, context),
        )
    ]
    assert all(
        0 <= before <= after * (1 + 1e-9) and math.isfinite(after) for before, after in pairs
    )
