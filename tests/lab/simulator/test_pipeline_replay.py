"""Runs of a pipeline with several plans in flight are replayed, plan by plan."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.engine.engine import Engine
from nanoserve.lab.benchmarks.policies.variants import DecodePrioritizing, PrefillPrioritizing
from nanoserve.lab.simulator.replay import record_run, replay
from nanoserve.request import Request, SamplingParams
from nanoserve.scheduler import make_policy
from nanoserve.scheduler.assembly import make_extensions
from nanoserve.scheduler.optional import LayoutCapacity
from nanoserve.scheduler.policies.transition_minimizing import TransitionMinimizing
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.scheduler.work import Chunk, StepWork
from tests.fakes.moving_executor import MovingExecutor
from tests.fakes.observed_executor import ObservedExecutor

_TICK = 2.0**-10


@dataclass
class JitteryTimes:
    """Every stage, link and preparation takes what it likes, in ticks of the clock."""

    num_stages: int
    seed: int
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def _some(self) -> float:
        return self._random.randrange(20) * _TICK

    def work(
        self,
        decode_contexts: Sequence[int] = (),
        chunks: Iterable[Chunk] = (),
        sampled: int | None = None,
    ) -> StepWork:
        return StepWork.of(decode_contexts, chunks, sampled)

    def stage_seconds(self, work: StepWork, stage: int) -> float:
        return self._some()

    def send_seconds(self, work: StepWork, stage: int) -> float:
        return self._some()

    def host_seconds(self, work: StepWork) -> float:
        return self._some()


def _arriving(now: float, gaps: Sequence[float]) -> list[Request]:
    """Each is longer than the one before, which it follows after so many ticks."""
    requests = []
    for number, gap in enumerate(gaps):
        now += gap * _TICK
        params = SamplingParams(max_tokens=1 + number * 3, ignore_eos=True)
        requests.append(
            Request(f"r{number}", (1,) * (3 + 2 * number), params, seed=0, arrival_time=now)
        )
    return requests


@settings(max_examples=25, deadline=None)
@given(
    policy=st.sampled_from(["sarathi", "throttling", "adaptive", "prefill-first"]),
    stages=st.integers(1, 4),
    blocks=st.integers(10, 30),
    seed=st.integers(0, 1000),
    gaps=st.lists(st.integers(0, 60) | st.floats(0, 60), min_size=1, max_size=8),
)
def test_a_replay_makes_the_plans_of_the_run(
    policy: str, stages: int, blocks: int, seed: int, gaps: list[float]
) -> None:
    def scheduler() -> Scheduler:
        return Scheduler(
            make_policy(policy, 8),
            num_blocks=blocks,
            block_size=4,
            max_model_len=32,
            pipeline_depth=stages,
        )

    executor = ObservedExecutor(JitteryTimes(stages, seed))
    record = record_run(
        Engine(scheduler(), executor, vocab_size=2), _arriving(executor.now(), gaps)
    )
    assert replay(record, scheduler, vocab_size=2) == record.plans


@dataclass
class JitteryMoves(JitteryTimes):
    """So do swaps and transitions."""

    def swap_seconds(self, tokens: int, stage: int) -> float:
        return self._some()

    def reload_seconds(self, stage: int) -> float:
        return self._some()


@settings(max_examples=25, deadline=None)
@given(
    policy=st.sampled_from([TransitionMinimizing, PrefillPrioritizing, DecodePrioritizing]),
    stages=st.sampled_from([(2, 1), (1, 2), (4, 2)]),
    host_blocks=st.integers(10, 40),
    seed=st.integers(0, 1000),
    gaps=st.lists(st.integers(0, 60), min_size=2, max_size=8),
)
def test_a_replay_makes_the_plans_of_a_run_with_two_layouts(
    policy: type[TransitionMinimizing],
    stages: tuple[int, int],
    host_blocks: int,
    seed: int,
    gaps: list[int],
) -> None:
    def scheduler() -> Scheduler:
        return Scheduler(
            policy(token_budget=16),
            num_blocks=16,
            block_size=4,
            max_model_len=32,
            pipeline_depth=stages[0],
            extensions=make_extensions(
                host_blocks=host_blocks, other_layouts=[LayoutCapacity(20, stages[1])]
            ),
        )

    executor = MovingExecutor(
        [JitteryMoves(number, seed) for number in stages], block_size=4, workers=4
    )
    record = record_run(
        Engine(scheduler(), executor, vocab_size=2), _arriving(executor.now(), gaps)
    )
    assert any(plan.layouts.transition is not None for plan in record.plans), (
        "the second answer has several tokens"
    )
    assert replay(record, scheduler, vocab_size=2) == record.plans
