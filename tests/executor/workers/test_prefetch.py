"""The thread between the engine's socket and a worker's loop."""

import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch
import zmq

from nanoserve.executor.workers.messages import (
    Allocate,
    Follow,
    ForgetHost,
    Prepare,
    RunPlan,
    ToWorker,
)
from nanoserve.executor.workers.worker import THREAD_NAME, PrefetchedStep, PrefetchThread
from nanoserve.scheduler.optional import LayoutPlan
from nanoserve.scheduler.plan import StepPlan

PATIENCE = 240.0
CPU = torch.device("cpu")


class Engine:
    """The other end of a prefetch thread's socket, and what the thread has prepared."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._plans = self._context.socket(zmq.PAIR)
        self.prefetch_socket = self._context.socket(zmq.PAIR)
        self._plans.bind("inproc://plans")
        self.prefetch_socket.connect("inproc://plans")
        self.prepared: list[int] = []
        self.threads: set[int] = set()

    def say(self, *messages: ToWorker) -> None:
        for message in messages:
            self._plans.send(msgspec.msgpack.encode(message))

    def prepare(self, plan: StepPlan, received: float) -> PrefetchedStep:
        if plan.step < 0:
            raise RuntimeError("such a plan cannot be prepared")
        self.prepared.append(plan.step)
        self.threads.add(threading.get_ident())
        return PrefetchedStep(plan, None, received, time.monotonic())

    def end(self) -> None:
        """Have the prefetch thread end, in whose hands its socket is, then close the sockets."""
        self.say_nonsense()
        for thread in threading.enumerate():
            if thread.name == THREAD_NAME:
                thread.join(PATIENCE)
                assert not thread.is_alive()
        self._context.destroy(linger=0)

    def say_nonsense(self) -> None:
        self._plans.send(b"\xc1 nonsense")


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.end()


def eventually(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_one_plan_is_prepared_ahead_and_no_more(engine: Engine) -> None:
    """The buffers of a step are those of the step before the last one."""
    thread = PrefetchThread(engine.prefetch_socket, engine.prepare, CPU)
    engine.say(*(RunPlan(StepPlan(step)) for step in range(4)))
    eventually(lambda: len(engine.prepared) == 2)
    for step in range(4):
        turn = thread.next(PATIENCE)
        assert isinstance(turn, PrefetchedStep) and turn.step.step == step
        assert turn.received <= turn.prepared
        time.sleep(0.01)
        assert len(engine.prepared) <= step + 2
        thread.done()
    assert engine.prepared == [0, 1, 2, 3]
    assert threading.get_ident() not in engine.threads


def test_everything_comes_in_order(engine: Engine) -> None:
    thread = PrefetchThread(engine.prefetch_socket, engine.prepare, CPU)
    engine.say(RunPlan(StepPlan(0)), Prepare(), RunPlan(StepPlan(1)), Allocate((3,)))
    arrived = [thread.next(PATIENCE) for _ in range(4)]
    assert [type(one) for one in arrived] == [PrefetchedStep, Prepare, PrefetchedStep, Allocate]


def test_nothing_is_prepared_beside_the_steps_before_host_sequences_are_forgotten(
    engine: Engine,
) -> None:
    """It would forget the sequences that they answer."""
    thread = PrefetchThread(engine.prefetch_socket, engine.prepare, CPU)
    engine.say(RunPlan(StepPlan(0)), RunPlan(StepPlan(1)), ForgetHost(), RunPlan(StepPlan(2)))
    assert all(isinstance(thread.next(PATIENCE), PrefetchedStep) for _ in range(2))
    for _ in range(2):
        assert thread.next(0.02) is None
        assert engine.prepared == [0, 1]
        thread.done()
    assert thread.next(PATIENCE) == ForgetHost()
    assert isinstance(thread.next(PATIENCE), PrefetchedStep)


def test_plans_of_a_coupled_worker_are_left_to_the_loop(engine: Engine) -> None:
    thread = PrefetchThread(engine.prefetch_socket, None, CPU)
    engine.say(*(RunPlan(StepPlan(step)) for step in range(3)), Follow())
    assert [thread.next(PATIENCE) for _ in range(4)] == [
        *(RunPlan(StepPlan(step)) for step in range(3)),
        Follow(),
    ]


def test_a_change_of_layout_is_left_to_the_loop(engine: Engine) -> None:
    thread = PrefetchThread(engine.prefetch_socket, engine.prepare, CPU)
    engine.say(RunPlan(StepPlan(0, layouts=LayoutPlan(transition=1))))
    assert thread.next(PATIENCE) == RunPlan(StepPlan(0, layouts=LayoutPlan(transition=1)))


def test_what_fails_in_another_thread_fails_in_the_loop(engine: Engine) -> None:
    thread = PrefetchThread(engine.prefetch_socket, engine.prepare, CPU)
    thread.fail(RuntimeError("a block is gone"))
    with pytest.raises(RuntimeError, match="a block is gone"):
        thread.next(PATIENCE)


def test_it_waits_no_longer_than_it_is_asked_to(engine: Engine) -> None:
    assert PrefetchThread(engine.prefetch_socket, engine.prepare, CPU).next(0.01) is None


def test_what_cannot_be_prepared_fails_when_its_turn_comes(engine: Engine) -> None:
    thread = PrefetchThread(engine.prefetch_socket, engine.prepare, CPU)
    engine.say(RunPlan(StepPlan(0)), RunPlan(StepPlan(-1)))
    assert isinstance(thread.next(PATIENCE), PrefetchedStep)
    with pytest.raises(RuntimeError, match="such a plan cannot be prepared"):
        thread.next(PATIENCE)


def test_what_is_no_message_is_an_error_and_not_a_silence(engine: Engine) -> None:
    thread = PrefetchThread(engine.prefetch_socket, engine.prepare, CPU)
    engine.say_nonsense()
    with pytest.raises(msgspec.MsgspecError):
        thread.next(PATIENCE)
