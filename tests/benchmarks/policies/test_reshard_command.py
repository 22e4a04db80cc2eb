"""``bench reshard`` on simulated workers: in virtual time, all of it."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nanoserve.benchmarks.policies.variants import OpenEngine
from nanoserve.engine_config import EngineConfig
from tests.benchmarks.conftest import Run, interrupt
from tests.benchmarks.policies.simulated_workers import BLOCK_SIZE, simulated_alone, simulated_pair

RESHARDING = [f"{name}, P2 -> T2" for name in ("prefill-prioritizing", "decode-prioritizing", "transition-minimizing")]


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Puts simulated workers in the place of real ones; the list fills with those that were closed."""
    names: list[str] = []

    def open_workers(name: str, resolved: Any, config: EngineConfig, model: Any, progress: Any) -> OpenEngine:
        number = 0 if config.pipeline_parallel > 1 else 1
        engine = simulated_alone(number) if config.decode_layout is None else simulated_pair()
        assert engine.name == name
        return replace(engine, close=lambda: names.append(f"{name} {len(engine.layouts)}"))

    monkeypatch.setattr("nanoserve.benchmarks.policies.engines.open_workers", open_workers)
    return names


@pytest.fixture
def bench(closed: list[str], run_undisturbed: Run) -> Run:
    """Runs ``nanoserve bench reshard ARGUMENTS`` here."""
    return partial(run_undisturbed, "reshard", "--block-size", BLOCK_SIZE)


def test_everything_at_once(bench: Run, closed: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report, chart, trace = (tmp_path / name for name in ("report.json", "chart.png", "trace.json"))
    work = ("--requests", 16, "--lengths", "13+9", "--rounds", 2, "--max-num-batched-tokens", 32)
    files = ("--json", report, "--plot", chart, "--record", trace)
    code, out, err = bench(*work, "--against-own-workers", *files)
    assert code == 0, err
    assert sorted(closed) == ["P2 -> T2 2", "own workers 1", "own workers 1"]
    found = json.loads(report.read_text())
    assert found["complete"]
    alone = ["sarathi, P2", "throttling, P2", "sarathi, T2"]
    alone += [f"{name}, own workers" for name in alone]
    assert [row["variant"] for row in found["summary"]] == [*alone, *RESHARDING]
    first = found["rows"][0]["round"]["variants"]
    for name in (*alone, *RESHARDING):
        assert first[name]["simulated"]["makespan"] == pytest.approx(1, abs=1e-4)
        assert name in out
    assert first["sarathi, P2"]["seconds"] == pytest.approx(first["sarathi, P2, own workers"]["seconds"])
    assert "transition-minimizing over decode-prioritizing, P2 -> T2" in out
    assert chart.read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text())
    groups = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert groups == {f"{name}: {part}" for name in (*alone, *RESHARDING) for part in ("workers", "scheduler")}
    assert {"prefill in P2", "draining T2", "re-shard to T2", "KV blocks in the host pool"} <= {
        event["name"] for event in events
    }


def test_an_interrupt_shows_what_was_measured(
    bench: Run, closed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, at=6 + 6 + 1)
    report = tmp_path / "report.json"
    code, out, err = bench("--requests", 4, "--lengths", "13+9", "--json", report)
    assert code == 130
    assert closed == ["P2 -> T2 2"]
    assert "1 rows were measured" in err
    assert "transition-minimizing, P2 -> T2" in out
    assert not json.loads(report.read_text())["complete"]


def test_requests_that_do_not_fit_are_left_out_and_counted(bench: Run, tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("input_tokens,output_tokens\n20,3\n900,3\n30,4\n")
    code, out, _ = bench("--trace", lengths, "--rounds", 1)
    assert code == 0
    assert "1 requests are longer than the context of 120 and left out" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "sarathi"), "--policy: this command compares those that it names; leave it out"),
        (("--prefill-parallel", "d2p2", "--decode-parallel", "d2t2"), "one engine is measured; leave out the D"),
        (("--prefill-parallel", "p2", "--decode-parallel", "t4"), "both run on the same ones"),
        (("--pp", 2), "replace --dp, --pp, --tp and --pp-split"),
        (("--device", "cuda"), "this command measures CPUs"),
        (("--lengths", "900+1"), "every request of 900+1 is longer than the context of 120 tokens"),
        (("--record", "/none/trace.json"), "cannot write /none/trace.json"),
    ],
)
def test_what_makes_no_sense_is_one_line(bench: Run, arguments: tuple[object, ...], message: str) -> None:
    code, _, err = bench(*arguments)
    assert code in (1, 2)
    assert message in err.replace("\n", " ")
    assert "Traceback" not in err
