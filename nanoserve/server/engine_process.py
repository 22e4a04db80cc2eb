"""The engine process: it takes commands between two steps, and reports the updates of each step.

It never waits for the front end: commands and reports queue in the socket. It loads torch; the
front end does not.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec
import zmq

from nanoserve.engine.interface import InferenceEngine
from nanoserve.errors import NanoserveError, PolicyFailed, RuntimeFailure, UsageError, WorkersFailed
from nanoserve.record.counters import RecentStep
from nanoserve.record.recent_steps import RecentSteps
from nanoserve.request import Sequence, SequenceUpdate
from nanoserve.server import messages
from nanoserve.utils.memory import keep_what_is_loaded
from nanoserve.utils.sockets import connect
from nanoserve.utils.watchdog import ParentWatchdog

COMMAND_BYTES = 64 << 10
COMMAND_SAMPLES = 256
"""Limits of the commands that are taken between two steps: their bytes, and the samples that they
ask for. The command that reaches a limit is the last. So a large request does not delay the
others."""
COMMAND_SECONDS = 0.1
"""Longest wait for a result before commands are read again: other processes may be slow, or may be
starting."""
PROMPT_PIECE = 1024
"""Log probabilities of a prompt in one message. The front end takes 3 us for each of its likeliest
tokens."""
WATCH_SECONDS = 1.0  # interval at which an idle engine checks that its workers live


def receive(mailbox: messages.Mailbox[messages.Command], seconds: float) -> list[messages.Command]:
    """Take the commands that have arrived, up to COMMAND_BYTES and COMMAND_SAMPLES. Waits up to
    `seconds` for the first command."""
    commands: list[messages.Command] = []
    size = 0
    samples = 0
    mailbox.socket.poll(int(1000 * seconds))
    with suppress(zmq.Again):
        while size < COMMAND_BYTES and samples < COMMAND_SAMPLES:
            data = mailbox.socket.recv(zmq.NOBLOCK)
            size += len(data)
            for command in mailbox.decoded(data):
                commands.append(command)
                if isinstance(command, messages.Add):
                    samples += command.request.params.n
    return commands


class EngineLoop:
    """Drives an engine by the commands of a mailbox."""

    def __init__(
        self, engine: InferenceEngine, mailbox: messages.Mailbox[messages.Command]
    ) -> None:
        self._engine = engine
        self._mailbox = mailbox
        self._recent = [RecentSteps(each.scheduler) for each in engine.engines]
        for each, recent in zip(engine.engines, self._recent, strict=True):
            each.observers.append(recent)
        self._added = 0
        # log probabilities that were reported of each sequence
        self._reported: dict[Sequence, int] = {}
        self._workers = (True, 0)  # readiness and deaths as last reported

    def run(self) -> None:
        """Serve until the process is ended, or until the engine gives up; then report why."""
        while self._engine.failure is None:
            self.turn()
        self._report([], [])  # the last death counts too
        self._mailbox.send(messages.Failed(self._engine.failure, WorkersFailed.exit_code))

    def turn(self) -> None:
        """Take commands, waiting for one if there is nothing to do; then make a step."""
        patience = WATCH_SECONDS
        if self._engine.has_work:
            patience = 0.0
        commands = receive(self._mailbox, patience)
        updates: list[SequenceUpdate] = []
        for command in commands:
            updates += self._obey(command)
        until = self._engine.now()
        if self._engine.has_work:
            until += COMMAND_SECONDS
        updates += self._engine.step(until)
        workers = (self._engine.ready, self._engine.losses)
        steps = [step for recent in self._recent for step in recent.take()]
        has_news = bool(updates or steps or commands) or workers != self._workers
        if has_news and self._engine.failure is None:
            self._report(updates, steps)
            self._workers = workers

    def _obey(self, command: messages.Command) -> list[SequenceUpdate]:
        if isinstance(command, messages.Stop):
            return self._engine.stop(command.request_id, index=command.index, reason=command.reason)
        self._added += 1
        request_id = command.request.request_id
        try:
            self._engine.add(command.request)
        except (UsageError, PolicyFailed) as error:
            self._mailbox.send(messages.Failed(str(error), error.exit_code, request_id))
        for index in command.finished:
            self._engine.stop(request_id, index=index)
        return []

    def _report(self, updates: list[SequenceUpdate], steps: list[RecentStep]) -> None:
        for update in updates:
            for piece in self._prompt_pieces(update):
                self._send([piece], [])
        self._send([self._as_message(update) for update in updates], steps)

    def _send(self, updates: list[messages.SampleUpdate], steps: list[RecentStep]) -> None:
        report = messages.StepReport(
            updates=tuple(updates),
            status=self._engine.status,
            steps=tuple(steps),
            added=self._added,
            dropped=self._mailbox.dropped,
            ready=self._engine.ready,
        )
        self._mailbox.send(report)

    def _prompt_pieces(self, update: SequenceUpdate) -> Iterator[messages.SampleUpdate]:
        """Split the prompt's log probabilities, which come with the first update of their sequence.
        There may be a million, and the front end does nothing else while it takes in a message."""
        if update.sequence in self._reported:
            return
        logprobs = update.sequence.prompt_logprobs
        for start in range(0, len(logprobs), PROMPT_PIECE):
            piece = tuple(logprobs[start : start + PROMPT_PIECE])
            yield messages.SampleUpdate(
                update.request_id, update.index, (), prompt_logprobs=piece, prompt_start=start
            )

    def _as_message(self, update: SequenceUpdate) -> messages.SampleUpdate:
        """The update with the log probabilities of its sequence that were not reported yet."""
        sequence = update.sequence
        reported = self._reported.pop(sequence, 0)
        if not sequence.finished:
            self._reported[sequence] = len(sequence.logprobs)
        return messages.SampleUpdate(
            request_id=update.request_id,
            index=update.index,
            tokens=update.new_tokens,
            logprobs=tuple(sequence.logprobs[reported:]),
            cached_tokens=sequence.cached_tokens,
            started=sequence.first_scheduled_time,
            finish_reason=sequence.finish_reason if sequence.finished else None,
            stop_token=sequence.stop_token,
            error=sequence.error,
        )


def build_from_model(
    start: messages.EngineStart, mailbox: messages.Mailbox[messages.Command]
) -> InferenceEngine:
    """Load the model, reporting progress, and report that the engine is ready."""
    from nanoserve.engine.assembly import build_engine

    try:
        built = build_engine(
            start.model,
            start.config,
            lambda *now: mailbox.send(messages.LoadProgress(*now)),
            on_trace_failure=lambda failure: mailbox.send(messages.TraceFailed(str(failure))),
        )
    except MemoryError as error:
        raise RuntimeFailure(
            "out of memory: choose a smaller --kv-cache-memory or --max-model-len"
        ) from error
    mailbox.send(
        messages.EngineFacts(
            max_model_len=built.max_model_len,
            vocab_size=built.model.vocab_size,
            end_tokens=built.model.eos_token_ids,
            default_params=built.default_params,
            max_num_seqs=built.config.max_num_seqs * built.config.data_parallel,
        )
    )
    for told in (built.choice, built.gpu):
        if told:
            print(f"nanoserve: {told}", file=sys.stderr, flush=True)
    built.start_preparing()
    return built.engine


def main(build: Callable[..., InferenceEngine] = build_from_model) -> None:
    """Entry point; ``build`` makes the engine. The first line of stdin is an EngineStart."""
    watchdog = ParentWatchdog.of_this_process()
    line = watchdog.read_line()
    start = msgspec.json.decode(
        line, type=messages.EngineStart, dec_hook=lambda kind, text: kind(text)
    )
    mailbox: messages.Mailbox[messages.Command] = messages.Mailbox(
        zmq.Context(io_threads=1), messages.Command
    )
    connect(mailbox.socket, start.address, start.key)
    # remembered before TMPDIR changes: files of workers must outlive the directory
    tempfile.gettempdir()
    # leftovers of a killed compiler are removed with it
    os.environ["TMPDIR"] = str(watchdog.directory)
    watchdog.start()
    try:
        engine = build(start, mailbox)
    except NanoserveError as error:
        mailbox.send(messages.Failed(str(error), error.exit_code))
        mailbox.close()
        sys.exit(error.exit_code)
    keep_what_is_loaded()
    EngineLoop(engine, mailbox).run()
    engine.close()
    mailbox.close()
    sys.exit(WorkersFailed.exit_code)
