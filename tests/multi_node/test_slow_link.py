"""What compares layouts over links of many speeds: how its figures are summed up, and that pairs of layouts run."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.slow_link import UNSHAPED, Work, measure, summarize
from scripts.two_hosts import Host, torchrun, wait

SETTINGS = ["--dtype", "float32", "--kv-cache-memory", "16MiB", "--threads", "1", "--eager", "-t", "0", "-n", "60"]


def rows(rate: str, work: str, **seconds: Sequence[float]) -> list[dict[str, Any]]:
    names = {"t": "T2", "p": "P2", "pair": "P2 -> T2"}
    return [
        {"rate": rate, "work": work, "variant": names[name], "round": number, "seconds": value}
        for name, values in seconds.items()
        for number, value in enumerate(values)
    ]


def test_a_pair_is_compared_with_the_best_layout_within_each_round() -> None:
    """The third round was slow for all."""
    fast = rows(UNSHAPED, "balanced", t=[1.0, 1.0, 9.0], p=[2.0, 2.0, 18.0], pair=[1.1, 0.9, 9.0])
    slow = rows("100mbit", "balanced", t=[3.0, 3.0, 3.0], p=[2.0, 2.0, 2.0], pair=[2.2, 2.4, 2.6])
    first, second = summarize(fast + slow)
    assert first == {
        "rate": UNSHAPED,
        "work": "balanced",
        "seconds": {"T2": 1.0, "P2": 2.0, "P2 -> T2": 1.1},
        "best static": "T2",
        "over": {"P2 -> T2": 1.0},
    }
    assert (second["best static"], second["over"]) == ("P2", {"P2 -> T2": 1.2})


@pytest.mark.slow
def test_layouts_and_a_pair_of_them_are_measured(hosts: tuple[Host, Host]) -> None:
    """The hosts are other ones; the fixture skips where there can be none."""
    work = Work("tiny", 3, 16, 4)
    measured = measure(["300mbit"], ["T2", "P2 -> T2"], [work], rounds=2)
    assert [(row["variant"], row["round"]) for row in measured] == [
        *(("T2", 0), ("P2 -> T2", 0)),
        *(("P2 -> T2", 1), ("T2", 1)),
    ]
    assert all(0 < row["prefill_seconds"] < row["seconds"] for row in measured)
    assert [row["transitions"] > 0 for row in measured] == [False, True, True, False]


@pytest.mark.slow
def test_two_layouts_on_two_hosts_answer_what_one_process_answers(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """The hosts have the memory of one machine in common, which is what two layouts want."""
    command = ["-m", "nanoserve", "generate", "Once upon a time", *SETTINGS]
    alone = hosts[0].start([sys.executable, *command])
    wait([alone], 120)
    first, second = both = torchrun(hosts, [*command, "--prefill-parallel", "p2", "--decode-parallel", "t2"])
    wait(both, 180)
    assert (alone.code, first.code, second.code) == (0, 0, 0), first.errors + second.errors
    assert first.output == alone.output
