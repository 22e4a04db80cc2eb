"""The words between the engine and its workers: typed msgpack, never pickle."""

import msgspec

from nanoserve.config import EngineConfig
from nanoserve.runtime.stage_times import StageTimes
from nanoserve.scheduler.plan import StepPlan, StepResult

# ------------------------------------------------------------------------------------------------ to a worker


class WorkerStart(msgspec.Struct, frozen=True):
    """What a worker is told first: as one line of JSON on the stdin of one that the engine starts.

    Attributes:
        rank: which worker it is.
        local_rank: which of those on its machine.
        plans, reports: ZeroMQ addresses of the engine: plans come from the first, reports go to the second.
        engine_key: public key of the engine behind these addresses; None where they are on one machine.
        init_method: where the workers meet, as `Addresses` has it.
        name, model_directory, tokenizer_directory: of the model, as in `ResolvedModel`.
        coupled: plans come from the stage before, with the hidden states, and not ahead of them.
        observe_times: whether to report what was done when.
    """

    rank: int
    local_rank: int
    plans: str
    reports: str
    engine_key: str | None
    init_method: str
    name: str
    model_directory: str | None
    tokenizer_directory: str
    config: EngineConfig
    coupled: bool = False
    observe_times: bool = False


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Make the KV cache, and be ready for plans."""

    num_blocks: int


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Load or compile what makes steps faster; it takes over between two steps."""


class Run(msgspec.Struct, frozen=True, tag=True):
    """Run a plan, behind those before it."""

    plan: StepPlan


class Follow(msgspec.Struct, frozen=True, tag=True):
    """Run the plan that the stage before sends with its hidden states. For coupled workers behind the first stage."""


ToWorker = Allocate | Prepare | Run | Follow

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
        block_bytes: of its part of one KV block.
        free_bytes: of that memory, beside what steps need.
    """

    rank: int
    memory: str
    block_bytes: int
    free_bytes: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A worker takes plans."""

    rank: int


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


FromWorker = Hello | Loading | Loaded | Ready | Prepared | Failed | Answered | Observed
