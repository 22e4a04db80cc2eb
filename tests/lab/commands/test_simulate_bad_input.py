"""``nanoserve simulate`` against what a hostile or hurried user gives it: one line, exit code 2, nothing computed."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]
HARDWARE = ["simulate", "--model", "qwen3-0.6b", "--hardware", "l4", "--pp", "1"]
SMALL = [*HARDWARE, "--requests", "3", "--lengths", "20+3"]
HUGE = "9" * 400


def _refused(result: tuple[int, str, str], says: str, exit_code: int = 2) -> None:
    code, out, err = result
    assert (code, out) == (exit_code, ""), err
    assert says in err
    assert len(err.splitlines()) == 1
    assert "Traceback" not in err
    assert "unexpected" not in err


@pytest.mark.parametrize(
    "flag",
    ["--requests", "--replicas", "--num-blocks", "--block-size", "--max-num-seqs", "--max-num-batched-tokens"],
)
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "nan", "many"])
def test_counts_are_whole_numbers_from_one(command: Run, flag: str, value: str) -> None:
    _refused(command(*SMALL, flag, value), "replicas" if flag == "--replicas" else f"Invalid value for '{flag}'")


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--requests", "--requests"),
        ("--num-blocks", "--num-blocks"),
        ("--replicas", "a fleet has 1 to 1024 replicas"),
        ("--block-size", "--block-size"),
        ("--max-num-seqs", "--max-num-seqs"),
        ("--max-num-batched-tokens", "--max-num-batched-tokens"),
        ("--pp", "pipeline stages: the model has 28 layers, so there are at most 28 stages"),
        ("--tp", "does not divide 16 query heads"),
    ],
)
def test_numbers_beyond_all_bounds(command: Run, flag: str, says: str) -> None:
    _refused(command(*SMALL, flag, HUGE), says)


@pytest.mark.parametrize("value", ["0", "-2", "nan", "inf", "-inf", "1e400", "1e-400", "1e-300", "1e300", HUGE])
def test_rates_and_variations(command: Run, value: str) -> None:
    _refused(command(*SMALL, "--rate", value), "the request rate must")
    _refused(command(*SMALL, "--rate", "1", "--variation", value), "the variation of the gaps must")


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ("iterations=0", "iterations must be at least 1, not 0"),
        ("iterations=-1", "iterations must be at least 1, not -1"),
        ("iterations=0.5", "iterations is a whole number"),
        ("iterations=inf", "iterations is a whole number"),
        ("iterations=nan", "iterations is a whole number"),
        ("threshold=1", "threshold must be at least 0 and below 1, not 1"),
        ("threshold=-0.1", "threshold must be at least 0 and below 1, not -0.1"),
        ("threshold=nan", "is no parameter such as"),
        ("threshold=1e400", "is no parameter such as"),
        (f"threshold={HUGE}", "is no parameter such as"),
        ("min_prefill=0", "min_prefill must be at least 1 and at most max_prefill (2048), not 0"),
        ("min_prefill=2049", "min_prefill must be at least 1 and at most max_prefill (2048), not 2049"),
        ("max_prefill=1", "no parameter 'max_prefill'"),
        ("iterations=1:iterations=2", "iterations is given twice"),
        ("iterations==1", "is no parameter such as"),
        ("iterations=4:", "'' is no parameter such as"),
        ("=1", "no parameter ''"),
        ("__class__=1", "no parameter '__class__'"),
        ("without_ut=1", "is no parameter such as"),
    ],
)
def test_parameters_of_a_policy(command: Run, parameters: str, says: str) -> None:
    _refused(command(*SMALL, "--policy", f"throttling:{parameters}"), says)


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=", "ttft=0", "ttft=-1", "ttft=nan", "tpot=inf", "ttft=1,ttft=2", "speed=1", "2000,100"]
)
def test_objectives(command: Run, text: str) -> None:
    _refused(command(*SMALL, "--slo", text), "--slo takes milliseconds such as ttft=2000,tpot=100,e2el=30000")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--policy", ""], "unknown policy ''; choose one of prefill-first"),
        (["--policy", "throttling,"], "unknown policy ''"),
        (["--policy", "\x00"], "unknown policy '\\x00'"),
        (["--router", "magic"], "unknown router 'magic'; choose one of round-robin, least-tokens"),
        (["--hardware", ""], "unknown hardware ''"),
        (["--hardware", "missing.toml"], "cannot read missing.toml"),
        (["--model", "missing.json"], "unknown model 'missing.json'"),
        (["--lengths", ""], "--lengths takes tokens in and out"),
        (["--lengths", "5+"], "--lengths takes whole numbers from 1"),
        (["--lengths", "5+5+5"], "--lengths takes tokens in and out"),
        (["--lengths", f"{HUGE}+5"], "--lengths takes whole numbers from 1"),
        (["--lengths", "1048576+1"], "request-0 takes 1048577 tokens, but all KV blocks together hold"),
    ],
)
def test_names(command: Run, arguments: list[str], says: str) -> None:
    _refused(command(*SMALL, *arguments), says)


def test_a_model_that_does_not_fit_is_refused_with_what_would(command: Run) -> None:
    too_large = ["simulate", "--model", "qwen2.5-32b", "--hardware", "a10", "--pp", "1"]
    for blocks in ([], ["--num-blocks", "10"]):  # blocks that were asked for do not make the weights fit
        result = command(*too_large, *blocks)
        _refused(result, "the model does not fit: 61.0 GiB of weights on each a10 in layout T1, 41.2 GiB more than")
        assert "what would fit: 4 devices (layout P4) or 4-bit weights" in result[2]


def test_blocks_that_are_larger_than_what_is_left_beside_the_weights_are_refused(command: Run) -> None:
    _refused(command(*SMALL, "--block-size", "1000000"), "not one KV block of 1000000 tokens fits beside the weights")


def test_more_blocks_than_there_is_memory_for_are_refused(command: Run) -> None:
    _refused(command(*SMALL, "--num-blocks", "900000"), "blocks of 16 tokens fit beside the weights in layout T1")


HEADER = b"arrived_at,input_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"\n", "is empty"),
        (HEADER, "has no rows"),
        (b"arrived_at,tokens\n1,2\n", "has none of these pairs of columns: ContextTokens and GeneratedTokens"),
        (b"input_tokens,output_tokens\n5,5\n", "tells no arrival times"),
        (HEADER + b"0,5,5\n0,5\n", "row 3, output_tokens: '' is not a number of tokens"),
        (HEADER + b"0,0,5\n", "row 2, input_tokens: '0' is not a number of tokens"),
        (HEADER + b"0,5,5\n\n0,5,-1\n", "row 4, output_tokens: '-1' is not a number of tokens"),
        (HEADER + b"0,five,5\n", "row 2, input_tokens: 'five' is not a number of tokens"),
        (HEADER + b"0,5.5,5\n", "row 2, input_tokens: '5.5' is not a number of tokens"),
        (HEADER + b"0,1e3,5\n", "row 2, input_tokens: '1e3' is not a number of tokens"),
        (HEADER + b"0,nan,5\n", "row 2, input_tokens: 'nan' is not a number of tokens"),
        (HEADER + b"0," + b"9" * 5000 + b",5\n", "row 2, input_tokens: '999"),
        (HEADER + b"noon,5,5\n", "row 2, arrived_at: 'noon' is no time"),
        (HEADER + b"nan,5,5\n", "row 2, arrived_at: 'nan' is no time"),
        (HEADER + b"0,5,5\n1e300,5,5\n", "row 3, arrived_at: '1e300' is no time"),
        (HEADER + b"0,5,5\n3,5,5\n2,5,5\n", "row 4, arrived_at: 2 is before the row in front of it; sort the trace"),
        (HEADER + b'"0,5,5\n', "is no time in seconds"),
        (bytes(range(256)) * 20, "is not a CSV file in UTF-8"),
        (b"\x00" * 5000, "tells no arrival times"),
        (b"x" * 300_000, "is not a CSV file in UTF-8 (field larger than field limit"),
    ],
)
def test_traces(command: Run, tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(content)
    _refused(command(*HARDWARE, "--trace", str(path)), says)


def test_a_trace_that_is_a_directory_or_a_pipe(command: Run, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (tmp_path, pipe):
        _refused(command(*HARDWARE, "--trace", str(path)), "is not a regular file")


@pytest.mark.parametrize("flag", ["--json", "--record"])
@pytest.mark.parametrize("place", ["", ".", "missing/result", "x" * 300])
def test_files_that_cannot_be_written(command: Run, tmp_path: Path, flag: str, place: str) -> None:
    path = tmp_path / place if place else ""
    _refused(command(*SMALL, flag, str(path)), "cannot write", exit_code=1)
    assert list(tmp_path.iterdir()) == []  # no draft is left behind


def test_a_picture_that_cannot_be_written_costs_no_figures(command: Run, tmp_path: Path) -> None:
    code, out, err = command(*SMALL, "--plot", str(tmp_path))
    assert code == 1
    assert "throttling" in out
    assert "cannot write" in err


def test_a_report_into_what_is_no_file_does_not_replace_it(command: Run, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)  # a writer need not wait
    try:
        assert command(*HARDWARE, "--requests", "1", "--lengths", "5+1", "--json", str(pipe))[0] == 0
        assert stat.S_ISFIFO(pipe.stat().st_mode)
        assert os.read(reader, 1 << 16).startswith(b'{\n "schema"')
    finally:
        os.close(reader)
