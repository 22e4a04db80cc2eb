"""The messages between the front end and the engine process, and their sockets: typed msgpack, never pickle.

Commands go to the engine and reports come back, over one authenticated socket each. A message that does not decode to
exactly one of these types is dropped and counted.
"""

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from nanoserve.engine_config import EngineConfig
from nanoserve.errors import NanoserveError
from nanoserve.processes.sockets import SocketKeys, connect, listen
from nanoserve.record.counters import EngineStatus, RecentStep
from nanoserve.request import FinishReason, Request, SamplingParams, TokenLogprob

M = TypeVar("M")

MAX_COMMAND_BYTES = 64 << 20
_LINGER_MILLISECONDS = 1000

# ---------------------------------------------------------------------------------------------- to the engine


class EngineSockets(msgspec.Struct, frozen=True):
    """The first line of JSON on the engine process's stdin."""

    commands: str
    """ZeroMQ address at which the engine listens."""
    reports: str
    """ZeroMQ address at which the front end listens."""
    keys: SocketKeys
    """Keys of both sockets, which no other process has."""


class EngineStart(msgspec.Struct, frozen=True):
    """The second line of JSON on the engine process's stdin."""

    name: str
    """The model's name for people; a dummy's name also contains its shape."""
    directory: str | None
    """The model's directory; None for a dummy."""
    tokenizer_directory: str
    """Directory of the model's tokenizer."""
    config: EngineConfig


class Add(msgspec.Struct, frozen=True, tag=True):
    """Run a request."""

    request: Request
    finished: tuple[int, ...] = ()
    """Samples that ended in an earlier engine."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End a request, or one of its samples: an abort, or a stop string that its text has met."""

    request_id: str
    index: int | None = None
    reason: FinishReason = FinishReason.ABORT


Command = Add | Stop

# ------------------------------------------------------------------------------------------- from the engine


class LoadProgress(msgspec.Struct, frozen=True, tag=True):
    """Progress of loading the model."""

    stage: str
    done: int
    total: int


class EngineFacts(msgspec.Struct, frozen=True, tag=True):
    """The engine takes requests from now on, for this model."""

    max_model_len: int
    """Longest sequence in tokens, prompt and output together."""
    vocab_size: int
    """Width of the logits; every token id must be below it."""
    end_tokens: tuple[int, ...]
    """The model's end-of-sequence ids."""
    default_params: SamplingParams
    """Parameters that the model's generation_config.json recommends."""
    max_num_seqs: int
    """Sequences that run at a time."""


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start, and its process ends. ``exit_code`` belongs to the error's class."""

    message: str
    exit_code: int


class Ending(msgspec.Struct, frozen=True):
    """How a sample ended."""

    reason: FinishReason
    stop_token: int | None = None
    error: str | None = None


class SampleUpdate(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one sample."""

    request_id: str
    index: int
    """Which of the request's samples."""
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    """One per token, if the request asks for them."""
    prompt_logprobs: tuple[TokenLogprob, ...]
    """Those of the whole prompt, once, if the request asks for them."""
    cached_tokens: int
    """Prompt tokens that came from the prefix cache."""
    started: float | None
    """Time of the first plan with the sample, in seconds of the machine's monotonic clock."""
    ending: Ending | None
    """None while the sample runs."""


class StepReport(msgspec.Struct, frozen=True, tag=True):
    """The updates of a step, and the state after it or after new commands."""

    updates: tuple[SampleUpdate, ...] = ()
    status: EngineStatus = EngineStatus()
    steps: tuple[RecentStep, ...] = ()
    """Steps that have ended since the last report."""
    added: int = 0
    """Requests received since the start; the front end subtracts them from those it sent."""
    dropped: int = 0
    """Messages that could not be decoded."""
    ready: bool = True
    """Whether a step would run at once; false while workers are stopped or being restarted."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request that can never run here."""

    request_id: str
    message: str


class EngineStopped(msgspec.Struct, frozen=True, tag=True):
    """The engine gave up for this reason, and its process ends."""

    message: str


EngineMessage = LoadProgress | EngineFacts | StartFailed | StepReport | Refused | EngineStopped

# ------------------------------------------------------------------------------------------------ both sockets


class Mailbox(Generic[M]):
    """One end of the two sockets; ``M`` are the messages that it receives. Messages queue without bound.

    Args:
        sockets: addresses and keys.
        receives: `Command` in the engine process, `EngineMessage` in the front end.

    Raises:
        RuntimeFailure: if it cannot listen.
    """

    def __init__(self, sockets: EngineSockets, receives: Any) -> None:
        in_engine = receives is Command
        own, other = (sockets.commands, sockets.reports) if in_engine else (sockets.reports, sockets.commands)
        self._context = zmq.Context(io_threads=1)
        self.incoming, self._outgoing = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        self.incoming.set(zmq.RCVHWM, 0)
        self._outgoing.set(zmq.SNDHWM, 0)
        self._outgoing.set(zmq.LINGER, _LINGER_MILLISECONDS)
        if in_engine:
            self.incoming.set(zmq.MAXMSGSIZE, MAX_COMMAND_BYTES)
        listen(self.incoming, own, sockets.keys)
        connect(self._outgoing, other, sockets.keys.public)
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._encoder = msgspec.msgpack.Encoder()
        self.dropped = 0  # messages that could not be decoded

    def send(self, message: Command | EngineMessage) -> None:
        """Queue a message; never waits."""
        self._outgoing.send(self._encoder.encode(message), zmq.NOBLOCK)

    def decoded(self, data: bytes) -> Iterator[M]:
        """The message, or nothing if it cannot be decoded."""
        try:
            yield self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, NanoserveError):
            self.dropped += 1

    def close(self, linger: int = _LINGER_MILLISECONDS) -> None:
        """Send queued messages for at most `linger` milliseconds, and close."""
        self._context.destroy(linger=linger)
