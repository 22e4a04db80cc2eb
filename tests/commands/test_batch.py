"""Offline batches: rows, results, errors, and going on where a run was stopped."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanoserve.commands.batch_files import ResultFile, read_rows
from tests.commands.conftest import ROOT, start
from tests.commands.fake_llm import FakeLLM
from tests.commands.test_terminal import Terminal

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def by_index(path: Path) -> list[dict[str, Any]]:
    return sorted(rows_of(path), key=lambda row: row["index"])


def test_a_text_file_is_a_prompt_per_line(command: Run, tmp_path: Path, target: Path) -> None:
    (tmp_path / "prompts.txt").write_text("one\n\ntwo {x}\nl’été", "utf-8")
    code, out, err = command("generate", "-f", str(tmp_path / "prompts.txt"), "-o", str(target))
    assert (code, out) == (0, "")
    assert err.startswith(f"nanoserve: 3 rows written to {target}, 10 tokens in ")
    assert err.count("\n") == 1
    assert by_index(target) == [
        {
            "index": index,
            "text": f"You said: {text}",
            "finish_reason": "stop",
            "usage": usage(prompt, prompt + 2),
        }
        for index, text, prompt in [(0, "one", 1), (2, "two {x}", 2), (3, "l’été", 1)]
    ]
    assert [row["index"] for row in rows_of(target)] == [2, 3, 0]  # as they finished


def usage(prompt: int, completion: int) -> dict[str, int]:
    total = prompt + completion
    return {
        "prompt_tokens": prompt,
        "cached_tokens": 1,
        "completion_tokens": completion,
        "total_tokens": total,
    }


def test_rows_have_settings_of_their_own(
    command: Run, fake: list[FakeLLM], source: Path, target: Path
) -> None:
    rows = [
        {"id": "a", "prompt": "x", "temperature": 0.1, "stop": "end"},
        {"id": 7, "messages": [{"role": "user", "content": "hi"}], "seed": 5},
        {"prompt": "y", "n": 2},
    ]
    source.write_text("\n".join(map(json.dumps, rows)))
    assert (
        command("generate", "-f", str(source), "-o", str(target), "--top-k", "3", "--seed", "10")[0]
        == 0
    )
    params = fake[0].params
    assert [(each.temperature, each.top_k, each.top_p) for each in params] == [
        (0.1, 3, 0.95),
        (0.8, 3, 0.95),
        (0.8, 3, 0.95),
    ]
    assert params[0].stop == ("end",)
    assert [each.seed for each in params] == [10, 5, 12]
    results = by_index(target)
    assert [row.get("id") for row in results] == ["a", 7, None]
    assert results[2]["text"] == ["You said: y"] * 2
    assert results[2]["finish_reason"] == ["stop"] * 2
    assert results[2]["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.txt"])
def test_the_mark_that_windows_editors_write_is_no_text(name: str, tmp_path: Path) -> None:
    text = '{"prompt": "l’été"}\n' if name.endswith("jsonl") else "l’été\n"
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert [(row.prompt, row.error) for row in read_rows(tmp_path / name)] == [("l’été", None)]


def test_reasoning_is_told_apart_in_conversations_and_not_in_texts(
    command: Run, source: Path, target: Path
) -> None:
    said = "<think>well now</think> so be it"
    rows = [
        {"prompt": said},
        *({"messages": [{"role": "user", "content": said}], "n": n} for n in (1, 2)),
    ]
    source.write_text("\n".join(map(json.dumps, rows)))
    assert command("generate", "-f", str(source), "-o", str(target))[0] == 0
    plain, one, two = by_index(target)
    assert plain["text"] == said and "reasoning" not in plain
    assert (one["text"], one["reasoning"]) == ("so be it", "well now")
    assert (two["text"], two["reasoning"]) == (["so be it"] * 2, ["well now"] * 2)


BAD_ROWS: list[tuple[bytes, str]] = [
    (b"{", "not valid JSON"),
    (b"[1]", "not a JSON object"),
    (b"[" * 100_000, "not valid JSON"),
    (b'{"prompt": "\xff"}', "not valid JSON"),
    (b"{}", 'a row needs either "prompt" or "messages"'),
    (b'{"prompt": "a", "messages": []}', 'a row needs either "prompt" or "messages"'),
    (b'{"prompt": ""}', "the prompt is empty"),
    (b'{"messages": []}', "the prompt is empty"),
    (b'{"prompt": 5}', "the prompt is no text"),
    (b'{"prompt": "a", "id": [1]}', "id must be a string or a whole number"),
    (b'{"prompt": "a", "temperature": -1}', "temperature must be a number"),
    (b'{"prompt": "a", "temperature": NaN}', "not valid JSON"),
    (b'{"prompt": "a", "colour": 1}', "colour"),
    (b'{"prompt": "a", "n": 100}', "n must be a whole number"),
    (b'{"messages": ["x"]}', "messages must be a list of"),
    (b'{"messages": [5]}', "messages must be a list of"),
    (b'{"messages": "x"}', "messages must be a list of"),
    (b'{"prompt": "' + b"w " * 300 + b'"}', "the prompt has 300 tokens"),
    (b'{"prompt": "fail"}', "the executor died"),
]


def test_bad_rows_become_error_rows_and_the_rest_go_on(
    command: Run, source: Path, target: Path
) -> None:
    source.write_bytes(
        b"\n".join([b'{"prompt": "first"}', *(line for line, _ in BAD_ROWS), b'{"prompt": "last"}'])
    )
    code, _, err = command("generate", "-f", str(source), "-o", str(target))
    assert code == 0
    assert f"2 rows written to {target}, {len(BAD_ROWS)} rows with errors" in err
    results = by_index(target)
    assert len(results) == len(BAD_ROWS) + 2
    assert (results[0]["text"], results[-1]["text"]) == ("You said: first", "You said: last")
    for result, (_, says) in zip(results[1:-1], BAD_ROWS, strict=True):
        assert says in result["error"]


def test_an_id_that_comes_twice(command: Run, source: Path, target: Path) -> None:
    source.write_text('{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}\n')
    command("generate", "-f", str(source), "-o", str(target))
    assert by_index(target)[1] == {"index": 1, "id": 1, "error": "the id 1 appears a second time"}


DUPLICATE = '{"index":1,"id":"a","error":"the id \'a\' appears a second time"}\n'


def test_the_error_of_a_repeated_id_does_not_stand_for_the_row_that_had_it_first(
    command: Run, fake: list[FakeLLM], source: Path, target: Path
) -> None:
    source.write_text('{"id": "a", "prompt": "first"}\n{"id": "a", "prompt": "second"}\n')
    target.write_text(DUPLICATE)  # and then the run was interrupted
    assert "1 rows written" in command("generate", "-f", str(source), "-o", str(target))[2]
    assert fake[0].prompts == ["first"]
    assert [(row["index"], "error" in row) for row in by_index(target)] == [(0, False), (1, True)]
    assert "all 2 rows are in" in command("generate", "-f", str(source), "-o", str(target))[2]


def test_an_id_that_is_repeated_no_more_is_answered(
    command: Run, fake: list[FakeLLM], source: Path, target: Path
) -> None:
    source.write_text('{"id": "b", "prompt": "first"}\n{"id": "a", "prompt": "second"}\n')
    target.write_text(DUPLICATE)
    command("generate", "-f", str(source), "-o", str(target))
    assert fake[0].prompts == ["first", "second"]


def test_rows_that_are_there_are_not_computed_again(
    command: Run, fake: list[FakeLLM], source: Path, target: Path
) -> None:
    source.write_text("".join(f'{{"prompt": "p{index}"}}\n' for index in range(4)))
    target.write_text('{"index":2,"text":"kept"}\n{"index":0,"error":"kept, too"}\n')
    assert "2 were there already" in command("generate", "-f", str(source), "-o", str(target))[2]
    assert fake[0].prompts == ["p1", "p3"]
    assert by_index(target)[2]["text"] == "kept"
    before = target.read_bytes()
    again = command("generate", "-f", str(source), "-o", str(target))
    assert again == (0, "", f"nanoserve: all 4 rows are in {target} already\n")
    assert len(fake) == 1  # no model is loaded when nothing is left
    assert target.read_bytes() == before


@pytest.mark.parametrize("cut", range(1, 27))
def test_a_torn_last_line_is_computed_again(
    command: Run, fake: list[FakeLLM], source: Path, target: Path, cut: int
) -> None:
    source.write_text('{"id": "é", "prompt": "p0"}\n{"prompt": "p1"}\n')
    whole = '{"index":0,"id":"é","text":"x"}\n'.encode()
    target.write_bytes(b'{"index":1,"text":"y"}\n' + whole[:-cut])
    command("generate", "-f", str(source), "-o", str(target))
    assert sorted(row["index"] for row in rows_of(target)) == [0, 1]
    assert bool(fake) is (cut > 1)  # without its line break alone the row is whole


@pytest.mark.parametrize(
    "content", ["precious", "precious\n", '{"a": 1}\n', '{"index": "x"}\n', "[]", "\n"]
)
def test_a_file_that_holds_something_else_is_left_alone(
    command: Run, source: Path, target: Path, content: str
) -> None:
    source.write_text('{"prompt": "a"}\n')
    target.write_text(content)
    code, _, err = command("generate", "-f", str(source), "-o", str(target))
    assert code == 2
    assert f"{target} line 1 is not a result of a batch" in err
    assert target.read_text() == content


def test_files_that_cannot_be_used(
    command: Run, source: Path, target: Path, tmp_path: Path
) -> None:
    source.write_text("\n\n")
    assert "has no prompts" in command("generate", "-f", str(source), "-o", str(target))[2]
    source.write_text('{"prompt": "a"}\n')
    code, _, err = command("generate", "-f", str(source), "-o", str(source))
    assert (code, err) == (2, "nanoserve: --file and --output are the same file\n")
    code, _, err = command("generate", "-f", str(source), "-o", str(tmp_path / "nowhere" / "out"))
    assert (code, err.count("\n")) == (1, 1)
    assert "No such file or directory" in err
    assert command("generate", "-f", str(source), "-o", str(target), "-m", "missing")[0] == 3


def test_what_cannot_be_read_back_is_no_output(command: Run, source: Path, tmp_path: Path) -> None:
    source.write_text('{"prompt": "a"}\n')
    os.mkfifo(tmp_path / "pipe")
    for name in ("/dev/null", str(tmp_path / "pipe"), str(tmp_path)):
        code, _, err = command("generate", "-f", str(source), "-o", name)
        assert (code, err.count("\n")) == (2, 1)
        assert f"{name} is no regular file" in err


def test_two_runs_do_not_write_one_file(command: Run, source: Path, target: Path) -> None:
    source.write_text('{"prompt": "a"}\n')
    with ResultFile(target):
        code, _, err = command("generate", "-f", str(source), "-o", str(target))
        assert (code, err.count("\n")) == (1, 1)
        assert f"another run is writing {target}" in err
    assert command("generate", "-f", str(source), "-o", str(target))[0] == 0
    assert len(rows_of(target)) == 1


def test_interrupt_keeps_what_is_finished_and_says_how_to_go_on(source: Path, target: Path) -> None:
    prompts = ["a", "b", "slowly", "c"]
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    arguments = ["generate", "-f", str(source), "-o", str(target)]
    process = start(*arguments, "--max-model-len", "100000")
    deadline = time.monotonic() + 240
    while not target.exists() or not target.read_bytes():
        assert time.monotonic() < deadline, "no row is written"
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 130
    assert err.startswith(b"nanoserve: interrupted: 1 rows written to ")
    assert err.endswith(b", 3 rows are left; the same command goes on from here\n")
    assert err.count(b"\n") == 1
    assert [row["index"] for row in rows_of(target)] == [1]
    source.write_text(source.read_text().replace("slowly", "fast"))
    assert start(*arguments).wait(240) == 0
    assert [row["index"] for row in by_index(target)] == [0, 1, 2, 3]


def test_rows_that_nobody_could_answer_any_more_are_left_for_the_same_command(
    command: Run, source: Path, target: Path
) -> None:
    source.write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("a", "b", "perish", "c"))
    )
    code, _, err = command("generate", "-f", str(source), "-o", str(target))
    assert code == 1
    assert err.startswith("nanoserve: the workers died 3 times; 1 rows written to ")
    assert (
        err.endswith(", 3 rows are left; the same command goes on from here\n")
        and err.count("\n") == 1
    )
    assert [row["index"] for row in rows_of(target)] == [1]
    source.write_text(source.read_text().replace("perish", "live"))
    assert command("generate", "-f", str(source), "-o", str(target))[0] == 0
    assert [row["index"] for row in by_index(target)] == [0, 1, 2, 3]


def test_rows_that_one_of_several_engines_took_with_it_are_left_and_the_others_go_on(
    command: Run, source: Path, target: Path
) -> None:
    source.write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("a", "b", "half perish", "c"))
    )
    code, _, err = command("generate", "-f", str(source), "-o", str(target))
    assert code == 1
    assert err.startswith("nanoserve: the workers died 3 times; 3 rows written to ")
    assert err.endswith(", 1 rows are left; the same command goes on from here\n")
    assert [row["index"] for row in by_index(target)] == [0, 1, 3]


PAIR = ["--prefill-parallel", "d2p4", "--decode-parallel", "d2t4"]


def test_without_a_terminal_the_last_line_says_how_two_layouts_went(
    command: Run, source: Path, target: Path
) -> None:
    source.write_text(json.dumps({"prompt": "word " * 30}))
    code, _, err = command("generate", "-f", str(source), "-o", str(target), *PAIR)

    assert (code, err.count("\n")) == (0, 1)
    assert re.search(
        r"D2P4 \S+ tokens/s, D2T4 \S+ tokens/s, host pool at most 25%, 3 transitions$", err
    )


def test_a_terminal_shows_the_phase_while_no_row_finishes_and_ctrl_c_keeps_the_rest(
    source: Path, target: Path, tmp_path: Path
) -> None:
    source.write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("a", "b", "slowly"))
    )
    words = ["generate", "-f", str(source), "-o", str(target), "--max-model-len", "100000", *PAIR]
    terminal = Terminal(*words, state=tmp_path, columns=500)
    terminal.wait_for("decode D2T4, host pool 25%, ")
    terminal.wait_for("prefill D2P4, host pool 25%, ")
    terminal.type("\x03")
    terminal.wait_for("interrupted: 1 rows written to")
    terminal.wait_for("2 rows are left; the same command goes on from here")

    assert terminal.exit_code() == 130
    assert [row["index"] for row in rows_of(target)] == [1]


STORY = "Once upon a time there was a cat that lived in a boat. " * 8
LONG_ROWS = [
    {"prompt": f"{number}. {STORY}", "temperature": 0, "max_tokens": 30} for number in range(40)
]
REAL = [
    sys.executable,
    "-m",
    "nanoserve",
    "generate",
    "--eager",
    "--dtype",
    "float32",
    "--threads",
    "2",
]


@pytest.fixture(scope="module")
def texts_of_one_process(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Answers of LONG_ROWS with the bundled model."""
    source, target = (tmp_path_factory.mktemp("whole") / name for name in ("in.jsonl", "out.jsonl"))
    source.write_text("".join(json.dumps(row) + "\n" for row in LONG_ROWS))
    ended = subprocess.run(
        [*REAL, "-f", str(source), "-o", str(target)], cwd=ROOT, capture_output=True, check=True
    )
    assert ended.stderr.count(b"\n") == 1
    return [row["text"] for row in by_index(target)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "state", ["prefill P2, host pool [^;]*, 2 transitions", "decode T2, host pool [^;]*, 3 tr"]
)
def test_ctrl_c_in_each_phase_of_real_workers_keeps_the_rows_and_the_next_run_ends_them(
    state: str, source: Path, target: Path, tmp_path: Path, texts_of_one_process: list[str]
) -> None:
    source.write_text("".join(json.dumps(row) + "\n" for row in LONG_ROWS))
    pair = ["--prefill-parallel", "p2", "--decode-parallel", "t2", "--host-kv-memory", "6MiB"]
    command = [*REAL, "-f", str(source), "-o", str(target), *pair]
    terminal = Terminal(*command[3:], state=tmp_path, module="nanoserve", columns=500)
    terminal.wait_for_match(state)
    terminal.type("\x03")
    terminal.wait_for("rows are left; the same command goes on from here")
    assert terminal.exit_code() == 130
    written = rows_of(target)
    assert 0 < len(written) < len(LONG_ROWS)

    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    assert rows_of(target)[: len(written)] == written
    assert [row["text"] for row in by_index(target)] == texts_of_one_process
