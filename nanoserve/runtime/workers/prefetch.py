"""A worker's thread that receives messages of the engine, and prepares the next step while this one is computed."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import msgspec
import torch
import zmq

from nanoserve.runtime.step.model_runner import PreparedStep
from nanoserve.runtime.workers.distributed import Expected
from nanoserve.runtime.workers.messages import ForgetHost, RunPlan, ToWorker
from nanoserve.scheduler.plan import StepPlan

THREAD_NAME = "prefetch"

_STEPS = 2
"""The step that is computed, and the one prepared ahead of it."""


@dataclass(frozen=True, slots=True)
class PrefetchedStep:
    """A plan that is ready to be computed."""

    step: PreparedStep
    entering: Expected | None
    """Hidden states from the stage before, being received; None where none come."""
    received: float
    prepared: float
    """When the plan came and when its inputs were ready, in seconds of the monotonic clock."""


class PrefetchThread:
    """A thread between the engine's socket and the worker's loop.

    Args:
        socket: used by the thread alone from now on.
        prepare: prepares a plan that came at that time; called in the thread, one step ahead of the loop. None
            leaves plans to the loop, as changes of layout always are.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        prepare: Callable[[StepPlan, float], PrefetchedStep] | None,
        device: torch.device,
    ) -> None:
        self._socket = socket
        self._device = device
        self._prepare = prepare
        self._arrived: SimpleQueue[PrefetchedStep | ToWorker | BaseException] = SimpleQueue()
        self._places = threading.Semaphore(_STEPS)
        threading.Thread(target=self._receive, name=THREAD_NAME, daemon=True).start()

    def next(self, seconds: float | None) -> PrefetchedStep | ToWorker | None:
        """What came next; waits for it for `seconds`, or without limit. Raises what preparing it raised."""
        try:
            arrived = self._arrived.get(timeout=seconds)
        except Empty:
            return None
        if isinstance(arrived, BaseException):
            raise arrived
        return arrived

    def fail(self, error: BaseException) -> None:
        """Have the loop raise the error of another thread."""
        self._arrived.put(error)

    def done(self) -> None:
        """Free the buffers of a step that the loop has ended."""
        self._places.release()

    def _receive(self) -> None:
        decoder = msgspec.msgpack.Decoder(ToWorker)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a setting of each thread
        try:
            while True:
                message = decoder.decode(self._socket.recv())
                if isinstance(message, RunPlan) and self._prepare is not None and message.plan.transition is None:
                    received = time.monotonic()
                    self._places.acquire()
                    self._arrived.put(self._prepare(message.plan, received))
                elif isinstance(message, ForgetHost):
                    # Preparing the next plan may forget sequences of which the steps before this have still to answer.
                    for _ in range(_STEPS):
                        self._places.acquire()
                    self._arrived.put(message)
                    self._places.release(_STEPS)
                else:
                    self._arrived.put(message)
        except BaseException as error:  # the loop reports it
            self._arrived.put(error)
