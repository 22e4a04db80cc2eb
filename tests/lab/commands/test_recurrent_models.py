"""``nanoserve analyze``, ``plan``, ``simulate`` and ``explain`` with a model that has recurrent
states: Qwen3-Next in its published shape."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanoserve.config.published_shapes import load_shape
from nanoserve.costs.hardware import load_machine
from nanoserve.costs.step_costs import StepCosts
from nanoserve.engine.assembly import build_engine
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import UsageError
from nanoserve.lab.benchmarks.policies.engines import open_workers
from nanoserve.lab.benchmarks.profiling import measure_profile
from nanoserve.layout import ParallelLayout
from nanoserve.models.hub import resolve_model
from tests.costs.conftest import qwen3_next
from tests.executor.small_model import local_executor, small_decoder, stateful_config

Run = Callable[..., tuple[int, str, str]]
MODEL = "qwen3-next-80b-a3b"
STAGES = StepCosts(qwen3_next(), load_machine("h200"), ParallelLayout(pipeline_parallel=2))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"policy": "apex"}, "--policy apex"),
        ({"host_kv_memory": 2**30}, "--host-kv-memory"),
        ({"speculate": "ngram"}, "--speculate ngram"),
        ({"decode_layout": ParallelLayout(tensor_parallel=2)}, "--decode-parallel"),
    ],
)
def test_an_engine_refuses_by_name_what_does_not_go_with_states(
    settings: dict[str, Any], named: str
) -> None:
    config = EngineConfig(**{"pipeline_parallel": 2} | settings)
    with pytest.raises(UsageError, match=f"^{named}: layers of lfm2 have recurrent states"):
        build_engine(resolve_model("dummy:lfm2-350m"), config)


def test_benchmarks_of_two_layouts_refuse_states_too() -> None:
    config = EngineConfig(pipeline_parallel=2, decode_layout=ParallelLayout(tensor_parallel=2))
    with pytest.raises(UsageError, match="--decode-parallel: layers of qwen3_next have recurrent"):
        open_workers(ExitStack(), "P2 -> T2", resolve_model(None), config, qwen3_next(), None)


def test_parts_of_steps_with_states_are_not_profiled() -> None:
    model = stateful_config()
    executor = local_executor(small_decoder(model), num_blocks=8, block_size=4, state_slots=2)
    built = SimpleNamespace(config=EngineConfig(), model=model)
    llm: Any = SimpleNamespace(engine=SimpleNamespace(executor=executor), built=built)
    processor: Any = None  # nothing is measured
    with pytest.raises(UsageError, match="nanoserve profile: layers of llama have recurrent"):
        measure_profile(llm, processor, print)


def test_analyze_says_how_much_state_a_sequence_has(command: Run, tmp_path: Path) -> None:
    report = tmp_path / "found.json"
    code, out, _ = command(
        *("analyze", "-m", MODEL, "--hardware", "h200", "--tp", "2", "--lengths", "1008+16"),
        *("--batch-sizes", "1,64", "--json", str(report)),
    )
    assert code == 0
    # two devices have 16 of 32 value heads each
    assert "GiB for keys, values and states: 36.8 MiB of state in a sequence" in out
    found = json.loads(report.read_text())
    rows = {row["operator"]: row for row in found["operators"] if row["phase"] == "decode"}
    activations = 2 * 36 * 64 * (4096 + 2048)  # q, k, v of one token, and what is read for it
    assert rows["state"]["bytes"] == 2 * 64 * 73.6875 * 2**20 / 2 + activations
    memory = StepCosts(qwen3_next(), load_machine("h200"), ParallelLayout(tensor_parallel=2)).memory
    sequence = 73.6875 * 2**20 / 2 + 1024 * 24576 / 2
    assert found["rows"][1]["kv_share"] == pytest.approx(64 * sequence / memory.kv_bytes(0))


@pytest.mark.parametrize(("limit", "states"), [([], None), (["--max-num-seqs", "20"], 20)])
def test_no_more_sequences_run_than_have_a_place_for_their_states(
    command: Run, tmp_path: Path, limit: list[str], states: int | None
) -> None:
    """Half of what weights leave is for states, unless fewer sequences may run."""
    report = tmp_path / "found.json"
    code, out, _ = command(
        *("simulate", "-m", MODEL, "--hardware", "h200", "--pp", "2", "--requests", "60"),
        *("--lengths", "40+20", *limit, "--json", str(report)),
    )
    assert code == 0
    room = min(STAGES.memory.kv_bytes(stage, 2048) for stage in range(2))
    expected = states or room // 2 // (18 * (2 * 2**20 + 48 * 2**10))
    assert f"states of {expected:,.0f} sequences" in out
    settings = json.loads(report.read_text())["settings"]
    assert settings["states"] == expected
    assert settings["kv_blocks"] == STAGES.memory.kv_blocks(16, 2048, int(expected))


def test_explain_simulates_no_more_sequences_either(command: Run, tmp_path: Path) -> None:
    """Beside the weights, this device has room for five states, so two of three sequences run."""
    counts = StepCosts(qwen3_next(), load_machine("h200"), ParallelLayout(tensor_parallel=2)).counts
    usable = counts.stage_weight_bytes(0) + 5 * counts.state_bytes(0)
    hardware, report = tmp_path / "small.toml", tmp_path / "found.json"
    hardware.write_text(
        f"[devices.small]\nmemory_gib = {usable / 0.9 / 2**30}\nmemory_gb_per_s = 4800\n"
        'tflops = 989\nlink = "nvlink4"\nsource = "made up for this test"\n'
    )
    code, _, err = command(
        *("explain", "--simulate", "-m", MODEL, "--hardware", str(hardware), "--tp", "2"),
        *("--lengths", "40+4", "--requests", "3", "--policy", "sarathi", "--json", str(report)),
    )
    assert code == 0, err
    steps = json.loads(report.read_text())["runs"][0]["steps"]
    assert steps[0]["load"]["free_slots"] == 2
    assert max(len(step["rows"]) for step in steps) == 2


def test_plan_shows_how_many_sequences_have_a_place(command: Run, tmp_path: Path) -> None:
    report = tmp_path / "found.json"
    code, out, _ = command(
        *("plan", "-m", MODEL, "--hardware", "h200", "--gpus", "2", "--requests", "20"),
        *("--lengths", "60+6", "--policy", "sarathi", "--json", str(report)),
    )
    assert code == 0
    found = json.loads(report.read_text())
    assert {(row["layout"], row["states"]) for row in found["rows"]} == {("P2", 20), ("T2", 20)}
    assert "states" in out and "stay on their devices" in out


def test_without_attention_only_states_take_memory(command: Run, tmp_path: Path) -> None:
    """Mamba-2 of 780 million: in 48 layers, 48 heads of 128 x 64 numbers in 32 bits and 3 inputs of
    3,328 channels in 16."""
    state = 48 * (48 * 128 * 64 * 4 + 3 * 3328 * 2)
    model = ("-m", "mamba2-780m", "--hardware", "h200")
    code, out, err = command("analyze", *model, "--lengths", "1008+16", "--batch-sizes", "1")
    assert code == 0, err
    assert f"{state / 2**20:.1f} MiB of state in a sequence" in out
    report = tmp_path / "found.json"
    small = ("--requests", "20", "--lengths", "60+6", "--policy", "sarathi", "--json", str(report))
    code, out, err = command("simulate", *model, "--pp", "1", *small, "--max-num-seqs", "4000")
    assert code == 0, err
    memory = StepCosts(load_shape("mamba2-780m"), load_machine("h200")).memory
    settings = json.loads(report.read_text())["settings"]
    assert settings["states"] == min(4000, memory.kv_bytes(0, 2048) // state)
    assert settings["kv_blocks"] == 2**16
    code, out, err = command("plan", *model, "--gpus", "2", *small)
    assert code == 0, err
    layouts = {row["layout"]: row["states"] for row in json.loads(report.read_text())["rows"]}
    assert layouts == {"D2": 20, "P2": 20, "T2": 20}
    code, out, err = command("explain", "--simulate", *model, *small[:-2])
    assert code == 0, err
    assert "free_slots" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--prefill-parallel", "P2", "--decode-parallel", "T2"],
            "--prefill-parallel: the recurrent states of qwen3-next-80b-a3b stay on their devices",
        ),
        (
            ["--host-kv-memory", "8GiB"],
            "--host-kv-memory: the recurrent states of qwen3-next-80b-a3b",
        ),
        (["--speculate", "0.8,0.7"], "--speculate: draft tokens cannot be taken back from the"),
        (["--num-blocks", "10000000"], "blocks of 16 tokens fit beside the weights and 3 states"),
    ],
)
def test_what_states_do_not_do_is_refused_in_one_line(
    refused: Callable[..., str], words: list[str], says: str
) -> None:
    named = ["simulate", "-m", MODEL, "--hardware", "h200", "--requests", "3"]
    stages = ["--max-num-seqs", "3"]
    if "--prefill-parallel" not in words and "--pp" not in words:
        stages += ["--pp", "2"]
    refused([*named, *stages, *words], says)
