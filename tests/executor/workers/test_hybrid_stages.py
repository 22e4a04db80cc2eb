"""Host sequences in a pipeline of worker processes: every request answers what it does alone in one
process."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from nanoserve.executor.workers import process
from nanoserve.executor.workers.building import part_of
from nanoserve.executor.workers.executor import WorkersExecutor
from nanoserve.scheduler.optional import HostWork
from nanoserve.scheduler.plan import StepPlan, StepResult
from nanoserve.utils.threads import cores_in_use
from tests.executor.workers.disturbances import Pair
from tests.executor.workers.loads import TIGHT_BLOCKS, Case, Reference, pairwise, start_workers
from tests.executor.workers.test_layouts import reference_of

POLICIES = ("neo", "overlap", "apex", "hybrid")
HOST_BLOCKS = 100
NUM_LAYERS = 3
MAIN = "from nanoserve.executor.workers.process import main"
LOSE = "NANOSERVE_TEST_LOSE"
DISTURBED = """
import os, time
from nanoserve.executor.cpu_attention.host_attention import HostAttentionThread
attend = HostAttentionThread._attend

def disturbed(self, task):
    try:  # the number of layers tells the stages apart
        os.unlink(f"{os.environ['NANOSERVE_TEST_LOSE']} {len(self._keys)} raise")
        raise RuntimeError("the CPU is gone")
    except FileNotFoundError:
        pass
    try:
        os.unlink(f"{os.environ['NANOSERVE_TEST_LOSE']} {len(self._keys)} hang")
        time.sleep(30)
    except FileNotFoundError:
        pass
    return attend(self, task)

HostAttentionThread._attend = disturbed
HostAttentionThread.__init__.__kwdefaults__["patience"] = 2.0
"""
"""Code that workers run first: their attention on the CPU fails or hangs once a file says so."""


@dataclass
class Watched:
    """Workers, and what they told of host sequences since this was asked for.

    Attributes:
        before: is shown each plan before it is sent.
        progress: layers that were behind each cohort, result by result, by the plan in which it
            began.
    """

    executor: WorkersExecutor
    before: Callable[[StepPlan], None] = lambda plan: None
    progress: dict[int, list[int]] = field(default_factory=dict)
    work: list[HostWork] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    deaths: int = 0

    def check(self, reference: Reference, *cases: Case) -> Any:
        """Live them; returns what was seen."""
        submit, collect = self.executor.submit, self.executor.collect

        def submitting(plan: StepPlan) -> None:
            self.before(plan)
            submit(plan)

        def collecting(until: float | None) -> list[StepResult]:
            results = collect(until)
            for result in results:
                self._note(result)
            return results

        with pytest.MonkeyPatch().context() as patch:
            patch.setattr(self.executor, "submit", submitting)
            patch.setattr(self.executor, "collect", collecting)
            return reference.check(self.executor, list(cases))

    def _note(self, result: StepResult) -> None:
        for cohort in result.host.cohorts:
            self.progress.setdefault(cohort.step, []).append(cohort.layers)
        self.work += result.host.work
        self.lost += [] if result.host.lost is None else [result.host.lost]
        self.deaths += result.lost is not None


def case(policy: str, seed: int = 0, num_blocks: int = TIGHT_BLOCKS, **settings: Any) -> Case:
    settings = {"token_budget": 24, "host_blocks": HOST_BLOCKS} | settings
    return Case(policy, num_blocks=num_blocks, seed=seed, **settings)


def start(
    reference: Reference,
    stages: int,
    metadata: Literal["decoupled", "coupled"] = "decoupled",
    **settings: Any,
) -> WorkersExecutor:
    return start_workers(
        reference,
        pipeline_parallel=stages,
        host_blocks=HOST_BLOCKS,
        policy="hybrid",
        metadata=metadata,
        **settings,
    )


def in_the_sixth_plan_with_host_rows(action: Callable[[], None]) -> Callable[[StepPlan], None]:
    """To be shown each plan; does that once."""
    plans = 0

    def look(plan: StepPlan) -> None:
        nonlocal plans
        if any(row.host is not None for row in plan.rows):
            plans += 1
            if plans == 6:
                action()

    return look


@pytest.fixture(scope="module")
def losing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The beginning of the names of files that make workers fail."""
    path = tmp_path_factory.mktemp("losing") / "stage of"
    with pytest.MonkeyPatch().context() as patch:
        patch.setenv(LOSE, str(path))
        patch.setattr(process, "_PROGRAM", process._PROGRAM.replace(MAIN, DISTURBED + MAIN))
        patch.setattr("nanoserve.utils.quarantine.DEATHS_SECONDS", 0.0)
        yield path


@pytest.fixture(scope="module")
def stages(reference: Reference, losing: Path) -> Iterator[WorkersExecutor]:
    """Two, of two layers and of one."""
    with closing(start(reference, 2)) as workers:
        yield workers


@pytest.mark.parametrize("policy", POLICIES)
def test_two_stages_answer_what_one_process_answers(
    stages: WorkersExecutor, reference: Reference, policy: str
) -> None:
    seen = Watched(stages).check(reference, *(case(policy, seed) for seed in range(2)))
    assert seen.host_tokens > 20 and seen.together == 2, seen
    assert seen.taken > 0 or policy not in ("apex", "hybrid"), seen


def test_the_last_stage_tells_of_all(stages: WorkersExecutor, reference: Reference) -> None:
    watched = Watched(stages)
    tokens = watched.check(reference, case("overlap", seed=3)).host_tokens
    assert all(layers == sorted(layers) for layers in watched.progress.values())
    assert {layer for layers in watched.progress.values() for layer in layers} == set(
        range(NUM_LAYERS)
    )
    assert sum(work.sequences for work in watched.work) == NUM_LAYERS * tokens
    assert watched.lost == []


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="the system gives nobody cores of his own"
)
def test_each_stage_keeps_to_cores_of_its_own(
    stages: WorkersExecutor, reference: Reference
) -> None:
    """The thread that attends for one of them takes nothing from another one's device."""
    cores = cores_in_use()
    for number, identifier in enumerate(Pair(stages, reference).processes):
        mine = {processor for core in part_of(cores, number, 2) for processor in core}
        assert (
            len(os.sched_getaffinity(identifier)) > 0 and os.sched_getaffinity(identifier) <= mine
        )


@pytest.mark.parametrize(
    ("policy", "what", "layers", "told"),
    [
        ("overlap", "raise", 1, "worker 1: attention on the CPU failed: the CPU is gone"),
        ("neo", "hang", 2, "worker 0: attention on the CPU has hung for"),
    ],
)
def test_attention_on_the_cpu_is_lost_in_one_stage(
    stages: WorkersExecutor,
    reference: Reference,
    losing: Path,
    policy: str,
    what: str,
    layers: int,
    told: str,
) -> None:
    lose = in_the_sixth_plan_with_host_rows(Path(f"{losing} {layers} {what}").touch)
    watched = Watched(stages, before=lose)
    watched.check(reference, case(policy))
    (reason,) = watched.lost
    assert reason.startswith(told)
    assert watched.deaths == 0


# ------------------------------------------------------------------------------------------ longer,
# and other layouts


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["overlap", "neo"])
def test_a_stage_is_killed_with_cohorts_in_flight(
    stages: WorkersExecutor, reference: Reference, policy: str
) -> None:
    kill = in_the_sixth_plan_with_host_rows(
        lambda: Pair(stages, reference).send(policy == "neo", signal.SIGKILL)
    )
    watched = Watched(stages, before=kill)
    assert watched.check(reference, case(policy)).host_tokens > 6
    assert (watched.deaths, watched.lost) == (1, [])


@pytest.mark.slow
def test_many_lives(stages: WorkersExecutor, reference: Reference) -> None:
    chosen = pairwise(
        policy=POLICIES,
        num_blocks=(TIGHT_BLOCKS, TIGHT_BLOCKS + 8, TIGHT_BLOCKS + 16),
        host_blocks=(25, HOST_BLOCKS),
        prefix_caching=(True, False),
        depth=(2, 1),
    )
    seen = reference.check(
        stages, [case(seed=seed, **settings) for seed, settings in enumerate(chosen)]
    )
    assert min(seen.cached_tokens, seen.copies, seen.aborted, seen.chunks, seen.swaps) > 0, seen


@pytest.mark.slow
@pytest.mark.parametrize("metadata", ["decoupled", "coupled"])
def test_three_stages(reference: Reference, metadata: Literal["decoupled", "coupled"]) -> None:
    with closing(start(reference, 3, metadata)) as workers:
        for policy in POLICIES:
            seen = reference.check(workers, [case(policy, seed) for seed in range(3)])
            assert seen.host_tokens > 30 and seen.together == 3, seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "policies"), [("glm4", ("neo", "apex")), ("qwen3_moe", ("overlap", "hybrid"))]
)
def test_families_that_differ_in_their_layers(
    family: str, policies: tuple[str, ...], tmp_path: Path
) -> None:
    """The reference of the other tests has windows in some of its layers."""
    reference = reference_of(family, tmp_path)
    with closing(start(reference, 2)) as workers:
        for policy in policies:
            assert (
                reference.check(workers, [case(policy, seed) for seed in range(2)]).host_tokens > 20
            )
