"""``nanoserve quantize``: what it prints, its bad input, and Ctrl-C."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from nanoserve.models.hub import resolve_model

Run = Callable[..., tuple[int, str, str]]
STORY = "One day, a little girl named Lily went to the park with her mom. They saw a big dog. "


@pytest.fixture
def story(tmp_path: Path) -> str:
    path = tmp_path / "story.txt"
    path.write_text(STORY * 60)
    return str(path)


def test_it_prints_perplexity_before_and_after(command: Run, story: str, tmp_path: Path) -> None:
    output = str(tmp_path / "output")
    code, out, err = command("quantize", "--calibrate", story, "--output", output)
    assert (code, err) == (0, "")
    size, perplexity = out.splitlines()
    assert size == f"{output}: 3.6 MiB of weights, from 8.1 MiB"
    assert perplexity.startswith("perplexity of 511 tokens: ")
    assert " before, " in perplexity
    code, out, err = command("quantize", "--bits", "8", "--output", f"{output}-8")
    assert (code, len(out.splitlines())) == (0, 1)
    assert err == "give --held-out FILE to see what this does to the perplexity\n"


def test_bad_input_is_one_line(command: Run, story: str, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text(STORY)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"\xe9t\xe9")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("kept")
    bundled = resolve_model(None).directory
    assert bundled is not None
    narrow = tmp_path / "narrow"
    shutil.copytree(bundled, narrow)
    config = (narrow / "config.json").read_text()
    (narrow / "config.json").write_text(config.replace('"vocab_size": 4096', '"vocab_size": 50'))
    cases: list[tuple[list[str], str, int]] = [
        ([], "Missing option '--output'", 2),
        (["--method", "nf4"], "'nf4' is not one of rtn, awq, gptq, llm-int8", 2),
        (["--bits", "5"], "--method rtn has weights of 3 or 4 or 8 bits, not 5", 2),
        (["--bits", "0"], "--method rtn has weights of 3 or 4 or 8 bits, not 0", 2),
        (
            ["--method", "llm-int8", "--bits", "4"],
            "--method llm-int8 has weights of 8 bits, not 4",
            2,
        ),
        (
            ["--method", "llm-int8", "--group", "32"],
            "has a scale for each row: leave out --group",
            2,
        ),
        (["--group", "20"], "--group must be -1 or a multiple of 32, not 20", 2),
        (["--group", "0"], "--group must be -1 or a multiple of 32, not 0", 2),
        (["--act-order"], "--act-order needs --method gptq, not rtn", 2),
        (["--method", "gptq"], "needs a text to run through the model: give --calibrate FILE", 2),
        (["--calibrate", str(tmp_path / "none.txt")], "none.txt: No such file or directory", 2),
        (["--calibrate", str(tmp_path / "latin.txt")], "latin.txt is not UTF-8 text", 2),
        (
            ["--calibrate", str(tmp_path / "empty.txt")],
            "empty.txt has 0 tokens, and at least 1024 are needed",
            2,
        ),
        (
            ["--calibrate", str(tmp_path / "short.txt"), "--held-out", story],
            "and at least 512 are needed",
            2,
        ),
        (
            ["--held-out", str(tmp_path / "empty.txt")],
            "empty.txt has 0 tokens, and at least 2 are needed",
            2,
        ),
        (["--held-out", str(tmp_path)], "is not a regular file", 2),
        (["dummy:qwen3-0.6b"], "dummy:qwen3-0.6b has no files to quantize", 2),
        ([str(tmp_path / "nowhere")], "no such directory", 3),
        ([str(narrow)], "has shape [4096, 256], config.json says [50, 256]", 3),
        (["--held-out", story, str(narrow)], " is not in the vocabulary of 50", 2),
        (["--group", "512"], "--group 512 does not divide the 256 columns", 2),
    ]
    for words, says, exit_code in cases:
        output = ["--output", str(tmp_path / "new")] if words else []
        code, out, err = command("quantize", *words, *output)
        assert (code, out) == (exit_code, ""), (words, err)
        assert says in err
        assert len(err.splitlines()) == 1, err
        assert "unexpected" not in err
        assert not (tmp_path / "new").exists()
    code, out, err = command("quantize", "--output", str(tmp_path / "full"))
    assert (code, out) == (2, "")
    assert (
        err == f"nanoserve: {tmp_path / 'full'} exists and is not empty; choose another --output\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_leaves_whole_files(times: int, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "nanoserve", "quantize", "--output", "output"]
    process = subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not list(tmp_path.glob("output/model-00002*")):
        assert process.poll() is None
        time.sleep(0.001)
    for _ in range(times):
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert (process.returncode, out) == (130, "")
    assert err.startswith("nanoserve: interrupted")
    assert times == 2 or err.endswith(
        "layers are in output; the same command continues after them\n"
    )
    assert len(err.splitlines()) == 1
    for path in tmp_path.glob("output/model-*"):
        with safe_open(path, "pt") as file:
            assert file.keys()
    assert not (tmp_path / "output" / "config.json").exists()
