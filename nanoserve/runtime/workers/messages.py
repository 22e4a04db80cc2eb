"""The words between the engine and its workers: typed msgpack, never pickle."""

import msgspec

from nanoserve.config import EngineConfig
from nanoserve.costs.measured_machine import MachineSpeeds
from nanoserve.costs.profile import Profile
from nanoserve.runtime.stage_times import ReshardTimes, StageTimes, SwapTimes
from nanoserve.scheduler.plan import StepPlan, StepResult

# ------------------------------------------------------------------------------------------------ to a worker


class WorkerStart(msgspec.Struct, frozen=True):
    """What a worker is told first: as one line of JSON on the stdin of one that the engine starts.

    Attributes:
        rank: which worker it is.
        local_rank: which of those on its machine.
        plans, reports: ZeroMQ addresses of the engine: plans come from the first, reports go to the second.
        engine_key: public key of the engine behind these addresses.
        init_method: where the workers meet, as `Addresses` has it.
        name, model_directory, tokenizer_directory: of the model, as in `ResolvedModel`.
        layout: number of the parallel layout to begin in.
        host_pool: file in memory with the blocks of the host tier, and how many; None without that tier.
        coupled: plans come from the stage before, with the hidden states, and not ahead of them.
        observe_times: whether to report what was done when.
        profiles: whether the first worker is to find out what policies that attend in host memory predict by.
    """

    rank: int
    local_rank: int
    plans: str
    reports: str
    engine_key: str
    init_method: str
    name: str
    model_directory: str | None
    tokenizer_directory: str
    config: EngineConfig
    layout: int = 0
    host_pool: tuple[str, int] | None = None
    coupled: bool = False
    observe_times: bool = False
    profiles: bool = False


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Make the KV cache, and be ready for plans. How many blocks it has, by layout."""

    num_blocks: tuple[int, ...]


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Load or compile what makes steps faster; it takes over between two steps. `waited`: nobody goes on before."""

    waited: bool = False


class Run(msgspec.Struct, frozen=True, tag=True):
    """Run a plan, behind those before it."""

    plan: StepPlan


class Follow(msgspec.Struct, frozen=True, tag=True):
    """Run the plan that the stage before sends with its hidden states. For coupled workers behind the first stage."""


class ForgetHost(msgspec.Struct, frozen=True, tag=True):
    """Host sequences that are under way are so no more, in any stage. Ordered among the plans: it concerns those before
    it."""


ToWorker = Allocate | Prepare | Run | Follow | ForgetHost

# ---------------------------------------------------------------------------------------------- from a worker


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first word of a worker."""

    rank: int


class Loading(msgspec.Struct, frozen=True, tag=True):
    """How far a worker is with its part of the model."""

    rank: int
    stage: str
    done: int
    total: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """A worker has its part of the model.

    Attributes:
        memory: what it takes its KV cache from, the same text for workers that take it from the same.
        block_bytes: of its part of one KV block, by layout.
        free_bytes: of that memory, beside what steps need.
        speeds: what it reaches while the others do the same; None where nobody decides by them.
    """

    rank: int
    memory: str
    block_bytes: tuple[int, ...]
    free_bytes: int
    speeds: MachineSpeeds | None = None


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A worker takes plans.

    Attributes:
        profile: what policies that attend in host memory predict by, if that was asked for and could be measured.
    """

    rank: int
    profile: Profile | None = None


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """A worker's layers run compiled, or never will."""

    rank: int
    compiled: bool


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A worker cannot go on. ``exit_code`` is that of the error's class."""

    rank: int
    message: str
    exit_code: int


class Answered(msgspec.Struct, frozen=True, tag=True):
    """What came of a plan; from the first rank of the last stage alone."""

    result: StepResult


class Observed(msgspec.Struct, frozen=True, tag=True):
    """What a worker did when for one plan."""

    times: StageTimes


class Moved(msgspec.Struct, frozen=True, tag=True):
    """A worker has done its part of a change of layout, or of a swap."""

    times: ReshardTimes | SwapTimes


class HostLost(msgspec.Struct, frozen=True, tag=True):
    """A worker's attention on the CPU failed or hangs; it goes on with a new thread.

    Attributes:
        forgotten: how many ForgetHost it has followed: what they concern needs not be lost again.
    """

    rank: int
    reason: str
    forgotten: int


FromWorker = Hello | Loading | Loaded | Ready | Prepared | Failed | Answered | Observed | Moved | HostLost
