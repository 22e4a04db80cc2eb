"""The closed forms that follow from APEX's inequality, by hand. That they bound what is decided:
test_hybrid.py."""

import pytest

from nanoserve.costs.closed_forms import (
    overlap_gain_bound,
    pipelining_break_even,
    pipelining_speedup_bound,
)


@pytest.mark.parametrize(
    ("attention", "ratio"),
    [(0.5, 7.5), (1.0, 6.0), (1.5, 35 / 6), (0.35, 9.06), (0.07, 31.64)],
)
def test_the_break_even_ratio_by_hand(attention: float, ratio: float) -> None:
    """The paper's "about 7.5" at the low end of its 0.5 to 1.5; 9 to 32 at what its own platforms
    have."""
    assert pipelining_break_even(1.0, attention) == pytest.approx(ratio, abs=0.005)


@pytest.mark.parametrize(
    ("hosts", "speedup"),
    [
        (100, 1.6 * 2 / 3),  # the CPU is the limit: 0.2 * (1 + 2)
        (6, 1.6 * 2 / 3),
        (3, 1.3 * 2 / 3),  # the three sequences are: slower than the device alone
        (0, 2 / 3),
    ],
)
def test_the_bound_of_asymmetric_pipelining_by_hand(hosts: int, speedup: float) -> None:
    bound = pipelining_speedup_bound(1.0, 1.0, speed_ratio=0.2, decodes=10, host_sequences=hosts)
    assert bound == pytest.approx(speedup)


@pytest.mark.parametrize(
    ("hosts", "gain"),
    [
        (1000, 0.4),  # the CPU is the limit: 0.2 * (1 + 1)
        (132, 0.4),
        (33, 0.1),  # a token each in 33 steps, beside 330 of the device
        (0, 0.0),
    ],
)
def test_the_bound_of_asynchronous_overlap_by_hand(hosts: int, gain: float) -> None:
    bound = overlap_gain_bound(
        1.0, 1.0, speed_ratio=0.2, decodes=10, host_sequences=hosts, layers=32
    )
    assert bound == pytest.approx(gain)


def test_what_is_beside_the_layers_runs_once_and_only_overlap_uses_it() -> None:
    known = {"speed_ratio": 0.2, "decodes": 10, "host_sequences": 1000, "beside": 2.0}
    # The CPU attends in 1 + 2 layers' times either way, of a step of 5 where the device alone takes
    # 4.
    assert pipelining_speedup_bound(1.0, 1.0, **known) == pytest.approx(1.6 * 4 / 5)
    assert overlap_gain_bound(1.0, 1.0, layers=3, **known) == pytest.approx(0.2 * 4)
