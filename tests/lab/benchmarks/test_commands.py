"""The commands, on the bundled model with work so small that it takes no time, and on fakes."""

import json
import re
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nanoserve.engine.assembly import BuiltEngine
from nanoserve.errors import RuntimeFailure
from nanoserve.lab.benchmarks import operators
from nanoserve.lab.benchmarks.driving import EngineDriver
from nanoserve.lab.benchmarks.floors import Limits
from nanoserve.lab.benchmarks.local import compiled_ratios
from nanoserve.lab.benchmarks.peers.process import PEERS, Opening, PeerKind
from nanoserve.lab.benchmarks.roofline import BandwidthProbe
from nanoserve.lab.benchmarks.speculation import RATES, Scripted
from nanoserve.lab.charts import Chart
from nanoserve.request import Request, SamplingParams, Sequence
from nanoserve.utils.installation import install_command
from tests.lab.benchmarks.conftest import Run
from tests.lab.benchmarks.fakes import FakePeer

ROOT = Path(__file__).parents[3]


@pytest.fixture
def bench(run_command: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs ``nanoserve bench ARGUMENTS`` here, which looks at the machine but briefly, and finds
    nothing disturbed."""
    monkeypatch.setattr("nanoserve.lab.benchmarks.machine.ForeignLoad.read", lambda self: 0.0)
    monkeypatch.setattr("nanoserve.lab.benchmarks.rounds.MAX_DRIFT", 1e9)
    # nothing is built for the processes that a benchmark starts
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    monkeypatch.setattr("nanoserve.lab.benchmarks.roofline._PRODUCT_SIZES", (64,))
    monkeypatch.setattr(BandwidthProbe.__init__, "__defaults__", (2**20,))
    return partial(run_command, "bench")


def test_latency_writes_a_table_json_and_a_chart(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    prepared: list[BuiltEngine] = []
    monkeypatch.setattr(BuiltEngine, "prepare", lambda built, progress: prepared.append(built))
    report, chart = tmp_path / "report.json", tmp_path / "chart.png"
    sizes = ("--batch-sizes", "1,2", "--lengths", "6+3", "--repeats", 2)
    code, out, _ = bench("latency", *sizes, "--json", report, "--plot", chart)
    assert code == 0
    assert len(prepared) == 1, "layers are compiled ahead of what is timed"
    assert "2 x 6+3" in out
    found = json.loads(report.read_text())
    assert found["complete"]
    assert [row["case"] for row in found["rows"]] == ["1 x 6+3", "2 x 6+3"]
    assert found["rows"][1]["ttft_ms"]["n"] == 4  # two requests, twice
    assert found["rows"][1]["itl_ms"]["n"] == 8
    assert [row["steps"]["decode"]["steps"] for row in found["rows"]] == [4, 4]
    # a processor that looks at itself but briefly may find a floor that does not hold
    for row in found["rows"]:
        shares = [row["steps"][kind]["of_floor"] for kind in ("prefill", "decode", "all")]
        assert all(share is None for share in shares) or all(0 < share <= 1 for share in shares)
    assert out.splitlines()[-1] == found["verdict"] and found["verdict"].endswith(
        "; 4 of 4 runs count."
    )
    assert found["engine"]["operators"].startswith(("C++", "plain torch ("))
    assert found["engine"]["dtype"] in out
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_compare_of_speculation_with_plain_decoding(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, names = (
        tmp_path / "report.json",
        ["edits", "stories", "random", "scripted 0", "scripted 0.8"],
    )
    sizes = (
        "--batch-sizes",
        2,
        "--lengths",
        "30+12",
        "--rounds",
        2,
        "--kv-cache-memory",
        "8MiB",
        "--eager",
    )
    words = ("--speculate", "ngram", "--workloads", ",".join(names), "--dtype", "float32")
    code, out, _ = bench("compare", *words, *sizes, "--json", report)
    assert code == 0
    assert "10 of 10 rounds count" in out and "storyteller, ngram" in out
    found = json.loads(report.read_text())
    assert found["complete"] and found["settings"]["speculate"] == "ngram"
    assert {row["case"] for row in found["summary"]} == {f"{name}, 2 x 30+12" for name in names}
    for row in found["rows"]:
        done, workload = row["round"]["variants"]["speculative"], row["case"].partition(",")[0]
        assert done["same_tokens"] == 1, "speculation changes no answer in float32"
        assert 1 <= done["tokens_a_step"] <= 8
        assert done["plain"] > 0 and done["decode"] > 0
        assert ("predicted" in done) == (workload in RATES)
        # By times that were measured beside other work, a step of more rows may even be predicted
        # to be shorter.
        assert workload != "scripted 0" or done["tokens_a_step"] == 1 <= done["predicted"]
    code, _, err = bench("compare", "--speculate", "ngram", "--workloads", "poems")
    assert code == 2
    assert "--workloads 'poems' is not one of edits, stories, random, scripted 0" in err


@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0])
def test_a_scripted_drafter_is_right_as_often_as_asked(rate: float) -> None:
    prompt, answer = (7, 8), tuple(range(1000, 3000))
    drafter = Scripted(rate, {prompt: answer}, vocab_size=3000, token_budget=512)
    request = Request("a", prompt, SamplingParams(max_tokens=2000), seed=0)
    sequence = Sequence(0, request, 0, [*prompt, *answer[:5]])
    draft_tokens = drafter._look_up(sequence, None, 1990)
    right = [
        draft_token == token
        for draft_token, token in zip(draft_tokens, answer[5:1995], strict=True)
    ]
    assert sum(right) / len(right) == pytest.approx(rate, abs=0.05)
    assert max(draft_tokens) < 3000
    assert drafter._look_up(sequence, None, -1) == ()


@pytest.mark.parametrize("again", [1e15, 1.0])
def test_no_share_above_the_floor_is_printed(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: float
) -> None:
    """A machine that was busy while it was looked at reads a byte a second; a second look is
    better, or is as bad."""
    shares_are_told = again > 1
    looks = [Limits(1.0, 1.0), Limits(again, again)]
    monkeypatch.setattr(
        "nanoserve.lab.benchmarks.local.machine_limits",
        lambda *_, **__: looks.pop(0) if looks else worst,
    )
    monkeypatch.setattr(BandwidthProbe, "read", lambda self: 1.0)
    worst, report = Limits(1.0, 1.0), tmp_path / "report.json"
    sizes = (
        "--batch-sizes",
        "1,2",
        "--lengths",
        "6+3",
        "--repeats",
        1,
        "--eager",
        "--json",
        report,
    )
    code, out, err = bench("latency", *sizes)
    assert code == 0
    assert "steps took less than the least time there is: looking at the machine again" in err
    found = json.loads(report.read_text())
    shares = [steps["of_floor"] for row in found["rows"] for steps in row["steps"].values()]
    assert all((share is not None and share < 1) == shares_are_told for share in shares)
    assert ("no shares of the floor: steps took less" in out) == (not shares_are_told)
    assert ("steps, against the floor" in out) == shares_are_told == found["engine"]["floor_holds"]
    assert ("of the machine's floor" in found["verdict"]) == shares_are_told
    assert found["engine"]["limit_gflops"] == max(1.0, again) / 1e9


def test_disturbed_runs_are_made_again_and_left_out(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = iter([1.15, 0.0, 0.0])
    monkeypatch.setattr(
        "nanoserve.lab.benchmarks.machine.ForeignLoad.read", lambda self: foreign[-1]
    )
    foreign, run, runs = [0.0], EngineDriver.run, list[Any]()

    def beside(self: EngineDriver, prompts: Any, *arguments: Any) -> Any:
        if runs:  # the first run warms up
            foreign.append(next(cores))
        runs.append(prompts)
        return run(self, prompts, *arguments)

    monkeypatch.setattr(EngineDriver, "run", beside)
    report = tmp_path / "report.json"
    words = (
        "--batch-sizes",
        1,
        "--lengths",
        "6+3",
        "--repeats",
        2,
        "--eager",
        "--no-probe",
        "--json",
        report,
    )
    assert bench("latency", *words)[0] == 0
    found = json.loads(report.read_text())
    (row,) = found["rows"]
    assert (len(runs), row["repeats"], row["ttft_ms"]["n"]) == (1 + 3, 2, 2)
    assert [one["counts"] for one in row["rounds"]] == [False, True, True]
    assert found["verdict"].endswith("; 2 of 3 runs count (in 1 other programs kept cores busy).")
    cores = iter([1.15, 1.15])
    runs.clear()
    assert bench("latency", *words, "--keep-all")[0] == 0
    found = json.loads(report.read_text())
    assert (len(runs), found["rows"][0]["foreign_cores"]) == (1 + 2, 1.15)
    assert found["verdict"].endswith("; 2 of 2 runs count (in 2 other programs kept cores busy).")


@pytest.mark.slow
def test_throughput_of_two_engines(bench: Run, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    engine = (
        "--dp",
        2,
        "--eager",
        "--dtype",
        "float32",
        "--kv-cache-memory",
        "16MiB",
        "--no-probe",
    )
    code, out, _ = bench(
        "throughput", *engine, "--requests", 4, "--lengths", "6+3", "--json", report
    )
    (row,) = json.loads(report.read_text())["rows"]
    assert code == 0
    assert (row["ttft_ms"]["n"], row["itl_ms"]["n"], row["steps"]) == (4, 8, {})
    assert "steps of" not in out


@pytest.mark.parametrize("layers", ["eager,compiled", "compiled,eager"])
def test_latency_of_eager_and_compiled_layers_prints_their_ratio(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: str
) -> None:
    """An LLM without `--eager` passes for a compiled one, for compiling takes a minute."""
    monkeypatch.setattr(BuiltEngine, "compiled", property(lambda built: not built.config.eager))
    monkeypatch.setattr(BuiltEngine, "prepare", lambda built, progress: None)
    run, runs = EngineDriver.run, []

    def recorded(self: EngineDriver, *arguments: Any) -> Any:
        runs.append(id(self))
        return run(self, *arguments)

    monkeypatch.setattr(EngineDriver, "run", recorded)
    report = tmp_path / "report.json"
    sizes = (
        "--batch-sizes",
        "1,2",
        "--lengths",
        "6+3",
        "--repeats",
        3,
        "--no-probe",
        "--json",
        report,
    )
    code, out, _ = bench("latency", "--layers", layers, *sizes)
    assert code == 0
    found = json.loads(report.read_text())
    assert [row["case"] for row in found["rows"]] == [
        f"{n} x 6+3 {one}" for n in (1, 2) for one in layers.split(",")
    ]
    assert found["engine"]["layers"] == layers.replace(",", " and ")
    assert "compiled layers over eager ones" in out
    metrics = ["ttft_ms", "tpot_ms", "output_tokens_per_s"]
    assert [(ratio["case"], ratio["metric"]) for ratio in found["ratios"]] == [
        (f"{n} x 6+3", metric) for n in (1, 2) for metric in metrics
    ]
    assert all(0 < ratio["low"] <= ratio["median"] <= ratio["high"] for ratio in found["ratios"])
    assert all(ratio["rounds"] == 3 for ratio in found["ratios"])
    first, second = runs[:2]
    assert runs == [first, second, *(first, second), *(second, first), *(first, second)] * 2, (
        "warm-ups, then in turn"
    )


def test_ratios_above_one_say_that_compiled_layers_are_faster() -> None:
    rows = [
        {
            "case": "1 x 6+3 eager",
            "samples": {"tpot_ms": [4.0, 6.0, 2.0], "output_tokens_per_s": [10.0, 30.0, 20.0]},
        },
        {
            "case": "1 x 6+3 compiled",
            "samples": {"tpot_ms": [2.0, 2.0, 4.0], "output_tokens_per_s": [20.0, 30.0, 5.0]},
        },
    ]
    spread = {"case": "1 x 6+3", "rounds": 3}
    assert compiled_ratios("1 x 6+3", rows) == [
        {**spread, "metric": "tpot_ms", "median": 2.0, "low": 0.5, "high": 3.0},
        {**spread, "metric": "output_tokens_per_s", "median": 1.0, "low": 0.25, "high": 2.0},
    ]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--layers", "fused"), "--layers fused: choose eager, compiled or eager,compiled"),
        (
            ("--layers", "compiled", "--eager"),
            "--eager and --layers say the same; leave one of them out",
        ),
        (("--layers", "eager,compiled"), "layers cannot be compiled on this machine"),
    ],
)
def test_layers_that_cannot_be_compared_are_refused(
    bench: Run, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], line: str
) -> None:
    monkeypatch.setattr(BuiltEngine, "compiled", False)
    monkeypatch.setattr(BuiltEngine, "prepare", lambda built, progress: None)
    code, _, err = bench("latency", *options, "--batch-sizes", 1, "--lengths", "6+3", "--no-probe")
    assert code != 0 and line in err


def test_what_is_waited_for_is_said_and_can_be_skipped(bench: Run, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    sizes = ("--batch-sizes", 1, "--lengths", "6+3", "--repeats", 1, "--eager", "--json", report)
    code, out, err = bench("latency", *sizes)
    assert code == 0
    assert err.index("to know what the machine does at best") < err.index("measuring 1 x 6+3")
    assert "steps, against the floor" in out
    code, out, err = bench("latency", "--no-probe", *sizes)
    assert code == 0
    assert "to know what the machine does" not in err
    assert "against the floor" not in out
    found = json.loads(report.read_text())
    assert "limit_gflops" not in found["engine"]
    assert found["rows"][0]["read_gb_per_s"] == []
    assert found["rows"][0]["steps"]["decode"]["of_floor"] is None


def test_a_busy_machine_is_said_in_a_sentence_and_in_the_picture(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    titles = []

    def draw(chart: Chart, path: Path, **options: Any) -> None:
        titles.append(chart.title)

    monkeypatch.setattr("nanoserve.lab.benchmarks.plots.draw", draw)
    sizes = (
        "--sequences",
        1,
        "--context",
        4,
        "--steps",
        2,
        "--keep-all",
        "--plot",
        tmp_path / "chart.png",
    )
    sentence = (
        "other programs kept up to 1.3 cores busy meanwhile: on a quiet machine the figures differ"
    )
    for cores, is_told in ((1.3, True), (0.1, False), (None, False)):
        monkeypatch.setattr(
            "nanoserve.lab.benchmarks.machine.ForeignLoad.read", lambda self, cores=cores: cores
        )
        code, out, _ = bench("scheduler", *sizes)
        assert code == 0
        assert (sentence in out, sentence in titles[-1]) == (is_told, is_told)


def test_throughput_of_a_trace_leaves_out_what_is_too_long(bench: Run, tmp_path: Path) -> None:
    trace, report = tmp_path / "trace.csv", tmp_path / "report.json"
    trace.write_text("input_tokens,output_tokens\n5,2\n900000,2\n3,4\n")
    code, out, _ = bench("throughput", "--eager", "--trace", trace, "--json", report)
    assert code == 0
    assert "1 requests are longer than the context" in out
    row = json.loads(report.read_text())["rows"][0]
    assert (row["requests"], row["itl_ms"]["n"]) == (2, 1 + 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("latency", "--batch-sizes", "0"), "--batch-sizes takes whole numbers"),
        (("latency", "--lengths", "128+-3"), "--lengths takes whole numbers"),
        (("latency", "--device", "cuda"), "--device cuda: this command measures CPUs"),
        (("throughput", "--device", "cuda:1"), "--device cuda:1: this command measures CPUs"),
        (("compare", "--device", "cuda"), "for a GPU there is nanoserve bench gpu"),
        (("latency", "--repeats", "0"), "--repeats"),
        (("latency", "--eager", "--lengths", "1048576+32"), "needs a context of"),
        (("throughput", "--lengths", "huge"), "or one of nano-vllm, cpu, cpu-small, sharegpt-gllm"),
        (("throughput", "--lengths", "cpu", "--trace", "x"), "give --lengths or --trace, not both"),
        (("throughput", "--trace", "missing.csv"), "cannot read the trace missing.csv"),
        (("compare", "--peers", "vllm"), "--peers 'vllm' is not one of transformers, llama.cpp"),
        (
            ("operators", "--cells", "16"),
            "--cells takes sequences x context such as 16x2048,4x512, not '16'",
        ),
        (("operators", "--cells", "0x5"), "--cells takes sequences x context"),
        (("operators", "--rows", "x"), "--rows takes whole numbers"),
        (("operators", "--dtype", "float64"), "'float64' is not one of bfloat16, float16, float32"),
        (("scheduler", "--policy", "x"), "unknown policy 'x'"),
        (("scheduler", "--context", "0"), "--context"),
        (("quality",), "give --text, --questions or both"),
        (("quality", "--text", "missing.txt"), "cannot read missing.txt"),
        (("diff", "missing.json", "other.json"), "cannot read missing.json"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    bench: Run, arguments: tuple[str, ...], message: str
) -> None:
    code, _, err = bench(*arguments)
    last = err.strip().splitlines()[-1]
    assert code == 2
    assert message in last
    assert last.startswith("nanoserve: ")
    assert "Traceback" not in err


def test_an_interrupted_benchmark_keeps_what_was_measured(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, runs = EngineDriver.run, []

    def interrupted(self: EngineDriver, *arguments: Any) -> Any:
        runs.append(arguments)
        if len(runs) == 4:  # the second case is warm, its measurement begins
            # A benchmark that were killed now would have kept it.
            assert [row["case"] for row in json.loads(report.read_text())["rows"]] == ["1 x 4+2"]
            raise KeyboardInterrupt
        return run(self, *arguments)

    report = tmp_path / "report.json"
    monkeypatch.setattr(EngineDriver, "run", interrupted)
    sizes = ("--batch-sizes", "1,2", "--lengths", "4+2", "--repeats", 1)
    code, out, err = bench("latency", "--eager", *sizes, "--json", report)
    assert code == 130
    last = err.strip().splitlines()[-1]
    assert last == f"nanoserve: interrupted: 1 rows were measured, {report} keeps them"
    assert "1 x 4+2" in out and "2 x 4+2" not in out and "TTFT ms" in out
    found = json.loads(report.read_text())
    assert not found["complete"]
    assert [row["case"] for row in found["rows"]] == ["1 x 4+2"]


def test_a_chart_without_matplotlib_names_the_extra(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = bench("scheduler", "--plot", tmp_path / "chart.png")
    assert code == 2
    assert install_command("plot") in err


def test_compare_prints_ratios_and_names_the_peer_that_is_missing(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FakeProcess(FakePeer):
        process_id = 1

        def __init__(self, opening: Opening) -> None:
            super().__init__(opening.engine, 0.5 if opening.engine == "nanoserve" else 1.0)
            self.description["layers"] = "eager"

    monkeypatch.setattr("nanoserve.lab.commands.bench_compare.PeerProcess", FakeProcess)
    monkeypatch.setitem(PEERS, "llama.cpp", PeerKind("", ("no_such_module",), "pip install it"))
    report = tmp_path / "report.json"
    sizes = ("--batch-sizes", 2, "--lengths", "4+3", "--rounds", 2)
    code, out, _ = bench("compare", "-m", _bundled(), *sizes, "--json", report)
    assert code == 0
    assert (
        "llama.cpp is not installed and left out; to compare with it, first run: pip install it"
        in out
    )
    assert "2 of 2 rounds count" in out
    decode = [
        ratio for ratio in json.loads(report.read_text())["ratios"] if ratio["metric"] == "decode"
    ]
    assert {ratio["peer"] for ratio in decode} == {"transformers"}
    assert decode[0]["median"] == pytest.approx(2.0)
    verdict = (
        "nanoserve decodes 2.00 (2.00-2.00) times as fast as transformers; 2 of 2 rounds count."
    )
    assert out.splitlines()[-1] == verdict == json.loads(report.read_text())["verdict"]


def test_compare_says_first_what_installs_its_peers(
    bench: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("transformers", "llama.cpp"):
        monkeypatch.setitem(PEERS, name, PEERS[name]._replace(modules=("no_such_module",)))
    code, out, err = bench("compare")
    assert (code, out) == (2, "")
    assert (
        err == "nanoserve: nothing to compare with is installed; first run: "
        f"{install_command('peers')}\n"
    )


def test_the_extra_installs_what_peers_import() -> None:
    """The packages of the extra are those whose modules the peers need, by the names that pip has
    for them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = {re.split("[><=]", line)[0] for line in project["optional-dependencies"]["peers"]}
    needed = {module for name in ("transformers", "llama.cpp") for module in PEERS[name].modules}
    assert packages == {{"llama_cpp": "llama-cpp-python"}.get(module, module) for module in needed}
    assert PEERS["transformers"].install == PEERS["llama.cpp"].install == install_command("peers")


def test_compare_of_rounded_weights_leaves_transformers_out(
    bench: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Opening] = []

    class FakeProcess(FakePeer):
        process_id = 1

        def __init__(self, opening: Opening) -> None:
            super().__init__(opening.engine, 1.0)
            self.description["layers"] = "eager"
            opened.append(opening)

    monkeypatch.setattr("nanoserve.lab.commands.bench_compare.PeerProcess", FakeProcess)
    words = (
        "--quantization",
        "int8",
        "--peers",
        "transformers,server",
        "--lengths",
        "4+3",
        "--rounds",
        1,
    )
    code, out, _ = bench("compare", "-m", _bundled(), "--batch-sizes", 1, *words)
    assert code == 0
    assert "transformers is left out" in out
    assert "int8, " in out
    assert [(one.engine, one.quantization) for one in opened] == [
        ("nanoserve", "int8"),
        ("server", "int8"),
    ]


def test_compare_fails_when_a_peer_that_is_installed_cannot_be_opened(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FakeProcess(FakePeer):
        process_id = 1

        def __init__(self, opening: Opening) -> None:
            super().__init__(opening.engine, 1.0)
            if opening.engine == "transformers":
                raise RuntimeFailure("transformers: KeyError: 'metadata'")

    monkeypatch.setattr("nanoserve.lab.commands.bench_compare.PeerProcess", FakeProcess)
    code, out, err = bench("compare", "-m", _bundled(), "--peers", "transformers")
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == (
        "nanoserve: transformers: KeyError: 'metadata' (to compare without transformers, leave it "
        "out of --peers)"
    )


def test_compare_refuses_a_model_that_a_peer_cannot_read(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setitem(PEERS, "llama.cpp", PeerKind("", (), ""))
    code, _, err = bench("compare", "-m", "dummy:mixtral-8x7b", "--peers", "llama.cpp")
    assert code == 2
    assert "mixtral with default rope cannot be written for llama.cpp" in err.splitlines()[-1]
    assert "leave it out of --peers" in err.splitlines()[-1]


def test_operators_beside_stock_torch(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "COLD_BYTES", 1)
    monkeypatch.setattr(operators, "_TURN_SECONDS", 0.0)
    monkeypatch.setattr(operators, "_matrices", lambda: [("down", 32, 64)])
    monkeypatch.setattr(operators, "SAMPLERS", operators.SAMPLERS[1:2])
    report = tmp_path / "report.json"
    sizes = ("--cells", "2x32", "--prompts", "8", "--rows", "1,5")
    code, out, err = bench("operators", *sizes, "--rounds", 2, "--json", report)
    assert code == 0
    assert out.splitlines()[-1].endswith("; 46 of 46 rounds count.")
    assert "times as fast as stock torch" in out.splitlines()[-1]
    assert "measuring down 32 x 64, 5 rows" in err
    found = json.loads(report.read_text())
    assert found["engine"]["operators"].startswith(("C++", "plain torch ("))
    routes = [(row["case"], row["route"]) for row in found["summary"]]
    assert ("attention 2 x 32", "gather + SDPA") in routes
    assert ("host attention 2 x 32", "operator alone") in routes
    assert ("attention of a prompt of 8", "SDPA") in routes
    assert ("down 32 x 64, 1 rows", "F.linear float32") in routes
    assert ("sampling 5 x 151936, top-k 20, top-p 0.8", "softmax, sort, multinomial") in routes
    assert all(row["of_floor"] is None or 0 < row["of_floor"] <= 1 for row in found["summary"])


def test_compare_looks_a_hub_model_up_once_and_not_on_the_network_if_offline(
    bench: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def found(reference: object, title: str, *, offline: bool, **options: object) -> Path:
        asked.append(offline)
        return Path(_bundled())

    class FakeProcess(FakePeer):
        process_id = 1

        def __init__(self, opening: Opening) -> None:
            super().__init__(opening.engine, 1.0)
            self.description["layers"] = "eager"
            assert opening.model == _bundled()

    monkeypatch.setattr("nanoserve.models.hub._find_or_download", found)
    monkeypatch.setattr("nanoserve.lab.commands.bench_compare.PeerProcess", FakeProcess)
    sizes = ("--batch-sizes", 1, "--lengths", "4+2", "--rounds", 1)
    assert bench("compare", "-m", "owner/name", "--offline", "--peers", "", *sizes)[0] == 0
    assert asked == [True]


def test_scheduler_and_diff(bench: Run, tmp_path: Path) -> None:
    code, out, _ = bench("scheduler", "--sequences", "1,8", "--context", 40, "--steps", 4)
    assert code == 0
    assert "us per sequence" in out
    assert out.splitlines()[-1].endswith("; 2 of 2 runs count.")
    reports = [tmp_path / name for name in ("before.json", "after.json")]
    for place, report in enumerate(reports):
        assert (
            bench("scheduler", "--sequences", 1, "--context", 4, "--steps", 2, "--json", report)[0]
            == 0
        )
        document = json.loads(report.read_text())
        document["rows"][0]["samples"] = {"ttft_ms": [10.0 + place * 5, 10.1 + place * 5]}
        report.write_text(json.dumps(document))
    code, out, _ = bench("diff", *reports)
    assert code == 1
    last = (
        "After over before is 1.498; 1 of 1 metrics are worse by more than 5%, where at least 2 "
        "measurements of each"
    )
    assert out.splitlines()[-1] == f"{last} count."  # (15.0 + 15.1) / (10.0 + 10.1)
    assert bench("diff", *reports, "--threshold", 0.9)[0] == 0
    assert bench("diff", *reversed(reports))[0] == 0


def test_quality_equals_the_reference(bench: Run, tmp_path: Path) -> None:
    text, questions, report = (
        tmp_path / name for name in ("text.txt", "questions.jsonl", "report.json")
    )
    text.write_text("Once upon a time there was a little fox. The fox had a red ball.")
    rows = [{"question": f"Tom has {n} cats. How many?", "answer": f"#### {n}"} for n in range(3)]
    questions.write_text("\n".join(map(json.dumps, rows)))
    work = ("--text", text, "--questions", questions, "--shots", 1, "--max-tokens", 4)
    code, out, _ = bench("quality", "--dtype", "float32", *work, "--json", report)
    assert code == 0
    assert "same tokens" in out
    ours, theirs, accuracy, reference = json.loads(report.read_text())["rows"]
    assert (ours["case"], ours["engine"], theirs["engine"]) == (
        "perplexity",
        "nanoserve",
        "transformers",
    )
    assert ours["value"] == pytest.approx(theirs["value"], rel=1e-4)
    assert accuracy["value"] == reference["value"]
    assert reference["same_tokens"] == 1.0
    assert out.splitlines()[-1].startswith(
        "The perplexity of nanoserve is 1.0000 times that of transformers; "
    )


def test_quality_without_the_reference_names_the_command_that_installs_it(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = PeerKind("", ("no_such_module",), "pip install it")
    monkeypatch.setitem(PEERS, "transformers", missing)
    (tmp_path / "text.txt").write_text("Once upon a time there was a little fox.")
    code, out, _ = bench("quality", "--text", tmp_path / "text.txt")
    assert code == 0
    assert "no_such_module is not installed and left out: pip install it" in out
    assert "perplexity" in out


@pytest.mark.slow
def test_one_start_of_a_process(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanoserve.lab.benchmarks.starting.library_directories", list)
    report = tmp_path / "report.json"
    code, out, _ = bench("startup", "--repeats", 1, "--json", report)
    assert code == 0
    document = json.loads(report.read_text())
    assert document["operators"].startswith("plain torch (the compiler named by CXX")
    rows = document["rows"]
    assert [row["case"] for row in rows] == ["first ever", "cold", "warm"]
    assert document["layers"] == "eager"
    assert all(sum(row["stages"].values()) > row["to_first_token"] > 0 for row in rows)
    assert "s to the first token, " in out.splitlines()[-1]


def test_a_start_that_fails_is_one_line(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process fails while it imports torch, in whose place it finds another module."""
    (tmp_path / "torch.py").write_text("raise ValueError('no torch at all')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, _, err = bench("startup")
    assert code == 1
    last = err.strip().splitlines()[-1]
    assert "a process that was to start failed: " in last
    assert "no torch at all" in last


def _bundled() -> str:
    from nanoserve.models.hub import resolve_model

    return str(resolve_model(None).tokenizer_directory)
