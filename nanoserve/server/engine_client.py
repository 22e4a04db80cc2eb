"""The front end's side of the engine: it sends requests, feeds streams, and starts a new process
when one dies."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from typing import NoReturn

import msgspec
import zmq.asyncio

from nanoserve.engine.outputs import TokenDecoder
from nanoserve.errors import ModelError, NanoserveError, RuntimeFailure, error_of
from nanoserve.record.counters import EngineStatus, RecentStep
from nanoserve.request import FinishReason, Request
from nanoserve.server import messages
from nanoserve.server.streams import RequestStream
from nanoserve.utils.quarantine import Quarantine
from nanoserve.utils.sockets import listen, local_address
from nanoserve.utils.temporary import choose_directory, make_directory
from nanoserve.utils.waiting import Waiting
from nanoserve.utils.watchdog import TiedChild, end_children

START_SECONDS = 60.0  # time to the first heartbeat: Python starts and imports ZeroMQ, nothing more
LOADING_SILENCE_SECONDS = 120.0  # importing torch can hold the interpreter for a while
SILENCE_SECONDS = 10.0  # twenty missed heartbeats: the process is stopped, or its machine is
RETRY_SECONDS = 15.0  # time to the next attempt when engines keep dying

_LAST_MESSAGES_SECONDS = 0.2
_LOGGED_STEPS = 8
"""Number of last steps that the log shows when an engine dies."""

_LOG = logging.getLogger("nanoserve.server")


class EngineState(Enum):
    LOADING = "the model is being loaded"
    READY = "ready"
    RESTARTING = "the engine is being restarted"
    FAILED = "the engine keeps failing"
    CLOSED = "the server is stopping"


class EngineUnavailable(NanoserveError):
    """No engine can take or finish a request."""


class QueueFull(NanoserveError):
    """More requests are waiting than the server allows."""


class EngineChild:
    """A process that runs the engine; ``end`` it in any case. Raises RuntimeFailure if it cannot be
    started."""

    def __init__(self, program: str) -> None:
        self._directory = choose_directory()
        context = zmq.asyncio.Context(io_threads=1)
        try:
            self.mailbox: messages.Mailbox[messages.EngineMessage] = messages.Mailbox(
                context, messages.EngineMessage
            )
            self._process = TiedChild(program, directory=self._directory)
        except (OSError, zmq.ZMQError) as error:
            context.destroy(linger=0)
            raise RuntimeFailure(
                f"the engine process cannot be started: {error.strerror or error}"
            ) from error
        # set by the owner when the engine is ready; from then on less silence is tolerated
        self.ready = False

    async def start(self, start: messages.EngineStart) -> None:
        """Begin to load the model. Raises RuntimeFailure if the process does not come up."""
        make_directory(self._directory)
        address = local_address(self._directory)
        start = msgspec.structs.replace(
            start, address=address, key=listen({address: self.mailbox.socket})
        )
        self._process.tell(msgspec.json.encode(start, enc_hook=str))
        try:
            if not await self._beats(START_SECONDS):
                raise RuntimeFailure("the engine process died at once; its own error is above")
        except TimeoutError:
            raise RuntimeFailure(
                f"the engine process did not start within {START_SECONDS:g} s"
            ) from None

    async def death(self) -> str:
        """Wait until the process is dead, or kill it after too long a silence; returns what
        happened."""
        silence = 0.0
        while silence < self._tolerated_silence:
            try:
                # Second by second: if the machine was suspended for a minute, that counts as one
                # second of silence.
                if not await self._beats(1.0):
                    return await asyncio.to_thread(self._process.ending)
                silence = 0.0
            except TimeoutError:
                silence += 1.0
        await asyncio.to_thread(self._process.end)
        return f"gave no sign of life for {silence:g} s and was killed"

    @property
    def _tolerated_silence(self) -> float:
        """Seconds without a heartbeat until the process is killed."""
        if self.ready:
            return SILENCE_SECONDS
        return LOADING_SILENCE_SECONDS

    async def end(self) -> None:
        """Let the process end its workers and itself, or kill it. Then remove its socket and
        directory."""
        self.mailbox.close(linger=0)
        await asyncio.to_thread(end_children, [self._process], self._directory)

    async def _beats(self, seconds: float) -> bool:
        """Wait for a sign of life. Returns False if the process is dead. Raises TimeoutError if
        neither comes in time."""
        readable = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._process.pulse, readable.set)
        try:
            async with asyncio.timeout(seconds):  # wait_for of Python 3.11 may lose a cancellation
                await readable.wait()
        except TimeoutError:
            if not readable.is_set():  # after a long turn of the loop, both are found at once
                raise
        finally:
            loop.remove_reader(self._process.pulse)
        return self._process.beats()


class EngineClient:
    """Requests and their streams, over the lives of any number of engine processes.

    ``max_queue`` requests may wait for a place in the engine; ``program`` is the Python code of an
    engine process.
    """

    def __init__(
        self,
        start: messages.EngineStart,
        tokenizer: TokenDecoder,
        *,
        max_queue: int,
        program: str = "from nanoserve.server.engine_process import main; main()",
    ) -> None:
        self._start = start
        self._tokenizer = tokenizer
        self._max_queue = max_queue
        self._stage = Waiting("loading")  # of the engine that is being started
        self._starting_since = time.monotonic()
        self._program = program
        self._child: EngineChild | None = None
        self._streams: dict[str, RequestStream] = {}
        self._sent = 0
        self._quarantine = Quarantine()
        self._ready_since: float | None = None
        self.state = EngineState.LOADING
        self.reason = ""
        self.became_ready = asyncio.Event()  # set once the first engine is ready
        self.facts: messages.EngineFacts | None = None  # None until then
        # called with every step of an engine
        self.on_step: Callable[[RecentStep], None] = lambda step: None
        self.last = messages.StepReport()  # the last report of the current engine
        self.generated_tokens = 0  # tokens sampled by all engines
        # why the trace of an engine is not complete, if it is not
        self.trace_failure: str | None = None
        self.past: list[EngineStatus] = []  # the last status of each engine before the current one
        self._recent: deque[RecentStep] = deque(maxlen=_LOGGED_STEPS)  # steps of the current engine

    @property
    def running(self) -> int:
        return len(self._streams)

    @property
    def serving(self) -> bool:
        """Whether a request would run at once."""
        return self.state is EngineState.READY and self.last.ready

    @property
    def dropped(self) -> int:
        """Undecodable messages to and from the current engine."""
        dropped = self.last.dropped
        if self._child is not None:
            dropped += self._child.mailbox.dropped
        return dropped

    @property
    def total(self) -> EngineStatus:
        """The counts of all engines together."""
        return EngineStatus.together(self.past + [self.last.status])

    def add(self, requests: list[Request]) -> list[RequestStream]:
        """Take all of the requests or none; one reader follows their streams.

        Raises EngineUnavailable if no engine will be there soon, QueueFull if too many requests are
        waiting.
        """
        if self.state not in (EngineState.READY, EngineState.RESTARTING):
            raise EngineUnavailable(self.describe_state())
        queued = self._queue_length()
        if queued + len(requests) > self._max_queue + self._free_places():
            raise QueueFull(f"{queued} requests are waiting already; try again later")
        news = asyncio.Event()
        streams = [RequestStream(request, self._tokenizer, news) for request in requests]
        self._streams |= {stream.request_id: stream for stream in streams}
        self._admit(streams)
        return streams

    def _free_places(self) -> int:
        """Places in the engine that new requests would get; none while earlier requests wait for
        places."""
        status = self.last.status
        if self.facts is None or status.waiting:
            return 0
        return max(0, self.facts.max_num_seqs - status.running)

    def _admit(self, streams: Iterable[RequestStream]) -> None:
        """Send the engine the requests that it does not have and that the quarantine allows."""
        if self.state is EngineState.READY:
            for stream in streams:
                if not stream.sent and self._quarantine.admits(stream.request_id):
                    stream.sent = True
                    self._send(stream.resumed())

    def _take_out(self, request_id: str) -> RequestStream | None:
        """Remove a request that has ended, and send the requests that waited for it in
        quarantine."""
        stream = self._streams.pop(request_id, None)
        was_suspect = self._quarantine.suspect == request_id
        self._quarantine.forget(request_id)
        if was_suspect:
            self._admit(self._streams.values())
        return stream

    def forget(self, stream: RequestStream) -> None:
        """Drop a stream whose reader is done, and abort it if it still runs."""
        if stream.request_id in self._streams and not stream.finished:
            self._send(messages.Stop(stream.request_id))
        self._take_out(stream.request_id)

    @property
    def waiting(self) -> Waiting | None:
        """Tell what a start waits for now; None where none is under way. Another thread may ask."""
        if self.state in (EngineState.LOADING, EngineState.RESTARTING):
            return self._stage
        return None

    def describe_state(self) -> str:
        waiting = self.waiting
        if waiting is not None:
            told = waiting.after(time.monotonic() - self._starting_since)
            return f"{self._described_state}: {told}"
        return self._described_state

    @property
    def _described_state(self) -> str:
        if self.state is EngineState.READY and not self.last.ready:
            return "the engine's workers are stopped, or are being restarted"
        if self.reason:
            return f"{self.state.value}: {self.reason}"
        return self.state.value

    def _queue_length(self) -> int:
        """Requests without a place in the engine: its own queue, requests on their way to it, and
        requests held back here."""
        if self.state is not EngineState.READY:
            return len(self._streams)
        held = [stream for stream in self._streams.values() if not stream.sent]
        on_their_way = self._sent - self.last.added
        return self.last.status.waiting + on_their_way + len(held)

    def _send(self, command: messages.Command) -> None:
        if self._child is None or self.state is not EngineState.READY:
            return  # the next engine gets all unfinished requests
        if isinstance(command, messages.Add):
            self._sent += 1
        self._child.mailbox.send(command)

    async def run(self) -> NoReturn:
        """Keep an engine alive until cancelled. Raises NanoserveError if the very first engine
        cannot start."""
        try:
            while True:
                self._ready_since = None
                try:
                    death = await self._run_engine()
                except NanoserveError as error:
                    if self.facts is None:
                        raise
                    if self._ready_since is not None:
                        _LOG.warning(
                            "the engine gave up: %s; the next one is started in %g s",
                            error,
                            RETRY_SECONDS,
                        )
                        await self._rest(str(error))
                        continue
                    death = f"cannot start: {error}"
                if self.facts is None:
                    raise RuntimeFailure(
                        f"the engine process {death} while it was loading the model"
                    )
                await self._after_death(death)
        finally:
            self.state = EngineState.CLOSED
            self.reason = ""
            self._fail_all(EngineUnavailable(self.state.value))

    async def _after_death(self, death: str) -> None:
        _LOG.warning("the engine %s; another one is started", death)
        now = time.monotonic()
        ran = 0.0
        if self._ready_since is not None:
            ran = now - self._ready_since
        in_flight = [stream.request_id for stream in self._streams.values() if stream.sent]
        culprit = self._quarantine.on_death(in_flight, now, ran=ran)
        times = self._quarantine.exhausted
        if times is not None:
            await self._rest(f"engines died {times}; the last one {death}")
            return
        self._expect_another(EngineState.RESTARTING, f"the last one {death}")
        if culprit is not None:
            self._fail(
                culprit,
                RuntimeFailure("the engine died too often while this request ran, at last alone"),
            )

    async def _rest(self, reason: str) -> None:
        """Fail all streams after too many failures, and wait before the next attempt."""
        self._expect_another(EngineState.FAILED, reason)
        self._fail_all(EngineUnavailable(self.describe_state()))
        await asyncio.sleep(RETRY_SECONDS)

    def _expect_another(self, state: EngineState, reason: str) -> None:
        if self._recent:
            _LOG.warning("its last steps: %s", "; ".join(map(str, self._recent)))
        self.state = state
        self.reason = reason
        self.past.append(self.last.status)
        self.last = messages.StepReport()
        self._recent.clear()
        self._sent = 0
        for stream in self._streams.values():
            stream.sent = False

    async def _run_engine(self) -> str:
        """Run one engine until it dies; returns how it died."""
        self._stage, self._starting_since = Waiting("loading"), time.monotonic()
        child = EngineChild(self._program)
        try:
            await child.start(self._start)
            self._child = child
            listener = asyncio.create_task(self._listen(child))
            watcher = asyncio.create_task(child.death())
            try:
                await asyncio.wait({listener, watcher}, return_when=asyncio.FIRST_COMPLETED)
                # The listener only ends by an error. The last messages of a dead engine may still
                # be on their way.
                await asyncio.wait({listener}, timeout=_LAST_MESSAGES_SECONDS)
                if listener.done():
                    listener.result()  # raises its error
                return watcher.result()
            finally:
                listener.cancel()
                watcher.cancel()
                await asyncio.gather(listener, watcher, return_exceptions=True)
        finally:
            self._child = None
            await child.end()

    async def _listen(self, child: EngineChild) -> NoReturn:
        while True:
            for message in child.mailbox.decoded(await child.mailbox.socket.recv()):
                self._take(message, child)
            await asyncio.sleep(0)  # with many messages queued, recv never yields to other tasks

    def _take(self, message: messages.EngineMessage, child: EngineChild) -> None:
        if isinstance(message, messages.StepReport):
            self.last = message
            self._recent += message.steps
            for step in message.steps:
                self.on_step(step)
            for update in message.updates:
                self._pass_on(update)
        elif isinstance(message, messages.LoadProgress):
            self._stage = Waiting.for_stage(message.stage, message.done, message.total)
        elif isinstance(message, messages.TraceFailed):
            if self.trace_failure is None:  # several engines may write one file
                _LOG.warning("the trace ends here: %s", message.message)
            self.trace_failure = message.message
        elif isinstance(message, messages.Failed):
            error = error_of(message.exit_code, message.message)
            if message.request_id is None:
                raise error
            self._fail(message.request_id, error)
        else:
            child.ready = True
            self.facts = message
            self._ready_since = time.monotonic()
            self.state = EngineState.READY
            self.reason = ""
            self._admit(self._streams.values())  # all unfinished requests
            self.became_ready.set()

    def _fail(self, request_id: str, error: NanoserveError) -> None:
        """End one request with an error, if it has not ended."""
        stream = self._take_out(request_id)
        if stream is not None:
            stream.fail(error)

    def _pass_on(self, update: messages.SampleUpdate) -> None:
        self.generated_tokens += len(update.tokens)
        stream = self._streams.get(update.request_id)
        if stream is None:
            return
        try:
            met_stop_string = stream.take(update)
        # the tokenizer fails with these tokens; the reader ends the request
        except ModelError as error:
            stream.fail(error)
            return
        if met_stop_string:
            self._send(messages.Stop(update.request_id, update.index, FinishReason.STOP))
        if stream.finished:
            self._take_out(update.request_id)
            if all(
                sample.finish_reason != FinishReason.ERROR.value
                for sample in stream.tracker.whole().outputs
            ):
                self._quarantine.on_answer()

    def _fail_all(self, error: NanoserveError) -> None:
        for stream in self._streams.values():
            stream.fail(error)
            self._quarantine.forget(stream.request_id)
        self._streams.clear()
