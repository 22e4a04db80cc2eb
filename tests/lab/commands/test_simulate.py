"""``nanoserve simulate``: what it prints and writes, and one line for what makes no sense."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]
SMALL = ["simulate", "--model", "qwen3-0.6b", "--hardware", "l4", "--pp", "1", "--requests", "5"]


def test_policies_are_put_side_by_side(command: Run, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    code, out, _ = command(
        *SMALL, "--policy", "sarathi,adaptive", "--lengths", "30+4", "--json", str(path)
    )
    assert code == 0
    assert "5 requests of 30+4, all at once" in out
    document = json.loads(path.read_text())
    assert document["complete"]
    assert [row["policy"] for row in document["rows"]] == ["sarathi", "adaptive"]
    assert [
        (row["requests"], row["input_tokens"], row["output_tokens"]) for row in document["rows"]
    ] == [(5, 150, 20)] * 2


def test_ratios_to_the_first_policy_stand_below_the_table(command: Run, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    words = (
        "--policy",
        "sarathi,throttling",
        "--lengths",
        "600+4",
        "--rate",
        "50",
        "--requests",
        "40",
    )
    code, out, _ = command(*SMALL, *words, "--json", str(path))
    assert code == 0
    first, second = json.loads(path.read_text())["rows"]
    table, ratios = out.split("over sarathi")
    assert f"{first['steady']['requests_per_second']:,.2f}" in table
    assert f"{second['itl_ms']['p99'] / first['itl_ms']['p99']:.2f}" in ratios
    assert f"{second['ttft_ms']['mean'] / first['ttft_ms']['mean']:.2f}" in ratios
    assert "rates per second: without the first 12 arrivals and all after the last one" in out
    assert max(map(len, out.splitlines())) <= 100


def test_layers_are_divided_by_cost_or_as_asked(command: Run, tmp_path: Path) -> None:
    found = []
    for split in ([], ["--pp-split", "7,7,7,7"], ["--pp-split", "7,8,8,5"]):
        path = tmp_path / "result.json"
        arguments = [
            "--pp",
            "4",
            *split,
            "--policy",
            "sarathi",
            "--lengths",
            "30+4",
            "--json",
            str(path),
        ]
        assert command(*SMALL, *arguments)[0] == 0
        found.append(json.loads(path.read_text())["settings"]["kv_blocks"])
    # the engine's own division: the last stage has the head
    assert found[0] == found[2] != found[1]


def test_each_policy_has_parameters_of_its_own(command: Run, tmp_path: Path) -> None:
    path, both = (
        tmp_path / "result.json",
        "throttling:iterations=1,throttling:iterations=16,sarathi",
    )
    assert command(*SMALL, "--policy", both, "--lengths", "600+4", "--json", str(path))[0] == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["policy"] for row in rows] == both.split(",")
    assert rows[0]["tokens_per_step"]["mean"] > rows[1]["tokens_per_step"]["mean"]


def test_a_trace_brings_times_and_lengths(command: Run, tmp_path: Path) -> None:
    trace, bars = tmp_path / "trace.csv", tmp_path / "bars.json"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n100,20,2\n107.5,10,1\n")
    code, out, _ = command(*SMALL, "--trace", str(trace), "--record", str(bars))
    assert code == 0
    assert "trace.csv, as the trace has them" in out
    starts = [event["ts"] for event in json.loads(bars.read_text()) if event["name"] == "compute"]
    assert len(starts) == 3
    assert starts[2] > 7.5e6


def test_objectives_and_fleets_are_shown_when_asked_for(command: Run, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    plot = tmp_path / "result.png"
    fleet = [
        "--plot",
        str(plot),
        "--replicas",
        "3",
        "--router",
        "least-tokens",
        "--slo",
        "ttft=60000,tpot=1000",
        "--json",
        str(path),
    ]
    code, out, _ = command(*SMALL, "--policy", "sarathi", "--lengths", "30+4", *fleet)
    assert code == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "3 replicas (least-tokens)" in out
    assert "least / mean / most of the replicas" in out
    assert all(heading in out for heading in ("SLO", "goodput", "100.0%"))
    document = json.loads(path.read_text())
    assert document["settings"]["slo_ms"] == {"ttft": 60000, "tpot": 1000, "e2el": None}
    (row,) = document["rows"]
    assert row["slo_attainment"] == 1
    assert [replica["requests"] for replica in row["replicas"]] == [2, 2, 1]


def test_the_highest_rate_of_each_policy_is_found(command: Run, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    search = [
        "--requests",
        "40",
        "--max-rate",
        "--policy",
        "sarathi,decode-first",
        "--lengths",
        "60+1",
    ]
    code, out, err = command(*SMALL, *search, "--json", str(path))
    assert code == 0, err
    assert "40 requests of 60+1, at many rates" in out
    document = json.loads(path.read_text())
    for policy, found in document["highest_rates"].items():
        assert f"{policy}: no queue grows up to {found['rate']:.3g} requests/s" in out
        tried = [row for row in document["rows"] if row["policy"] == policy]
        assert tried[0]["rate"] == 1e9  # all at once
        assert found["rate"] in [row["rate"] for row in tried]
        # The next rate that was tried is at most 2 % higher, and was too high.
        assert (
            min(row["rate"] for row in tried[1:] if row["rate"] > found["rate"])
            <= 1.02 * found["rate"]
        )
    assert list(document["highest_rates"]) == ["sarathi", "decode-first"]


def test_a_trial_of_the_highest_rate_is_known_by_policy_rate_and_requests(
    command: Run, tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    search = ["--requests", "40", "--max-rate", "--policy", "sarathi", "--lengths", "60+1"]
    code, out, err = command(*SMALL, *search, "--slo", "ttft=60000,e2el=1", "--json", str(path))
    assert code == 0
    at_once, *others = json.loads(path.read_text())["rows"]
    lines = [line.split("│")[1:-1] for line in out.splitlines() if line.startswith("│")]
    tables = len(lines) // (1 + len(others))
    assert tables > 1  # they are too wide for one, and each begins with what identifies a trial
    keys = [(cells[0].strip(), cells[1].strip(), cells[2].strip()) for cells in lines]
    one = [
        ("sarathi", "burst", "40"),
        *(("sarathi", f"{row['rate']:.3g}", f"{row['requests']:,d}") for row in others),
    ]
    assert keys == tables * one
    # The 40 requests that came at once have no window between arrivals: their rates are those of
    # the whole run.
    assert float(lines[0][4]) == pytest.approx(40 / at_once["seconds"], abs=0.005)
    assert err.splitlines()[0] == "simulating sarathi: 40 requests, all at once ..."
    assert len(err.splitlines()) == 1 + len(others)
    assert "rates per second: without the first 30% of the arrivals" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--policy", "magic"], "unknown policy 'magic'; choose one of prefill-first"),
        (["--policy", "throttling:iterations=0"], "iterations must be at least 1, not 0"),
        (["--policy", "throttling:threshold=1"], "threshold must be at least 0 and below 1, not 1"),
        (
            ["--policy", "throttling:min_prefill=9999"],
            "min_prefill must be at least 1 and at most max_prefill (2048), not 9999",
        ),
        (["--policy", "throttling:patience=1"], "no parameter 'patience'; it has iterations"),
        (
            ["--policy", "throttling:iterations"],
            "iterations is a whole number, 'iterations' is no parameter",
        ),
        (["--policy", "throttling:without_wt=yes"], "'without_wt=yes' is no parameter"),
        (["--pp-split", "14,14"], "--pp-split 14,14 names 2 stages, but --pp is 1"),
        (["--pp-split", "29"], "--pp-split 29 adds up to 29 layers, but the model has 28"),
        (["--policy", "throttling,throttling"], "throttling is named twice"),
        (["--rate", "-1"], "the request rate must be a number above 0, not -1.0"),
        (["--rate", "1", "--variation", "0"], "the variation of the gaps must be a number above 0"),
        (["--variation", "2"], "give both"),
        (
            ["--max-rate", "--rate", "3"],
            "--max-rate tries many rates: leave out --rate, --plot and --record",
        ),
        (["--max-rate"], "--max-rate takes at least 16 requests, not 5: see --requests"),
        (
            ["--lengths", "long"],
            "--lengths takes tokens in and out such as 512+128, or one of sharegpt-gllm, azure",
        ),
        (["--lengths", "0+5"], "--lengths takes whole numbers from 1"),
        (
            ["--lengths", "500000+5", "--num-blocks", "10"],
            "request-0 takes 500005 tokens, but all KV blocks together",
        ),
        (["--hardware", "abacus"], "unknown hardware 'abacus'"),
        (["--model", "gpt-9"], "unknown model 'gpt-9'"),
        (["--metadata", "telepathy"], "'telepathy' is not one of decoupled, coupled"),
        (["--policy", "sarathi,throttling", "--record", "x.json"], "--record takes one policy"),
        (["--trace", "missing.csv"], "cannot read the trace missing.csv"),
        (["--trace", "missing.csv", "--lengths", "5+5"], "give --lengths or --trace, not both"),
    ],
)
def test_what_makes_no_sense_is_one_line(command: Run, arguments: list[str], says: str) -> None:
    code, out, err = command(*SMALL, *arguments)
    assert (code, out) == (2, "")
    assert says in err
    assert len(err.splitlines()) == 1


def test_a_trace_out_of_order_is_refused(command: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at,input_tokens,output_tokens\n3,5,5\n2,5,5\n")
    code, _, err = command(*SMALL, "--trace", str(trace))
    assert code == 2
    assert "trace.csv, row 3, arrived_at: 2 is before the row in front of it" in err


def test_a_drafter_makes_policies_faster_on_hardware_that_nobody_has(
    command: Run, tmp_path: Path
) -> None:
    path, tpot = tmp_path / "result.json", {}
    for name, arguments in (("plain", []), ("speculative", ["--speculate", "0.9,0.8:0.02"])):
        both = [
            "--policy",
            "sarathi,throttling",
            "--lengths",
            "30+80",
            *arguments,
            "--json",
            str(path),
        ]
        code, out, _ = command(*SMALL, *both)
        assert (code, "drafted" in out) == (0, name == "speculative")
        tpot[name] = [row["tpot_ms"]["mean"] for row in json.loads(path.read_text())["rows"]]
    assert all(speculating < 0.7 * plain for plain, speculating in zip(*tpot.values(), strict=True))
    code, _, problem = command(*SMALL, "--speculate", "often")
    assert code != 0
    assert "RATE,RATE,...:COST" in problem
