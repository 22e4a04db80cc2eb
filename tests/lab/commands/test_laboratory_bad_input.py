"""``plan``, ``analyze``, ``profile``, ``bench paper`` and simulate's later options against bad
input: one line each."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.costs.profiles import made_up_profile

Run = Callable[..., tuple[int, str, str]]
Refused = Callable[..., str]
HUGE = "9" * 400
LONG = "x" * 5000
PLAN = "plan --model qwen3-0.6b --hardware l4 --gpus 1 --lengths 20+3 --requests 2"
ANALYZE = "analyze -m qwen3-0.6b --hardware l4 --batch-sizes 1"
SIMULATE = "simulate --model qwen3-0.6b --hardware l4 --pp 1 --lengths 20+3"
PLAN_COUNTS = ["--requests", "--max-num-batched-tokens", "--max-num-seqs"]
MEASURED = [
    "profile --threads",
    "bench operators --threads",
    "bench throughput --requests",
    "bench serve --requests",
]
MEMORIES = ["0", "-1", "nan", "inf", "1e400", "1e-300", "1e9", "1e300", HUGE]

# Commands, and what the line says. One space stands between words: nothing after it is an empty
# word.
COMMANDS = [
    # Counts have bounds, in plans and in measured runs.
    *[
        (f"{PLAN} {flag} {value}", f"Invalid value for '{flag}'")
        for flag in PLAN_COUNTS
        for value in ("0", "-1", "nan", "1000000000000", HUGE)
    ],
    *[
        (f"{words} {value}", f"Invalid value for '{words.split()[-1]}'")
        for words in MEASURED
        for value in ("0", "9e29", "9" * 20, HUGE)
    ],
    *[(f"{SIMULATE} --host-kv-memory {value}", "--host-kv-memory") for value in MEMORIES],
    # Names that are no paths.
    *[(f"{base} --hardware {LONG}.toml", "cannot read") for base in (PLAN, ANALYZE, SIMULATE)],
    *[(f"{base} --hardware \x00.toml", "embedded null byte") for base in (PLAN, ANALYZE, SIMULATE)],
    # Papers.
    ("bench paper nope", "unknown paper 'nope'; choose one of gllm"),
    ("bench paper ../gllm", "unknown paper '../gllm'"),
    ("bench paper gllm --figure ", "has no figure '' here; choose one of"),
    ("bench paper gllm --seeds 0", "--seeds"),
    ("bench paper lecture --workers 0", "--workers"),
]


@pytest.mark.parametrize(("words", "says"), COMMANDS)
def test_commands(refused: Refused, words: str, says: str) -> None:
    refused(words.split(" "), says)


@pytest.mark.parametrize("base", [PLAN, ANALYZE, SIMULATE])
def test_a_model_whose_name_is_too_long(refused: Refused, base: str) -> None:
    refused([*base.split(), "--model", LONG], "File name too long", exit_code=3)


def test_files_that_would_be_read_for_ever(refused: Refused, tmp_path: Path) -> None:
    for name in ("pipe.toml", "pipe.json"):
        os.mkfifo(tmp_path / name)
    refused([*ANALYZE.split(), "--hardware", str(tmp_path / "pipe.toml")], "is not a regular file")
    refused(["simulate", "--profile", str(tmp_path / "pipe.json")], "is not a regular file")


HARDWARE = """[devices.mine]
source = "x"
link = "pcie4-x16"
memory_gib = {memory_gib}
memory_gb_per_s = {memory_gb_per_s}
tflops = {tflops}
"""
FIGURES = {"memory_gib": "24", "memory_gb_per_s": "300", "tflops": "120"}


@pytest.mark.parametrize("value", ["1e300", "1e13", HUGE, "nan", "inf", "0", "-1", "true", '"x"'])
@pytest.mark.parametrize("key", FIGURES)
def test_figures_of_hardware(refused: Refused, tmp_path: Path, key: str, value: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(HARDWARE.format(**FIGURES | {key: value}))
    line = refused([*ANALYZE.split(), "--hardware", str(path)], f"- at `$.{key}`")
    assert "mine.toml: devices.mine: Expected `float`" in line or "Number out of range" in line


def test_more_memory_than_can_be_simulated(command: Run, refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(HARDWARE.format(**FIGURES | {"memory_gib": "1e10"}))
    simulate = [*SIMULATE.split(), "--hardware", str(path)]
    refused(simulate, "more than can be simulated: give --num-blocks")
    assert command(*simulate, "--num-blocks", "99", "--requests", "2")[0] == 0


# Places in a profile, what is written there, and what the line says.
PROFILES = [
    ("settings", {}, "settings must have model, dtype, operators"),
    ("bits", 0, "weight_bits must be one of"),
    ("memory.kv_tokens", 10**15, "Expected `int` <= 268435456 - at `$.memory.kv_tokens`"),
    ("memory.kv_tokens", 0, "Expected `int` >= 1 - at `$.memory.kv_tokens`"),
    ("model.num_layers", 10**9, "num_layers must be 1 to"),
    ("model.num_layers", 0, "num_layers must be 1 to"),
    ("linear.seconds", [1e308, 1e308], "Expected `float` <= 30000000.0 - at `$.linear.seconds[0]`"),
    ("linear.seconds", [-1, 1], "Expected `float` > 0.0 - at `$.linear.seconds[0]`"),
    ("head.sizes", [1, 10**18], "Expected `int` <= 1125899906842624 - at `$.head.sizes[1]`"),
    ("head.sizes", [1, 10**400], "is not a profile"),
    ("schema", "nanoserve-profile/2", "is not a profile"),
]


@pytest.mark.parametrize(("place", "value", "says"), PROFILES)
def test_profiles(refused: Refused, tmp_path: Path, place: str, value: object, says: str) -> None:
    document = json.loads(msgspec.json.encode(made_up_profile()))
    *parents, key = place.split(".")
    part = document
    for parent in parents:
        part = part[parent]
    part[key] = value
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document))
    refused(["simulate", "--requests", "2", "--lengths", "20+3", "--profile", str(path)], says)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"schema": NaN}'])
def test_what_is_no_profile(refused: Refused, tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    refused(["simulate", "--profile", str(path)], "is not a profile")


@pytest.mark.parametrize("place", [".", "missing/profile.json", "x" * 300])
def test_profiles_that_cannot_be_written_are_known_before_measuring(
    refused: Refused, tmp_path: Path, place: str
) -> None:
    refused(["profile", "--json", str(tmp_path / place)], "cannot write", exit_code=1)


def test_pictures_of_papers_that_cannot_be_written_are_known_before_simulating(
    refused: Refused, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below", "x" * 300):
        refused(
            ["bench", "paper", "gllm", "--plot", str(tmp_path / place)],
            "cannot make the directory",
            exit_code=1,
        )


def test_a_config_with_more_experts_for_a_token_than_there_are(
    refused: Refused, tmp_path: Path
) -> None:
    config = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 64}
    config |= {
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config |= {"vocab_size": 99, "num_local_experts": 2, "num_experts_per_tok": 5}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    says = "num_experts_per_tok is 5, more than the 2 experts"
    refused(["analyze", "-m", str(path), "--hardware", "l4"], says, exit_code=3)
