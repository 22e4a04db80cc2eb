"""The list on which adaptive is compared with throttling, and how the comparison is made."""

import pytest

from nanoserve.papers.adaptive import ADAPTIVE, SETTINGS, THROTTLING, Setting, compare
from nanoserve.papers.framework import Scale
from nanoserve.papers.running import Runner

SMALL = Setting("qwen3-0.6b", "l4", 1, "40+20", 0.01, 0.8)


def test_the_list_is_whole() -> None:
    assert len(set(SETTINGS)) == len(SETTINGS) == 3 * 2 * 2 * 3
    assert [len({setting[place] for setting in SETTINGS}) for place in (0, 3, 4, 5)] == [3, 2, 2, 3]


def test_policies_meet_at_the_same_rate_with_the_same_requests() -> None:
    with Runner(1) as runner:
        comparisons, outcomes = compare(
            [SMALL, SMALL._replace(load=1.6)], [THROTTLING, ADAPTIVE], 60, Scale(seeds=(0, 1)), runner.run
        )
    light, _, heavy, _ = comparisons
    rates = [case.rate for case in (*light.cases, *heavy.cases)]
    assert rates[2:] == [pytest.approx(2 * rates[0])] * 2
    itself, adaptive = (one.row(outcomes) for one in comparisons[:2])
    assert [itself[f"{name}_text"] for name in ("throughput", "tpot", "ttft")] == ["1.000"] * 3
    assert adaptive["policy"] == "adaptive" and adaptive["ttft_text"] != "1.000"
    assert [case.seed for case in comparisons[1].cases] == [case.seed for case in comparisons[1].throttling] == [0, 1]
