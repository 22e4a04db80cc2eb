"""EngineSetting: all that one simulated engine is made of."""

from collections.abc import Sequence
from dataclasses import dataclass

from nanoserve.costs.predictor import Predictor
from nanoserve.engine import Engine
from nanoserve.record.events import Observer
from nanoserve.record.metrics import LatencyMetrics, RequestObserver, StepMetrics
from nanoserve.scheduler.load import Policy
from nanoserve.scheduler.plan import LayoutCapacity
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.simulator.executor import VOCAB_SIZE, SimulatedExecutor
from nanoserve.simulator.fleet import Replica
from nanoserve.simulator.pipeline import Runtime, StepTimes, TieredTimes
from nanoserve.simulator.tiered_executor import TieredExecutor


@dataclass(frozen=True, slots=True)
class OtherLayout:
    """A parallel layout beside the first one."""

    times: TieredTimes
    """Of its stages, its links and the host."""
    num_blocks: int
    """KV blocks on its devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetting:
    """One engine."""

    policy: Policy
    """Decides, as it would for real."""
    times: StepTimes
    """Of stages, links and the host; there are as many micro-batches in flight as it has stages."""
    num_blocks: int
    """KV blocks; all stages share one block table."""
    block_size: int
    """Tokens per block."""
    max_num_seqs: int
    """Sequences that hold blocks at a time."""
    runtime: Runtime
    """How the stages' processes work together."""
    host_blocks: int
    """KV blocks in host memory; for these, and for other layouts, ``times`` are TieredTimes."""
    other_layouts: Sequence[OtherLayout]
    """Parallel layouts 1, 2, ... that the policy may change to."""
    predictors: Sequence[Predictor]
    """For the policy, one per layout."""

    @property
    def longest(self) -> int:
        """Tokens of a sequence that takes all blocks in every layout; the KV of its last token is never written."""
        return min([self.num_blocks, *(layout.num_blocks for layout in self.other_layouts)]) * self.block_size + 1

    def replica(self, observers: Sequence[Observer], request_observers: Sequence[RequestObserver]) -> Replica:
        """One engine, which is measured and observed."""
        scheduler = Scheduler(
            self.policy,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_model_len=self.longest,
            max_num_seqs=self.max_num_seqs,
            prefix_caching=False,
            pipeline_depth=self.times.num_stages,
            host_blocks=self.host_blocks,
            other_layouts=[LayoutCapacity(one.num_blocks, one.times.num_stages) for one in self.other_layouts],
            predictors=self.predictors,
        )
        executor = self._executor()
        engine = Engine(scheduler, executor, vocab_size=VOCAB_SIZE)
        steps, lives = StepMetrics(self.block_size, 1 + len(self.other_layouts)), LatencyMetrics(request_observers)
        engine.recorder.add(steps, lives, *observers)
        return Replica(engine, scheduler, executor, steps, lives)

    def _executor(self) -> SimulatedExecutor:
        if not self.host_blocks and not self.other_layouts:
            return SimulatedExecutor(self.times, runtime=self.runtime)
        if not isinstance(self.times, TieredTimes):
            raise TypeError("host memory and other layouts want step times that know them: see TieredTimes")
        return TieredExecutor(
            [self.times, *(layout.times for layout in self.other_layouts)],
            block_size=self.block_size,
            runtime=self.runtime,
        )
