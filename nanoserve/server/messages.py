"""The words between the front end and the engine process: typed msgpack, never pickle.

Commands go to the engine, reports come back, each over a socket of its own on which nobody else is heard. What does not
decode to exactly one of these types is dropped and counted.
"""

import msgspec

from nanoserve.config import EngineConfig
from nanoserve.request import FinishReason, Request, SamplingParams, TokenLogprob
from nanoserve.sockets import SocketKeys

# ---------------------------------------------------------------------------------------------- to the engine


class EngineSockets(msgspec.Struct, frozen=True):
    """What the engine process reads first, as one line of JSON on its stdin.

    Attributes:
        commands: ZeroMQ address at which the engine listens.
        reports: ... and the front end.
        keys: of both; nobody else has them.
    """

    commands: str
    reports: str
    keys: SocketKeys


class EngineStart(msgspec.Struct, frozen=True):
    """What the engine process reads next, likewise.

    Attributes:
        name: of the model, for people; of a dummy also its shape.
        directory: where the model is; None for a dummy.
        tokenizer_directory: where its tokenizer is.
    """

    name: str
    directory: str | None
    tokenizer_directory: str
    config: EngineConfig


class Add(msgspec.Struct, frozen=True, tag=True):
    """Run a request.

    Attributes:
        finished: samples that had ended before the request came to this engine.
    """

    request: Request
    finished: tuple[int, ...] = ()


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
    """The engine takes requests.

    Attributes:
        max_model_len: longest sequence in tokens, prompt and output together.
        vocab_size: width of the logits; every token id must be below it.
        end_tokens: the model's end-of-sequence ids.
        default_params: what the model's generation_config.json recommends.
        max_num_seqs: sequences that run at a time.
    """

    max_model_len: int
    vocab_size: int
    end_tokens: tuple[int, ...]
    default_params: SamplingParams
    max_num_seqs: int


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
    """What one sample gained.

    Attributes:
        index: which of the request's samples.
        logprobs: one per token, where asked for.
        prompt_logprobs: of the whole prompt, once, where asked for.
        cached_tokens: prompt tokens that came from the prefix cache.
        started: when a plan first held the sample, in seconds of the machine's monotonic clock.
        ending: None while it goes on.
    """

    request_id: str
    index: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    cached_tokens: int
    started: float | None
    ending: Ending | None


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """The engine's state between two steps.

    Attributes:
        added: requests taken in since the start, so that the sender knows what is still on its way.
        dropped: messages that made no sense.
        running, waiting: sequences that hold blocks on the device, and that hold none.
        free_blocks, total_blocks: of the KV cache; blocks that are cached but without an owner are free.
        preemptions: since the start.
        steps: since the start.
        losses: times that its workers died, since the start.
        on_host: sequences whose KV is in host memory.
        free_host_blocks, total_host_blocks: of the KV blocks there.
        host_losses: times that attention on the CPU was lost, since the start.
        ready: whether a step would be computed at once; not while workers are stopped or being started anew.
    """

    added: int = 0
    dropped: int = 0
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    preemptions: int = 0
    steps: int = 0
    losses: int = 0
    on_host: int = 0
    free_host_blocks: int = 0
    total_host_blocks: int = 0
    host_losses: int = 0
    ready: bool = True


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
