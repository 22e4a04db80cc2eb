"""A mechanism takes part in a step at the moments that it overrides, and at no others."""

from collections.abc import Iterator

import msgspec
import pytest

from nanoserve.errors import RuntimeFailure
from nanoserve.executor.local import LocalExecutor
from nanoserve.executor.mechanism import Mechanism, bound
from nanoserve.executor.stage import Stage
from nanoserve.executor.step.model_runner import ModelRunner, PreparedStep
from nanoserve.request import SamplingParams
from nanoserve.scheduler.plan import Begin, Row, StepPlan, StepResult
from tests.executor.small_model import dense_greedy, small_decoder

PROMPT = (7, 3, 58, 21, 9)


class Watching(Mechanism):
    """Notes what it is told, and how far the step is then."""

    def __init__(self) -> None:
        self.noted: list[tuple[object, ...]] = []

    def attach(self, runner: ModelRunner) -> None:
        self.noted.append(("attach", len(runner.records)))

    def prepare(self, step: PreparedStep) -> None:
        self.noted.append(("prepare", step.plan.step, step.inputs is not None))

    def begin(self, step: PreparedStep) -> None:
        self.noted.append(("begin", step.plan.step, step.inputs is not None))

    def complete(self, step: PreparedStep, result: StepResult) -> StepResult:
        self.noted.append(("complete", step.plan.step, len(result.answers)))
        return msgspec.structs.replace(
            result, host=msgspec.structs.replace(result.host, swapped=(9,))
        )

    def abandon(self) -> None:
        self.noted.append(("abandon",))

    def close(self) -> None:
        self.noted.append(("close",))


@pytest.fixture
def watching() -> Watching:
    return Watching()


@pytest.fixture
def executor(watching: Watching) -> Iterator[LocalExecutor]:
    stage = Stage.build(
        small_decoder(),
        num_blocks=8,
        block_size=4,
        device="cpu",
        mechanisms=[Mechanism(), watching],
    )
    made = LocalExecutor(stage)
    yield made
    made.close()


def plan() -> StepPlan:
    begin = Begin(1, PROMPT, len(PROMPT), 0, 0, SamplingParams(temperature=0.0))
    return StepPlan(3, begin=(begin,), rows=(Row(1, 0, PROMPT, True, (0, 1)),))


def test_only_what_is_overridden_is_bound() -> None:
    one, other = Watching(), Watching()
    assert bound([one, Mechanism(), other], Mechanism.begin) == (one.begin, other.begin)
    assert bound([one, Mechanism(), other], Mechanism.wait) == ()


def test_the_moments_of_a_step_come_in_order(executor: LocalExecutor, watching: Watching) -> None:
    executor.submit(plan())
    (result,) = executor.collect(None)
    assert result.answers[0].tokens == tuple(dense_greedy(executor.runner.decoder, PROMPT, 1))
    assert result.host.swapped == (9,)
    executor.close()
    assert watching.noted == [
        ("attach", 0),
        ("prepare", 3, False),
        ("begin", 3, True),
        ("complete", 3, 1),
        ("close",),
    ]


def test_what_is_under_way_is_abandoned_when_memory_does_not_suffice(
    executor: LocalExecutor, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(hidden: object) -> None:
        raise MemoryError

    monkeypatch.setattr(executor.runner.decoder, "compute_logits", fail)
    executor.submit(plan())
    with pytest.raises(RuntimeFailure, match="a step of 5 tokens does not fit"):
        executor.collect(None)
    assert [moment for moment, *_ in watching.noted] == ["attach", "prepare", "begin", "abandon"]
