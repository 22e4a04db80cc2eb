"""A check fails when something is wrong."""

from collections.abc import Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoserve.executor.start.gpu_start import GpuStartReport
from nanoserve.lab.benchmarks.gpu.attention import AttentionRow, compared, make_batch
from nanoserve.lab.benchmarks.gpu.correctness import engine_cases, operator_cases
from nanoserve.lab.benchmarks.gpu.device import GpuBench
from nanoserve.lab.benchmarks.gpu.markdown import to_markdown
from nanoserve.lab.benchmarks.gpu.models import EngineShelf
from tests.lab.benchmarks.gpu.test_markdown import results
from triton_ops import paged_attention

NAN = torch.nan


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ([3.0, 4.0, 0.0, NAN], (True, 0)),
        # 1 % of 4, and of the row's root mean square of 2.5, is 0.065
        ([3.0, 4.06, 0.02, NAN], (True, 0)),
        ([3.0, 4.07, 0.0, NAN], (False, 0)),
        ([3.0, 4.0, 0.03, NAN], (False, 0)),
        ([3.0, NAN, 0.0, NAN], (False, 1)),
        ([3.0, 4.0, 0.0, 5.0], (False, 1)),
    ],
)
def test_numbers_agree_within_the_tolerance_and_nan_with_nan(
    found: list[float], verdict: tuple[bool, int]
) -> None:
    fields = compared("it", torch.tensor([found]), torch.tensor([[3.0, 4.0, 0.0, NAN]]), 0.01)
    assert (fields["ok"], fields["unwanted_nans"]) == verdict


def test_what_only_moves_numbers_changes_none() -> None:
    numbers = torch.tensor([[1.0, NAN]], dtype=torch.bfloat16)
    assert compared("it", numbers, numbers.clone(), 0.0)["ok"]
    assert not compared("it", numbers * 1.01, numbers, 0.0)["ok"]


@pytest.mark.slow
def test_steps_can_be_overlapped_and_not_with_the_same_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The CPU in a GPU's place: two plans in flight, then one."""

    monkeypatch.setattr(
        "nanoserve.engine.assembly._overlaps_steps", lambda config, model, device: True
    )
    with closing(EngineShelf(GpuBench.open(dry_run=True))) as shelf:
        _, case = engine_cases(shelf, ["qwen3"])
        fields = case.measure()
    assert (fields["ok"], fields["in_flight"], fields["requests"]) == (True, 2, 20)


class Engine:
    """Gives a token per request, and is not what was asked for if `differing`."""

    def __init__(self, facts: GpuStartReport | None, *, overlaps: bool, differing: bool) -> None:
        self.in_flight = 2 if overlaps else 1
        executor = SimpleNamespace(max_in_flight=self.in_flight)
        self.llm = SimpleNamespace(
            built=SimpleNamespace(gpu=facts), engine=SimpleNamespace(executor=executor)
        )
        self.driver, self._differing, self._runs = self, differing, 0

    def run(self, prompts: Sequence[object], lengths: Sequence[int]) -> SimpleNamespace:
        self._runs += 1
        last = self._runs if self._differing else 0
        return SimpleNamespace(tokens=((1,),) * (len(prompts) - 1) + ((last,),))


def check_on_a_gpu(
    number: int, family: str, *, graphs: int = 5, overlaps: bool = True, differing: bool = False
) -> dict[str, Any]:
    """Return the verdict of the check with that number on such an engine."""
    engine = Engine(
        GpuStartReport(True, 1.0, 1, graphs=graphs), overlaps=overlaps, differing=differing
    )
    shelf: Any = SimpleNamespace(get=lambda model, **settings: engine)
    return list(engine_cases(shelf, [family]))[number].measure()


GRAPHS, OVERLAP = 0, 1


def test_the_same_tokens_prove_nothing_of_graphs_that_were_not_captured() -> None:
    assert check_on_a_gpu(GRAPHS, "qwen3")["ok"]
    fields = check_on_a_gpu(GRAPHS, "qwen3", graphs=0)
    assert (fields["ok"], fields["graphs"], fields["problem"]) == (
        False,
        0,
        "no decode step was captured",
    )
    assert "* graph against eager, qwen3: no decode step was captured" in to_markdown(
        results(correctness=[{"case": "graph against eager, qwen3", **fields}])
    )
    assert not check_on_a_gpu(GRAPHS, "qwen3", differing=True)["ok"]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_steps_with_experts_need_not_be_captured(family: str) -> None:
    fields = check_on_a_gpu(GRAPHS, family, graphs=0)
    assert (fields["ok"], fields["graphs"]) == (True, 0)
    assert not check_on_a_gpu(GRAPHS, family, graphs=0, differing=True)["ok"]


def test_the_same_tokens_prove_nothing_of_steps_that_were_not_overlapped() -> None:
    assert check_on_a_gpu(OVERLAP, "qwen3")["ok"]
    fields = check_on_a_gpu(OVERLAP, "qwen3", overlaps=False)
    assert (fields["ok"], fields["in_flight"], fields["problem"]) == (
        False,
        1,
        "steps were not overlapped",
    )
    fields = check_on_a_gpu(OVERLAP, "qwen3", differing=True)
    assert (fields["ok"], fields["requests"], fields["different_requests"]) == (False, 20, [19])


def test_what_must_not_be_read_is_poison() -> None:
    rows = (AttentionRow(1, 20), AttentionRow(3, 5))
    batch = make_batch(rows, 4, 2, 64, block_size=16, dtype=torch.float32, poisoned=True)
    finite = batch.key_cache.isfinite().all(dim=-1).all(dim=1)  # [blocks, block_size]
    assert int(finite.sum()) == 20 + 5
    assert batch.block_tables[1, 1] >= batch.key_cache.shape[0]
    assert batch.attend().isfinite().all()


@pytest.mark.parametrize("longest", [37, 700, 1500])
def test_attention_that_sees_one_key_too_few_is_found(
    longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(out: Tensor, *tensors: Tensor, **settings: float) -> None:
        *others, contexts = tensors
        is_reference = out.dtype == torch.float64
        operator(
            out,
            *others,
            contexts if is_reference else contexts - (contexts == longest).int(),
            **settings,
        )

    operator: Any = paged_attention
    rows = {"decode": [AttentionRow(1, longest), AttentionRow(1, 20)]}
    monkeypatch.setattr("nanoserve.lab.benchmarks.gpu.correctness.ROWS", rows)
    monkeypatch.setattr("nanoserve.lab.benchmarks.gpu.correctness.DRY_CONTEXT", longest)
    case = next(operator_cases(GpuBench.open(dry_run=True)))
    assert case.measure()["ok"]
    monkeypatch.setattr("nanoserve.lab.benchmarks.gpu.correctness.paged_attention", forgetful)
    case = next(operator_cases(GpuBench.open(dry_run=True)))
    assert not case.measure()["ok"]


def test_a_gpu_gets_every_head_size_format_and_kind_of_batch() -> None:
    names = " ".join(
        case.name for case in operator_cases(GpuBench(torch.device("cuda"), dry_run=False))
    )
    for word in (
        "head_dim 64",
        "head_dim 80",
        "head_dim 128",
        "head_dim 256",
        "bfloat16",
        "float16",
        "float32",
    ):
        assert word in names
    for word in (
        "decode",
        "prefill",
        "mixed",
        "window 48",
        "blocks of 32",
        "8/8 heads",
        "14/2 heads",
        "padding rows",
    ):
        assert word in names
