"""The best candidates are found and get into the table that is read at run time."""

import ast
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nanoserve.lab.benchmarks.gpu.attention import AttentionRow, decode_rows
from nanoserve.lab.benchmarks.gpu.device import GpuBench
from nanoserve.lab.benchmarks.gpu.tuning import (
    DECODE,
    PREFILL,
    Configuration,
    best_configurations,
    decode_candidates,
    part_cases,
    prefill_tiles,
    tuned_source,
    write_table,
)
from triton_ops import paged_attention
from triton_ops.gpu import configurations
from triton_ops.gpu.configurations import ATTENTION, DecodeConfiguration, PrefillConfiguration

KEY = (9, 2, 128)
SOURCE = Path(configurations.__file__).read_text()


def row(
    program: str, candidate: Configuration, *microseconds: float, ok: bool = True
) -> dict[str, Any]:
    times = {
        f"work {place}": {"us": one, "low": one, "high": one, "n": 5}
        for place, one in enumerate(microseconds)
    }
    found = {
        "case": "it",
        "key": KEY,
        "program": program,
        "candidate": candidate,
        "times": times,
        "ok": ok,
    }
    return msgspec.json.decode(msgspec.json.encode(found))  # type: ignore[no-any-return]


def table(source: str) -> dict[object, configurations.AttentionConfiguration]:
    """ATTENTION as this text defines it, after a check that it is valid Python."""
    ast.parse(source)
    names: dict[str, Any] = {"__name__": "tuned"}
    exec(compile(source, "configurations.py", "exec", dont_inherit=True), names)
    return dict(names["ATTENTION"])


def test_the_least_geometric_mean_wins_among_those_that_are_right() -> None:
    small, large, wrong = (DecodeConfiguration(tile, 4, 3) for tile in (32, 64, 128))
    rows = [
        row(DECODE, small, 10.0, 1000.0),
        row(DECODE, large, 30.0, 300.0),
        row(DECODE, wrong, 1.0, 1.0, ok=False),
        {"case": "another", "error": "out of shared memory"},
        {"case": "a third", "skipped": "the time budget was spent"},
        row(PREFILL, PrefillConfiguration(64, 32, 4, 2), 5.0),
    ]
    best = best_configurations(rows)
    assert best == {(KEY, DECODE): large, (KEY, PREFILL): PrefillConfiguration(64, 32, 4, 2)}


def test_what_was_measured_replaces_its_entry_and_no_other() -> None:
    decode, prefill = DecodeConfiguration(32, 8, 4, 512, 16), PrefillConfiguration(64, 64, 4, 4)
    once = tuned_source(SOURCE, [row(DECODE, decode, 1.0), row(PREFILL, prefill, 1.0)])
    assert max(map(len, once.splitlines())) <= 120
    found = table(once)
    assert repr(found.pop(KEY)) == repr(configurations.AttentionConfiguration(decode, prefill))
    assert {key: repr(entry) for key, entry in found.items()} == {
        key: repr(entry) for key, entry in ATTENTION.items() if key != KEY
    }
    twice = tuned_source(
        once, [row(DECODE, ATTENTION[KEY].decode, 1.0), row(PREFILL, ATTENTION[KEY].prefill, 1.0)]
    )
    assert repr(table(twice)) == repr(table(SOURCE))


def test_a_program_that_was_not_measured_keeps_its_configuration() -> None:
    source = tuned_source(SOURCE, [row(PREFILL, PrefillConfiguration(64, 64, 4, 4), 1.0)])
    assert repr(table(source)[KEY].decode) == repr(ATTENTION[KEY].decode)
    assert tuned_source(SOURCE, []) == SOURCE


def test_a_table_without_the_entry_is_refused() -> None:
    with pytest.raises(ValueError, match="0 entries"):
        tuned_source("ATTENTION = {}\n", [row(DECODE, ATTENTION[KEY].decode, 1.0)])


@pytest.mark.parametrize("key", ATTENTION)
def test_the_present_configuration_is_among_the_candidates(key: tuple[int, int, int]) -> None:
    now = ATTENTION[key]
    assert decode_candidates(now.decode)[0] == now.decode
    assert prefill_tiles(now.prefill)[0] == now.prefill
    assert all(one.keys_per_split % one.keys_per_tile == 0 for one in decode_candidates(now.decode))


def test_every_candidate_is_a_case() -> None:
    bench = GpuBench.open(dry_run=True)  # Triton's interpreter is taken for a GPU of generation 9
    names = [case.name for case in part_cases(bench, [])]
    assert len(set(names)) == len(names) < 250
    assert "decode, head_dim 128, [128, 4, 2, 512, 8]" in names
    assert "decode, head_dim 128, [64, 4, 3, 128, 8]" in names
    assert "prefill, head_dim 80, [128, 64, 8, 4]" in names


def test_a_candidate_that_disagrees_with_the_present_configuration_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain attention in the place of the programs: with splits of 512 keys it leaves the last key
    out, with tiles of 128 it writes nothing."""

    def attend(
        configuration: configurations.AttentionConfiguration,
        multiprocessors: int,
        tensors: Any,
        **settings: Any,
    ) -> None:
        *others, contexts = tensors
        left_out = 1 if configuration.decode.keys_per_split == 512 else 0
        if configuration.decode.keys_per_tile != 128:
            paged_attention(*others, contexts - left_out, **settings)

    monkeypatch.setattr("nanoserve.lab.benchmarks.gpu.tuning.attend", attend)
    work = {DECODE: {"2 x 20": decode_rows(2, 20)}, PREFILL: {"9": (AttentionRow(9, 9),)}}
    monkeypatch.setattr("nanoserve.lab.benchmarks.gpu.tuning.WORK", work)
    cases = {case.name: case for case in part_cases(GpuBench.open(dry_run=True), [])}
    rows = []
    for fields in ("[64, 4, 2, 64, 2]", "[64, 4, 3, 512, 8]", "[128, 4, 3, 128, 8]"):
        case = cases[f"decode, head_dim 128, {fields}"]
        rows.append(msgspec.to_builtins({"case": case.name, **case.measure()}))
    assert [row["ok"] for row in rows] == [True, False, False]
    assert best_configurations(rows) == {(KEY, DECODE): DecodeConfiguration(64, 4, 2, 64, 2)}
    assert repr(table(write_table(tmp_path, rows).read_text())) == repr(table(SOURCE))
