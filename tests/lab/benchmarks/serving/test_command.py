"""``nanoserve bench serve`` on a server with the fake engine, and on servers of others."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoserve.commands.engine_options import EngineOptions
from nanoserve.commands.main import main
from nanoserve.errors import RuntimeFailure
from nanoserve.lab.benchmarks.peers.process import Opening
from nanoserve.lab.benchmarks.peers.server_peer import ServerPeer
from nanoserve.lab.benchmarks.serving import own_server, sending
from nanoserve.lab.benchmarks.serving.own_server import OwnServer
from nanoserve.lab.benchmarks.serving.records import LoadRun, RequestRecord
from nanoserve.lab.commands import bench_serve
from nanoserve.layout import ParallelLayout
from tests.server.client.foreign import HELLO, Asked, Scripted, as_error, foreign
from tests.server.starting import ROOT, Server, alive, running_fake, wait_until

Run = Callable[..., tuple[int, str, str]]
FACTS = {
    "model": "fake",
    "dtype": "float32",
    "quantization": None,
    "operators": "C++",
    "layers": "eager",
    "threads": 1,
    "policy": "sarathi",
}
FAKE_COMMAND = "tests.lab.benchmarks.serving.fake_command"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_fake() as server:
        yield server


@pytest.fixture(autouse=True)
def harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key or URL comes from outside, and no other work disturbs a run."""
    monkeypatch.setattr("nanoserve.lab.benchmarks.machine.ForeignLoad.read", lambda self: 0.0)
    for name in ("OPENAI_API_KEY", "NANOSERVE_API_KEY", "NANOSERVE_URL", "NANOSERVE_MODEL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``nanoserve bench serve ARGUMENTS`` here; returns exit code, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main(["bench", "serve", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_sweep_of_clients_is_a_table_json_a_chart_and_can_be_compared(
    bench: Run, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    report, chart = tmp_path / "report.json", tmp_path / "chart.png"
    work = ("--concurrency", "1,3", "--lengths", "20+6", "--requests", 5, "--repeats", 2)
    code, out, err = bench(
        "--url", server.url, *work, "--slo", "e2el=60000", "--json", report, "--plot", chart
    )
    assert code == 0, err
    found = json.loads(report.read_text())
    assert (found["kind"], found["complete"], found["server"]["model"]) == (
        "serve",
        True,
        "storyteller",
    )
    assert [row["case"] for row in found["rows"]] == ["1 client", "3 clients"]
    for row, most in zip(found["rows"], (1, 3), strict=True):
        assert (row["requests"], row["completed"], row["failed"], row["unfinished"]) == (
            10,
            10,
            0,
            0,
        )
        assert (row["input_tokens"], row["output_tokens"], row["cached_tokens"]) == (200, 60, 0)
        assert row["peak_concurrency"] == most
        assert (row["uncounted"], row["of_other_length"], row["without_text"]) == (0, 0, 0)
        assert row["ttft_ms"]["n"] == row["e2el_ms"]["n"] == row["tpot_ms"]["n"] == 10
        assert row["goodput"]["attainment"] == 1.0
        assert len(row["samples"]["ttft_ms"]) == len(row["samples"]["goodput_requests_per_s"]) == 2
        assert row["foreign_cores"] is None  # which process the server is, nobody knows
    assert "3 clients" in out and "TTFT" in out and "100%" in out
    assert out.splitlines()[-1] == found["verdict"] and found["verdict"].endswith(
        "; 4 of 4 runs count."
    )
    assert found["verdict"].startswith("3 clients get ")
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert main(["bench", "diff", str(report), str(report)]) == 0
    assert "goodput_requests_per_s" in capsys.readouterr().out


def test_open_loops_and_traces(bench: Run, server: Server, tmp_path: Path) -> None:
    trace, report = tmp_path / "trace.csv", tmp_path / "report.json"
    trace.write_text("arrived_at,input_tokens,output_tokens\n7.0,5,2\n7.1,900000,2\n7.2,3,4\n")
    words = ("--url", server.url, "--trace", trace, "--json", report)
    code, out, _ = bench(*words, "--arrivals", "trace")
    row = json.loads(report.read_text())["rows"][0]
    assert code == 0
    assert "1 requests are longer than the context of 512 and left out" in out
    assert (row["case"], row["completed"], row["output_tokens"]) == ("trace", 2, 6)
    assert row["offered_requests_per_s"] == pytest.approx(5.0)
    assert bench(*words, "--arrivals", "trace", "--rate", "20,inf")[0] == 0
    rows = json.loads(report.read_text())["rows"]
    assert [row["case"] for row in rows] == ["trace at 20 requests/s", "trace at inf requests/s"]
    assert [row["offered_requests_per_s"] for row in rows] == [pytest.approx(20.0), None]
    assert bench(*words, "--rate", "50")[0] == 0
    assert json.loads(report.read_text())["rows"][0]["case"] == "50 requests/s"


def test_the_highest_rate_is_that_of_a_queue_of_known_capacity(
    bench: Run, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answer at a time, each in a quarter of a second, and no second of it is waited."""

    async def queue(
        _: Any, requests: Any, arrivals: Any, run: LoadRun, clients: Any = None, told: Any = None
    ) -> None:
        free = 0.0
        for arrival in arrivals:
            first, free = max(free, arrival) + 0.05, max(free, arrival) + 0.25
            times = [first, free]
            run.records.append(
                RequestRecord(
                    scheduled=arrival,
                    started=arrival,
                    ended=free,
                    text_times=times,
                    output_tokens=3,
                )
            )
        run.seconds = free

    monkeypatch.setattr(sending, "send_all", queue)
    report = tmp_path / "report.json"
    words = ("--url", server.url, "--max-rate", "--requests", 300, "--json", report)
    code, out, err = bench(*words, "--plot", tmp_path / "rates.png")
    assert code == 0, err
    document = json.loads(report.read_text())
    found = document["highest_rate"]["rate"]
    assert 0.5 * 4.0 <= found <= 1.02 * 4.0
    assert f"no queue grows up to {found:.3g} requests/s" in out
    offered = [row["offered_requests_per_s"] for row in document["rows"]]
    assert offered[0] is None and found in [pytest.approx(rate) for rate in offered[1:]]
    assert "some eight more runs or longer ones find the rate, each of 75 s or more" in err
    # An answer is late where four others are before it: in 1 of 100 long before the capacity is
    # reached.
    assert bench(*words, "--slo", "e2el=1000")[0] == 0
    limited = json.loads(report.read_text())
    assert 0.5 < limited["highest_rate"]["rate"] < 0.9 * found
    held = [row for row in limited["rows"] if row["goodput"]["attainment"] >= 0.99]
    assert max(row["offered_requests_per_s"] for row in held) >= limited["highest_rate"]["rate"]


def test_a_chat_of_others(bench: Run, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    with foreign(chat=HELLO) as other:
        words = (
            "--url",
            other.url,
            "--endpoint",
            "chat",
            "--allow-eos",
            "--concurrency",
            2,
            "--requests",
            4,
        )
        code, out, err = bench(
            *words, "--policy", "prefill-first", "--api-key", "secret", "--json", report
        )
    assert code == 0
    assert "4 answers are not of the length that was asked for" in out
    assert "with --url these have no effect: --policy" in err
    assert all("ignore_eos" not in body for body in other.bodies("/v1/chat/completions"))
    assert other.asked[-1].headers["authorization"] == "Bearer secret"
    assert "secret" not in report.read_text()


def test_failures_under_load_are_part_of_the_result(bench: Run, tmp_path: Path) -> None:
    answered: list[Asked] = []

    def every_other(asked: Asked) -> Scripted:
        answered.append(asked)
        return HELLO if len(answered) <= 4 or len(answered) % 2 else as_error(429, "full")

    with foreign(chat=every_other) as other:
        words = ("--url", other.url, "--endpoint", "chat", "--concurrency", 1, "--requests", 6)
        code, out, _ = bench(*words, "--json", tmp_path / "report.json")
    row = json.loads((tmp_path / "report.json").read_text())["rows"][0]
    assert code == 0
    assert (row["completed"], row["failures"]) == (3, {"HTTP 429: full": 3})
    assert "1 client: 3 requests failed: HTTP 429: full" in out


def test_a_warm_up_that_fails_ends_it(bench: Run) -> None:
    with foreign(completions=as_error(404, "no such path")) as other:
        code, out, err = bench("--url", other.url)
        assert (code, out) == (1, "")
        assert (
            "4 requests of the warm-up failed: HTTP 404: no such path"
            in err.strip().splitlines()[-1]
        )
        other.script["/v1/models"] = as_error(401, "no key")
        assert bench("--url", other.url)[0] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--concurrency", "2", "--rate", "3"), "--concurrency is a closed loop"),
        (
            ("--max-rate", "--rate", "3"),
            "--max-rate finds the rate: leave out --rate and --concurrency",
        ),
        (
            ("--max-rate", "--concurrency", "3"),
            "--max-rate finds the rate: leave out --rate and --concurrency",
        ),
        (("--rate", "fast"), "--rate takes requests per second"),
        (("--concurrency", "0"), "--concurrency takes whole numbers"),
        (("--arrivals", "gamma"), "'gamma' is not one of poisson, trace"),
        (("--arrivals", "trace"), "--arrivals trace needs the --trace"),
        (("--lengths", "5"), "--lengths takes tokens in and out"),
        (("--lengths", "5+5", "--trace", "x.csv"), "give --lengths or --trace, not both"),
        (("--lengths", "huge"), "or one of nano-vllm, cpu, cpu-small, sharegpt-gllm"),
        (("--trace", "missing.csv"), "cannot read the trace missing.csv"),
        (("--endpoint", "embeddings"), "'embeddings' is not one of completions, chat"),
        (("--slo", "itl=3"), "--slo takes milliseconds"),
        (("--url", "localhost"), "--url takes http://HOST:PORT"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    bench: Run, arguments: tuple[str, ...], message: str
) -> None:
    code, _, err = bench(*arguments)
    assert code == 2
    assert message in err.strip().splitlines()[-1] and "Traceback" not in err


def test_ctrl_c_keeps_the_answers_that_have_come(server: Server, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    work = ["--concurrency", "2", "--lengths", "4+60", "--requests", "500"]
    words = [
        sys.executable,
        "-m",
        "nanoserve",
        "bench",
        "serve",
        "--url",
        server.url,
        *work,
        "--json",
        str(report),
    ]
    first = {"model": "storyteller", "prompt": "Once", "max_tokens": 1}
    # the metric exists once a request has finished
    server.post("/v1/completions", first).raise_for_status()
    before = server.metric("vllm:request_success_total")
    process = subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    enough = before + 4 + 3  # the warm-up, and more
    wait_until(
        lambda: process.poll() is not None or server.metric("vllm:request_success_total") >= enough
    )
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 130, err
    assert (
        err.strip().splitlines()[-1]
        == f"nanoserve: interrupted: 1 rows were measured, {report} keeps them"
    )
    assert "Traceback" not in err and "had no answer yet" in out
    found = json.loads(report.read_text())
    row = found["rows"][0]
    assert not found["complete"]
    assert (
        row["completed"] >= 3 and row["failed"] == 0 and row["completed"] + row["unfinished"] == 500
    )
    wait_until(lambda: server.metric("vllm:num_requests_running") == 0)


def test_a_server_of_its_own_is_started_and_ended(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_server, "_COMMAND", FAKE_COMMAND)
    monkeypatch.setattr(bench_serve, "prepare_engine", lambda *_: FACTS)
    monkeypatch.setenv("NANOSERVE_API_KEY", "not for this server")
    started: list[int] = []
    ready = OwnServer._wait_until_ready

    def remembered(self: OwnServer) -> Any:
        started.append(self.process_id)
        return ready(self)

    monkeypatch.setattr(OwnServer, "_wait_until_ready", remembered)
    report = tmp_path / "report.json"
    code, _, _ = bench("--rate", "inf", "--lengths", "4+3", "--requests", 4, "--json", report)
    found = json.loads(report.read_text())
    assert code == 0
    assert found["server"]["own"] and found["engine"] == FACTS
    assert found["rows"][0]["completed"] == 4
    assert found["rows"][0]["foreign_cores"] is not None
    assert len(started) == 1 and not alive(started[0])
    with pytest.raises(RuntimeFailure, match="the server did not start: no such directory"):
        OwnServer(["--model", "./nowhere"])


def test_options_of_an_engine_are_handed_on_as_they_were_given() -> None:
    flags = EngineOptions(model="x y", eager=True, threads=2, kv_cache_memory="2GiB").flags()
    given = dict(zip(flags, [*flags[1:], ""], strict=True))
    assert (given["--model"], given["--threads"], given["--kv-cache-memory"]) == (
        "x y",
        "2",
        "2GiB",
    )
    assert given["--dtype"] == "auto"  # a default, too: an environment variable must not change it
    assert "--eager" in flags and "--offline" not in flags and "--seed" not in flags


def test_a_server_does_not_outlive_a_benchmark_that_is_killed() -> None:
    program = (
        "import time; from nanoserve.lab.benchmarks.serving import own_server as module; "
        f"module._COMMAND = {FAKE_COMMAND!r}; "
        "print(module.OwnServer([]).process_id, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    front_end = int(parent.stdout.readline())
    children = Path(f"/proc/{front_end}/task/{front_end}/children").read_text().split()
    assert alive(front_end) and children
    parent.kill()
    parent.communicate()
    wait_until(lambda: not any(map(alive, [front_end, *map(int, children)])))


def test_the_server_as_a_peer_streams_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_server, "_COMMAND", FAKE_COMMAND)
    model = str(ROOT / "nanoserve" / "assets" / "storyteller")
    opening = Opening(
        engine="server", model=model, dtype="float32", threads=1, max_batch=3, max_length=40
    )
    peer = ServerPeer(opening)
    try:
        result = peer.run(
            tuple((1000 + place, *range(1001, 1020)) for place in range(3)), output_tokens=8
        )
    finally:
        peer.server.close()
    assert [timing.output_tokens for timing in result.timings] == [8] * 3
    assert all(timing.input_tokens == 20 and timing.ttft > 0 for timing in result.timings)
    assert all(list(timing.token_times) == sorted(timing.token_times) for timing in result.timings)
    assert result.tokens == ((), (), ())


@pytest.mark.slow
def test_what_will_run_is_found_out_beforehand(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "none"))  # nothing is built for this
    settings = {"dtype": "float32", "kv_cache_memory": 1 << 24, "eager": True}
    facts = bench_serve.prepare_engine(None, settings, threads=1)
    assert (facts["model"], facts["dtype"], facts["layers"], facts["threads"]) == (
        "storyteller",
        "float32",
        "eager",
        1,
    )
    assert facts["operators"].startswith("plain torch (")
    with pytest.raises(RuntimeFailure, match="no such directory"):
        bench_serve.prepare_engine("./nowhere", {}, threads=None)
    # heard, and refused
    settings |= {"pipeline_parallel": 8, "decode_layout": ParallelLayout(tensor_parallel=8)}
    with pytest.raises(RuntimeFailure, match="--prefill-parallel P8: the model has 4 layers"):
        bench_serve.prepare_engine(None, settings, threads=None)
    assert "CXX" in os.environ
