"""Bootstrap intervals on samples whose difference is plain."""

from typing import Any

import pytest

from nanoserve.errors import UsageError
from nanoserve.lab.commands.bench_diff import compare_reports


def report(**samples: list[float]) -> dict[str, Any]:
    return {"kind": "latency", "rows": [{"case": "a", "samples": samples}]}


def test_a_slowdown_is_seen_in_its_direction() -> None:
    slower = compare_reports(report(ttft_ms=[10.0, 10.1, 9.9]), report(ttft_ms=[20.0, 20.1, 19.9]))[
        0
    ]
    assert slower.ratio == pytest.approx(2.0)
    assert slower.low < 2.0 < slower.high
    assert slower.worse == pytest.approx(slower.low - 1)
    faster = compare_reports(
        report(output_tokens_per_s=[10.0] * 3), report(output_tokens_per_s=[20.0] * 3)
    )[0]
    assert faster.worse == 0.0
    halved = compare_reports(
        report(output_tokens_per_s=[20.0] * 3), report(output_tokens_per_s=[10.0] * 3)
    )[0]
    assert halved.worse == pytest.approx(0.5)


def test_noise_is_no_slowdown() -> None:
    change = compare_reports(report(ttft_ms=[9.0, 10.0, 14.0]), report(ttft_ms=[9.5, 11.0, 13.0]))[
        0
    ]
    assert change.low < 1 < change.high
    assert change.worse == 0.0


@pytest.mark.parametrize("metric", ["output_tokens_per_s", "decode_ratio", "of_floor"])
def test_of_rates_and_shares_more_is_better(metric: str) -> None:
    before, after = report(**{metric: [10.0] * 3}), report(**{metric: [5.0] * 3})
    assert compare_reports(before, after)[0].worse == pytest.approx(0.5)
    assert compare_reports(after, before)[0].worse == 0.0


def test_samples_may_stand_beside_the_rows() -> None:
    reports = [
        {
            "kind": "startup",
            "rows": [{"case": "cold"}],
            "samples": {"warm": {"to_first_token_s": [value] * 2}},
        }
        for value in (1.0, 1.5)
    ]
    (change,) = compare_reports(*reports)
    assert (change.case, change.ratio, change.worse) == ("warm", 1.5, 0.5)


def test_reports_without_anything_to_compare() -> None:
    with pytest.raises(UsageError, match="no case with repeated measurements in common"):
        compare_reports(report(ttft_ms=[1.0, 2.0]), report(tpot_ms=[1.0, 2.0]))
    with pytest.raises(UsageError, match="one report is of bench latency"):
        compare_reports(report(), {"kind": "startup", "rows": []})
    scheduler = {"kind": "scheduler", "rows": [{"case": "1 sequences"}]}
    with pytest.raises(
        UsageError, match="a report of bench scheduler holds no repeated measurements"
    ):
        compare_reports(scheduler, scheduler)
    with pytest.raises(
        UsageError, match="a report of bench latency holds no repeated measurements"
    ):
        # one value tells nothing about chance
        compare_reports(report(ttft_ms=[1.0]), report(ttft_ms=[1.0]))


def test_a_report_that_someone_changed() -> None:
    damaged = {"kind": "latency", "rows": [{"case": 3}]}
    with pytest.raises(UsageError, match="a report of bench latency is damaged: Expected `str`"):
        compare_reports(damaged, report(ttft_ms=[1.0, 2.0]))
