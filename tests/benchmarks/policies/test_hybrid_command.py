"""``bench hybrid`` on a simulated engine: in virtual time, all of it."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nanoserve.benchmarks.policies.cases import KvCases
from nanoserve.benchmarks.policies.variants import OpenEngine
from nanoserve.engine_config import EngineConfig
from tests.benchmarks.conftest import Run, interrupt
from tests.benchmarks.policies.simulated_engine import BLOCK_SIZE, simulated_engine

POLICIES = ["sarathi", "neo", "overlap", "apex", "hybrid"]
SMALL = ("--requests", 12, "--max-num-batched-tokens", 32)


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """Puts a simulated engine in the place of a real one; the list fills with the settings of those closed."""
    configs: list[EngineConfig] = []

    def open_with_host(resolved: Any, config: EngineConfig, model: Any, work: KvCases, progress: Any) -> OpenEngine:
        return replace(simulated_engine(), close=lambda: configs.append(config))

    monkeypatch.setattr("nanoserve.benchmarks.policies.engines.open_with_host", open_with_host)
    return configs


@pytest.fixture
def bench(closed: list[EngineConfig], run_undisturbed: Run) -> Run:
    """Runs ``nanoserve bench hybrid ARGUMENTS`` here."""
    return partial(run_undisturbed, "hybrid", "--block-size", BLOCK_SIZE)


def test_everything_at_once(bench: Run, closed: list[EngineConfig], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report, chart, trace = (tmp_path / name for name in ("report.json", "chart.png", "trace.json"))
    work = (*SMALL, "--lengths", "13+40,13+9", "--kv-limits", "1,0.3", "--rounds", 1)
    code, out, err = bench(*work, "--host-threads", 1, "--json", report, "--plot", chart, "--record", trace)
    assert code == 0, err
    assert [(config.policy, config.host_threads) for config in closed] == [("hybrid", 1)]
    found = json.loads(report.read_text())
    assert found["complete"]
    cases = ["13+9, KV 30%", "13+9, KV 100%", "13+40, KV 30%", "13+40, KV 100%"]
    assert [(row["case"], row["variant"]) for row in found["summary"]] == [
        (case, policy) for case in cases for policy in POLICIES
    ]
    assert list(found["findings"]) == cases
    assert len(found["samples"]["13+40, KV 30%, overlap"]["output_tokens_per_s"]) == 1
    by_name = {(row["case"], row["variant"]): row for row in found["summary"]}
    overlap = by_name["13+40, KV 30%", "overlap"]
    assert overlap["output_tokens_per_s"] > by_name["13+40, KV 30%", "sarathi"]["output_tokens_per_s"]
    assert overlap["ratio"].startswith("1.") and by_name["13+40, KV 30%", "sarathi"]["ratio"] is None
    assert overlap["simulation_error"] == pytest.approx(0, abs=1e-4)
    ratios = [row["ratio"]["median"] for row in found["ratios"] if row["case"].endswith("100%")]
    assert set(found["means"]["KV 100%"].values()) == {1.0} == set(ratios)
    assert found["means"]["KV 30%"]["overlap over sarathi"] > 1
    assert overlap["engine_ms"] == 0, "virtual time stands still while the engine thinks"
    assert "where the device holds everything, no step was hybrid" in out
    assert "hybrid is at 98% of the device alone or above in 4 of 4 cases with rounds that count" in out
    assert chart.read_bytes().startswith(b"\x89PNG")
    names = {event["args"]["name"] for event in json.loads(trace.read_text()) if event["name"] == "process_name"}
    assert "13+9, KV 30%, overlap: scheduler" in names


def test_an_interrupt_shows_what_was_measured(
    bench: Run, closed: list[EngineConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, at=2 + 2 + 1)
    report = tmp_path / "report.json"
    code, out, err = bench(*SMALL, "--policy", "sarathi,overlap:cohorts=2", "--lengths", "13+9", "--json", report)
    assert code == 130
    assert len(closed) == 1
    assert "1 rows were measured" in err
    assert "overlap:cohorts=2" in out
    assert not json.loads(report.read_text())["complete"]


def test_what_was_promised_and_does_not_hold_is_said(
    bench: Run, closed: list[EngineConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a whole that is less than what the requests need, there are hybrid steps."""
    monkeypatch.setattr(KvCases, "device_blocks", lambda self, shape: 50)
    code, out, _ = bench(*SMALL, "--policy", "sarathi,overlap", "--lengths", "13+40", "--kv-limits", 1, "--rounds", 1)
    assert code == 0
    assert "HYBRID STEPS although the device holds everything: overlap in 13+40, KV 100%" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "neo,sarathi"), "begins with one that leaves the CPU alone"),
        (("--policy", "sarathi,nothing"), "unknown policy 'nothing'"),
        (("--kv-cache-memory", "1GiB"), "--kv-cache-memory: how much there is, --kv-limits says; leave it out"),
        (("--pp", 2), "one device is measured: leave out --dp, --pp, --tp"),
        (("--kv-limits", "2"), "--kv-limits takes shares above 0 and up to 1"),
        (("--lengths", "13+0"), "--lengths takes whole numbers from 1"),
        (("--lengths", "13+9,14+9"), "--lengths takes prompts of one length here"),
        (("--lengths", "1000+100"), "are 1100 tokens, more than the context of 1024"),
        (("--record", "/none/trace.json"), "cannot write /none/trace.json"),
    ],
)
def test_what_makes_no_sense_is_one_line(bench: Run, arguments: tuple[object, ...], message: str) -> None:
    code, _, err = bench(*arguments)
    assert code in (1, 2)
    assert message in err.replace("\n", " ")
    assert "Traceback" not in err
