"""A worker's two sockets to the engine. The engine's own are prepared alike."""

import threading

import msgspec
import zmq

from nanoserve.executor.workers.messages import (
    FromWorker,
    Hello,
    ToWorker,
    WorkerStart,
    worker_decoder,
)
from nanoserve.utils.sockets import connect


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
        """Connect to these addresses. Messages at the addresses before, both ways, are of no use
        any more."""
        for context in (self.plans.context, self._context):
            context.destroy(linger=0)
        self._connect(start)

    def introduce(self, hello: Hello) -> None:
        """The first word, over the socket that plans come from: the engine can only send them to
        whom it has heard."""
        self.plans.send(self._encoder.encode(hello))

    def hear(self) -> ToWorker:
        """Wait for a message, before a `PrefetchThread` takes the socket over."""
        message: ToWorker = self._decoder.decode(self.plans.recv())
        return message

    def report(self, message: FromWorker) -> None:
        """Put a message on its way. Any thread may do so."""
        # a socket may go from thread to thread, but has to be used by one at a time
        with self._reporting:
            self._reports.send(self._encoder.encode(message))

    def close(self) -> None:
        """Send the reports that are on their way; the process is about to end."""
        self._context.destroy(linger=1000)


def identity(rank: int) -> bytes:
    """A worker's name among the engine's peers."""
    return f"worker {rank}".encode()


def prepare_socket(socket: "zmq.Socket[bytes]") -> None:
    """No bounds on what is queued, since plans in flight are bounded.

    ZeroMQ's own heartbeats stay off: an engine that is stopped for a while (Ctrl-Z) would lose its
    connections, and with them, without a word, the plans that it sends before the workers have come
    back.
    """
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
