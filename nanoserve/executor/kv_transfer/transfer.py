"""KvTransfer: carries out the swaps of plans beside their steps."""

import time
from typing import TYPE_CHECKING

import msgspec

from nanoserve.executor.kv_transfer.host_pool import HostPart
from nanoserve.executor.kv_transfer.swapping import BlockMover, LocalSwaps, Swapper
from nanoserve.executor.mechanism import Mechanism
from nanoserve.executor.start.memory import memory_errors
from nanoserve.record.times import SwapTimes
from nanoserve.scheduler.optional import HostResult, Swap
from nanoserve.scheduler.plan import StepResult

if TYPE_CHECKING:
    from nanoserve.executor.step.model_runner import ModelRunner, PreparedStep
    from nanoserve.executor.workers.worker import Worker


class KvTransfer(Mechanism):
    """Swaps KV blocks between the cache of a runner and its part of the host pool, with the threads
    of a Swapper."""

    swapper: Swapper | None = None

    def __init__(self, part: HostPart) -> None:
        self._part = part

    def attach(self, runner: "ModelRunner") -> None:
        runner.moves_blocks = True
        self._device = runner.device
        groups = runner.config.cache_groups
        last_layers = dict[int, int]()  # by tensor, the last layer that writes to it
        for layer in range(runner.config.num_layers):
            last_layers[groups.tensor_of(layer)[0]] = layer
        self.mover = BlockMover(
            runner.caches.keys,
            runner.caches.values,
            self._part,
            runner.device,
            [last_layers[tensor] for tensor in sorted(last_layers)],
        )

    def begin(self, step: "PreparedStep") -> None:
        """Have the plan's swaps carried out, behind all work issued so far. Where some follow the
        step's rows, they follow its layers one by one. Raises RuntimeError if a swap follows a row
        and the step has none."""
        swaps = step.plan.host.swaps
        if not swaps:
            return
        if step.inputs is None and any(swap.after_row for swap in swaps):
            raise RuntimeError("a swap follows a row, and the plan has none on the device")
        assert self.swapper is not None
        marks = self.swapper.begin(swaps, self.mover)
        if marks is not None and step.inputs is not None:
            step.inputs.computed = marks.computed


class LocalKvTransfer(KvTransfer):
    """The KvTransfer of an executor of this process: results name the swaps that are done."""

    def attach(self, runner: "ModelRunner") -> None:
        super().attach(runner)
        self.swapper: LocalSwaps = LocalSwaps()

    def complete(self, step: "PreparedStep", result: StepResult) -> StepResult:
        swapped = self._take_done(time.monotonic())
        if not swapped:
            return result
        return msgspec.structs.replace(
            result, host=msgspec.structs.replace(result.host, swapped=swapped)
        )

    def wait(self, until: float | None) -> StepResult | None:
        swapped = self._take_done(until)
        return StepResult(step=None, host=HostResult(swapped=swapped)) if swapped else None

    def abandon(self) -> None:
        self.swapper.abandon()

    def close(self) -> None:
        self.swapper.close()

    def _take_done(self, until: float | None) -> tuple[int, ...]:
        with memory_errors(self._device, "a swap does not fit", "lower --max-num-batched-tokens"):
            return self.swapper.take_done(until)


class WorkerKvTransfer(KvTransfer):
    """The KvTransfer of a worker, to which it reports each swap that is done."""

    def connect(self, worker: "Worker") -> None:
        def report(swap: Swap, num_bytes: int, began: float, ended: float) -> None:
            worker.report_moved(
                SwapTimes(
                    swap.swap, worker.rank, swap.direction, num_bytes, began, ended, swap.after_row
                )
            )

        self.swapper = Swapper(report, worker.fail)
