"""A worker process, from its first line of input on, and its two sockets to the engine.

The tie to its parent is there before torch is imported.
"""

import os
import sys
import threading
from pathlib import Path

import msgspec
import zmq

from nanoserve.processes.sockets import connect
from nanoserve.processes.watchdog import ParentWatchdog, TiedChild
from nanoserve.runtime.workers.messages import FromWorker, Hello, ToWorker, WorkerFailed, WorkerStart, worker_decoder

_PROGRAM = "from nanoserve.runtime.workers.process import main; main()"
_SWITCH_SECONDS = 0.0002
"""How long one of a worker's two threads may keep the interpreter when the other wants it. With Python's 5 ms, a loop
that has only just let go of it, to send something, waits until the next plan is prepared: longer than a small step."""


def main() -> None:
    """Entry point of a worker: the first line of stdin is its WorkerStart. It works for the engine until its process is
    ended, or cannot go on."""
    watchdog = ParentWatchdog.of_this_process()
    start = WorkerStart.read(watchdog.read_line())
    watchdog.start()
    os.environ["TMPDIR"] = str(watchdog.directory)  # leftovers of a killed compiler are removed with it
    # Both import torch.
    from nanoserve.runtime.workers.building import work
    from nanoserve.runtime.workers.measuring import measure

    sys.setswitchinterval(_SWITCH_SECONDS)
    endpoint = WorkerEndpoint(start)
    endpoint.introduce(Hello(start.rank))
    try:
        if start.measures:
            measure(start, endpoint)
        work(start, endpoint)
    except Exception as error:
        failed = WorkerFailed.of(start.rank, error)
    endpoint.report(failed)
    endpoint.close()
    os._exit(failed.exit_code)  # at once: torch would wait for the other workers


def start_worker(number: int, threads: int, directory: Path) -> TiedChild:
    """Start a process that waits for its WorkerStart; lists of processes show its number on this machine. Raises
    OSError if it cannot be started."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    return TiedChild(_PROGRAM, str(number), directory=directory, environment=environment)


class WorkerEndpoint:
    """Where a worker hears from the engine and answers it. Nothing that is said waits."""

    def __init__(self, start: WorkerStart) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = worker_decoder()
        self._reporting = threading.Lock()
        self._connect(start)

    def _connect(self, start: WorkerStart) -> None:
        # Two contexts, so that the reports can be closed while another thread waits for plans.
        self._context = zmq.Context(io_threads=1)
        self.plans = zmq.Context(io_threads=1).socket(zmq.DEALER)
        self._reports = self._context.socket(zmq.PUSH)
        self.plans.set(zmq.IDENTITY, identity(start.rank))
        for socket, address in ((self.plans, start.plans), (self._reports, start.reports)):
            prepare_socket(socket)
            socket.set(zmq.LINGER, 1000)
            connect(socket, address, start.engine_key)

    def move(self, start: WorkerStart) -> None:
        """Go on at these addresses: what was said at those before, both ways, is of no use any more."""
        for context in (self.plans.context, self._context):
            context.destroy(linger=0)
        self._connect(start)

    def introduce(self, hello: Hello) -> None:
        """The first word, over the socket that plans come from: the engine can only send them to whom it has heard."""
        self.plans.send(self._encoder.encode(hello))

    def hear(self) -> ToWorker:
        """Wait for a message, before a `PrefetchThread` takes the socket over."""
        message: ToWorker = self._decoder.decode(self.plans.recv())
        return message

    def report(self, message: FromWorker) -> None:
        """Put a message on its way. Any thread may do so."""
        with self._reporting:  # a socket may go from thread to thread, but has to be used by one at a time
            self._reports.send(self._encoder.encode(message))

    def close(self) -> None:
        """Send the reports that are on their way; the process is about to end."""
        self._context.destroy(linger=1000)


def identity(rank: int) -> bytes:
    """A worker's name among the engine's peers."""
    return f"worker {rank}".encode()


def prepare_socket(socket: "zmq.Socket[bytes]") -> None:
    """No bounds on what is queued, since plans in flight are bounded.

    ZeroMQ's own heartbeats stay off: an engine that is stopped for a while (Ctrl-Z) would lose its connections, and
    with them, without a word, the plans that it sends before the workers have come back.
    """
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
