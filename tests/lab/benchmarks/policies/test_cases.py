"""Requests of a case: lengths, and memory as a share of what holds everything."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from nanoserve.engine_config import EngineConfig
from nanoserve.errors import UsageError
from nanoserve.executor.start.memory import choose_num_blocks, kv_bytes_per_block
from nanoserve.executor.start.model_loading import read_config
from nanoserve.lab.benchmarks.policies import engines
from nanoserve.lab.benchmarks.policies.variants import KvCases
from nanoserve.lab.commands.bench_hybrid import parse_contenders, parse_shares
from nanoserve.models.hub import resolve_model


def _work(*shares: float) -> KvCases:
    return KvCases(input_tokens=13, outputs=(7, 40), requests=10, shares=shares, block_size=4)


def test_the_whole_holds_every_sequence_and_what_policies_keep_free() -> None:
    cases = list(_work(0.5, 1.0).cases())
    assert [(case.shape.output_tokens, case.share) for case in cases] == [
        (7, 0.5),
        (7, 1.0),
        (40, 0.5),
        (40, 1.0),
    ]
    assert [case.num_blocks for case in cases] == [32, 10 * (5 + 1) + 4, 77, 10 * (14 + 1) + 4]
    assert _work(1.0).host_blocks(_work(1.0).longest) == 140


def test_the_engine_is_opened_with_the_context_of_the_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory for short requests need not hold one of the model's whole context, which nobody asks
    for."""
    opened: list[EngineConfig] = []

    def refuse(stack: Any, resolved: Any, config: EngineConfig, progress: Any) -> Any:
        opened.append(config)
        raise UsageError("enough is seen")

    monkeypatch.setattr(engines, "_open", refuse)
    resolved, work = resolve_model(None), replace(_work(0.5, 1.0), block_size=16, requests=2)
    model, asked = (
        read_config(resolved),
        EngineConfig(policy="hybrid", block_size=16, dtype="float32"),
    )
    with ExitStack() as stack, pytest.raises(UsageError, match="enough is seen"):
        engines.open_with_host(stack, resolved, asked, model, work, None)
    (config,) = opened
    assert config.max_model_len == 13 + 40 < model.max_position_embeddings
    size = kv_bytes_per_block(model.in_one_group(), 16, torch.float32)
    assert choose_num_blocks(size, 2**40, model.max_position_embeddings, config) == 2 * (4 + 1) + 1


def test_a_share_that_holds_no_request_is_refused_with_one_that_does() -> None:
    with pytest.raises(
        UsageError, match=r"--kv-limits 0.05: 3 of 64 KV blocks .* 13\+7; give at least 0.078"
    ):
        list(_work(0.05).cases())


def test_shares_are_read_in_any_order() -> None:
    assert parse_shares("1, 0.25,0.5,1") == (0.25, 0.5, 1.0)


@pytest.mark.parametrize("text", ["", "0", "1.1", "-1", "half", "nan", "0.5;1"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--kv-limits takes shares above 0 and up to 1"):
        parse_shares(text)


def test_the_device_alone_comes_first() -> None:
    assert parse_contenders("sarathi, overlap:cohorts=4", 32) == ("sarathi", "overlap:cohorts=4")
    with pytest.raises(
        UsageError, match="begins with one that leaves the CPU alone, as sarathi, not neo"
    ):
        parse_contenders("neo,sarathi", 32)
