"""Rounds, what makes them count, and ratios, with fake peers and a scripted bandwidth."""

from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nanoserve.lab.benchmarks.machine import ForeignLoad
from nanoserve.lab.benchmarks.rounds import Repeating, counting_words, in_states
from nanoserve.lab.commands.bench_compare import Round, ratios, run_rounds, samples, summarize
from nanoserve.lab.workloads import BatchCase
from tests.lab.benchmarks.fakes import FakePeer

CASE = BatchCase(batch=2, input_tokens=3, output_tokens=5)
REPEATS = 3


def compared(
    peers: list[Any], bandwidths: Iterable[float], rounds: int, tmp_path: Path
) -> list[Round]:
    readings: Iterator[float] = iter([gigabytes * 1e9 for gigabytes in bandwidths])
    foreign = ForeignLoad(proc=tmp_path)  # an empty /proc: load unknown
    seconds = count()
    settings: dict[str, Any] = {
        "vocab_size": 50,
        "foreign": foreign,
        "probe": lambda: next(readings),
    }
    # a second for each round
    repeating = Repeating(seconds_left=REPEATS, now=lambda: float(next(seconds)))
    return list(run_rounds(CASE, peers, rounds=rounds, repeating=repeating, **settings))


def test_engines_take_turns_and_the_first_one_changes(tmp_path: Path) -> None:
    log: list[str] = []
    peers: list[Any] = [FakePeer("nanoserve", 1.0, log), FakePeer("other", 1.0, log)]
    compared(peers, [10.0] * 6, 3, tmp_path)
    warm_up, rounds = log[:2], log[2:]
    assert warm_up == ["nanoserve", "other"]
    assert rounds == ["nanoserve", "other", "other", "nanoserve", "nanoserve", "other"]


def test_a_round_whose_bandwidth_moved_does_not_count_and_is_made_up_for(tmp_path: Path) -> None:
    peers: list[Any] = [FakePeer("nanoserve", 1.0), FakePeer("other", 2.0)]
    done = compared(peers, [10.0, 10.5, 10.0, 12.0, 12.0, 12.0], 2, tmp_path)
    assert [one.counts for one in done] == [True, False, True]


def test_rounds_end_even_if_none_counts(tmp_path: Path) -> None:
    done = compared(
        [FakePeer("nanoserve", 1.0), FakePeer("other", 2.0)], [10.0, 20.0] * 20, 3, tmp_path
    )
    assert len(done) == 3 + REPEATS
    assert samples(done) == {}
    for row in (*ratios(done), *summarize(done)):
        assert (row["rounds"], row["state"]) == (6, "15 GB/s, not counted")


def test_ratios_are_ours_over_theirs_within_each_round(tmp_path: Path) -> None:
    peers: list[Any] = [FakePeer("nanoserve", 0.5), FakePeer("other", 2.0)]
    found = {ratio["metric"]: ratio for ratio in ratios(compared(peers, [10.0] * 4, 2, tmp_path))}
    assert found["decode"]["median"] == pytest.approx(4.0)
    assert found["prefill"]["median"] == pytest.approx(1.0)
    assert (found["decode"]["rounds"], found["decode"]["low"], found["decode"]["high"]) == (
        2,
        4.0,
        4.0,
    )
    assert (found["decode"]["peer"], found["decode"]["state"]) == ("other", "10 GB/s")


def test_samples_are_the_ratios_of_the_rounds_that_count(tmp_path: Path) -> None:
    peers: list[Any] = [FakePeer("nanoserve", 0.5), FakePeer("other", 2.0)]
    done = compared(peers, [10.0, 10.0, 10.0, 30.0, 60.0, 60.0], 2, tmp_path)
    assert samples(done)["2 x 3+5 over other"]["decode_ratio"] == [4.0, 4.0]


def test_bandwidth_states_are_told_apart(tmp_path: Path) -> None:
    done = compared(
        [FakePeer("nanoserve", 1.0)], [36, 36, 60, 60, 38, 38, 58, 61, 36, 60], 4, tmp_path
    )
    assert in_states(done) == list(zip(done, ["36-38 GB/s", "60 GB/s"] * 2, strict=True))


def test_engines_that_agree_on_first_tokens(tmp_path: Path) -> None:
    peers: list[Any] = [FakePeer("nanoserve", 1.0), FakePeer("other", 1.0)]
    assert compared(peers, [10.0] * 2, 1, tmp_path)[0].same_tokens == {"other": 1.0}


def test_busy_rounds_do_not_count_unless_all_are_kept(tmp_path: Path) -> None:
    quiet = compared([FakePeer("nanoserve", 1.0)], [10.0] * 2, 1, tmp_path)[0]
    busy = replace(quiet, foreign_cores=0.8)
    kept = replace(busy, kept=True)
    assert in_states([quiet, busy]) == [(quiet, "10 GB/s")]
    assert in_states([quiet, kept]) == [(quiet, "10 GB/s"), (kept, "10 GB/s, busy")]
    assert in_states([busy, busy]) == [(busy, "10 GB/s, not counted")] * 2
    words = (
        "1 of 3 rounds count (in 2 other programs kept cores busy, in 1 the read bandwidth moved "
        "by 10 % or more)"
    )
    assert counting_words([quiet, busy, replace(busy, bandwidth_after=11.0)]) == words


def test_disturbed_rounds_are_repeated_for_the_time_that_a_command_has(tmp_path: Path) -> None:
    quiet = compared([FakePeer("nanoserve", 1.0)], [10.0] * 2, 1, tmp_path)[0]
    busy = replace(quiet, foreign_cores=0.8)
    seconds = count(step=10)
    # ten seconds for each round
    repeating = Repeating(seconds_left=25.0, now=lambda: float(next(seconds)))
    assert list(repeating.rounds(lambda number: quiet if number > 1 else busy, 2)) == [
        busy,
        quiet,
        quiet,
    ]
    assert len(list(repeating.rounds(lambda _: busy, 2))) == 2 + 2, (
        "15 seconds are left for two more"
    )
    assert len(list(repeating.rounds(lambda _: busy, 2))) == 2, "no time is left"
    kept = list(Repeating(keep_all=True).rounds(lambda _: busy, 2))
    assert [one.counts for one in kept] == [True, True]
