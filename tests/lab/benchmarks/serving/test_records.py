"""Figures of a run whose every moment is written down here, against figures worked out by hand."""

import math

import pytest
from msgspec.structs import replace

from nanoserve.errors import UsageError
from nanoserve.lab.benchmarks.serving.records import (
    LoadRun,
    RequestRecord,
    figures,
    knee,
    peak_concurrency,
    warnings,
)
from nanoserve.record.metrics import Slo, parse_slo

PROMPT = RequestRecord(
    scheduled=1.0,
    started=1.0,
    ended=2.0,
    text_times=[1.2, 1.6, 2.0],
    input_tokens=10,
    output_tokens=3,
    wanted_tokens=3,
)
"""TTFT 200 ms, gaps of 400 ms, E2EL 1000 ms."""
LATE = RequestRecord(
    scheduled=2.0,
    started=2.5,
    ended=5.0,
    text_times=[3.0, 5.0],
    input_tokens=20,
    output_tokens=5,
    wanted_tokens=5,
)
"""Sent half a second late, which it pays for: TTFT 1000 ms, not 500. Two pieces for five tokens:
TPOT 500 ms."""
SHORT = RequestRecord(
    scheduled=3.0,
    started=3.0,
    ended=4.0,
    text_times=[4.0],
    input_tokens=30,
    output_tokens=1,
    wanted_tokens=2,
)
"""A single token, though two were wanted: no TPOT, TTFT is E2EL."""
REFUSED = RequestRecord(scheduled=3.5, started=3.5, ended=3.6, failure="HTTP 429", wanted_tokens=4)
RUN = LoadRun([PROMPT, LATE, SHORT, REFUSED], seconds=5.0)


def test_latencies_count_from_the_schedule() -> None:
    row = figures([RUN], None)
    ttft, tpot, e2el = row["ttft_ms"], row["tpot_ms"], row["e2el_ms"]
    assert (ttft.n, ttft.mean, ttft.p50, ttft.max) == (3, pytest.approx(2200 / 3), 1000, 1000)
    assert (tpot.n, tpot.min, tpot.max) == (2, pytest.approx(400), pytest.approx(500))
    assert (e2el.n, e2el.p50, e2el.max) == (3, pytest.approx(1000), pytest.approx(3000))
    assert row["send_delay_ms"].max == 500


def test_inter_token_latencies_are_pooled() -> None:
    itl = figures([RUN], None)["itl_ms"]
    assert (itl.n, itl.min, itl.max) == (3, pytest.approx(400), pytest.approx(2000))
    assert itl.mean == pytest.approx(2800 / 3)


def test_pieces_that_come_together_are_one() -> None:
    """A read of the connection brought three pieces at 1.2 s and two at 2.0 s: one gap, and three
    of 0 are none."""
    burst = replace(PROMPT, text_times=[1.2, 1.2, 1.2, 2.0, 2.0])
    itl = figures([LoadRun([burst], seconds=2.0)], None)["itl_ms"]
    assert (itl.n, itl.p50) == (1, pytest.approx(800))


def test_the_knee_is_where_output_over_latency_is_greatest() -> None:
    """A queue serves a request a second (M/M/1): latency is 1 / (1 - load), so that power is load
    (1 - load), which is greatest at a load of a half (Kleinrock 1979)."""
    rows = [
        {
            "case": load,
            "completed": 9,
            "output_tokens_per_s": load,
            "e2el_ms": {"mean": 1000 / (1 - load)},
        }
        for load in (0.1, 0.3, 0.5, 0.7, 0.9)
    ]
    assert knee(rows) is rows[2]
    assert knee(rows[:2]) is None
    assert (
        knee(
            [*rows[:2], {"case": 0.5, "completed": 0, "output_tokens_per_s": 0.0, "e2el_ms": None}]
        )
        is None
    )


def test_rates_count_complete_answers_over_the_whole_time() -> None:
    row = figures([RUN], None)
    assert row["requests_per_s"] == 3 / 5
    assert row["output_tokens_per_s"] == 9 / 5
    assert row["total_tokens_per_s"] == 69 / 5
    assert row["peak_concurrency"] == 3  # LATE, SHORT and for a moment REFUSED


def test_failures_are_named_and_counted() -> None:
    row = figures([RUN, RUN], None)
    assert (row["requests"], row["completed"], row["failed"]) == (8, 6, 2)
    assert row["failures"] == {"HTTP 429": 2}
    assert row["goodput"] is None


def test_goodput_is_of_answers_that_meet_every_limit_and_attainment_of_all_requests() -> None:
    def of(**limits: float) -> tuple[float, float]:
        found = figures([RUN], Slo(**limits))["goodput"]
        return found["requests_per_s"], found["attainment"]

    assert of(ttft=5000) == (3 / 5, 3 / 4)
    assert of(ttft=500) == (1 / 5, 1 / 4)
    assert of(tpot=450) == (2 / 5, 2 / 4)  # an answer of one token has no TPOT to be slow with
    assert of(ttft=1000, e2el=2000, tpot=400.1) == (2 / 5, 2 / 4)
    assert of(e2el=1) == (0, 0)


def test_every_run_is_a_sample() -> None:
    slower = LoadRun(RUN.records, seconds=10.0)
    half = LoadRun([PROMPT], seconds=10.0, unfinished=3)
    assert (
        figures([RUN, slower, half], Slo(ttft=5000))["samples"]
        == figures([RUN, slower], Slo(ttft=5000))["samples"]
    )
    row = figures([RUN, slower], Slo(ttft=5000))
    assert row["samples"]["output_tokens_per_s"] == [9 / 5, 9 / 10]
    assert row["samples"]["goodput_requests_per_s"] == [3 / 5, 3 / 10]
    assert row["samples"]["ttft_ms"] == [pytest.approx(2200 / 3)] * 2
    assert row["output_tokens_per_s"] == pytest.approx((9 / 5 + 9 / 10) / 2)
    assert row["seconds"] == 7.5


def test_nothing_but_failures_has_no_latencies() -> None:
    row = figures([LoadRun([REFUSED], seconds=1.0, unfinished=2)], Slo(ttft=1))
    assert row["ttft_ms"] is row["tpot_ms"] is row["itl_ms"] is None
    assert (row["requests_per_s"], row["goodput"]["attainment"], row["samples"]["ttft_ms"]) == (
        0,
        0,
        [],
    )


def test_an_answer_without_text_has_its_first_token_at_its_end() -> None:
    silent = RequestRecord(scheduled=0.0, started=0.0, ended=2.0, output_tokens=5, wanted_tokens=5)
    assert (silent.ttft, silent.e2el, silent.tpot, silent.itls) == (2.0, 2.0, 0.0, ())


def test_one_that_ends_makes_room_for_one_that_starts() -> None:
    spans = [(0.0, 1.0), (1.0, 2.0), (1.5, 3.0)]
    records = [RequestRecord(scheduled=start, started=start, ended=end) for start, end in spans]
    assert peak_concurrency(records) == 2
    assert peak_concurrency([]) == 0


def test_a_row_says_where_it_is_weak() -> None:
    guessed = RequestRecord(
        scheduled=0.0,
        started=0.0,
        ended=1.0,
        input_tokens=10,
        output_tokens=2,
        cached_tokens=5,
        counted=False,
    )
    row = figures([LoadRun([*RUN.records, guessed], seconds=5.0, unfinished=7)], None)
    said = warnings({**row, "send_delay_ms": {"p99": 490.0}})
    assert said == [
        "1 requests failed: HTTP 429",
        "interrupted, 7 requests had no answer yet",
        "the server counted no tokens of 1 answers: their pieces stand for tokens",
        "2 answers are not of the length that was asked for",
        "1 answers showed no text before they ended: that is their first token's time",
        "7.1% of the prompt tokens came from the server's prefix cache",
        "the client was late itself: by 490 ms in the 99th percentile",
    ]
    clean = figures([LoadRun([PROMPT], seconds=2.0)], None)
    assert warnings({**clean, "send_delay_ms": {"p99": 1.0}}) == []


def test_limits_as_they_are_typed() -> None:
    assert parse_slo("ttft=2000, tpot=100.5") == Slo(ttft=2000, tpot=100.5)
    assert parse_slo(None) is None
    for text in (
        "",
        "ttft",
        "ttft=",
        "ttft=x",
        "ttft=-1",
        "ttft=0",
        "ttft=inf",
        "ttft=nan",
        "itl=3",
        "ttft=1,ttft=2",
    ):
        with pytest.raises(UsageError, match="--slo takes milliseconds such as"):
            parse_slo(text)
    assert math.isclose(figures([RUN], parse_slo("ttft=5000"))["goodput"]["attainment"], 0.75)
