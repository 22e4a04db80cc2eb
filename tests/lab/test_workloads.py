"""Lengths from grids, presets and traces, and what is said about bad ones."""

from pathlib import Path

import pytest

from nanoserve.errors import UsageError
from nanoserve.lab.workloads import PRESETS, parse_lengths, parse_sizes, random_prompts, read_trace
from nanoserve.request import RequestShape


@pytest.mark.parametrize("text", ["0", "-1", "1,,2", "two", "1.5", "", "1048577", "9" * 400, "²"])
def test_sizes_that_make_no_sense_are_one_line(text: str) -> None:
    with pytest.raises(UsageError, match="--batch-sizes takes whole numbers from 1"):
        parse_sizes(text, "--batch-sizes")


def test_sizes_keep_their_order_and_drop_repetitions() -> None:
    assert parse_sizes("16, 1,16", "--input") == (16, 1)


def test_lengths_are_pairs_of_tokens_in_and_out() -> None:
    assert parse_lengths("8+4, 8+5,8+4", "--lengths") == (RequestShape(8, 4), RequestShape(8, 5))


@pytest.mark.parametrize("text", ["", "8", "8+", "+8", "8+4,", "8+4+2", "0+4", "8-4"])
def test_lengths_that_make_no_sense_are_one_line(text: str) -> None:
    with pytest.raises(UsageError, match="--lengths takes"):
        parse_lengths(text, "--lengths")


def test_the_nano_vllm_preset_is_that_project_s_setting() -> None:
    shapes = PRESETS["nano-vllm"].draw(seed=0)
    assert len(shapes) == 256
    assert all(
        100 <= length <= 1024
        for shape in shapes
        for length in (shape.input_tokens, shape.output_tokens)
    )
    assert shapes == PRESETS["nano-vllm"].draw(seed=0) != PRESETS["nano-vllm"].draw(seed=1)


def test_prompts_are_the_same_for_the_same_seed() -> None:
    prompts = random_prompts([3, 5], vocab_size=100, seed=1)
    assert [len(prompt) for prompt in prompts] == [3, 5]
    assert prompts == random_prompts([3, 5], 100, 1) != random_prompts([3, 5], 100, 2)


@pytest.mark.parametrize(
    "header", ["TIMESTAMP,ContextTokens,GeneratedTokens", "x,num_prefill_tokens,num_decode_tokens"]
)
def test_known_traces_are_read(tmp_path: Path, header: str) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(f"{header}\n2023-11-16 18:17:03,4808,10\nlater,3180.0,8\n")
    assert read_trace(trace) == [RequestShape(4808, 10), RequestShape(3180, 8)]
    assert read_trace(trace, limit=1) == [RequestShape(4808, 10)]


@pytest.mark.parametrize("row", ["12,-1", "12,0", "12", "12,x", ",4", "12,99999999", "12,nan"])
def test_a_bad_row_is_named(tmp_path: Path, row: str) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(f"input_tokens,output_tokens\n5,6\n{row}\n7,8\n")
    with pytest.raises(
        UsageError, match=r"trace\.csv, row 3, (in|out)put_tokens: .* is not a number of tokens"
    ):
        read_trace(trace)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"a,b\n1,2\n", "none of these pairs of columns"),
        (b"input_tokens,output_tokens\n", "has no rows"),
        (b"input_tokens,output_tokens\n\xff\xfe,1\n", "not a CSV file in UTF-8"),
    ],
)
def test_a_file_that_is_no_trace(tmp_path: Path, content: bytes, message: str) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_trace(trace)


def test_a_missing_trace(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the trace"):
        read_trace(tmp_path / "none.csv")
