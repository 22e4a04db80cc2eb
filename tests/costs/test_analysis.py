"""``nanoserve analyze``: its rows against the model they come from, and the command itself."""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nanoserve.commands.main import main
from nanoserve.config.published_shapes import load_shape
from nanoserve.costs.analysis import BLOCK_SIZE, Analysis
from nanoserve.costs.counts import Precision
from nanoserve.costs.hardware import load_machine
from nanoserve.costs.step_costs import StepCosts
from nanoserve.layout import ParallelLayout

Run = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def analyze(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``nanoserve analyze ARGUMENTS`` here; returns exit code, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main(["analyze", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def analysis_of(model: str, machine: str, **degrees: int) -> Analysis:
    return Analysis(
        StepCosts(load_shape(model), load_machine(machine), ParallelLayout(**degrees)), 1000, 200
    )


@pytest.mark.parametrize("model", ["deepseek-v3", "deepseek-v2-lite", "gemma-3-27b", "gpt-oss-20b"])
def test_a_step_of_every_kind_of_model_is_in_its_rows(model: str) -> None:
    analysis = Analysis(
        StepCosts(
            load_shape(model),
            load_machine("h200"),
            ParallelLayout(tensor_parallel=8),
            Precision.of(8),
        ),
        1000,
        200,
    )
    for work in (analysis.prefill_work(), analysis.decode_work(50)):
        rows = analysis.operator_rows("any", work)
        assert sum(row.seconds for row in rows) == pytest.approx(analysis.costs.step_seconds(work))


@pytest.mark.parametrize(
    ("model", "full", "windowed"), [("gemma-3-27b", 1, 6 * 66), ("gpt-oss-20b", 1, 10)]
)
@pytest.mark.parametrize("tokens", [2048, 32768])
def test_how_many_sequences_fit_by_hand(model: str, full: int, windowed: int, tokens: int) -> None:
    """Blocks of full groups grow, those of windows do not: 1024 positions lie in 66 blocks at most,
    128 in 10."""
    costs = StepCosts(load_shape(model), load_machine("h200"))
    analysis = Analysis(costs, tokens - 16, 16)
    blocks = costs.memory.kv_bytes(0) // costs.counts.block_bytes(BLOCK_SIZE, 0)
    assert analysis.largest_batch == blocks // (full * tokens // BLOCK_SIZE + windowed)


def test_the_parts_of_a_step_make_the_whole() -> None:
    analysis = analysis_of("qwen3-30b-a3b", "gllm-l20", tensor_parallel=2, pipeline_parallel=2)
    for work in (analysis.prefill_work(), analysis.decode_work(50)):
        rows = analysis.operator_rows("any", work)
        assert sum(row.seconds for row in rows) == pytest.approx(analysis.costs.step_seconds(work))
        assert sum(row.share for row in rows) == pytest.approx(1)
    names = [row.operator for row in rows]
    assert names == [
        *("embedding", "qkv", "attention", "output", "router", "experts", "head"),
        *("all-reduce", "send", "kernel gaps", "host"),
    ]


def test_prompts_are_bound_by_computing_and_decoding_by_memory() -> None:
    analysis = analysis_of("llama-3.1-8b", "h100")
    bounds = {
        (row.phase, row.operator): row.bound
        for row in (
            *analysis.operator_rows("prefill", analysis.prefill_work()),
            *analysis.operator_rows("decode", analysis.decode_work(8)),
        )
    }
    assert {bounds["prefill", name] for name in ("qkv", "attention", "gate_up", "down")} == {
        "compute"
    }
    assert {bounds["decode", name] for name in ("qkv", "attention", "gate_up", "down", "head")} == {
        "memory"
    }


@pytest.mark.parametrize("model", ["gemma-4-e2b", "deepseek-v2-lite", "qwen3-30b-a3b"])
def test_operators_of_every_kind_have_a_place_in_the_table(model: str) -> None:
    analysis = analysis_of(model, "h200")
    shown = [row.operator for row in analysis.operator_rows("prefill", analysis.prefill_work())]
    assert len(shown) == len(set(shown)) and {"qkv", "attention", "output"} < {*shown}


def test_windows_leave_room_for_more_sequences() -> None:
    """5.3 times as many of 32k for Gemma 3 27B, whose five layers of six keep 1024 tokens."""
    costs = StepCosts(load_shape("gemma-3-27b"), load_machine("h200"))
    analysis = Analysis(costs, 32768 - 16, 16)
    full = analysis.kv_tokens / 32768
    assert analysis.largest_batch == pytest.approx(5.3 * full, rel=0.15)


def test_throughput_grows_and_latency_too() -> None:
    analysis = analysis_of("llama-3.1-8b", "h100", pipeline_parallel=2)
    batches = analysis.default_batches()
    rows = [analysis.batch_row(batch) for batch in batches]
    assert batches[:3] == [1, 2, 4] and analysis.largest_batch in batches
    assert [row.fits for row in rows] == [batch <= analysis.largest_batch for batch in batches]
    assert not rows[-1].fits
    for before, after in itertools.pairwise(rows):
        assert after.tpot >= before.tpot
        assert (
            after.tokens_per_second
            > before.tokens_per_second
            > before.tokens_per_second_with_prefill
        )


def test_a_pipeline_that_is_full_gives_a_token_a_round() -> None:
    analysis = analysis_of("qwen2.5-32b", "gllm-l20", pipeline_parallel=4)
    costs, work = analysis.costs, analysis.decode_work(400)
    assert (work.decodes, work.decode_context) == (100, 100 * 1100)
    pace = max(
        costs.stage_seconds(work, stage) + costs.send_seconds(work, stage) for stage in range(4)
    )
    assert analysis.batch_row(400).tpot == max(4 * pace, costs.step_seconds(work))
    alone = analysis.decode_work(1)
    assert analysis.batch_row(1).tpot == costs.step_seconds(alone)


def test_tables_json_and_a_picture(analyze: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report, chart = tmp_path / "report.json", tmp_path / "chart.png"
    where = ("-m", "qwen2.5-14b", "--hardware", "gllm-l20", "--tp", 2, "--pp", 2)
    code, out, _ = analyze(
        *where, "--batch-sizes", "8,1", "--lengths", "100+9", "--json", report, "--plot", chart
    )
    assert code == 0
    assert "qwen2.5-14b on gllm-l20, layout T2P2, 100 + 9 tokens" in out
    assert "prefill of 100 tokens" in out and "decode of 8 sequences" in out
    found = json.loads(report.read_text())
    assert (found["kind"], found["complete"]) == ("analyze", True)
    assert [row["batch"] for row in found["rows"]] == [1, 8]
    assert {"qkv", "all-reduce", "send"} <= {row["operator"] for row in found["operators"]}
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_quantized_weights_are_counted(analyze: Run, tmp_path: Path) -> None:
    """The bytes of the matrices in a decode step, in 4.5 bits a weight, and of the head, in
    6.5625."""
    report, model = tmp_path / "found.json", load_shape("qwen3-0.6b")
    where = ("-m", "qwen3-0.6b", "--hardware", "l4", "--batch-sizes", "1")
    code, out, _ = analyze(*where, "--quantization", "int4", "--json", report)
    assert code == 0 and out.startswith("qwen3-0.6b in int4 on l4")
    found = json.loads(report.read_text())
    assert found["settings"]["quantization"] == "int4"
    sizes = {
        row["operator"]: row["bytes"] for row in found["operators"] if row["phase"] == "decode"
    }
    hidden, inner = model.hidden_size, model.intermediate_size
    assert sizes["down"] == model.num_layers * (hidden * inner * 4.5 / 8 + 2 * (hidden + inner))
    assert sizes["head"] == model.vocab_size * hidden * 6.5625 / 8 + 2 * (hidden + model.vocab_size)


def test_a_batch_that_no_memory_holds_is_marked(analyze: Run) -> None:
    code, out, _ = analyze("-m", "qwen3-8b", "--hardware", "a10", "--batch-sizes", "100000")
    assert code == 0
    assert out.split("fits")[-1].count("no") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-m", "gpt-9", "--hardware", "h100"), "unknown model 'gpt-9'"),
        (("-m", "qwen3-8b", "--hardware", "h900"), "unknown hardware 'h900'"),
        (("-m", "qwen3-8b", "--hardware", "none.toml"), "cannot read none.toml"),
        (("-m", "llama-2-70b", "--hardware", "a10"), "what would fit: 7 devices (layout P7)"),
        (("-m", "qwen3-8b", "--hardware", "h100", "--tp", "5"), "does not divide 32 query heads"),
        (
            ("-m", "qwen3-8b", "--hardware", "h100", "--tp", "16"),
            "does not divide|has 8 devices and no network",
        ),
        (("-m", "qwen3-8b", "--hardware", "h100", "--pp", "99"), "at most 36"),
        (
            ("-m", "qwen3-8b", "--hardware", "h100", "--batch-sizes", "0"),
            "--batch-sizes takes whole numbers",
        ),
        (
            ("-m", "qwen3-8b", "--hardware", "h100", "--lengths", "0+9"),
            "--lengths takes whole numbers",
        ),
        (
            ("-m", "qwen3-8b", "--hardware", "h100", "--weight-bits", "3"),
            "weight_bits must be one of 4, 8, 16, 32",
        ),
        (("--lengths", "5+5,6+6"), "--lengths takes one length here"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_exit_code_2(
    analyze: Run, arguments: tuple[str, ...], message: str
) -> None:
    code, _, err = analyze(*arguments)
    assert code == 2
    assert any(part in err for part in message.split("|")), err
    assert err.count("\n") == 1


def test_analyzing_needs_no_torch() -> None:
    program = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from nanoserve.commands.main import main\n"
        "sys.exit(main(['analyze', '-m', 'qwen3-0.6b', '--hardware', 't4']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "T4 data sheet" in done.stdout
