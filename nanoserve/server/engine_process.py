"""The engine process: takes commands between two steps, and reports what each step brought.

It waits for no one: commands and reports queue in the sockets. It loads torch; the front end does not.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from nanoserve.dispatcher import Dispatcher
from nanoserve.engine import Engine
from nanoserve.errors import NanoserveError, RuntimeFailure, UsageError, WorkersFailed
from nanoserve.processes.sockets import connect, listen
from nanoserve.processes.watchdog import ParentWatchdog, own_pipes, read_line
from nanoserve.request import Request, Sequence, SequenceUpdate
from nanoserve.server.messages import (
    Command,
    Ending,
    EngineMessage,
    EngineSockets,
    EngineStart,
    EngineStats,
    Failed,
    Loading,
    Ready,
    Refused,
    Report,
    SampleUpdate,
    StartFailed,
    Stop,
)

MAX_COMMAND_BYTES = 64 << 20
COMMAND_BYTES = 256 << 10
"""Of commands that are taken in between two steps, or one longer one: what one client sends holds no one up."""
COMMAND_SECONDS = 0.1
"""Commands wait no longer while nothing becomes known: long steps of other processes, or new ones being started."""
WATCH_SECONDS = 1.0
"""How often an idle engine sees whether its workers live."""


class Mailbox:
    """Both sockets of the engine's side.

    Raises:
        RuntimeFailure: if it cannot listen.
    """

    def __init__(self, sockets: EngineSockets) -> None:
        self._context = zmq.Context(io_threads=1)
        self._commands = self._context.socket(zmq.PULL)
        self._reports = self._context.socket(zmq.PUSH)
        for socket in (self._commands, self._reports):
            socket.set(zmq.LINGER, 1000)
            socket.set(zmq.SNDHWM, 0)  # unbounded: a step is never held up
            socket.set(zmq.RCVHWM, 0)
        self._commands.set(zmq.MAXMSGSIZE, MAX_COMMAND_BYTES)
        listen(self._commands, sockets.commands, sockets.keys)
        connect(self._reports, sockets.reports, sockets.keys.public)
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._encoder = msgspec.msgpack.Encoder()
        self.dropped = 0

    def send(self, message: EngineMessage) -> None:
        """Put a message on its way; never waits."""
        self._reports.send(self._encoder.encode(message), zmq.NOBLOCK)

    def receive(self, seconds: float) -> list[Command]:
        """The commands that have come, up to COMMAND_BYTES; waits for the first so long."""
        commands: list[Command] = []
        size = 0
        self._commands.poll(int(1000 * seconds))
        try:
            while size < COMMAND_BYTES:
                data = self._commands.recv(zmq.NOBLOCK)
                size += len(data)
                try:
                    commands.append(self._decoder.decode(data))
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, NanoserveError):
                    self.dropped += 1
        except zmq.Again:
            pass
        return commands

    def close(self) -> None:
        """Send what is on its way and close."""
        self._context.destroy(linger=1000)


@dataclass(slots=True)
class _Told:
    """What of a sequence the front end knows: how many log probabilities, and whether the prompt's."""

    logprobs: int = 0
    prompt: bool = False


class EngineLoop:
    """The engine between its two sockets."""

    def __init__(self, engine: Engine | Dispatcher, mailbox: Mailbox) -> None:
        self._engine = engine
        self._mailbox = mailbox
        self._added = 0
        self._told: dict[Sequence, _Told] = {}
        self._workers = (True, 0)  # whether they are ready and how often they died, as last told

    def run(self) -> None:
        """Serve until the process is ended, or the engine runs nothing any more; the front end is told that."""
        while self._engine.failure is None:
            self.turn()
        self._report([])  # the last death counts too
        self._mailbox.send(Failed(self._engine.failure))

    def turn(self) -> None:
        """Take commands in, waiting a while for one if there is nothing to do; then make a step."""
        commands = self._mailbox.receive(0.0 if self._engine.has_work else WATCH_SECONDS)
        updates = [update for command in commands for update in self._obey(command)]
        updates += self._engine.step(self._engine.now() + (COMMAND_SECONDS if self._engine.has_work else 0.0))
        workers = (self._engine.ready, self._engine.losses)
        if (updates or commands or workers != self._workers) and self._engine.failure is None:
            self._report(updates)
            self._workers = workers

    def _obey(self, command: Command) -> list[SequenceUpdate]:
        if isinstance(command, Stop):
            return self._engine.stop(command.request_id, index=command.index, reason=command.reason)
        self._added += 1
        self._add(command.request, command.finished)
        return []

    def _add(self, request: Request, finished: Iterable[int]) -> None:
        try:
            self._engine.add(request)
        except UsageError as error:
            self._mailbox.send(Refused(request.request_id, str(error)))
        for index in finished:
            self._engine.stop(request.request_id, index=index)

    def _report(self, updates: list[SequenceUpdate]) -> None:
        status = self._engine.status
        stats = EngineStats(
            added=self._added,
            dropped=self._mailbox.dropped,
            running=status.running,
            waiting=status.waiting,
            free_blocks=status.free_blocks,
            total_blocks=status.total_blocks,
            preemptions=status.preemptions,
            steps=status.steps,
            losses=status.losses,
            on_host=status.on_host,
            free_host_blocks=status.free_host_blocks,
            total_host_blocks=status.total_host_blocks,
            host_losses=status.host_losses,
            ready=self._engine.ready,
        )
        self._mailbox.send(Report(tuple(self._as_message(update) for update in updates), stats))

    def _as_message(self, update: SequenceUpdate) -> SampleUpdate:
        """The update with what its sequence has that was not told yet."""
        sequence = update.sequence
        told = self._told.setdefault(sequence, _Told())
        logprobs = tuple(sequence.logprobs[told.logprobs :])
        prompt_logprobs = () if told.prompt else tuple(sequence.prompt_logprobs)
        told.logprobs += len(logprobs)
        told.prompt = True
        ending = None
        if sequence.finished and sequence.finish_reason is not None:
            ending = Ending(sequence.finish_reason, sequence.stop_token, sequence.error)
            del self._told[sequence]
        return SampleUpdate(
            request_id=update.request_id,
            index=update.index,
            tokens=update.new_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            cached_tokens=sequence.cached_tokens,
            started=sequence.first_scheduled_time,
            ending=ending,
        )


Build = Callable[[EngineStart, Mailbox], Engine | Dispatcher]


def main(build: Build | None = None) -> None:
    """Entry point; ``build`` makes the engine, from a model if not given.

    Stdin brings EngineSockets and EngineStart and is the lifeline, stdout takes the heartbeats.
    The directory that is to go with this process is named on the command line.
    """
    parent, pulse = own_pipes()
    directory = Path(sys.argv[2])
    sockets = msgspec.json.decode(read_line(parent, directory), type=EngineSockets)
    start = msgspec.json.decode(read_line(parent, directory), type=EngineStart)
    try:
        mailbox = Mailbox(sockets)
    except RuntimeFailure as error:
        sys.exit(f"nanoserve: {error}")
    tempfile.gettempdir()  # once and for all: what workers write must not lie in what is removed before they end
    os.environ["TMPDIR"] = str(directory)  # what a compiler leaves that is killed goes with the rest
    ParentWatchdog(parent, pulse, directory).start()
    try:
        engine = (build or build_from_model)(start, mailbox)
    except NanoserveError as error:
        mailbox.send(StartFailed(str(error), error.exit_code))
        mailbox.close()
        sys.exit(error.exit_code)
    EngineLoop(engine, mailbox).run()
    engine.close()
    mailbox.close()
    sys.exit(WorkersFailed.exit_code)


def build_from_model(start: EngineStart, mailbox: Mailbox) -> Engine | Dispatcher:
    """Load the model, telling how far it is, and say Ready."""
    from nanoserve.assembly import build_engine
    from nanoserve.models.hub import ResolvedModel

    directory = None if start.directory is None else Path(start.directory)
    resolved = ResolvedModel(start.name, directory, Path(start.tokenizer_directory))
    try:
        built = build_engine(
            resolved, start.config, lambda stage, done, total: mailbox.send(Loading(stage, done, total))
        )
    except MemoryError as error:
        raise RuntimeFailure("out of memory: choose a smaller --kv-cache-memory or --max-model-len") from error
    mailbox.send(
        Ready(
            max_model_len=built.max_model_len,
            vocab_size=built.model.vocab_size,
            end_tokens=built.model.eos_token_ids,
            default_params=built.default_params,
            max_num_seqs=start.config.max_num_seqs * start.config.data_parallel,
        )
    )
    if built.gpu is not None:
        print(f"nanoserve: {built.gpu}", file=sys.stderr, flush=True)
    if built.layers is not None:
        built.layers.start()  # compiled in the background; they take over between two steps
    return built.engine
