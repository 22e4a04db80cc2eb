"""The list on which adaptive is compared with throttling, and how the comparison is made."""

import pytest

from nanoserve.lab.papers.adaptive import ADAPTIVE, SETTINGS, THROTTLING, ListEntry, compare
from nanoserve.lab.papers.framework import Scale
from nanoserve.lab.papers.running import Runner

SMALL = ListEntry("qwen3-0.6b", "l4", 1, "40+20", 0.01, 0.8)


def test_the_list_is_whole() -> None:
    assert len(set(SETTINGS)) == len(SETTINGS) == 3 * 2 * 2 * 3
    assert [len({setting[place] for setting in SETTINGS}) for place in (0, 3, 4, 5)] == [3, 2, 2, 3]


def test_policies_meet_at_the_same_rate_with_the_same_requests() -> None:
    entries = [SMALL, SMALL._replace(load=1.6)]
    with Runner(1) as runner:
        found = compare(entries, [ADAPTIVE], 60, Scale(seeds=(0, 1)), runner.run)
    assert found.places == [(entry, ADAPTIVE.label) for entry in entries]
    light, heavy = ([case.rate for case in found.cases[place]] for place in found.places)
    assert heavy == [pytest.approx(2 * light[0])] * 2
    itself, adaptive = found.row((SMALL, THROTTLING.label)), found.row((SMALL, ADAPTIVE.label))
    assert [itself[f"{name}_text"] for name in ("throughput", "tpot", "ttft")] == ["1.000"] * 3
    assert adaptive["policy"] == "adaptive" and adaptive["ttft_text"] != "1.000"
    for place in ((SMALL, ADAPTIVE.label), (SMALL, THROTTLING.label)):
        assert [case.seed for case in found.cases[place]] == [0, 1]
