"""The words between the engine and its workers: typed msgpack, never pickle."""

from pathlib import Path
from typing import Self

import msgspec

from nanoserve.costs.hardware import MachineSpeeds
from nanoserve.costs.layout_profile import LayoutProfile
from nanoserve.costs.profile import Profile
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import NanoserveError, RuntimeFailure, first_line
from nanoserve.models.hub import ResolvedModel
from nanoserve.record.times import ReshardTimes, StageTimes, SwapTimes
from nanoserve.scheduler.plan import StepPlan, StepResult


class WorkerStart(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a worker: as one line of JSON, in which a path is a string, on the stdin
    of one that the engine starts."""

    model: ResolvedModel  # where this machine has it
    config: EngineConfig
    rank: int = 0
    local_rank: int = 0
    """Its number among the workers on its machine. Engines beside each other have their workers in
    a row."""
    plans: str = ""
    reports: str = ""
    """ZeroMQ addresses of the engine: plans come from the first, reports go to the second."""
    engine_key: str = ""  # public key of the engine behind these addresses
    init_method: str = ""  # where the workers meet, as `Addresses` has it
    layout: int = 0  # number of the parallel layout to begin in
    host_pool: tuple[str, int] | None = None
    """File in memory with the blocks of the host tier, and how many; None without that tier."""
    # plans come from the stage before, with the hidden states, and not ahead of them
    coupled: bool = False
    observe_times: bool = False  # whether to report what was done when
    profiles: bool = False
    """Whether the first worker is to find out what policies that attend in host memory predict
    by."""
    again: bool = False
    """Whether workers ran before: what they measured together is known, and others may not measure
    any more."""
    # whether it is to measure layouts with the other workers, and nothing else
    measures: bool = False

    @classmethod
    def read(cls, line: bytes) -> Self:
        return msgspec.json.decode(line, type=cls, dec_hook=_read_path)

    def line(self) -> bytes:
        return msgspec.json.encode(self, enc_hook=str)


def _read_path(kind: type[Path], text: str) -> Path:
    """Decode a path for msgspec."""
    return kind(text)


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Make the KV cache, and be ready for plans. How many blocks it has, by layout."""

    num_blocks: tuple[int, ...]
    state_slots: int = 0
    """Slots for recurrent states."""


class Rejoin(msgspec.Struct, frozen=True, tag=True):
    """A worker is lost and started anew: leave the group, and meet with all again, with the weights
    that are here."""

    start: WorkerStart


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Load or compile what makes steps faster; it takes over between two steps. `waited`: no plan
    comes before."""

    waited: bool = False


class RunPlan(msgspec.Struct, frozen=True, tag=True):
    """Run a plan, after the plans sent before it."""

    plan: StepPlan


class Follow(msgspec.Struct, frozen=True, tag=True):
    """Run the plan that the stage before sends with its hidden states. For coupled workers behind
    the first stage."""


class ForgetHost(msgspec.Struct, frozen=True, tag=True):
    """Drop the host sequences under way, in every stage. It is ordered among the plans, and
    concerns the plans before it."""


ToWorker = Allocate | Rejoin | Prepare | RunPlan | Follow | ForgetHost


def worker_decoder() -> "msgspec.msgpack.Decoder[ToWorker]":
    """Reads what a worker is told; each thread has its own."""
    return msgspec.msgpack.Decoder(ToWorker, dec_hook=_read_path)


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a worker."""

    rank: int


class Loading(msgspec.Struct, frozen=True, tag=True):
    """How far a worker is with its part of the model."""

    rank: int
    stage: str
    done: int
    total: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """A worker has its part of the model."""

    rank: int
    memory: str
    """Name of the memory that holds its KV cache. Workers that share a memory give the same
    name."""
    block_bytes: tuple[int, ...]  # size of its part of one KV block, by layout
    free_bytes: int  # what is free of that memory, beside what steps need
    speeds: MachineSpeeds | None = None
    """Speeds that it reaches while the other workers measure too; None where no policy decides by
    them."""
    state_bytes: int = 0
    """Size of its part of a slot for recurrent states."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A worker takes plans."""

    rank: int
    profile: Profile | None = None
    """Profile for policies that attend in host memory, if it was asked for and could be
    measured."""
    # what was measured of layouts, the same by all workers, if that was asked for
    layouts: LayoutProfile | None = None


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """A worker's layers run compiled, or never will."""

    rank: int
    compiled: bool


class WorkerFailed(msgspec.Struct, frozen=True, tag=True):
    """A worker cannot go on. ``exit_code`` is that of the error's class."""

    rank: int
    message: str
    exit_code: int

    @classmethod
    def of(cls, rank: int, error: Exception) -> Self:
        """Describe an error to the engine."""
        if isinstance(error, NanoserveError):
            return cls(rank, str(error), error.exit_code)
        return cls(rank, f"{type(error).__name__}: {first_line(error)}", RuntimeFailure.exit_code)


class Answered(msgspec.Struct, frozen=True, tag=True):
    """Result of a plan, from the first rank of the last stage alone."""

    result: StepResult


class StepObserved(msgspec.Struct, frozen=True, tag=True):
    """Times of a worker's work on one plan."""

    times: StageTimes


class Moved(msgspec.Struct, frozen=True, tag=True):
    """A worker has done its part of a change of layout, or of a swap."""

    times: ReshardTimes | SwapTimes


class HostLost(msgspec.Struct, frozen=True, tag=True):
    """A worker's attention on the CPU failed or hangs; it goes on with a new thread."""

    rank: int
    reason: str
    forgotten: int
    """How many ForgetHost it has followed: what they concern needs not be lost again."""


FromWorker = (
    Hello
    | Loading
    | Loaded
    | Ready
    | Prepared
    | WorkerFailed
    | Answered
    | StepObserved
    | Moved
    | HostLost
)
