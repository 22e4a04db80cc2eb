"""``nanoserve prune``: what it prints, its bad input, and that the result is a model like any other."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nanoserve.llm import LLM
from nanoserve.request import SamplingParams

Run = Callable[..., tuple[int, str, str]]
STORY = "One day, a little girl named Lily went to the park with her mom. They saw a big dog. "


@pytest.fixture
def story(tmp_path: Path) -> str:
    path = tmp_path / "story.txt"
    path.write_text(STORY * 60)
    return str(path)


def test_it_writes_a_model_that_speaks(command: Run, story: str, tmp_path: Path) -> None:
    output = tmp_path / "output"
    sizes = ("--ffn-size", "384", "--heads", "4", "--layers", "3", "--hidden-size", "192")
    code, out, err = command("prune", *sizes, "--calibrate", story, "--output", str(output))
    assert (code, err) == (0, "")
    size, layers, perplexity = out.splitlines()
    # 2 bytes each of: embedding, final norm, and in 3 layers norms, attention, feed-forward part
    weights = 4096 * 192 + 192 + 3 * (2 * 192 + (128 + 64 + 64 + 128) * 192 + 3 * 384 * 192)
    assert size == f"{output}: {2 * weights / 2**20:.1f} MiB of weights, from 8.1 MiB"
    assert layers.startswith("layers that left, of 0 to 3: ") and len(layers.split()) == 8
    assert perplexity.startswith("perplexity of 511 tokens: ")
    assert " before, " in perplexity
    with LLM(str(output), kv_cache_memory=8 << 20) as llm:
        (answer,) = llm.generate(
            ["Once upon a time"], SamplingParams(max_tokens=3, ignore_eos=True)
        )
    assert len(answer.outputs[0].token_ids) == 3


def test_bad_input_is_one_line(command: Run, story: str, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("kept")
    (tmp_path / "short.txt").write_text(STORY)
    text, new = ["--calibrate", story], ["--output", str(tmp_path / "new")]
    cases: list[tuple[list[str], str, int]] = [
        (new, "Missing option '--calibrate'", 2),
        (text, "Missing option '--output'", 2),
        ([*text, *new], "nothing is to be pruned: give --hidden-size or --ffn-size or", 2),
        ([*text, *new, "--layers", "5"], "--layers 5: the model has 4; give 1 to 4", 2),
        ([*text, *new, "--heads", "3"], "give a multiple of 2", 2),
        ([*text, *new, "--heads", "6"], "6 heads do not divide a hidden size of 256", 2),
        (["--calibrate", str(tmp_path / "short.txt"), *new], "at least 1024 are needed", 2),
        (["-m", "dummy:qwen3-0.6b", *text, *new], "dummy:qwen3-0.6b has no files to prune", 2),
        (
            ["--layers", "3", *text, "--output", str(tmp_path / "full")],
            "full exists and is not empty; choose another --output",
            2,
        ),
    ]
    for words, says, exit_code in cases:
        code, out, err = command("prune", *words)
        assert (code, out) == (exit_code, ""), (words, err)
        assert says in err
        assert len(err.splitlines()) == 1, err
        assert not (tmp_path / "new").exists()
    assert (tmp_path / "full" / "notes.txt").read_text() == "kept"
