"""Results as tables, and targets held against them."""

from typing import Any

import pytest

from nanoserve.lab.benchmarks.gpu.markdown import TARGETS, outcomes, to_markdown, verdict

SPREAD = {"us": 100.0, "low": 90.0, "high": 120.0, "n": 9}


def kernel(case: str, **fields: Any) -> dict[str, Any]:
    shares = {"of_copy_bandwidth": 0.9, "of_matmul_peak": 0.5, "of_floor": 0.9}
    return {
        "case": case,
        "us": 100.0,
        **shares,
        "routes": {"nanoserve": SPREAD},
        "slower": {},
        **fields,
    }


def results(*, dry_run: bool = False, **rows: list[dict[str, Any]]) -> dict[str, Any]:
    limits = {"copy_gb_per_s": 4000.0, "matmul_tflops": 700.0}
    parts = {
        part: {
            "rows": some,
            "complete": part != "engine",
            "command": "nanoserve bench gpu --out x",
            "limits": limits,
        }
        for part, some in rows.items()
    }
    return {
        "schema": "nanoserve-gpu/1",
        "dry_run": dry_run,
        "device": {"name": "An invented GPU"},
        "date": "2026-01-01",
        "commit": "abc",
        "versions": {"torch": "2.11.0"},
        "parts": parts,
    }


DECODE_4 = "decode 64 x 4096, GQA 4, head_dim 128"
DECODE_8 = "decode 64 x 4096, GQA 8, head_dim 128"
PREFILL = "prefill 8192, GQA 4, head_dim 128"


def verdicts(document: dict[str, Any]) -> dict[str, tuple[str, float | None]]:
    return {one["target"]: (one["verdict"], one["share"]) for one in outcomes(document)}


def test_targets_are_met_missed_or_not_measured() -> None:
    found = verdicts(
        results(
            kernels=[
                kernel(DECODE_4, of_copy_bandwidth=0.935),
                kernel(DECODE_8, of_copy_bandwidth=0.425),
                kernel(PREFILL, of_matmul_peak=0.55, slower={"SDPA flash": 0.9}),
            ],
            engine=[
                {
                    "case": "qwen3-0.6b: preset",
                    "output_tokens_per_s": 10_000.0,
                    "floor_output_tokens_per_s": 20_000.0,
                    "of_floor": 0.5,
                },
                {
                    "case": "qwen3-0.6b: preset, temperature 0.6",
                    "output_tokens_per_s": 9_000.0,
                    "floor_output_tokens_per_s": 20_000.0,
                    "of_floor": 0.45,
                },
                {
                    "case": "qwen3-0.6b: preset, transformers",
                    "output_tokens_per_s": 2000.0,
                    "cut": False,
                    "attention": "paged|sdpa",
                },
                {"case": "qwen3-0.6b: steps of batch 1", "idle_between_steps": 0.1},
                {"case": "llama-3.1-8b: decode, batch 1", "error": "out of memory"},
            ],
        )
    )
    assert len(found) == len(TARGETS)
    assert found[f"{DECODE_4.replace('decode', 'decode attention,')}: share of copy bandwidth"] == (
        "met",
        pytest.approx(1.1),
    )
    assert found[f"{DECODE_8.replace('decode', 'decode attention,')}: share of copy bandwidth"] == (
        "missed",
        pytest.approx(0.5),
    )
    assert (
        found["prefill attention, 8192 tokens, head_dim 128: share of the matmul peak"][0] == "met"
    )
    assert (
        found["prefill attention, 8192 tokens: time of SDPA's flash back end over ours"][0]
        == "missed"
    )
    assert found["Llama-3.1-8B, decode at batch 1: share of the bandwidth floor"] == (
        "not measured",
        None,
    )
    assert found[
        "256-request preset, Qwen3-0.6B: output tokens/s over transformers' continuous batching"
    ] == (
        "met",
        pytest.approx(1.25),
    )
    sampled = "256-request preset, Qwen3-0.6B, temperature 0.6: share of the preset's floor"
    assert found[sampled] == ("missed", pytest.approx(0.45 / 0.75))
    over_greedy = "256-request preset, Qwen3-0.6B: output tokens/s at temperature 0.6 over greedy"
    assert found[over_greedy] == ("missed", pytest.approx(0.9 / 0.97))
    host = "host overhead, Qwen3-0.6B, batch 1: device idle between two steps, share of a step"
    assert found[host] == ("missed", pytest.approx(0.5))


def test_a_dry_run_decides_no_target() -> None:
    found = verdicts(results(dry_run=True, kernels=[kernel(DECODE_4)]))
    assert set(found.values()) == {("not measured", None)}


def test_a_row_that_failed_is_shown_with_its_reason() -> None:
    text = to_markdown(
        results(
            correctness=[
                {
                    "case": "copy_blocks, float16",
                    "check": "copy_blocks",
                    "ok": True,
                    "tolerance": 0.0,
                },
                {"case": "paged_attention, decode", "error": "ValueError: no | such thing"},
                {
                    "case": "cache_write, float16",
                    "check": "cache_write",
                    "ok": False,
                    "unwanted_nans": 3,
                },
            ],
            kernels=[
                kernel(
                    DECODE_4,
                    slower={"flex_attention": 1.25},
                    absent={"FlashInfer": "is not importable"},
                ),
                {"case": PREFILL, "skipped": "the time budget was spent"},
            ],
            engine=[
                {"case": "qwen3-0.6b: decode, batch 1", "tokens_per_s": 512.25, "of_floor": 0.5},
                {"case": "llama-3.1-8b: decode, batch 1", "error": "out of memory"},
                {
                    "case": "qwen3-0.6b: preset, temperature 0.6",
                    "output_tokens_per_s": 9_000.0,
                    "floor_output_tokens_per_s": 36_000.0,
                    "of_floor": 0.25,
                    "run_seconds": 16.0,
                },
            ],
        )
    )
    assert "| qwen3-0.6b: preset, temperature 0.6 | 9,000 | 36,000 | 25% | 16.0 |" in text
    assert "| paged_attention | 0 | 1 | 0 |" in text
    assert "* paged_attention, decode: ValueError: no | such thing" in text
    assert "* cache_write, float16: unwanted nans 3" in text
    assert f"| {DECODE_4} | 100.0 (90.0-120.0) | 90% | 50% | 90% | 1.25 |" in text
    assert f"| {PREFILL} | skipped: the time budget was spent |" in text
    assert "* FlashInfer: is not importable" in text
    assert "copy 4,000 GB/s, matmul 700.0 TFLOP/s" in text
    assert "| qwen3-0.6b: decode, batch 1 | 512.2 | 50% |" in text
    assert "| llama-3.1-8b: decode, batch 1 | error: out of memory |  |" in text
    assert "Interrupted, and not complete: engine." in text
    assert "which this is not" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith(f"| {DECODE_4}")}
    assert len(widths) == 1


def test_what_the_budget_cut_off_is_told() -> None:
    why = "cut off after 20 s, as the time budget was spent"
    rows = [
        {"case": PREFILL, "skipped": why},
        {"case": DECODE_4, "skipped": "the time budget was spent"},
    ]
    assert f"| {PREFILL} | skipped: {why} |" in to_markdown(results(kernels=rows))
    text = to_markdown(results(correctness=rows))
    assert f"\n* {PREFILL}: {why}\n" in text
    assert f"* {DECODE_4}" not in text


def test_no_share_above_the_floor_is_shown() -> None:
    """Attention only reads, so it may beat a copy of as many bytes: its share of the copy's
    bandwidth stays."""
    faster = kernel(DECODE_4, of_copy_bandwidth=1.04, of_matmul_peak=0.1, of_floor=1.04)
    step = {"case": "qwen3-0.6b: decode, batch 1", "tokens_per_s": 512.25, "of_floor": 1.01}
    text = to_markdown(results(kernels=[faster], engine=[step]))
    assert f"| {DECODE_4} | 100.0 (90.0-120.0) | 104% | 10% |  |" in text
    assert "| qwen3-0.6b: decode, batch 1 | 512.2 |  |" in text
    assert f"so that no floor is known: {DECODE_4}" in text


def test_the_verdict_counts_checks_and_targets() -> None:
    checks = [
        {"case": "a", "ok": True},
        {"case": "b", "ok": False},
        {"case": "c", "skipped": "no time"},
    ]
    assert (
        verdict(results(correctness=checks)) == "1 of 2 checks are right; no target was measured."
    )
    # 90 % of the 85 % that are wanted
    measured = verdict(results(correctness=checks[:1], kernels=[kernel(DECODE_4)]))
    assert (
        measured
        == "1 of 1 checks are right; 1 of 1 measured targets are met, at 1.06 of what was wanted."
    )
