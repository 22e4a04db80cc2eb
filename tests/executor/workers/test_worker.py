"""A worker's loop, without another process."""

import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import msgspec
import pytest
import torch
import zmq

from nanoserve.errors import RuntimeFailure
from nanoserve.executor.cpu_attention.pipeline import WorkerCpuAttention
from nanoserve.executor.kv_transfer.swapping import LayerMarks
from nanoserve.executor.kv_transfer.transfer import WorkerKvTransfer
from nanoserve.executor.mechanism import Mechanism
from nanoserve.executor.stage import Stage
from nanoserve.executor.step.forward_pass import StepInputs
from nanoserve.executor.step.model_runner import PreparedStep
from nanoserve.executor.step.staging import DeviceToHostCopy
from nanoserve.executor.workers.distributed import Activations
from nanoserve.executor.workers.messages import ForgetHost, HostLost, RunPlan
from nanoserve.executor.workers.worker import THREAD_NAME, Worker, WorkerLayout
from nanoserve.models.shards import Shard
from nanoserve.scheduler.optional import HostPlan, Swap
from nanoserve.scheduler.plan import Row, StepPlan

CPU = torch.device("cpu")


@pytest.fixture
def sockets() -> Iterator[tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]]:
    """The engine's end and the worker's."""
    with (
        zmq.Context() as context,
        context.socket(zmq.PAIR) as engine,
        context.socket(zmq.PAIR) as plans,
    ):
        engine.bind("inproc://plans")
        plans.connect("inproc://plans")
        yield engine, plans
        engine.send(b"\xc1 nonsense")  # ends the prefetch thread, in whose hands its socket is
        for thread in threading.enumerate():
            if thread.name == THREAD_NAME:
                thread.join(240)


class FullDevice:
    """In place of a ModelRunner."""

    device = CPU
    mechanisms: Sequence[Mechanism] = ()

    def prepare(self, plan: StepPlan) -> SimpleNamespace | PreparedStep:
        return SimpleNamespace(plan=plan, num_tokens=7, inputs=None, forward=None)

    def begin(self, step: PreparedStep) -> None:
        for mechanism in self.mechanisms:
            mechanism.begin(step)

    def compute(self, step: object, intermediate_hidden_states: object) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."
        )


def make_worker(connection: SimpleNamespace, runner: FullDevice, *, num_stages: int = 2) -> Worker:
    """That of the first stage, with one layout."""
    shard = Shard(range(1), num_stages=num_stages)
    activations = Activations(shard, hidden_size=1, num_tokens=1, dtype=torch.float32, device=CPU)
    stage = Stage(runner, mechanisms=runner.mechanisms)  # type: ignore[arg-type]
    start = SimpleNamespace(layout=0, coupled=False, observe_times=False)
    return Worker(start, connection, [WorkerLayout(shard, stage, activations)], None)  # type: ignore[arg-type]


def test_a_step_without_memory_is_told_in_one_line(
    sockets: tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"],
) -> None:
    engine, plans = sockets
    worker = make_worker(SimpleNamespace(plans=plans), FullDevice(), num_stages=1)
    engine.send(
        msgspec.msgpack.encode(RunPlan(StepPlan(0, rows=(Row(8, 0, (1,) * 7, sample=True),))))
    )
    with pytest.raises(
        RuntimeFailure,
        match=r"out of memory on cpu: a step of 7 tokens .*; lower --max-num-batched",
    ):
        worker.run()


class SlowRunner(FullDevice):
    """A step goes on until something moves beside it. Nothing should beside the first, which waits
    only a moment. The second is the last."""

    def __init__(self) -> None:
        self.last = 1
        self.moved = threading.Event()
        self.moved_beside: list[bool] = []

    def compute(self, step: SimpleNamespace, intermediate_hidden_states: object) -> None:
        self.moved_beside.append(self.moved.wait(0.2 if step.plan.step == 0 else 240))
        if step.plan.step == self.last:
            super().compute(step, intermediate_hidden_states)


class Mover:
    """In place of a BlockMover."""

    def __init__(self, moved: threading.Event) -> None:
        self._moved = moved

    def issued(self) -> None:
        """Nothing is waited for."""

    def into(self, device_blocks: object, host_blocks: object, after: object) -> int:
        self._moved.set()
        return 0


def transfer_by(mover: Mover) -> WorkerKvTransfer:
    transfer = WorkerKvTransfer(part=None)  # type: ignore[arg-type]
    transfer.mover = mover  # type: ignore[assignment]
    return transfer


def test_a_swap_begins_when_the_step_before_its_plan_is_done(
    sockets: tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"],
) -> None:
    """That step may copy from a block that is free already, and the swap may fill it."""
    engine, plans = sockets
    runner = SlowRunner()
    runner.mechanisms = [transfer_by(Mover(runner.moved))]
    worker = make_worker(SimpleNamespace(plans=plans, report=lambda _: None), runner)
    row = Row(8, 0, (1,), sample=True)
    for plan in (
        StepPlan(0, rows=(row,)),
        StepPlan(1, rows=(row,), host=HostPlan(swaps=(Swap(0, 9, "in", (4,), (2,)),))),
    ):
        engine.send(msgspec.msgpack.encode(RunPlan(plan)))
    with pytest.raises(RuntimeFailure, match="out of memory"):
        worker.run()
    assert runner.moved_beside == [False, True]


class LosingAttention(WorkerCpuAttention):
    """Attention on the CPU that fails in its first and in its third step."""

    def __init__(self) -> None:
        self.steps = self.forgotten = 0
        self.hybrid = self  # type: ignore[assignment]

    def take_loss(self) -> str | None:
        self.steps += 1
        return f"step {self.steps}" if self.steps in (1, 3) else None

    def begin(self, step: PreparedStep) -> None:
        """Nothing is computed."""

    def abandon(self) -> None:
        self.forgotten += 1


def test_a_loss_says_of_which_losses_of_other_stages_the_worker_knew(
    sockets: tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"],
) -> None:
    engine, plans = sockets
    runner, attention = SlowRunner(), LosingAttention()
    runner.mechanisms = [attention]
    runner.moved.set()
    runner.last = 3
    reports: list[object] = []
    worker = make_worker(SimpleNamespace(plans=plans, report=reports.append), runner)
    for message in (
        RunPlan(StepPlan(0)),
        RunPlan(StepPlan(1)),
        ForgetHost(),
        RunPlan(StepPlan(2)),
        RunPlan(StepPlan(3)),
    ):
        engine.send(msgspec.msgpack.encode(message))
    with pytest.raises(RuntimeFailure, match="out of memory"):
        worker.run()
    assert reports == [HostLost(0, "step 1", forgotten=0), HostLost(0, "step 3", forgotten=1)]
    assert attention.forgotten == 1


class LayeredRunner(FullDevice):
    """Computes a layer once the one before has left, then has no memory left."""

    def __init__(self) -> None:
        self.left = [threading.Event() for _ in range(3)]
        self.left_in_time: list[bool] = []

    def prepare(self, plan: StepPlan) -> PreparedStep:
        inputs = StepInputs(torch.zeros(1), torch.zeros(1), batch=None, longest=1)  # type: ignore[arg-type]
        return PreparedStep(plan, plan.rows, DeviceToHostCopy(CPU), inputs=inputs)

    def compute(self, step: PreparedStep, intermediate_hidden_states: object) -> None:
        assert step.inputs is not None and step.inputs.computed is not None
        for layer, left in enumerate(self.left):
            assert not left.is_set()
            step.inputs.computed(layer)
            self.left_in_time.append(left.wait(240))
        super().compute(step, intermediate_hidden_states)


class LayeredMover(Mover):
    def __init__(self, left: list[threading.Event]) -> None:
        self._left = left

    def out(
        self, device_blocks: object, host_blocks: object, after: object, marks: LayerMarks
    ) -> int:
        for layer, left in enumerate(self._left):
            marks.wait(layer)
            left.set()
        return 0


def test_a_prompt_that_is_parked_leaves_layer_by_layer(
    sockets: tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"],
) -> None:
    engine, plans = sockets
    runner = LayeredRunner()
    runner.mechanisms = [transfer_by(LayeredMover(runner.left))]
    worker = make_worker(SimpleNamespace(plans=plans, report=lambda _: None), runner)
    parked = Swap(0, 8, "out", (4,), (2,), after_row=True)
    engine.send(
        msgspec.msgpack.encode(
            RunPlan(
                StepPlan(0, rows=(Row(8, 0, (1,), sample=True),), host=HostPlan(swaps=(parked,)))
            )
        )
    )
    with pytest.raises(RuntimeFailure, match="out of memory"):
        worker.run()
    assert runner.left_in_time == [True] * 3
