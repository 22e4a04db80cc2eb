"""``plan``, ``analyze``, ``profile``, ``bench paper`` and simulate's later options against bad input: one line each."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.costs.profiles import made_up_profile

Run = Callable[..., tuple[int, str, str]]
PLAN = ["plan", "--model", "qwen3-0.6b", "--hardware", "l4", "--gpus", "1", "--lengths", "20+3", "--requests", "2"]
ANALYZE = ["analyze", "-m", "qwen3-0.6b", "--hardware", "l4", "--batch-sizes", "1"]
SIMULATE = ["simulate", "--model", "qwen3-0.6b", "--hardware", "l4", "--pp", "1", "--lengths", "20+3"]
HUGE = "9" * 400


def _refused(result: tuple[int, str, str], says: str, exit_code: int = 2) -> None:
    code, out, err = result
    assert (code, out) == (exit_code, ""), err
    assert says in err
    assert len(err.splitlines()) == 1
    assert "Traceback" not in err
    assert "unexpected" not in err


@pytest.mark.parametrize("value", ["0", "-1", "nan", "1000000000000", HUGE])
@pytest.mark.parametrize("flag", ["--requests", "--max-num-batched-tokens", "--max-num-seqs"])
def test_a_plans_counts_have_bounds(command: Run, flag: str, value: str) -> None:
    _refused(command(*PLAN, flag, value), f"Invalid value for '{flag}'")


@pytest.mark.parametrize("value", ["0", "9e29", "9" * 20, HUGE])
@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["profile"], "--threads"),
        (["bench", "operators"], "--threads"),
        (["bench", "throughput"], "--requests"),
        (["bench", "serve"], "--requests"),
    ],
)
def test_counts_of_measured_runs_have_bounds(command: Run, words: list[str], flag: str, value: str) -> None:
    _refused(command(*words, flag, value), f"Invalid value for '{flag}'")


@pytest.mark.parametrize("base", [PLAN, ANALYZE, SIMULATE])
def test_names_that_are_no_paths(command: Run, base: list[str]) -> None:
    _refused(command(*base, "--model", "x" * 5000), "File name too long", exit_code=3)
    _refused(command(*base, "--hardware", "x" * 5000 + ".toml"), "cannot read")
    _refused(command(*base, "--hardware", "\x00.toml"), "embedded null byte")


def test_files_that_would_be_read_for_ever(command: Run, tmp_path: Path) -> None:
    for name in ("pipe.toml", "pipe.json"):
        os.mkfifo(tmp_path / name)
    _refused(command(*ANALYZE, "--hardware", str(tmp_path / "pipe.toml")), "is not a regular file")
    _refused(command("simulate", "--profile", str(tmp_path / "pipe.json")), "is not a regular file")


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e400", "1e-300", "1e9", "1e300", HUGE])
def test_host_memory(command: Run, value: str) -> None:
    _refused(command(*SIMULATE, "--host-kv-memory", value), "--host-kv-memory")


@pytest.mark.parametrize("value", ["1e300", "1e13", HUGE, "nan", "inf", "0", "-1", "true", '"x"'])
@pytest.mark.parametrize("key", ["memory_gib", "memory_gb_per_s", "tflops"])
def test_figures_of_hardware(command: Run, tmp_path: Path, key: str, value: str) -> None:
    path = tmp_path / "mine.toml"
    keys = {"memory_gib": "24", "memory_gb_per_s": "300", "tflops": "120", key: value}
    lines = [
        "[devices.mine]",
        'source = "x"',
        'link = "pcie4-x16"',
        *(f"{name} = {text}" for name, text in keys.items()),
    ]
    path.write_text("\n".join(lines))
    code, out, err = command(*ANALYZE, "--hardware", str(path))
    _refused((code, out, err), f"- at `$.{key}`")
    assert "mine.toml: devices.mine: Expected `float`" in err or "Number out of range" in err


def test_more_memory_than_can_be_simulated(command: Run, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[devices.mine]\nsource="x"\nlink="pcie4-x16"\nmemory_gib=1e10\nmemory_gb_per_s=300\ntflops=120\n')
    _refused(command(*SIMULATE, "--hardware", str(path)), "more than can be simulated: give --num-blocks")
    assert command(*SIMULATE, "--hardware", str(path), "--num-blocks", "99", "--requests", "2")[0] == 0


@pytest.mark.parametrize(
    ("keys", "value", "says"),
    [
        (("settings",), {}, "settings must have model, dtype, operators"),
        (("bits",), 0, "weight_bits must be one of"),
        (("memory", "kv_tokens"), 10**15, "Expected `int` <= 268435456 - at `$.memory.kv_tokens`"),
        (("memory", "kv_tokens"), 0, "Expected `int` >= 1 - at `$.memory.kv_tokens`"),
        (("model", "num_layers"), 10**9, "num_layers must be 1 to"),
        (("model", "num_layers"), 0, "num_layers must be 1 to"),
        (("linear", "seconds"), [1e308, 1e308], "Expected `float` <= 30000000.0 - at `$.linear.seconds[0]`"),
        (("linear", "seconds"), [-1, 1], "Expected `float` > 0.0 - at `$.linear.seconds[0]`"),
        (("head", "sizes"), [1, 10**18], "Expected `int` <= 1125899906842624 - at `$.head.sizes[1]`"),
        (("head", "sizes"), [1, 10**400], "is not a profile"),
        (("schema",), "nanoserve-profile/3", "is not a profile"),
    ],
)
def test_profiles(command: Run, tmp_path: Path, keys: tuple[str, ...], value: object, says: str) -> None:
    document = json.loads(msgspec.json.encode(made_up_profile()))
    place = document
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document))
    _refused(command("simulate", "--requests", "2", "--lengths", "20+3", "--profile", str(path)), says)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"schema": NaN}'])
def test_what_is_no_profile(command: Run, tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    _refused(command("simulate", "--profile", str(path)), "is not a profile")


@pytest.mark.parametrize("place", [".", "missing/profile.json", "x" * 300])
def test_profiles_that_cannot_be_written_are_known_before_measuring(command: Run, tmp_path: Path, place: str) -> None:
    _refused(command("profile", "--json", str(tmp_path / place)), "cannot write", exit_code=1)


def test_pictures_of_papers_that_cannot_be_written_are_known_before_simulating(command: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below", "x" * 300):
        _refused(command("bench", "paper", "gllm", "--plot", str(tmp_path / place)), "cannot make the directory", 1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope"], "unknown paper 'nope'; choose one of gllm"),
        (["../gllm"], "unknown paper '../gllm'"),
        (["gllm", "--figure", ""], "has no figure '' here; choose one of"),
        (["gllm", "--seeds", "0"], "--seeds"),
        (["lecture", "--workers", "0"], "--workers"),
    ],
)
def test_papers(command: Run, arguments: list[str], says: str) -> None:
    _refused(command("bench", "paper", *arguments), says)


def test_a_config_with_more_experts_for_a_token_than_there_are(command: Run, tmp_path: Path) -> None:
    config = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 64}
    config |= {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"vocab_size": 99, "num_local_experts": 2, "num_experts_per_tok": 5}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    result = command("analyze", "-m", str(path), "--hardware", "l4")
    _refused(result, "num_experts_per_tok is 5, more than the 2 experts", exit_code=3)
