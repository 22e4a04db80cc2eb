"""``bench hybrid``, ``bench pipeline`` and ``bench reshard`` on simulated engines: in virtual time,
all of it."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from nanoserve.engine_config import EngineConfig
from nanoserve.executor.start.model_loading import read_config
from nanoserve.lab.benchmarks.policies.variants import KvCases, OpenEngine
from nanoserve.lab.benchmarks.rounds import Repeating
from nanoserve.lab.simulator.executor import SimulatedExecutor
from nanoserve.lab.simulator.pipeline import Runtime
from nanoserve.scheduler.optional import LayoutCapacity
from tests.fakes.observed_executor import ObservedExecutor, UntoldExecutor, dummy_answers
from tests.lab.benchmarks.conftest import Run, interrupt
from tests.lab.benchmarks.policies.simulated_engine import BLOCK_SIZE, simulated_engine
from tests.lab.benchmarks.policies.simulated_workers import BLOCK_SIZE as WORKERS_BLOCK_SIZE
from tests.lab.benchmarks.policies.simulated_workers import simulated_alone, simulated_pair
from tests.lab.simulator.linear_times import LinearTimes

HYBRID_POLICIES = ["sarathi", "neo", "overlap", "apex", "hybrid"]
RESHARDING = [
    f"{name}, P2 -> T2"
    for name in ("prefill-prioritizing", "decode-prioritizing", "transition-minimizing")
]
SMALL = ("--requests", 12, "--max-num-batched-tokens", 32)
BLOCK_SIZES = {
    "hybrid": ("--block-size", BLOCK_SIZE),
    "reshard": ("--block-size", WORKERS_BLOCK_SIZE),
    "pipeline": (),
}
_TIMES = {"step": 2.0**-6, "prompt_token": 2.0**-10, "decode": 2.0**-11}


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Puts simulated engines in the place of real ones; the list fills with what tells those that
    were closed."""
    found: list[Any] = []

    def open_engine(
        opened: ExitStack, name: str, executor: SimulatedExecutor, **facts: Any
    ) -> OpenEngine:
        capacities = (LayoutCapacity(100, executor.max_in_flight),)
        opened.callback(found.append, name)
        return OpenEngine(
            name=name, executor=executor, capacities=capacities, compiled=True, **facts
        )

    def open_workers(
        opened: ExitStack,
        name: str,
        resolved: Any,
        config: EngineConfig,
        model: Any,
        progress: Any,
        *,
        metadata: Any = None,
        predicted: bool = False,
        **facts: Any,
    ) -> OpenEngine:
        if metadata is None:  # those of bench reshard
            number = 0 if config.pipeline_parallel > 1 else 1
            engine = simulated_alone(number) if config.decode_layout is None else simulated_pair()
            assert engine.name == name
            opened.callback(found.append, f"{name} {len(engine.layouts)}")
            return engine
        times = LinearTimes(
            num_stages=config.pipeline_parallel, host=2.0**-8, send=2.0**-9, **_TIMES
        )
        executor = ObservedExecutor(times, runtime=Runtime(metadata=metadata))
        facts["costs"] = (times,) if predicted else ()
        return open_engine(
            opened, name, executor, workers=config.num_workers, vocab_size=model.vocab_size, **facts
        )

    def open_one_process(
        opened: ExitStack, name: str, resolved: Any, config: EngineConfig, progress: Any
    ) -> OpenEngine:
        executor = UntoldExecutor(LinearTimes(**_TIMES), answer=dummy_answers)
        return open_engine(
            opened, name, executor, vocab_size=read_config(resolved).vocab_size, simulated=False
        )

    def open_with_host(
        opened: ExitStack,
        resolved: Any,
        config: EngineConfig,
        model: Any,
        work: KvCases,
        progress: Any,
    ) -> OpenEngine:
        opened.callback(found.append, (config.policy, config.host_threads))
        return simulated_engine()

    for opener in (open_workers, open_one_process, open_with_host):
        monkeypatch.setattr(f"nanoserve.lab.benchmarks.policies.engines.{opener.__name__}", opener)
    return found


@pytest.fixture
def bench(closed: list[Any], run_undisturbed: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs ``nanoserve bench COMMAND ARGUMENTS`` here."""
    monkeypatch.setattr("nanoserve.lab.benchmarks.roofline._PRODUCT_SIZES", (64,))
    return lambda command, *arguments: run_undisturbed(command, *BLOCK_SIZES[command], *arguments)


def test_everything_at_once_hybrid(bench: Run, closed: list[Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report, chart, trace = (tmp_path / name for name in ("report.json", "chart.png", "trace.json"))
    work = (*SMALL, "--lengths", "13+40,13+9", "--kv-limits", "1,0.3", "--rounds", 1)
    code, out, err = bench(
        "hybrid", *work, "--host-threads", 1, "--json", report, "--plot", chart, "--record", trace
    )
    assert code == 0, err
    assert closed == [("hybrid", 1)]
    found = json.loads(report.read_text())
    assert found["complete"]
    cases = ["13+9, KV 30%", "13+9, KV 100%", "13+40, KV 30%", "13+40, KV 100%"]
    assert [(row["case"], row["variant"]) for row in found["summary"]] == [
        (case, policy) for case in cases for policy in HYBRID_POLICIES
    ]
    assert list(found["findings"]) == cases
    assert len(found["samples"]["13+40, KV 30%, overlap"]["output_tokens_per_s"]) == 1
    by_name = {(row["case"], row["variant"]): row for row in found["summary"]}
    overlap = by_name["13+40, KV 30%", "overlap"]
    assert (
        overlap["output_tokens_per_s"] > by_name["13+40, KV 30%", "sarathi"]["output_tokens_per_s"]
    )
    assert (
        overlap["ratio"].startswith("1.") and by_name["13+40, KV 30%", "sarathi"]["ratio"] is None
    )
    assert overlap["simulation_error"] == pytest.approx(0, abs=1e-4)
    ratios = [row["ratio"]["median"] for row in found["ratios"] if row["case"].endswith("100%")]
    assert set(found["means"]["KV 100%"].values()) == {1.0} == set(ratios)
    assert found["means"]["KV 30%"]["overlap over sarathi"] > 1
    assert overlap["engine_ms"] == 0, "virtual time stands still while the engine thinks"
    assert "where the device holds everything, no step was hybrid" in out
    assert out.splitlines()[-1] == found["verdict"] and found["verdict"].endswith(
        "; 4 of 4 rounds count."
    )
    assert (
        found["verdict"].startswith("Output tok/s: from ")
        and "over sarathi in 13+40, KV 30% 1." in found["verdict"]
    )
    assert (
        "hybrid is at 98% of the device alone or above in 4 of 4 cases with rounds that count"
        in out
    )
    assert chart.read_bytes().startswith(b"\x89PNG")
    names = {
        event["args"]["name"]
        for event in json.loads(trace.read_text())
        if event["name"] == "process_name"
    }
    assert "13+9, KV 30%, overlap: scheduler" in names


def test_everything_at_once_pipeline(bench: Run, closed: list[Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report, chart, trace = (tmp_path / name for name in ("report.json", "chart.png", "trace.json"))
    work = ("--requests", 6, "--rate", 8, "--lengths", "60+20", "--rounds", 2)
    work += ("--metadata", "both", "--against-one-process", "--predicted")
    code, out, err = bench("pipeline", *work, "--json", report, "--plot", chart, "--record", trace)
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
    for policy in ("sarathi", "throttling"):
        rate = first[f"{policy}, pp=2"]["output_tokens_per_s"]
        assert first[f"{policy}, pp=2"]["predicted_tokens_per_s"] == pytest.approx(rate, rel=0.02)
    assert first["sarathi, pp=2 coupled"]["predicted_tokens_per_s"] is None
    assert [len(first[name]["stages"]) for name in names] == [2, 2, 2, 2, 0, 0]
    assert first["throttling, pp=2"]["variation"] < first["sarathi, pp=2"]["variation"]
    assert out.splitlines()[-1] == found["verdict"] and found["verdict"].endswith(
        "; 2 of 2 rounds count."
    )
    for name in (*names, "throttling over sarathi, pp=2", "pp=2 over one process, sarathi"):
        assert name in out
    assert chart.read_bytes().startswith(b"\x89PNG")
    groups = {
        event["args"]["name"]
        for event in json.loads(trace.read_text())
        if event["name"] == "process_name"
    }
    assert groups == {f"{name}: {part}" for name in names for part in ("workers", "scheduler")}


def test_everything_at_once_reshard(bench: Run, closed: list[Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report, chart, trace = (tmp_path / name for name in ("report.json", "chart.png", "trace.json"))
    work = ("--requests", 16, "--lengths", "13+9", "--rounds", 2, "--max-num-batched-tokens", 32)
    files = ("--json", report, "--plot", chart, "--record", trace)
    code, out, err = bench("reshard", *work, "--against-own-workers", *files)
    assert code == 0, err
    assert sorted(closed) == ["P2 -> T2 2", "own workers 1", "own workers 1"]
    found = json.loads(report.read_text())
    assert found["complete"]
    alone = ["sarathi, P2", "throttling, P2", "adaptive, P2", "sarathi, T2"]
    alone += [f"{name}, own workers" for name in alone]
    assert [row["variant"] for row in found["summary"]] == [*alone, *RESHARDING]
    first = found["rows"][0]["round"]["variants"]
    for name in (*alone, *RESHARDING):
        assert first[name]["simulated"]["makespan"] == pytest.approx(1, abs=1e-4)
        assert name in out
    assert first["sarathi, P2"]["seconds"] == pytest.approx(
        first["sarathi, P2, own workers"]["seconds"]
    )
    assert "transition-minimizing over decode-prioritizing, P2 -> T2" in out
    assert out.splitlines()[-1] == found["verdict"] and found["verdict"].endswith(
        "; 2 of 2 rounds count."
    )
    assert chart.read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text())
    groups = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert groups == {
        f"{name}: {part}" for name in (*alone, *RESHARDING) for part in ("workers", "scheduler")
    }
    assert {"prefill in P2", "draining T2", "re-shard to T2", "KV blocks in the host pool"} <= {
        event["name"] for event in events
    }


@pytest.mark.parametrize(
    ("command", "variants", "arguments", "opened", "shown"),
    [
        (
            "hybrid",
            2,
            (*SMALL, "--policy", "sarathi,overlap:cohorts=2", "--lengths", "13+9"),
            1,
            "overlap:cohorts=2",
        ),
        ("pipeline", 1, ("--policy", "sarathi", "--requests", 2), ["pp=2"], "sarathi, pp=2"),
        (
            "reshard",
            7,
            ("--requests", 4, "--lengths", "13+9"),
            ["P2 -> T2 2"],
            "transition-minimizing, P2 -> T2",
        ),
    ],
)
def test_an_interrupt_shows_what_was_measured(
    command: str,
    variants: int,
    arguments: tuple[object, ...],
    opened: list[str] | int,
    shown: str,
    bench: Run,
    closed: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupt(monkeypatch, at=variants + variants + 1)
    report, trace = tmp_path / "report.json", tmp_path / "trace.json"
    code, out, err = bench(command, *arguments, "--json", report, "--record", trace)
    assert code == 130
    assert opened in (closed, len(closed))
    assert "1 rows were measured" in err
    assert shown in out
    assert not json.loads(report.read_text())["complete"]
    names = {event["name"] for event in json.loads(trace.read_text())}
    assert "compute" in names or command != "pipeline"


@pytest.mark.parametrize(
    ("command", "too_long", "context", "arguments", "shown"),
    [
        ("pipeline", 9000, 1600, ("--pp", 3), "sarathi, pp=3"),
        ("reshard", 900, 120, (), "transition-minimizing, P2 -> T2"),
    ],
)
def test_requests_that_do_not_fit_are_left_out_and_counted(
    command: str,
    too_long: int,
    context: int,
    arguments: tuple[object, ...],
    shown: str,
    bench: Run,
    tmp_path: Path,
) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text(f"input_tokens,output_tokens\n20,3\n{too_long},3\n30,4\n")
    code, out, _ = bench(command, "--trace", lengths, "--rounds", 1, *arguments)
    assert code == 0
    assert f"1 requests are longer than the context of {context} and left out" in out
    assert shown in out


def test_a_run_in_which_no_round_counts_prints_its_numbers_and_marks_them(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanoserve.lab.benchmarks.machine.ForeignLoad.read", lambda self: 1.15)
    monkeypatch.setattr(
        "nanoserve.lab.commands.bench_options.Repeating", lambda keep_all: Repeating(keep_all, 0.0)
    )
    report = tmp_path / "report.json"
    work = (
        *SMALL,
        "--policy",
        "sarathi,overlap",
        "--lengths",
        "13+9",
        "--kv-limits",
        1,
        "--rounds",
        2,
    )
    code, out, _ = bench("hybrid", *work, "--json", report)
    found = json.loads(report.read_text())
    assert code == 0
    assert [(row["variant"], row["state"], row["rounds"]) for row in found["summary"]] == [
        ("sarathi", "10 GB/s, not counted", 2),
        ("overlap", "10 GB/s, not counted", 2),
    ]
    assert "13+9, KV 100%" in out and "not" in out and found["samples"] == {}
    verdict = (
        "overlap over sarathi in 13+9, KV 100% 1.00 (1.00-1.00); 0 of 2 rounds count (in 2 other "
        "programs kept"
    )
    assert verdict in out.splitlines()[-1]
    code, out, _ = bench("hybrid", *work, "--keep-all", "--json", report)
    assert "2 of 2 rounds count" in out.splitlines()[-1]
    assert {row["state"] for row in json.loads(report.read_text())["summary"]} == {"10 GB/s, busy"}


def test_what_was_promised_and_does_not_hold_is_said(
    bench: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a whole that is less than what the requests need, there are hybrid steps."""
    monkeypatch.setattr(KvCases, "device_blocks", lambda self, shape: 50)
    code, out, _ = bench(
        "hybrid",
        *SMALL,
        "--policy",
        "sarathi,overlap",
        "--lengths",
        "13+40",
        "--kv-limits",
        1,
        "--rounds",
        1,
    )
    assert code == 0
    assert "HYBRID STEPS although the device holds everything: overlap in 13+40, KV 100%" in out


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("hybrid", ("--policy", "neo,sarathi"), "begins with one that leaves the CPU alone"),
        ("hybrid", ("--policy", "sarathi,nothing"), "unknown policy 'nothing'"),
        (
            "hybrid",
            ("--kv-cache-memory", "1GiB"),
            "--kv-cache-memory: how much there is, --kv-limits says; leave it out",
        ),
        ("hybrid", ("--pp", 2), "one device is measured: leave out --dp, --pp, --tp"),
        ("hybrid", ("--kv-limits", "2"), "--kv-limits takes shares above 0 and up to 1"),
        ("hybrid", ("--lengths", "13+0"), "--lengths takes whole numbers from 1"),
        ("hybrid", ("--lengths", "13+9,14+9"), "--lengths takes prompts of one length here"),
        ("hybrid", ("--lengths", "1000+100"), "are 1100 tokens, more than the context of 1024"),
        ("hybrid", ("--record", "/none/trace.json"), "cannot write /none/trace.json"),
        ("pipeline", ("--policy", "fair"), "unknown policy 'fair'"),
        (
            "pipeline",
            ("--metadata", "shared"),
            "--metadata 'shared' is not one of decoupled, coupled, both",
        ),
        ("pipeline", ("--rate", "1,2"), "--rate takes one rate here, not '1,2'"),
        ("pipeline", ("--rate", "0"), "--rate takes requests per second"),
        ("pipeline", ("--lengths", "huge"), "or one of nano-vllm, cpu, cpu-small, sharegpt-gllm"),
        ("pipeline", ("--device", "cuda"), "this command measures CPUs"),
        (
            "pipeline",
            ("--lengths", "9000+1"),
            "every request of 9000+1 is longer than the context of 1600 tokens",
        ),
        ("pipeline", ("--record", "/none/trace.json"), "cannot write /none/trace.json"),
        (
            "reshard",
            ("--policy", "sarathi,nothing"),
            "unknown policy 'nothing'; choose one of prefill-first, ",
        ),
        (
            "reshard",
            ("--prefill-parallel", "d2p2", "--decode-parallel", "d2t2"),
            "bench serve takes a D, here is one engine",
        ),
        (
            "reshard",
            ("--prefill-parallel", "p2", "--decode-parallel", "t4"),
            "both run on the same ones",
        ),
        ("reshard", ("--pp", 2), "replace --dp, --pp, --tp and --pp-split"),
        ("reshard", ("--device", "cuda"), "this command measures CPUs"),
        (
            "reshard",
            ("--lengths", "900+1"),
            "every request of 900+1 is longer than the context of 120 tokens",
        ),
        ("reshard", ("--record", "/none/trace.json"), "cannot write /none/trace.json"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    bench: Run, command: str, arguments: tuple[object, ...], message: str
) -> None:
    code, _, err = bench(command, *arguments)
    assert code in (1, 2)
    assert message in err.replace("\n", " ")
    assert "Traceback" not in err
    assert len(err.strip().splitlines()[-1]) < 400
