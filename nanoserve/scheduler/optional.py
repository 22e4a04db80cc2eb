"""The members of Load and Decision that belong to a mechanism, and say nothing where it is not used."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanoserve.scheduler.work import Strategy

if TYPE_CHECKING:
    from nanoserve.scheduler.load import Load


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
        """Ready host sequences that fit the device beside the expected growth; one if it is idle."""
        fitting = max(0, load.free_blocks - load.expected_growth) // self.sequence_blocks(load)
        if load.running_decodes == load.steps_in_flight == self.moving == 0:
            fitting = max(fitting, 1)
        return min(fitting, self.ready)

    @staticmethod
    def blocks_to_park(load: "Load") -> int:
        """Host blocks that the next prompt takes when it is parked, with room for its first token."""
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
    """Host sequences for sub-batches 0 and 1. "asymmetric" takes those under way, the most advanced first, then ready
    ones, and finishes their tokens within the step. "overlap" has one batch: this many ready sequences begin a token,
    and all that are under way advance without being counted."""
    swap_out: int = 0
    """Ready decodes to move from device to host memory, the last in order first, as far as the host has room."""
    swap_in: int = 0
    """Ready host sequences to move to the device, in order. Each of its decodes keeps a block to grow into."""
    park: bool = False
    """Prompts that this step completes move to host memory. A prompt whose blocks the host cannot hold is not begun."""
    preempt: bool = False
    """Preempted sequences move to host memory if it has room, instead of being recomputed."""
    alternatives: tuple[Alternative, ...] = field(default=(), compare=False)
    """The strategies that ``strategy`` was chosen from, for traces and figures; empty where there was no choice."""


ONE_LAYOUT = LayoutsLoad()
NO_HOST = HostLoad()
DEVICE_ONLY = HostDecision()
