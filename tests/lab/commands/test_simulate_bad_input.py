"""``nanoserve simulate`` against what a hostile or hurried user gives it: one line, exit code 2,
nothing computed."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]
Refused = Callable[..., str]
HARDWARE = ["simulate", "--model", "qwen3-0.6b", "--hardware", "l4", "--pp", "1"]
SMALL = [*HARDWARE, "--requests", "3", "--lengths", "20+3"]
HUGE = "9" * 400
NO_COUNTS = ["0", "-1", "1.5", "nan", "many"]
COUNTS = [
    "--requests",
    "--num-blocks",
    "--block-size",
    "--max-num-seqs",
    "--max-num-batched-tokens",
]
SPEEDS = ["0", "-2", "nan", "inf", "-inf", "1e400", "1e-400", "1e-300", "1e300", HUGE]
OBJECTIVES = [
    "",
    "ttft",
    "ttft=",
    "ttft=0",
    "ttft=-1",
    "ttft=nan",
    "tpot=inf",
    "ttft=1,ttft=2",
    "speed=1",
    "2000,100",
]
TOO_LARGE = "--model qwen2.5-32b --hardware a10"
NO_FIT = "the model does not fit: 61.0 GiB of weights on each a10 in layout T1, 41.2 GiB more than"

# Options added to SMALL, and what the line says. One space stands between words: nothing after it
# is an empty word.
OPTIONS = [
    # Counts are whole numbers from one, and have an upper bound.
    *[
        (f"{flag} {value}", f"Invalid value for '{flag}'")
        for flag in COUNTS
        for value in ("0", "-1", "1.5", "nan", "x")
    ],
    *[(f"--replicas {value}", "replicas") for value in NO_COUNTS],
    *[(f"{flag} {HUGE}", flag) for flag in COUNTS],
    (f"--replicas {HUGE}", "a fleet has 1 to 1024 replicas"),
    (f"--pp {HUGE}", "pipeline stages: the model has 28 layers, so there are at most 28 stages"),
    (f"--tp {HUGE}", "does not divide 16 query heads"),
    # Rates, and how much the gaps between arrivals vary.
    *[(f"--rate {value}", "the request rate must") for value in SPEEDS],
    *[(f"--rate 1 --variation {value}", "the variation of the gaps must") for value in SPEEDS],
    # Parameters of a policy.
    ("--policy throttling:iterations=0", "iterations must be at least 1, not 0"),
    ("--policy throttling:iterations=-1", "iterations must be at least 1, not -1"),
    ("--policy throttling:iterations=0.5", "iterations is a whole number"),
    ("--policy throttling:iterations=inf", "iterations is a whole number"),
    ("--policy throttling:iterations=nan", "iterations is a whole number"),
    ("--policy throttling:threshold=1", "threshold must be at least 0 and below 1, not 1"),
    ("--policy throttling:threshold=-0.1", "threshold must be at least 0 and below 1, not -0.1"),
    ("--policy throttling:threshold=nan", "is no parameter such as"),
    ("--policy throttling:threshold=1e400", "is no parameter such as"),
    (f"--policy throttling:threshold={HUGE}", "is no parameter such as"),
    (
        "--policy throttling:min_prefill=0",
        "min_prefill must be at least 1 and at most max_prefill (2048), not 0",
    ),
    (
        "--policy throttling:min_prefill=2049",
        "min_prefill must be at least 1 and at most max_prefill (2048), not 2049",
    ),
    ("--policy throttling:max_prefill=1", "no parameter 'max_prefill'"),
    ("--policy throttling:iterations=1:iterations=2", "iterations is given twice"),
    ("--policy throttling:iterations==1", "is no parameter such as"),
    ("--policy throttling:iterations=4:", "'' is no parameter such as"),
    ("--policy throttling:=1", "no parameter ''"),
    ("--policy throttling:__class__=1", "no parameter '__class__'"),
    ("--policy throttling:without_ut=1", "is no parameter such as"),
    # Objectives.
    *[
        (f"--slo {text}", "--slo takes milliseconds such as ttft=2000,tpot=100,e2el=30000")
        for text in OBJECTIVES
    ],
    # Names and lengths.
    ("--policy ", "unknown policy ''; choose one of prefill-first"),
    ("--policy throttling,", "unknown policy ''"),
    ("--policy \x00", "unknown policy '\\x00'"),
    ("--router magic", "unknown router 'magic'; choose one of round-robin, least-tokens"),
    ("--hardware ", "unknown hardware ''"),
    ("--hardware missing.toml", "cannot read missing.toml"),
    ("--model missing.json", "unknown model 'missing.json'"),
    ("--lengths ", "--lengths takes tokens in and out"),
    ("--lengths 5+", "--lengths takes whole numbers from 1"),
    ("--lengths 5+5+5", "--lengths takes tokens in and out"),
    (f"--lengths {HUGE}+5", "--lengths takes whole numbers from 1"),
    ("--lengths 1048576+1", "request-0 takes 1048577 tokens, but all KV blocks together hold"),
    # Memory. Blocks that were asked for do not make the weights fit.
    (TOO_LARGE, NO_FIT),
    (TOO_LARGE, "what would fit: 4 devices (layout P4) or 4-bit weights"),
    (f"{TOO_LARGE} --num-blocks 10", NO_FIT),
    (f"{TOO_LARGE} --num-blocks 10", "what would fit: 4 devices (layout P4) or 4-bit weights"),
    ("--block-size 1000000", "not one KV block of 1000000 tokens fits beside the weights"),
    ("--num-blocks 900000", "blocks of 16 tokens fit beside the weights in layout T1"),
]


@pytest.mark.parametrize(("options", "says"), OPTIONS)
def test_options(refused: Refused, options: str, says: str) -> None:
    refused([*SMALL, *options.split(" ")], says)


HEADER = b"arrived_at,input_tokens,output_tokens\n"
TRACES = [
    (b"", "is empty"),
    (b"\n", "is empty"),
    (HEADER, "has no rows"),
    (
        b"arrived_at,tokens\n1,2\n",
        "has none of these pairs of columns: ContextTokens and GeneratedTokens",
    ),
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
    (
        HEADER + b"0,5,5\n3,5,5\n2,5,5\n",
        "row 4, arrived_at: 2 is before the row in front of it; sort the trace",
    ),
    (HEADER + b'"0,5,5\n', "is no time in seconds"),
    (bytes(range(256)) * 20, "is not a CSV file in UTF-8"),
    (b"\x00" * 5000, "tells no arrival times"),
    (b"x" * 300_000, "is not a CSV file in UTF-8 (field larger than field limit"),
]


@pytest.mark.parametrize(("content", "says"), TRACES)
def test_traces(refused: Refused, tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(content)
    refused([*HARDWARE, "--trace", str(path)], says)


def test_a_trace_that_is_a_directory_or_a_pipe(refused: Refused, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (tmp_path, pipe):
        refused([*HARDWARE, "--trace", str(path)], "is not a regular file")


@pytest.mark.parametrize("flag", ["--json", "--record"])
@pytest.mark.parametrize("place", ["", ".", "missing/result", "x" * 300])
def test_files_that_cannot_be_written(
    refused: Refused, tmp_path: Path, flag: str, place: str
) -> None:
    path = tmp_path / place if place else ""
    refused([*SMALL, flag, str(path)], "cannot write", exit_code=1)
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
        assert (
            command(*HARDWARE, "--requests", "1", "--lengths", "5+1", "--json", str(pipe))[0] == 0
        )
        assert stat.S_ISFIFO(pipe.stat().st_mode)
        assert os.read(reader, 1 << 16).startswith(b'{\n "schema"')
    finally:
        os.close(reader)
