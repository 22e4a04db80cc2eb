"""TierMeter: what is measured of host memory, the host's processor and the parallel layouts."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from nanoserve.costs.work import StepWork
from nanoserve.kv import BlockPool
from nanoserve.scheduler.plan import StepPlan, Swap
from nanoserve.simulator.host_link import Direction
from nanoserve.simulator.meters import Occupancy, StepMeter
from nanoserve.simulator.pipeline import Passage


class LayoutTime(NamedTuple):
    """Time in one parallel layout: all of it, and that in which something was in flight."""

    seconds: float
    working: float


class TierMeter:
    """A StepObserver and TierObserver.

    Args:
        steps: of the same engine; told of what keeps it from being idle beside steps.
        host_pool: the KV blocks in host memory.
        layouts: how many there are.
    """

    def __init__(self, steps: StepMeter, host_pool: BlockPool, layouts: int = 1) -> None:
        self.strategy_steps: Counter[str] = Counter()  # how many steps had which strategy
        self.swapped_tokens: Counter[Direction] = Counter()  # what the blocks moved in each direction hold
        self.transitions = 0  # changes of the layout, from the reload's begin to its end
        self.transition_seconds = self.processor_seconds = 0.0  # in which the CPU attended
        self.occupancy = Occupancy()  # share of the host's blocks in use
        self._steps = steps
        self._host_pool = host_pool
        self._times = [LayoutTime(0.0, 0.0)] * layouts
        self._layout = 0
        self._since = self._idle_before = 0.0

    def on_step(self, now: float, plan: StepPlan, work: StepWork, passages: Sequence[Passage]) -> None:
        """A step begins."""
        self.strategy_steps[plan.strategy] += 1
        self._look(now)

    def on_swap(self, now: float, swap: Swap, tokens: int, passage: Passage) -> None:
        """A swap is submitted."""
        self.swapped_tokens[swap.direction] += tokens
        self._steps.keep_busy(now, passage.end)
        self._look(now)

    def on_transition(self, now: float, plan: StepPlan, passage: Passage) -> None:
        """The layout changes; the time between this moment and the begin of the reload belongs to the old one."""
        assert plan.transition is not None
        self._steps.keep_busy(now, passage.end)
        self._times = self._times_until(passage.start)
        self._layout = plan.transition
        self._since, self._idle_before = passage.end, self._steps.idle_seconds
        self.transitions += 1
        self.transition_seconds += passage.end - passage.start

    def on_host_attention(self, passage: Passage, seconds: float, rows: int) -> None:
        """The CPU attends."""
        self.processor_seconds += seconds

    def layout_times(self, now: float) -> list[LayoutTime]:
        """Of every layout, until now; transitions belong to none."""
        return self._times_until(now)

    def _times_until(self, now: float) -> list[LayoutTime]:
        seconds, working = self._times[self._layout]
        passed, idle = now - self._since, self._steps.idle_seconds - self._idle_before
        times = list(self._times)
        times[self._layout] = LayoutTime(seconds + passed, working + passed - idle)
        return times

    def _look(self, now: float) -> None:
        if blocks := self._host_pool.num_blocks:
            self.occupancy.add(now, 1 - self._host_pool.free_blocks / blocks)
