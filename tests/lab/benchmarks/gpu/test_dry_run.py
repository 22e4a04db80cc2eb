"""The command on the CPU, with tiny shapes: every case of every part runs and gives what its table
needs.

The correctness part runs as the command does it, in a process of its own; the other parts are
measured here.
"""

import json
import math
from pathlib import Path
from unittest.mock import Mock

import pytest

from nanoserve.commands.main import main
from nanoserve.errors import UsageError
from nanoserve.lab.benchmarks.gpu import engine
from nanoserve.lab.benchmarks.gpu.device import GpuBench
from nanoserve.lab.benchmarks.gpu.kernels import part_cases
from nanoserve.lab.benchmarks.gpu.markdown import to_markdown
from nanoserve.lab.benchmarks.gpu.running import PartRun, measure_part, read_results
from tests.executor.test_devices import pretend

EXPECTED_ABSENT = {"qwen3-0.6b: preset, transformers"}


@pytest.mark.parametrize("part", ["kernels", "engine"])
def test_every_case_of_a_part_runs(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for steps in ("_SETTLING_STEPS", "_TIMED_STEPS", "_TRACED_STEPS"):
        monkeypatch.setattr(engine, steps, 3)
    pipe = Mock()
    run = PartRun(part, dry_run=True, deadline=math.inf, rows=[], pipe=pipe)
    assert measure_part(run)
    sent = [call.args[0] for call in pipe.send.call_args_list]
    assert [value for name, value in sent if name == "row"] == run.rows
    told = dict(sent)
    assert "dry run" in told["device"]["name"]
    assert told["limits"].keys() == {"copy_gb_per_s", "matmul_tflops"}
    problems = {row["case"]: row for row in run.rows if "error" in row or "skipped" in row}
    assert problems.keys() <= EXPECTED_ABSENT, problems
    presets = {row["temperature"]: row for row in run.rows if "temperature" in row}
    assert list(presets) == ([] if part == "kernels" else [0.0, 0.6])
    for row in presets.values():
        assert row["of_floor"] == row["output_tokens_per_s"] / row["floor_output_tokens_per_s"]
    for row in run.rows:
        for name, difference in row.get("differences", {}).items():
            assert difference < 1e-5, (row["case"], name)


def test_the_command_checks_and_says_that_it_is_a_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "gpu", "--out", str(tmp_path), "--dry-run", "--part", "correctness"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("**Dry run")
    assert {path.name for path in tmp_path.iterdir()} >= {"correctness.json"}
    (together,) = tmp_path.glob("dry-run-*.json")
    results = json.loads(together.read_text())
    assert results["dry_run"] is True
    assert list(results["parts"]) == ["correctness"]
    assert results["parts"]["correctness"]["complete"]
    assert results["parts"]["correctness"]["settings"] == {"dry_run": True}
    rows = results["parts"]["correctness"]["rows"]
    assert all(row["ok"] for row in rows)
    assert rows[0]["check"] == "graph against eager"  # ahead of what may use up the budget
    checks = {row["check"] for row in rows}
    assert checks == {
        *(
            "paged_attention",
            "cache_write",
            "rotate_and_write",
            "rotate_and_write, neighbours",
            "fused_linear",
            "copy_blocks",
            "gather_blocks and scatter_blocks",
            "linear",
            "add_linear",
        ),
        *(
            "packed_linear",
            "sparse_packed_experts",
            "sampling",
            "sparse_experts",
            "causal_convolution",
            "gated_delta_rule",
            "state_space_dual",
            "selective_scan",
            "family",
            "graph against eager",
            "overlapped against plain",
        ),
    }
    assert main(["bench", "gpu", "--table", str(together)]) == 0
    assert capsys.readouterr().out == printed == to_markdown(read_results(tmp_path))
    assert "| missed" not in printed


def test_what_has_to_be_compiled_for_comes_behind_what_takes_a_moment() -> None:
    kinds = list(
        dict.fromkeys(case.name.split()[0] for case in part_cases(GpuBench.open(dry_run=True), []))
    )
    moves = ["cache_write", "copy_blocks", "gather_blocks", "scatter_blocks"]
    assert kinds == [*moves, "prefill", "decode", "mixed", "product"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "x"], "bench gpu: no NVIDIA GPU can be used here"),
        (["--out", "x", "--tune"], "or try it on the CPU with --dry-run"),
        (["--out", "x", "--tune", "--dry-run"], "--tune measures on a GPU"),
        (["--dry-run"], "--out DIR is needed"),
        (
            ["--out", "x", "--dry-run", "--part", "kernel"],
            "--part 'kernel' is not one of correctness, kernels, engine",
        ),
        (["--out", "x", "--dry-run", "--budget", "kernels"], "--budget takes PART=SECONDS"),
        (["--table", "nothing.json"], "cannot read nothing.json"),
        (["--table", "."], "holds none of correctness.json"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    words: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "gpu", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_gpu_that_is_too_old_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, gpus=1, capability=(7, 5))
    with pytest.raises(
        UsageError, match=r"^bench gpu: Tesla V100 is too old, .* 7\.5 and .*; try it .* --dry-run$"
    ):
        GpuBench.open(dry_run=False)
