"""Counts of an engine: its status, and the summary of one step."""

from collections.abc import Iterable
from functools import reduce
from operator import add
from typing import Any, Self

import msgspec
from msgspec.structs import replace

from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.scheduler.work import DraftCounts


class EngineStatus(msgspec.Struct, frozen=True, array_like=True):
    """Occupancy and counts of one engine, or of several together, at a moment."""

    layouts: tuple[int, ...] = (0,)  # number of each engine's current parallel layout
    changing: tuple[bool, ...] = (False,)
    """Whether each engine is leaving its layout: its devices are being emptied, or are changing."""
    running: int = 0
    on_host: int = 0
    waiting: int = 0
    """Sequences that hold KV blocks on the device, in host memory, and that hold none."""
    free_blocks: int = 0  # cached blocks without an owner count as free
    total_blocks: int = 0
    free_host_blocks: int = 0
    total_host_blocks: int = 0
    free_state_slots: int = 0
    total_state_slots: int = 0
    """Slots of recurrent states; snapshots without an owner count as free."""
    prompt_tokens: int = 0
    """Prompt tokens of requests that have their first token."""
    output_tokens: int = 0  # tokens sampled for all samples
    preemptions: int = 0
    steps: int = 0
    transitions: int = 0
    losses: int = 0
    host_losses: int = 0
    """How often workers died and were restarted, and attention on the CPU was lost and its
    sequences recomputed."""
    # stays at zeros without speculation
    drafts: DraftCounts = msgspec.field(default_factory=DraftCounts)

    @classmethod
    def of(cls, scheduler: Scheduler, losses: int) -> Self:
        """Return the status of one engine, from its scheduler and the number of times that its
        workers died."""
        status = cls(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            free_blocks=scheduler.pool.free_blocks,
            total_blocks=scheduler.pool.num_blocks,
            prompt_tokens=scheduler.prompt_tokens,
            output_tokens=scheduler.output_tokens,
            preemptions=scheduler.table.preemptions,
            steps=scheduler.steps,
            losses=losses,
        )
        attached = scheduler.extensions
        if attached.layouts is not None:
            status = replace(
                status,
                layouts=(attached.layouts.current,),
                changing=(attached.layouts.changing,),
                transitions=attached.layouts.transitions,
            )
        if attached.host is not None:
            status = replace(
                status,
                on_host=len(attached.host.on_host),
                free_host_blocks=attached.host.pool.free_blocks,
                total_host_blocks=attached.host.pool.num_blocks,
            )
        if attached.state is not None:
            pool = attached.state.pool
            status = replace(
                status, free_state_slots=pool.free_slots, total_state_slots=pool.num_slots
            )
        if attached.cpu_attention is not None:
            status = replace(status, host_losses=attached.cpu_attention.losses)
        if attached.drafts is not None:
            # a copy: the proposer goes on counting
            counts = attached.drafts.proposer.counts + DraftCounts()
            status = replace(status, drafts=counts)
        return status

    @classmethod
    def together(cls, statuses: Iterable[Self]) -> Self:
        """Add up the counts, and concatenate the tuples, of at least one engine."""
        every, added = list(statuses), dict[str, Any]()
        for name in cls.__struct_fields__:
            added[name] = reduce(add, [getattr(status, name) for status in every])
        return cls(**added)


class RecentStep(msgspec.Struct, frozen=True, array_like=True):
    """One step that has ended; a decode is a row of one token and its draft tokens."""

    step: int
    decodes: int
    prompt_tokens: int
    running: int
    waiting: int
    """Sequences that held KV blocks on the device, and that held none, when the step had ended."""
    seconds: float  # time of the step on the device

    def __str__(self) -> str:
        return (
            f"step {self.step}: {self.decodes} decodes + {self.prompt_tokens} prompt tokens in "
            f"{self.seconds * 1e3:.3g} ms, {self.running} running, {self.waiting} waiting"
        )
