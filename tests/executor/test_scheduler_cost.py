"""Cost of deciding, in calls: they are the same on every machine, however busy it is."""

import sys
from pathlib import Path
from typing import Any

import pytest

from nanoserve.errors import UsageError
from nanoserve.executor.profiling.scheduler_cost import measure_scheduler
from nanoserve.request import Request, SamplingParams
from nanoserve.scheduler.plan import Answer, StepResult
from nanoserve.scheduler.policies import POLICIES
from nanoserve.scheduler.policies.baselines import ChunkedPrefill
from nanoserve.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16


def _calls(sequences: int, *, prefix_caching: bool = True) -> int:
    """Calls, of Python and of C functions, in BLOCK_SIZE steps of ``schedule`` and ``apply`` with
    so many decodes."""
    scheduler = Scheduler(
        ChunkedPrefill(10**6),
        num_blocks=8 * sequences,
        block_size=BLOCK_SIZE,
        max_model_len=8 * BLOCK_SIZE,
        max_num_seqs=sequences,
        prefix_caching=prefix_caching,
    )
    for index in range(sequences):
        scheduler.add(Request(str(index), (index,) * 3 * BLOCK_SIZE, SamplingParams(), seed=0))
    calls = 0

    def count(frame: object, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    for step in range(1 + BLOCK_SIZE):
        if step > 0:  # the first one computes the prompts
            sys.setprofile(count)
        plan = scheduler.schedule(0.0)
        sys.setprofile(None)
        assert plan is not None and len(plan.rows) == sequences
        result = StepResult(plan.step, tuple(Answer(row.sequence, (7,)) for row in plan.rows))
        sys.setprofile(count if step > 0 else None)
        scheduler.apply(result, 0.0)
        sys.setprofile(None)
    return calls


def test_a_step_is_linear_in_its_sequences() -> None:
    few, many = _calls(32), _calls(128)
    assert many < 4.2 * few


def test_a_decode_is_a_few_calls() -> None:
    for prefix_caching in (True, False):
        assert _calls(128, prefix_caching=prefix_caching) < 25 * 128 * BLOCK_SIZE


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_can_be_measured(policy: str) -> None:
    assert len(measure_scheduler(8, context=3 * BLOCK_SIZE, steps=3, policy=policy)) == 3


def test_a_policy_that_lets_sequences_wait_cannot_be_measured(tmp_path: Path) -> None:
    file = tmp_path / "half.py"
    file.write_text(
        "from nanoserve.scheduler import Decision, Policy\n\n"
        "class Half(Policy):\n    def decide(self, load):\n        return Decision(64, "
        "load.ready_decodes // 2)\n"
    )
    with pytest.raises(UsageError, match="does not decode all sequences"):
        measure_scheduler(4, context=BLOCK_SIZE, steps=3, policy=f"{file}:Half")
