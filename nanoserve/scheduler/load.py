"""Load, the snapshot a policy sees, and Decision, what a policy answers.

A policy is a pure function of a Load. It holds no queues, allocates no blocks and imports nothing but this file;
what looks like state (the previous decision) is in the Load too. It chooses *how many*; the Scheduler chooses
*which*: oldest first.
"""

from dataclasses import dataclass, field
from typing import Protocol

from nanoserve.costs.predictor import Predictor as Predictor
from nanoserve.costs.step_features import Strategy as Strategy
from nanoserve.errors import UsageError


@dataclass(frozen=True, slots=True)
class Alternative:
    """A strategy that was weighed.

    Attributes:
        strategy: how host sequences would take part.
        seconds: that the step is predicted to take.
        per_second: sequences that it advances per second; by the policy's own count of prompts and of host sequences.
    """

    strategy: Strategy
    seconds: float
    per_second: float


@dataclass(frozen=True, slots=True)
class Decision:
    """How much of what the next step holds.

    Attributes:
        prefill_tokens: prompt tokens to compute at most.
        decodes: running sequences to decode at most, one token each.
        whole_prompts: prompts are taken whole or not at all; the first is taken even beyond ``prefill_tokens``,
            so that a prompt longer than the budget is not stuck.
        strategy: what becomes of sequences in host memory in this step.
        host_decodes: host sequences for sub-batch 0 and 1. "asymmetric" takes those whose token is under way first,
            the most advanced first, then ready ones, and finishes the token of each within the step. "overlap" knows
            one batch: so many ready ones begin a token; all that are under way advance without being counted.
        swap_out: ready decodes to move from device to host memory, newest first, as far as the host has room.
        swap_in: ready host sequences to move to the device, oldest first, as far as it has room beside one block for
            each of its decodes to grow into.
        park: prompts that this step computes to their end move to host memory when they are answered; a prompt whose
            blocks the host cannot hold is not begun.
        preempt_to_host: sequences that must give way to older ones move to host memory where it has room, instead of
            being computed again.
        admission_reserve: a new prompt is begun only where the free blocks hold all of it and one more for each running
            decode to grow into; else where they hold all of it, and what was begun last is soon preempted.
        layout: the parallel layout wanted. If it is another than the current one, nothing new is planned: what is in
            flight ends, what is on the device moves to host memory or gives its blocks up, then the layout changes.
            Passed over where there is no such layout, and until a token was answered since the last such beginning.
        alternatives: what was weighed for ``strategy``, for those who look; decisions that differ in nothing else are
            equal. Empty where there was no choice.
    """

    prefill_tokens: int
    decodes: int
    whole_prompts: bool = False
    strategy: Strategy = "device"
    host_decodes: tuple[int, int] = (0, 0)
    swap_out: int = 0
    swap_in: int = 0
    park: bool = False
    preempt_to_host: bool = False
    admission_reserve: bool = True
    layout: int = 0
    alternatives: tuple[Alternative, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Cohort:
    """Host sequences that began a token in the same step, as the executor last reported them.

    Attributes:
        layers: how many are behind them, from 0 to the model's.
        sequences: how many there still are.
        context_tokens: keys that their attention reads in each layer.
    """

    layers: int
    sequences: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine looks like when a step is to be decided.

    Attributes:
        previous: the last Decision, or None before the first.
        waiting_tokens: #WP, prompt tokens no plan computes yet, of waiting and partly prefilled sequences.
        first_waiting_tokens: remaining tokens of the prompt that would be prefilled next; 0 if none may start.
        running_decodes: #RD, sequences that decode on the device, in flight or not.
        ready_decodes: those of them that may enter the next plan; where tokens are fed, in flight or not.
        ready_prefills: partly prefilled sequences that may enter the next plan.
        context_tokens: tokens in the KV cache of all running sequences on the device.
        free_blocks: KV blocks without an owner, cached or not.
        total_blocks: all KV blocks.
        block_size: tokens per block.
        free_slots: how many more sequences may be admitted.
        steps_in_flight: plans submitted and not ended.
        pipeline_depth: into how many plans in flight the decodes are divided. Where tokens are fed it is 1, and two
            plans may be in flight, each with all of the decodes.
        preemptions: so far.
        layout: the current parallel layout, counted from 0; a transition under way is over when this has changed.
        layouts: how many there are.
        host_decodes: sequences whose KV is in host memory, in flight or not.
        ready_host: those of them that may enter the next plan, or move to the device.
        host_context_tokens: tokens in the KV cache of all of them.
        moving: sequences on their way between device and host memory.
        host_free_blocks, host_blocks: of the host tier, which has none where there is no such tier.
        cohorts: host sequences whose token is under way, the most advanced first.
        longest_remaining: tokens until the last of the running decodes ends. An estimate, as expected_growth, renewed
            as often; 0 for policies that do not set ``reads_forecast``.
        predictor: for the current layout; None where nobody knows.
        expected_growth: KV blocks by which the running sequences are expected to outgrow what they hold before enough
            of them have ended; from 0 to ``total_blocks - 1``. An estimate, renewed every few steps; 0 for policies
            that do not set ``reads_forecast``.
    """

    previous: Decision | None
    waiting_tokens: int
    first_waiting_tokens: int
    running_decodes: int
    ready_decodes: int
    ready_prefills: int
    context_tokens: int
    free_blocks: int
    total_blocks: int
    block_size: int
    free_slots: int
    steps_in_flight: int = 0
    pipeline_depth: int = 1
    preemptions: int = 0
    expected_growth: int = 0
    layout: int = 0
    layouts: int = 1
    host_decodes: int = 0
    ready_host: int = 0
    host_context_tokens: int = 0
    moving: int = 0
    host_free_blocks: int = 0
    host_blocks: int = 0
    cohorts: tuple[Cohort, ...] = ()
    longest_remaining: int = 0
    predictor: Predictor | None = None

    @property
    def free_tokens(self) -> int:
        """Tokens that the free KV blocks hold."""
        return self.free_blocks * self.block_size

    @property
    def free_fraction(self) -> float:
        """Free KV blocks over all KV blocks, in [0, 1]."""
        return self.free_blocks / self.total_blocks

    def first_waiting_fits(self, *, admission_reserve: bool = True) -> bool:
        """Whether the next prompt may start, or go on, and the free blocks hold all of it.

        With the reserve a new one must leave a block for each running decode to grow into, as in the Decision.
        """
        kept = self.running_decodes if admission_reserve and not self.ready_prefills else 0
        return self.first_waiting_tokens > 0 and self.first_waiting_blocks + kept <= self.free_blocks

    @property
    def first_waiting_blocks(self) -> int:
        """Blocks that the rest of the next prompt fills."""
        return -(-self.first_waiting_tokens // self.block_size)

    @property
    def first_parked_blocks(self) -> int:
        """Host blocks that the next prompt takes when it is parked: it keeps room for its first token there too."""
        return self.first_waiting_tokens // self.block_size + 1

    @property
    def decode_share(self) -> int:
        """RD / P, rounded up: a step's equal share of the decodes (gLLM, equation 4); one at least, if it is ready."""
        return min(max(1, -(-self.running_decodes // self.pipeline_depth)), self.ready_decodes)

    @property
    def host_sequence_blocks(self) -> int:
        """Blocks of a host sequence of mean length; at least one."""
        return max(1, -(-self.host_context_tokens // (max(1, self.host_decodes) * self.block_size)))

    @property
    def fitting_host(self) -> int:
        """Ready host sequences for which the device has room beside the expected growth; one if it is idle."""
        fitting = max(0, self.free_blocks - self.expected_growth) // self.host_sequence_blocks
        idle = self.running_decodes == self.steps_in_flight == self.moving == 0
        return min(max(fitting, int(idle)), self.ready_host)


class Policy(Protocol):
    """What every scheduling policy is.

    One that reads ``expected_growth`` or ``longest_remaining`` says so by ``reads_forecast: ClassVar[bool] = True``:
    the Scheduler looks at all running sequences for these two, and does it for nobody else.
    """

    def decide(self, load: Load) -> Decision:
        """Answer for this snapshot; a pure function."""


def check_parameter(
    name: str, value: float, low: float, *, below: float | None = None, up_to: float | None = None, limit: str = ""
) -> None:
    """That a policy's parameter is at least ``low`` and below, or not above, a bound, which may be one by name.

    Raises:
        UsageError: naming the parameter and its range.
    """
    if value >= low and (below is None or value < below) and (up_to is None or value <= up_to):
        return
    upper = "" if below is None else f" and below {below}"
    upper += "" if up_to is None else f" and at most {limit} ({up_to})"
    raise UsageError(f"{name} must be at least {low}{upper}, not {value}")
