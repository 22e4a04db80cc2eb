"""The members of Load, Decision, Row, StepPlan and StepResult that belong to a mechanism, and say
nothing without it.

Those of rows are None without it: every step sends its rows to every worker.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

from nanoserve.scheduler.work import Strategy

if TYPE_CHECKING:
    from nanoserve.request import PlannedDraft, PlannedRow
    from nanoserve.scheduler.load import Load
    from nanoserve.scheduler.plan import Row


@dataclass(frozen=True, slots=True)
class LayoutsLoad:
    """The parallel layouts that a policy may change between."""

    current: int = 0
    """The layout that runs, from 0. A transition is over when this has changed."""
    count: int = 1


@dataclass(frozen=True, slots=True)
class Cohort:
    """Host sequences that began a token in the same step, as the executor last reported them."""

    layers: int
    """Layers behind them, from 0 to the model's."""
    sequences: int
    context_tokens: int
    """Keys that their attention reads in each layer."""


@dataclass(frozen=True, slots=True)
class HostLoad:
    """Host memory, and the sequences whose KV is there."""

    decodes: int = 0
    """Sequences whose KV is in host memory, in flight or not."""
    ready: int = 0
    """Host sequences that may enter the next plan, or move to the device."""
    context_tokens: int = 0
    """Tokens in the KV cache of all host sequences."""
    moving: int = 0
    """Sequences that are being swapped."""
    free_blocks: int = 0
    total_blocks: int = 0
    """All blocks of the host tier; 0 without one."""
    cohorts: tuple[Cohort, ...] = ()
    """Host sequences whose token is under way, the most advanced first."""

    def sequence_blocks(self, load: "Load") -> int:
        """Blocks of a host sequence of mean length; at least one."""
        return max(1, -(-self.context_tokens // (max(1, self.decodes) * load.block_size)))

    def fitting(self, load: "Load") -> int:
        """Ready host sequences that fit the device beside the expected growth; one if it is
        idle."""
        fitting = max(0, load.free_blocks - load.expected_growth) // self.sequence_blocks(load)
        if load.running_decodes == load.steps_in_flight == self.moving == 0:
            fitting = max(fitting, 1)
        return min(fitting, self.ready)

    @staticmethod
    def blocks_to_park(load: "Load") -> int:
        """Host blocks that the next prompt takes when it is parked, with room for its first
        token."""
        return load.first_waiting_tokens // load.block_size + 1


@dataclass(frozen=True, slots=True)
class Alternative:
    """A strategy that was compared."""

    strategy: Strategy
    seconds: float
    """Predicted time of the step."""
    per_second: float
    """Sequences that it advances per second, as the policy counts prompts and host sequences."""


@dataclass(frozen=True, slots=True)
class HostDecision:
    """How host sequences take part in the next step, and which sequences move."""

    strategy: Strategy = "device"
    """How sequences in host memory take part in this step."""
    decodes: tuple[int, int] = (0, 0)
    """Host sequences for sub-batches 0 and 1. "asymmetric" takes those under way, the most advanced
    first, then ready ones, and finishes their tokens within the step. "overlap" has one batch: this
    many ready sequences begin a token, and all that are under way advance without being counted."""
    swap_out: int = 0
    """Ready decodes to move from device to host memory, the last in order first, as far as the host
    has room."""
    swap_in: int = 0
    """Ready host sequences to move to the device, in order. Each of its decodes keeps a block to
    grow into."""
    park: bool = False
    """Prompts that this step completes move to host memory. A prompt whose blocks the host cannot
    hold is not begun."""
    preempt: bool = False
    """Preempted sequences move to host memory if it has room, instead of being recomputed."""
    alternatives: tuple[Alternative, ...] = field(default=(), compare=False)
    """The strategies that ``strategy`` was chosen from, for traces and figures; empty where there
    was no choice."""


@dataclass(frozen=True, slots=True)
class LayoutCapacity:
    """The KV blocks and plans in flight of a parallel layout."""

    num_blocks: int
    pipeline_depth: int = 1
    """Most plans in flight."""


Tier = Literal["device", "host"]


class HostRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A row whose KV is in host memory."""

    sub_batch: int = 0
    """0, or 1 for the second of the two that alternate in an asymmetric step."""


def tier_of(row: "Row") -> Tier:
    """Where the KV of a row's sequence is."""
    if row.host is None:
        return "device"
    return "host"


class DraftRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The draft tokens of a row (speculation)."""

    verify: int = 0
    """How many of the row's last tokens are draft tokens. The answer is the longest run of them
    that is sampled as proposed, and one token more."""
    propose: int = 0
    """Tokens that the executor's drafter proposes after the answer, for the sequence's next row.
    The block table reaches start + len(tokens) + propose positions: the drafter's own cache has the
    same blocks."""


class CanvasRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The canvas at the end of a row (text diffusion): positions whose tokens are still chosen, and
    which see each other. Their keys and values are overwritten by the sequence's next row. Known
    tokens before the canvas are written for good.

    The answer is the canvas as it is after the step, or the tokens of the canvas that are new, once
    all are settled.
    """

    length: int
    """How many of the row's last tokens are the canvas."""
    fixed: int
    """How many of the canvas's first tokens are known: the end of a prompt, say."""
    step: int
    """Denoising steps that this canvas has had."""


def draft_of(row: "PlannedRow") -> "PlannedDraft":
    """The draft tokens of a row that may have none."""
    if row.draft is None:
        return NO_DRAFT
    return row.draft


NO_STATE = -1
"""Stands in a StateRow for the state of a sequence before its first position."""


class StateRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a row of this plan finds and leaves its sequence's recurrent state.

    A row without a StateRow reads the slot that the sequence's last one left its state in, and
    leaves it there. Rows of a plan never read a slot that another row of the plan writes.
    """

    sequence: int
    source: int
    """The slot that holds the state at the row's first position: of the sequence itself, or a
    snapshot; NO_STATE at position 0."""
    target: int
    """The slot that holds the state after the row."""
    saves: tuple[tuple[int, int], ...] = ()
    """Snapshots within the row, in order: the state at this position, between the row's start and
    its end, goes to this slot. The rest of the row goes on from there."""


class StatePlan(msgspec.Struct, frozen=True, array_like=True):
    """The recurrent states of a plan's rows, as far as they move."""

    rows: tuple[StateRow, ...] = ()


class LayoutPlan(msgspec.Struct, frozen=True, array_like=True):
    """The parallel layout of a plan."""

    current: int = 0
    """Which parallel layout runs it."""
    transition: int | None = None
    """The layout to change to; such a plan holds nothing else."""


class Swap(msgspec.Struct, frozen=True, array_like=True):
    """Move a sequence's blocks between tiers; both sides stay owned until the swap is answered."""

    swap: int
    """Its id, which the result names."""
    sequence: int
    direction: Literal["out", "in"]
    """"out" is device to host, "in" is host to device."""
    device_blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]
    """Pairwise source and target."""
    after_row: bool = False
    """Only for "out": the sequence's row in the same plan, the last chunk of a parked prompt, fills
    the device blocks. Each layer's blocks are copied once that layer is computed, while later
    layers compute. The swap may be answered before the row's token, with it or after it."""


class HostPlan(msgspec.Struct, frozen=True, array_like=True):
    """A plan's swaps, and how host sequences take part in it."""

    swaps: tuple[Swap, ...] = ()
    strategy: Strategy = "device"
    """How host sequences take part."""


class CohortProgress(msgspec.Struct, frozen=True, array_like=True):
    """The host sequences that began a token in plan ``step`` have passed this many layers."""

    step: int
    layers: int


class HostWork(msgspec.Struct, frozen=True, array_like=True):
    """The time of CPU attention for some host sequences in one layer."""

    sequences: int
    context_tokens: int
    """Keys that their attention read, summed over sequences."""
    seconds: float
    """Measured from receiving queries, keys and values until the result is ready."""


class HostResult(msgspec.Struct, frozen=True, array_like=True):
    """News of swaps and of host sequences since the executor's last result."""

    swapped: tuple[int, ...] = ()
    """Ids of the swaps that are done."""
    cohorts: tuple[CohortProgress, ...] = ()
    """Progress of the host sequences under way."""
    work: tuple[HostWork, ...] = ()
    """Attention on the CPU that ended since the last result."""
    lost: str | None = None
    """Why attention on the CPU died or hangs. Everything else in the result was known before. No
    host row of a plan that was submitted before this was collected will be answered after it, and
    the KV of host sequences must be recomputed. Nothing else is affected: the plans end, and their
    rows on the device and all swaps are answered. Host rows of later plans run as before."""


ONE_LAYOUT = LayoutsLoad()
NO_HOST = HostLoad()
DEVICE_ONLY = HostDecision()
NO_DRAFT = DraftRow()
