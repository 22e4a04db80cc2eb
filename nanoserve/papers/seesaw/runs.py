"""One configuration, simulated on one setting: a closed batch, static or with re-sharding."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from nanoserve.benchmarks.policies.baselines import DecodePrioritizing, PrefillPrioritizing
from nanoserve.costs.predictor import CostPredictor
from nanoserve.papers.seesaw.settings import BLOCK_SIZE, RESHARDING, LayoutChoice, OfflineBatch
from nanoserve.record.events import Planned, StepObserver
from nanoserve.record.times import Beside, ReshardTimes, StageTimes
from nanoserve.scheduler.load import Policy
from nanoserve.scheduler.policies import make_policy
from nanoserve.simulator import OtherLayout, SimulationResult, Workload, burst, simulate

FREQUENT, RARE = "prefill-prioritizing", "decode-prioritizing"
"""Re-sharding without tiered buffering, figure 2 (a) and (b); policies only to compare with."""
_COMPARED: Mapping[str, Callable[[int], Policy]] = MappingProxyType(
    {FREQUENT: PrefillPrioritizing, RARE: DecodePrioritizing}
)
_AS_VLLM = MappingProxyType({"admission_reserve": False, "virtual_engines": True})
"""Parameters of static configurations: no admission reserve, and each micro-batch has its share of the answers."""
MOST_SEQUENCES = 4096
"""Most sequences on the devices at a time: in effect no limit."""


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a run, by what a stage computed, on average over stages (figure 12)."""

    prefill: float
    mixed: float
    decode: float
    """``prefill``, ``decode``, ``mixed``: steps with prompts, with answers, and with both."""
    transition: float
    """Re-sharding."""
    other: float
    """It had nothing to compute."""

    @property
    def total(self) -> float:
        return self.prefill + self.mixed + self.decode + self.transition + self.other


class BatchOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a closed batch came to."""

    result: SimulationResult
    """What the simulation measured."""
    breakdown: Breakdown
    """Where the time of its first replica went."""
    phases: tuple[tuple[float, float, int], ...]
    """(begin, end, layout) of the times between transitions, of its first replica."""
    decodes: float
    """Answers of a step without prompts, averaged over the time of these steps."""

    @property
    def seconds(self) -> float:
        """Time until the last answer ended."""
        return self.result.seconds


class ClosedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A SimulationJob: all requests of a setting at once, under one configuration."""

    setting: OfflineBatch
    choice: LayoutChoice

    @property
    def name(self) -> str:
        return f"{self.choice.label} ({self.choice.token_budget}), {self.setting.name}"

    def run(self) -> BatchOutcome:
        """Simulate it; with data parallelism, until the slowest replica is done."""
        setting, choice = self.setting, self.choice
        layouts = [setting.costs(layout) for layout in (choice.prefill, choice.decode) if layout is not None]
        blocks = [costs.memory.kv_blocks(BLOCK_SIZE, choice.token_budget) for costs in layouts]
        if choice.policy in _COMPARED:  # what stays on the devices must fit them in both layouts
            blocks = [min(blocks)] * len(blocks)
        pool = setting.host_bytes_per_device * choice.prefill.devices / choice.replicas
        changes, clock = choice.decode is not None, PhaseClock()
        result = simulate(
            policy_of(choice),
            layouts[0],
            Workload(burst(), setting.shapes()),
            num_blocks=blocks[0],
            block_size=BLOCK_SIZE,
            max_num_seqs=MOST_SEQUENCES,
            observers=(clock,),
            replicas=choice.replicas,
            host_blocks=layouts[0].memory.host_kv_blocks(pool, BLOCK_SIZE) if changes else 0,
            other_layouts=[OtherLayout(*pair) for pair in list(zip(layouts, blocks, strict=True))[1:]],
            predictors=[CostPredictor(costs, layouts) for costs in layouts] if changes else (),
        )
        return BatchOutcome(
            result=result,
            breakdown=clock.breakdown(result.seconds),
            phases=clock.phases(result.seconds),
            decodes=clock.decodes,
        )


def policy_of(choice: LayoutChoice) -> Policy:
    """What schedules it."""
    if choice.policy in _COMPARED:
        return _COMPARED[choice.policy](choice.token_budget)
    return make_policy(choice.policy, choice.token_budget, {} if choice.policy == RESHARDING else _AS_VLLM)


class PhaseClock(StepObserver):
    """What the stages compute, by kind, and when the layout changes."""

    def __init__(self) -> None:
        self._seconds = {"prefill": 0.0, "mixed": 0.0, "decode": 0.0, "transition": 0.0}
        self._phases: list[tuple[float, float, int]] = []
        self._phase_begin = self._decode_rows = 0.0
        self._layout = 0

    def on_step(self, planned: Planned, stages: Sequence[StageTimes]) -> None:
        """A step enters the pipeline, and it is known when it will leave."""
        kind = "decode" if not planned.prompt_tokens else "mixed" if planned.decodes else "prefill"
        seconds = sum([times.computed - times.started for times in stages]) / len(stages)
        self._seconds[kind] += seconds
        if kind == "decode":
            self._decode_rows += planned.decodes * seconds

    def on_beside(self, planned: Planned, times: Beside) -> None:
        """The layout changes. Swaps run beside the steps; where a step waits for one, that is other time."""
        if isinstance(times, ReshardTimes):
            self._seconds["transition"] += times.ended - times.began
            self._phases.append((self._phase_begin, times.began, self._layout))
            self._phase_begin, self._layout = times.ended, times.layout

    @property
    def decodes(self) -> float:
        """Answers of a step without prompts, averaged over the time of these steps."""
        return self._decode_rows / self._seconds["decode"] if self._seconds["decode"] else 0.0

    def breakdown(self, end: float) -> Breakdown:
        """Where the time until ``end`` went."""
        return Breakdown(**self._seconds, other=max(0.0, end - sum(self._seconds.values())))

    def phases(self, end: float) -> tuple[tuple[float, float, int], ...]:
        """(begin, end, layout) of each phase, the last one until then."""
        return (*self._phases, (self._phase_begin, end, self._layout))
