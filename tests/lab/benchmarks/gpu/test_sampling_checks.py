"""A sampler that differs from the CPU's is found, and every setting makes a difference."""

from typing import Any

import pytest
import torch

from nanoserve.executor.sampling.sampler import Sampled, sample
from nanoserve.lab.benchmarks.gpu.correctness import (
    SAMPLED_ROWS,
    SETTINGS,
    draw,
    random_logits,
    sampling_cases,
)
from nanoserve.lab.benchmarks.gpu.device import GpuBench
from nanoserve.request import SamplingParams


def test_every_case_compares_all_of_its_rows() -> None:
    cases = list(sampling_cases(GpuBench.open(dry_run=True)))
    assert [case.name for case in cases[:2]] == ["sampling, greedy", "sampling, temperature"]
    fields = [case.measure() for case in cases]
    assert all(row["ok"] for row in fields)
    each_alone, in_one_batch, from_16_bits = len(SETTINGS), len(SETTINGS), 2
    assert [row["rows"] for row in fields] == [SAMPLED_ROWS] * each_alone + [
        SAMPLED_ROWS * in_one_batch,
        SAMPLED_ROWS * from_16_bits,
    ]


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "temperature"])
def test_every_setting_changes_what_is_drawn(name: str) -> None:
    logits = random_logits(SAMPLED_ROWS)
    without = (
        SamplingParams(temperature=0.0) if name == "penalties, greedy" else SETTINGS["temperature"]
    )
    tokens, others = (
        draw(logits, [params] * SAMPLED_ROWS).tokens for params in (SETTINGS[name], without)
    )
    assert int((tokens != others).sum()) >= SAMPLED_ROWS // 4


@pytest.mark.parametrize("broken", ["token", "verdict"])
def test_another_token_and_another_verdict_are_found(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time is the device's."""
    drawn = []

    def differing(logits: torch.Tensor, rows: Any) -> Sampled:
        sampled = sample(logits, rows)
        drawn.append(sampled)
        if len(drawn) < 2:
            return sampled
        tokens, valid = sampled.tokens.clone(), sampled.valid.clone()
        tokens[-1] += 1  # of the row without numbers: any token will do
        if broken == "token":
            tokens[3] += 1
        else:
            valid[-1] = True
        return Sampled(tokens, valid)

    monkeypatch.setattr("nanoserve.lab.benchmarks.gpu.correctness.sample", differing)
    fields = next(sampling_cases(GpuBench.open(dry_run=True))).measure()
    assert (fields["ok"], fields["different_rows"]) == (
        False,
        [3 if broken == "token" else SAMPLED_ROWS - 1],
    )
