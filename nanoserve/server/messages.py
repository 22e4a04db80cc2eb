"""The messages between the front end and the engine process, and their socket: typed msgpack, never
pickle.

Commands go to the engine and reports come back, over one authenticated socket. A message that does
not decode to exactly one of these types is dropped and counted.
"""

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from nanoserve.engine_config import EngineConfig
from nanoserve.errors import NanoserveError
from nanoserve.models.hub import ResolvedModel
from nanoserve.record.counters import EngineStatus, RecentStep
from nanoserve.request import FinishReason, Request, SamplingParams, TokenLogprob

M = TypeVar("M")

MAX_COMMAND_BYTES = 64 << 20


class EngineStart(msgspec.Struct, frozen=True):
    """The line of JSON on the engine process's stdin, in which a path is a string."""

    model: ResolvedModel
    config: EngineConfig
    address: str = ""
    """ZeroMQ address at which the front end listens."""
    key: str = ""  # public key of that socket, which no other process has


class _Message(msgspec.Struct, frozen=True, tag=True):
    """A message with the name of its class as its tag."""


class Add(_Message, frozen=True):
    request: Request
    finished: tuple[int, ...] = ()
    """Samples that ended in an earlier engine."""


class Stop(_Message, frozen=True):
    """End a request, or one of its samples: an abort, or a stop string that its text has met."""

    request_id: str
    index: int | None = None
    reason: FinishReason = FinishReason.ABORT


Command = Add | Stop


class LoadProgress(_Message, frozen=True):
    stage: str
    done: int
    total: int


class EngineFacts(_Message, frozen=True):
    """The engine takes requests from now on, for this model."""

    max_model_len: int  # longest sequence in tokens, prompt and output together
    vocab_size: int  # width of the logits; every token id must be below it
    end_tokens: tuple[int, ...]  # the model's end-of-sequence ids
    default_params: SamplingParams  # parameters that the model's generation_config.json recommends
    max_num_seqs: int


class Failed(_Message, frozen=True):
    """The engine cannot start or has given up, or one request can never run. The error's class has
    the exit code."""

    message: str
    exit_code: int
    request_id: str | None = None


class TraceFailed(_Message, frozen=True):
    """The trace of this engine (--record) ends here; the engine goes on."""

    message: str


class SampleUpdate(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one sample."""

    request_id: str
    index: int
    """The sample's place among the samples of its request."""
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token, if the request asks for them."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Part of the prompt's log probabilities, from ``prompt_start`` on, if the request asks for
    them. They come before the first token."""
    prompt_start: int = 0
    cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    # time of the first plan with the sample, in seconds of the machine's monotonic clock
    started: float | None = None
    finish_reason: FinishReason | None = None  # None while the sample runs
    stop_token: int | None = None
    error: str | None = None


class StepReport(_Message, frozen=True):
    """The updates of a step, and the state after it or after new commands."""

    updates: tuple[SampleUpdate, ...] = ()
    status: EngineStatus = EngineStatus()
    steps: tuple[RecentStep, ...] = ()
    """Steps that have ended since the last report."""
    # requests received since the start; the front end subtracts them from the requests that it sent
    added: int = 0
    dropped: int = 0  # messages that could not be decoded
    # whether a step would run at once; false while workers are stopped or being restarted
    ready: bool = True


EngineMessage = LoadProgress | EngineFacts | Failed | TraceFailed | StepReport


class Mailbox(Generic[M]):
    """One end of the socket, in a ``context`` of its own. Messages queue without bound.

    ``M`` and ``receives`` are `Command` in the engine process, and `EngineMessage` in the front
    end, which listens.
    """

    def __init__(self, context: "zmq.Context[Any]", receives: Any) -> None:
        self._context = context
        self.socket = context.socket(zmq.PAIR)
        self.socket.set(zmq.SNDHWM, 0)
        self.socket.set(zmq.RCVHWM, 0)
        if receives is Command:
            self.socket.set(zmq.MAXMSGSIZE, MAX_COMMAND_BYTES)
        self._decoder = msgspec.msgpack.Decoder(receives)
        self.dropped = 0  # messages that could not be decoded

    def send(self, message: Command | EngineMessage) -> None:
        """Queue a message. It is dropped if the other process is gone, which its missing heartbeats
        tell."""
        self.socket.send(msgspec.msgpack.encode(message))

    def decoded(self, data: bytes) -> Iterator[M]:
        """The message, or nothing if it cannot be decoded."""
        try:
            yield self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, NanoserveError):
            self.dropped += 1

    def close(self, linger: int = 1000) -> None:
        """Send queued messages for at most `linger` milliseconds, and close."""
        self._context.destroy(linger=linger)
