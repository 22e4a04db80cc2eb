"""``bench pipeline`` on simulated workers: in virtual time, all of it."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nanoserve.benchmarks.policies.variants import OpenEngine
from nanoserve.engine_config import EngineConfig
from nanoserve.scheduler.plan import LayoutCapacity
from nanoserve.simulator.executor import SimulatedExecutor
from nanoserve.simulator.pipeline import Runtime
from tests.benchmarks.conftest import Run, interrupt
from tests.fakes.observed_executor import ObservedExecutor, UntoldExecutor, dummy_answers
from tests.simulator.linear_times import LinearTimes

_TIMES = {"step": 2.0**-6, "prompt_token": 2.0**-10, "decode": 2.0**-11}


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Puts simulated engines in the place of real ones; the list fills with those that were closed."""
    names: list[str] = []

    def opened(name: str, executor: SimulatedExecutor, **facts: Any) -> OpenEngine:
        capacities = (LayoutCapacity(100, executor.max_in_flight),)
        close = partial(names.append, name)
        return OpenEngine(name=name, executor=executor, capacities=capacities, compiled=True, close=close, **facts)

    def open_workers(
        name: str, resolved: Any, config: EngineConfig, model: Any, progress: Any, *, metadata: Any, simulated: bool
    ) -> OpenEngine:
        times = LinearTimes(num_stages=config.pipeline_parallel, host=2.0**-8, send=2.0**-9, **_TIMES)
        executor = ObservedExecutor(times, runtime=Runtime(metadata=metadata))
        return opened(name, executor, workers=config.num_workers, simulated=simulated)

    def open_one_process(name: str, resolved: Any, config: EngineConfig, progress: Any) -> OpenEngine:
        return opened(name, UntoldExecutor(LinearTimes(**_TIMES), answer=dummy_answers), simulated=False)

    monkeypatch.setattr("nanoserve.benchmarks.policies.engines.open_workers", open_workers)
    monkeypatch.setattr("nanoserve.benchmarks.policies.engines.open_one_process", open_one_process)
    return names


@pytest.fixture
def bench(closed: list[str], run_undisturbed: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs ``nanoserve bench pipeline ARGUMENTS`` here."""
    monkeypatch.setattr("nanoserve.benchmarks.roofline._PRODUCT_SIZES", (64,))
    return partial(run_undisturbed, "pipeline")


def test_everything_at_once(bench: Run, closed: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report, chart, trace = (tmp_path / name for name in ("report.json", "chart.png", "trace.json"))
    work = ("--requests", 6, "--rate", 8, "--rounds", 2, "--metadata", "both", "--against-one-process")
    code, out, err = bench(*work, "--json", report, "--plot", chart, "--record", trace)
    assert code == 0, err
    engines = ["pp=2", "pp=2 coupled", "one process"]
    assert sorted(closed) == sorted(engines)
    found = json.loads(report.read_text())
    assert found["complete"]
    names = [f"{policy}, {engine}" for engine in engines for policy in ("sarathi", "throttling")]
    assert [row["variant"] for row in found["summary"]] == names
    first = found["rows"][0]["round"]["variants"]
    assert first["sarathi, pp=2"]["simulated"]["makespan"] == pytest.approx(1, abs=0.02)
    assert first["sarathi, pp=2 coupled"]["simulated"] is None
    assert [len(first[name]["stages"]) for name in names] == [2, 2, 2, 2, 0, 0]
    assert first["throttling, pp=2"]["variation"] < first["sarathi, pp=2"]["variation"]
    for name in (*names, "throttling over sarathi, pp=2", "pp=2 over one process, sarathi"):
        assert name in out
    assert chart.read_bytes().startswith(b"\x89PNG")
    groups = {event["args"]["name"] for event in json.loads(trace.read_text()) if event["name"] == "process_name"}
    assert groups == {f"{name}: {part}" for name in names for part in ("workers", "scheduler")}


def test_an_interrupt_shows_what_was_measured(
    bench: Run, closed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, at=1 + 1 + 1)
    report, trace = tmp_path / "report.json", tmp_path / "trace.json"
    code, out, err = bench("--policy", "sarathi", "--requests", 2, "--json", report, "--record", trace)
    assert code == 130
    assert closed == ["pp=2"]
    assert "1 rows were measured" in err
    assert "sarathi, pp=2" in out
    assert not json.loads(report.read_text())["complete"]
    assert any(event["name"] == "compute" for event in json.loads(trace.read_text()))


def test_requests_that_do_not_fit_are_left_out_and_counted(bench: Run, tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("input_tokens,output_tokens\n20,3\n9000,3\n30,4\n")
    code, out, _ = bench("--trace", lengths, "--rounds", 1, "--pp", 3)
    assert code == 0
    assert "1 requests are longer than the context of 1600 and left out" in out
    assert "sarathi, pp=3" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "fair"), "unknown policy 'fair'"),
        (("--metadata", "shared"), "--metadata 'shared' is not one of decoupled, coupled, both"),
        (("--rate", "1,2"), "--rate takes one rate here, not '1,2'"),
        (("--rate", "0"), "--rate takes requests per second"),
        (("--lengths", "huge"), "or one of nano-vllm, cpu, cpu-small, sharegpt-gllm"),
        (("--device", "cuda"), "this command measures CPUs"),
        (("--lengths", "9000+1"), "every request of 9000+1 is longer than the context of 1600 tokens"),
        (("--record", "/none/trace.json"), "cannot write /none/trace.json"),
    ],
)
def test_what_makes_no_sense_is_told_in_a_line(bench: Run, arguments: tuple[object, ...], message: str) -> None:
    code, _, err = bench(*arguments)
    assert code in (1, 2)
    assert message in err
    assert len(err.strip().splitlines()[-1]) < 400
