"""Bootstrap intervals on samples whose difference is plain."""

from typing import Any

import pytest

from nanoserve.benchmarks.diffing import compare_reports
from nanoserve.errors import UsageError


def report(**samples: list[float]) -> dict[str, Any]:
    return {"kind": "latency", "rows": [{"case": "a", "samples": samples}]}


def test_a_slowdown_is_seen_in_its_direction() -> None:
    slower = compare_reports(report(ttft_ms=[10.0, 10.1, 9.9]), report(ttft_ms=[20.0, 20.1, 19.9]))[0]
    assert slower.ratio == pytest.approx(2.0)
    assert slower.low < 2.0 < slower.high
    assert slower.worse == pytest.approx(slower.low - 1)
    faster = compare_reports(report(output_tokens_per_s=[10.0] * 3), report(output_tokens_per_s=[20.0] * 3))[0]
    assert faster.worse == 0.0
    halved = compare_reports(report(output_tokens_per_s=[20.0] * 3), report(output_tokens_per_s=[10.0] * 3))[0]
    assert halved.worse == pytest.approx(0.5)


def test_noise_is_no_slowdown() -> None:
    change = compare_reports(report(ttft_ms=[9.0, 10.0, 14.0]), report(ttft_ms=[9.5, 11.0, 13.0]))[0]
    assert change.low < 1 < change.high
    assert change.worse == 0.0


def test_reports_without_anything_in_common() -> None:
    with pytest.raises(UsageError, match="no case with repeated measurements in common"):
        compare_reports(report(ttft_ms=[1.0]), report(tpot_ms=[1.0]))
    with pytest.raises(UsageError, match="one report is of bench latency"):
        compare_reports(report(), {"kind": "startup", "rows": []})
