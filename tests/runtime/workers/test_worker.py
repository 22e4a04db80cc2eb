"""A worker's loop, without another process."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest
import torch
import zmq

from nanoserve.errors import RuntimeFailure
from nanoserve.runtime.workers.activations import Activations
from nanoserve.runtime.workers.messages import Run
from nanoserve.runtime.workers.ranks import Ranks
from nanoserve.runtime.workers.worker import Worker
from nanoserve.scheduler.plan import StepPlan

CPU = torch.device("cpu")


@pytest.fixture
def sockets() -> Iterator[tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]]:
    """The engine's end and the worker's."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as engine, context.socket(zmq.PAIR) as plans:
        engine.bind("inproc://plans")
        plans.connect("inproc://plans")
        yield engine, plans
        engine.send(b"\xc1 nonsense")  # ends the intake's thread, in whose hands its socket is
        for thread in threading.enumerate():
            if thread.name == "intake":
                thread.join(20)


class FullDevice:
    """In place of a ModelRunner."""

    device = CPU

    def prepare(self, plan: StepPlan) -> SimpleNamespace:
        return SimpleNamespace(plan=plan, num_tokens=7)

    def compute(self, step: object, entering: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")


def test_a_step_without_memory_is_told_in_one_line(
    sockets: tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"],
) -> None:
    engine, plans = sockets
    ranks = Ranks(0, num_stages=1, degree=1)
    worker = Worker(
        SimpleNamespace(plans=plans),  # type: ignore[arg-type]
        ranks,
        FullDevice(),  # type: ignore[arg-type]
        Activations(ranks, hidden_size=1, num_tokens=1, dtype=torch.float32, device=CPU),
        layers=None,
        built=(),
        coupled=False,
        observe_times=False,
    )
    engine.send(msgspec.msgpack.encode(Run(StepPlan(0))))
    with pytest.raises(RuntimeFailure, match=r"out of memory on cpu: a step of 7 tokens .*; lower --max-num-batched"):
        worker.run()
