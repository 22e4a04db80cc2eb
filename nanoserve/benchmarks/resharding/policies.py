"""Who takes part: each layout alone with the policies that suit it, and the ways of going from one to the other."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nanoserve.benchmarks.resharding.baselines import DecodePrioritizing, PrefillPrioritizing
from nanoserve.benchmarks.resharding.rounds import Variant
from nanoserve.benchmarks.resharding.running import LayoutsExecutor, Place
from nanoserve.costs.predictor import Predictor
from nanoserve.layout import ParallelLayout
from nanoserve.scheduler.load import Policy
from nanoserve.scheduler.plan import LayoutCapacity
from nanoserve.scheduler.policies import make_policy
from nanoserve.scheduler.policies.transition_minimizing import TransitionMinimizing
from nanoserve.scheduler.scheduler import Scheduler

RESHARDING: dict[str, type[TransitionMinimizing]] = {
    "prefill-prioritizing": PrefillPrioritizing,
    "decode-prioritizing": DecodePrioritizing,
    "transition-minimizing": TransitionMinimizing,
}
"""Seesaw, figures 2 and 6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Workers that are ready, in one layout or two."""

    name: str
    """What tells them from others."""
    executor: LayoutsExecutor
    """Theirs; started once for all runs."""
    layouts: tuple[ParallelLayout, ...]
    capacities: tuple[LayoutCapacity, ...]
    predictors: tuple[Predictor, ...]
    """By layout; no predictors with one."""
    host_blocks: int
    """Of the pool."""
    host_link_bandwidth: float | None
    """As it was measured, in bytes per second of one worker; None where it was not."""
    compiled: bool
    """Whether their layers run compiled."""
    close: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """What all schedulers have in common."""

    block_size: int
    max_model_len: int
    max_num_seqs: int
    token_budget: int
    """Of a step."""

    def variants(self, workers: Sequence[Workers]) -> Iterator[Variant]:
        """Each layout alone, on all workers that have it, before the ways of going from one to the other."""
        for group in workers:
            for number, layout in enumerate(group.layouts):
                for policy in _policies_for(layout):
                    yield self._alone(group, number, make_policy(policy, self.token_budget), policy)
        for group in workers:
            for policy, kind in RESHARDING.items() if len(group.layouts) == 2 else ():
                yield self._in_turn(group, kind(self.token_budget), policy)

    def _alone(self, group: Workers, number: int, policy: Policy, called: str) -> Variant:
        """On workers that stay in one of their layouts; nothing is moved to host memory."""
        layout, capacity = group.layouts[number], group.capacities[number]
        where = layout.name if len(group.layouts) == 2 else f"{layout.name}, {group.name}"
        return Variant(
            called, where, self._place(group, number, (layout,)), lambda: self._scheduler(policy, [capacity])
        )

    def _in_turn(self, group: Workers, policy: Policy, called: str) -> Variant:
        def scheduler() -> Scheduler:
            return self._scheduler(policy, group.capacities, group.host_blocks, group.predictors)

        return Variant(called, group.name, self._place(group, 0, group.layouts), scheduler)

    def _place(self, group: Workers, first: int, layouts: tuple[ParallelLayout, ...]) -> Place:
        return Place(
            executor=group.executor,
            layouts=layouts,
            first=first,
            workers=layouts[0].devices,
            block_size=self.block_size,
            host_link_bandwidth=group.host_link_bandwidth,
        )

    def _scheduler(
        self,
        policy: Policy,
        capacities: Sequence[LayoutCapacity],
        host_blocks: int = 0,
        predictors: Sequence[Predictor] = (),
    ) -> Scheduler:
        """A new one. Prompts are random: nothing is shared."""
        first, *others = capacities
        return Scheduler(
            policy,
            num_blocks=first.num_blocks,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            prefix_caching=False,
            pipeline_depth=first.pipeline_depth,
            host_blocks=host_blocks,
            other_layouts=others,
            predictors=predictors,
        )


def _policies_for(layout: ParallelLayout) -> tuple[str, ...]:
    """Chunked prefill, as the paper's baseline has it, and what is made for pipelines where there is one."""
    return ("sarathi", "throttling") if layout.pipeline_parallel > 1 else ("sarathi",)
