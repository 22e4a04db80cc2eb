"""Tables that are too wide go on below; nothing in them is cut."""

import pytest

from nanoserve.benchmarks.tables import Column, print_table

COLUMNS = [
    Column("policy", "policy"),
    Column("claim", "claim", "<"),
    *(Column(f"power of {number}s", f"figures.{number}", ",d") for number in range(12)),
]
ROWS = [
    {"policy": name, "claim": f"{name} is the best", "figures": {str(number): 10**number for number in range(12)}}
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
    plain = "".join(part.partition("m")[2] if place else part for place, part in enumerate(out.split("\x1b[")))
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
