"""The words between the front end and the engine process: typed msgpack, never pickle.

Commands go to the engine, reports come back, each over a socket of its own on which nobody else is heard. What does not
decode to exactly one of these types is dropped and counted.
"""

import msgspec

from nanoserve.engine_config import EngineConfig
from nanoserve.processes.sockets import SocketKeys
from nanoserve.request import FinishReason, Request, SamplingParams, TokenLogprob

# ---------------------------------------------------------------------------------------------- to the engine


class EngineSockets(msgspec.Struct, frozen=True):
    """What the engine process reads first, as one line of JSON on its stdin."""

    commands: str
    """ZeroMQ address at which the engine listens."""
    reports: str
    """... and the front end."""
    keys: SocketKeys
    """Of both; nobody else has them."""


class EngineStart(msgspec.Struct, frozen=True):
    """What the engine process reads next, likewise."""

    name: str
    """Of the model, for people; of a dummy also its shape."""
    directory: str | None
    """Where the model is; None for a dummy."""
    tokenizer_directory: str
    """Where its tokenizer is."""
    config: EngineConfig


class Add(msgspec.Struct, frozen=True, tag=True):
    """Run a request."""

    request: Request
    finished: tuple[int, ...] = ()
    """Samples that had ended before the request came to this engine."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End a request, or one of its samples: an abort, or a stop string that its text has met."""

    request_id: str
    index: int | None = None
    reason: FinishReason = FinishReason.ABORT


Command = Add | Stop

# ------------------------------------------------------------------------------------------- from the engine


class Loading(msgspec.Struct, frozen=True, tag=True):
    """How far the loading of the model is."""

    stage: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine takes requests."""

    max_model_len: int
    """Longest sequence in tokens, prompt and output together."""
    vocab_size: int
    """Width of the logits; every token id must be below it."""
    end_tokens: tuple[int, ...]
    """The model's end-of-sequence ids."""
    default_params: SamplingParams
    """What the model's generation_config.json recommends."""
    max_num_seqs: int
    """Sequences that run at a time."""


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start; the process ends. ``exit_code`` is that of the error's class."""

    message: str
    exit_code: int


class Ending(msgspec.Struct, frozen=True):
    """How a sample ended."""

    reason: FinishReason
    stop_token: int | None = None
    error: str | None = None


class SampleUpdate(msgspec.Struct, frozen=True, array_like=True):
    """What one sample gained."""

    request_id: str
    index: int
    """Which of the request's samples."""
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    """One per token, where asked for."""
    prompt_logprobs: tuple[TokenLogprob, ...]
    """Of the whole prompt, once, where asked for."""
    cached_tokens: int
    """Prompt tokens that came from the prefix cache."""
    started: float | None
    """When a plan first held the sample, in seconds of the machine's monotonic clock."""
    ending: Ending | None
    """None while it goes on."""


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """The engine's state between two steps."""

    added: int = 0
    """Requests taken in since the start, so that the sender knows what is still on its way."""
    dropped: int = 0
    """Messages that made no sense."""
    running: int = 0
    waiting: int = 0
    """Sequences that hold blocks on the device, and that hold none."""
    free_blocks: int = 0
    total_blocks: int = 0
    """Of the KV cache; blocks that are cached but without an owner are free."""
    preemptions: int = 0
    """Since the start."""
    steps: int = 0
    """Since the start."""
    losses: int = 0
    """Times that its workers died, since the start."""
    on_host: int = 0
    """Sequences whose KV is in host memory."""
    free_host_blocks: int = 0
    total_host_blocks: int = 0
    """Of the KV blocks there."""
    host_losses: int = 0
    """Times that attention on the CPU was lost, since the start."""
    ready: bool = True
    """Whether a step would be computed at once; not while workers are stopped or being started anew."""


class Report(msgspec.Struct, frozen=True, tag=True):
    """What a step brought, or that commands were taken in."""

    updates: tuple[SampleUpdate, ...]
    stats: EngineStats


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request that can never run here."""

    request_id: str
    message: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine runs nothing any more, and why; the process ends."""

    message: str


EngineMessage = Loading | Ready | StartFailed | Report | Refused | Failed
