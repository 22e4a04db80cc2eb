"""Load, the snapshot a policy sees, and Decision, what a policy answers.

A policy is a pure function of a Load. It holds no queues, allocates no blocks and imports nothing but this file;
what looks like state (the previous decision) is in the Load too. It chooses *how many*; the Scheduler chooses
*which*: oldest first.
"""

from dataclasses import dataclass
from typing import Protocol

from nanoserve.errors import UsageError


@dataclass(frozen=True, slots=True)
class Decision:
    """How much of what the next step holds.

    Attributes:
        prefill_tokens: prompt tokens to compute at most.
        decodes: running sequences to decode at most, one token each.
        whole_prompts: prompts are taken whole or not at all; the first is taken even beyond ``prefill_tokens``,
            so that a prompt longer than the budget is not stuck.
    """

    prefill_tokens: int
    decodes: int
    whole_prompts: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine looks like when a step is to be decided.

    Attributes:
        previous: the last Decision, or None before the first.
        waiting_tokens: #WP, prompt tokens no plan computes yet, of waiting and partly prefilled sequences.
        first_waiting_tokens: remaining tokens of the prompt that would be prefilled next; 0 if none may start.
        running_decodes: #RD, sequences in decode, in flight or not.
        ready_decodes: those of them that may enter the next plan.
        ready_prefills: partly prefilled sequences that may enter the next plan.
        context_tokens: tokens in the KV cache of all running sequences.
        free_blocks: KV blocks without an owner, cached or not.
        total_blocks: all KV blocks.
        block_size: tokens per block.
        free_slots: how many more sequences may be admitted.
        steps_in_flight: plans submitted and not ended.
        pipeline_depth: how many plans can be in flight.
        preemptions: so far.
        expected_growth: KV blocks by which the running sequences are expected to outgrow what they hold before enough
            of them have ended; from 0 to ``total_blocks - 1``. An estimate, renewed every few steps.
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

    @property
    def free_tokens(self) -> int:
        """Tokens that the free KV blocks hold."""
        return self.free_blocks * self.block_size

    @property
    def free_fraction(self) -> float:
        """Free KV blocks over all KV blocks, in [0, 1]."""
        return self.free_blocks / self.total_blocks

    @property
    def first_waiting_fits(self) -> bool:
        """Whether the next prompt may start and the free blocks hold all of it."""
        blocks = -(-self.first_waiting_tokens // self.block_size)
        return self.first_waiting_tokens > 0 and blocks <= self.free_blocks


class Policy(Protocol):
    """What every scheduling policy is."""

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
