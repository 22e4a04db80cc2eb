"""Tables that are too wide go on below; nothing in them is cut."""

from collections.abc import Sequence

import pytest

from nanoserve.commands.tables import Column, columns, markdown_table, print_table
from nanoserve.lab.commands import (
    bench_compare,
    bench_diff,
    bench_hybrid,
    bench_latency,
    bench_operators,
    bench_options,
    bench_pipeline,
    bench_quality,
    bench_reshard,
    bench_scheduler,
    bench_serve,
    bench_startup,
    bench_throughput,
)

COLUMNS = [
    Column("policy", "policy"),
    Column("claim", "claim", "<"),
    *(Column(f"power of {number}s", f"figures.{number}", ",d") for number in range(12)),
]
ROWS = [
    {
        "policy": name,
        "claim": f"{name} is the best",
        "figures": {str(number): 10**number for number in range(12)},
    }
    for name in ("prefill-first", "sarathi")
]


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
@pytest.mark.parametrize("keys", [1, 2])
def test_whatever_the_width_every_number_is_whole(
    width: int, keys: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    print_table("all of them", COLUMNS, ROWS, keys=keys)
    out = capsys.readouterr().out
    plain = "".join(
        part.partition("m")[2] if place else part for place, part in enumerate(out.split("\x1b["))
    )
    assert max(map(len, plain.splitlines())) <= width
    assert "…" not in plain
    for number in range(12):
        assert plain.count(f" {10**number:,d} ") == 2
    tables = plain.count("┏")
    assert plain.count("prefill-first ") >= tables
    assert (tables > 1) == (width < 200)


def test_a_table_that_fits_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("all of them", COLUMNS[:4], ROWS)
    out = capsys.readouterr().out
    assert out.count("┏") == 1
    assert "sarathi is the best" in out


_LOAD = columns(("", ("load", "case"), ("metric", "latency")))
_WORDS = {
    "state": "28-29 GB/s, unsteady",
    "kind": "prefill",
    "strategy": "asymmetric",
    "speedup": "12.34 (10.12-15.67)",
    "engine": "transformers",
    "peer": "transformers",
    "metric": "output_tokens_per_s",
    "route": "F.linear bfloat16",
    "variant": "overlap:cohorts=4",
    "moves": "re-sharding",
    "latency": "TTFT",
}
"""The longest of the usual words in a column of text."""
_NUMBERS = {
    "": "16",
    ",.0f": "12,345",
    ",d": "12,345",
    ",.1f": "12,345.6",
    ",.2f": "1,234.56",
    ",.3f": "12.345",
    ".3f": "1.234",
    ".2f": "12.34",
    ".0%": "100%",
    "+.0%": "+100%",
    ".1%": "12.3%",
    "+.1%": "+12.3%",
    ".5f": "12.34567",
}
"""A number as wide as it usually is, by the format of its column."""


@pytest.mark.parametrize(
    ("shown", "first"),
    [
        (bench_latency._COLUMNS, "16 x 1024+128 compiled"),
        (bench_latency._RATIO_COLUMNS, "16 x 1024+128"),
        (bench_options._STEP_COLUMNS, "16 x 1024+128 compiled"),
        (bench_throughput._COLUMNS, "AzureLLMInferenceTrace_conv.csv"),
        (bench_serve._COLUMNS, "trace at 12.5 requests/s"),
        ([*_LOAD, *bench_options._DISTRIBUTION_COLUMNS[1:]], "12.5 requests/s"),
        (bench_compare._ENGINE_COLUMNS, "16 x 1024+128"),
        (bench_compare._RATIO_COLUMNS, "16 x 1024+128"),
        (bench_compare._SPECULATION_COLUMNS, "scripted 0.6, 16 x 512+32"),
        (bench_operators._COLUMNS, "gate_up 6144 x 1024, 512 rows"),
        (bench_pipeline._REQUEST_COLUMNS, "throttling:without_wt, pp=2"),
        (bench_pipeline._STAGE_COLUMNS, "throttling:without_wt, pp=2"),
        (bench_pipeline._SIMULATED_COLUMNS, "throttling:without_wt, pp=2"),
        (bench_reshard._RUN_COLUMNS, "transition-minimizing, P2 -> T2"),
        (bench_reshard._PHASE_COLUMNS, "transition-minimizing, P2 -> T2"),
        (bench_reshard._MOVE_COLUMNS, "transition-minimizing, P2 -> T2"),
        (bench_reshard._SIMULATED_COLUMNS, "transition-minimizing, P2 -> T2"),
        (bench_hybrid._STEP_COLUMNS, "256+192, KV 100%"),
        (bench_hybrid._LATENCY_COLUMNS, "256+192, KV 100%"),
        (bench_hybrid._ERROR_COLUMNS, "64+32, KV 100%"),
        (bench_hybrid._GAIN_COLUMNS, "256+192, KV 100%"),
        (bench_startup._COLUMNS, "first ever"),
        (bench_scheduler._COLUMNS, "1,024"),
        (bench_quality._COLUMNS, "perplexity"),
        (bench_diff._COLUMNS, "16 x 1024+128"),
    ],
)
def test_every_benchmark_has_tables_that_a_file_holds_in_one(
    shown: Sequence[Column], first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the longest of the usual words and numbers; what few read is in the report alone."""
    texts = [first, *(_WORDS.get(column.path, _NUMBERS[column.format]) for column in shown[1:])]
    plain = [Column(column.heading, str(place)) for place, column in enumerate(shown)]
    print_table("", plain, [dict(zip(map(str, range(len(texts))), texts, strict=True))])
    out = capsys.readouterr().out
    assert out.count("┏") == 1, out
    assert max(map(len, out.splitlines())) <= 100


def test_a_percentile_of_few_values_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    shown = columns(
        ("", "case"), (",.1f", *((name, f"ttft_ms.{name}") for name in ("p50", "p90", "p99")))
    )
    figures = {"p50": 1.0, "p90": 2.0, "p99": 3.0}
    print_table(
        "", shown, [{"case": "a", "ttft_ms": {"n": number, **figures}} for number in (9, 12, 100)]
    )
    few, several, many, *_, note = (
        line for line in capsys.readouterr().out.splitlines() if "│" in line or "*" in line
    )
    assert [few.split("│")[place].strip() for place in (2, 3, 4)] == ["1.0", "2.0*", "3.0*"]
    assert [several.split("│")[place].strip() for place in (2, 3, 4)] == ["1.0", "2.0", "3.0*"]
    assert "*" not in many
    assert note.strip() == "* close to the largest value: p90 takes 10 values, p99 takes 100"


def test_a_cell_of_markdown_stays_one_cell_and_plain_text() -> None:
    shown = columns(("", ("a|b", "name")), (",d", "tokens"), ("<", "remark"))
    row = {"name": "2 * 3 * 4 `x`\nand more", "tokens": 1234, "remark": "<b> or \\ of x_y, P4->T4"}
    assert markdown_table(shown, [row, {"name": "nothing"}]).splitlines() == [
        r"| a\|b | tokens | remark |",
        "| --- | ---: | --- |",
        r"| 2 \* 3 \* 4 \`x\` and more | 1,234 | \<b> or \\ of x_y, P4->T4 |",
        "| nothing |  |  |",
    ]
