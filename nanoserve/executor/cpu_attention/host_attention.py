"""Attention on the CPU for sequences whose KV is in host memory, beside the computing device
(APEX).

The device hands over the queries, keys and values of some rows in one layer and goes on; a thread
with cores of its own writes the keys and values into the host pool and attends. It depends on no
other thread, and the device need not wait for it. If it fails or hangs, the next question about a
task says so, and the engine goes on without it.
"""

import contextlib
import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch
from torch import Tensor

from nanoserve.config.model_config import ModelConfig
from nanoserve.errors import UsageError, first_line
from nanoserve.executor.step.staging import to_pinned
from nanoserve.models.attention import AttentionBatch
from nanoserve.scheduler.optional import HostWork
from triton_ops import cache_write, paged_attention
from triton_ops.cpu import cpu_operators


class QkvTransfer:
    """Queries, keys and values of some rows in one layer on their way to the CPU, and the result on
    its way back.

    From a GPU they pass through pinned memory: copied at once, on the stream that computed them,
    with an event behind that the CPU waits for. From a device that is a CPU too, nothing is copied.
    """

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, device: torch.device) -> None:
        self._device = device
        self._on_host = query, key, value
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            self._computed = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._copied = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._computed.record(stream)
            self._on_host = to_pinned(query), to_pinned(key), to_pinned(value)
            self._copied.record(stream)
        # After `take`: when the CPU's part began. The time in which the device computed the queries
        # is no part.
        self.began = time.monotonic()

    def take(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three on the CPU; waits for the device to have them there. For the thread that
        attends."""
        if self._copied is not None:
            self._copied.synchronize()
            self.began = time.monotonic() - self._computed.elapsed_time(self._copied) / 1000
        return self._on_host

    def make_room(self) -> Tensor:
        """[n, num_heads * head_dim] on the CPU, for the result."""
        rows, heads, head_dim = self._on_host[0].shape
        return torch.empty(
            rows,
            heads * head_dim,
            dtype=self._on_host[0].dtype,
            pin_memory=self._copied is not None,
        )

    def bring_back(self, result: Tensor) -> Tensor:
        """Return `result`, which fills the tensor of `make_room`, on the device. Call it on the
        thread that runs the device: later work on its stream waits for the copy."""
        # torch keeps pinned memory from being used again until copies out of it are done.
        return result if self._copied is None else result.to(self._device, non_blocking=True)


PATIENCE = 10.0  # seconds that one layer's attention may take: about a hundred times what it takes
SECOND_LOOK = 1.0
"""Seconds, at most, that it gets once it was found too slow: if the whole process was stopped,
nothing hangs."""
_LOOK_EVERY = 0.05
_CLOSING = 1.0


class HostAttentionLost(RuntimeError):
    """Attention on the CPU failed, hangs or was closed; the message says why."""


class HostTask:
    """One layer's attention of some rows, under way. `ready` and `wait` raise HostAttentionLost if
    there will be no result."""

    def __init__(
        self,
        layer: int,
        transfer: QkvTransfer,
        batch: AttentionBatch,
        problem: Callable[[], str | None],
    ) -> None:
        self.layer = layer
        self.transfer = transfer
        self.batch = batch
        self._problem = problem
        self._done = threading.Event()
        self._result: Tensor | None = None

    def finish(self, result: Tensor) -> None:
        """Give the result, in the room of `QkvTransfer.make_room`; for the thread that attends."""
        self._result = result
        self._done.set()

    @property
    def ready(self) -> bool:
        if (problem := self._problem()) is not None:
            raise HostAttentionLost(problem)
        return self._done.is_set()

    def wait(self) -> None:
        """Wait for the result."""
        while not self.ready:
            self._done.wait(_LOOK_EVERY)

    def result(self) -> Tensor:
        """[n, num_heads * head_dim] on the device; once it is ready, and only for the thread that
        runs the device."""
        if self._result is None:
            raise RuntimeError("the result was asked for before it was ready")
        return self.transfer.bring_back(self._result)


class HostAttentionThread:
    """A thread that attends for host sequences, one task after the other. Its methods are for the
    one thread that runs the device. It waits first for the CPU's operators, if they are being
    built. Raises UsageError if there are fewer cores than threads, if they are not this process's,
    or if the model has attention sinks.

    Args:
        keys, values: per layer of the decoder [num_host_blocks, num_kv_heads, block_size,
            head_dim], in host memory.
        threads: number of threads that share each task.
        cores: numbers of the processors that they run on; None leaves that to the system.
        patience: seconds that one task may take before it counts as hanging.
    """

    def __init__(
        self,
        config: ModelConfig,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        device: torch.device,
        *,
        threads: int,
        cores: Sequence[int] | None = None,
        patience: float = PATIENCE,
    ) -> None:
        if config.attention.sinks:
            raise UsageError(
                f"{config.family}: attention in host memory does not support attention sinks; "
                "choose another policy"
            )
        if cores is not None and threads > len(cores):
            raise UsageError(
                f"{threads} host threads cannot share {len(cores)} cores; choose {len(cores)} at "
                "most"
            )
        cpu_operators().wait()  # they would be exchanged under the running thread
        self._config, self._device, self._patience = config, device, patience
        self._keys, self._values = keys, values
        self._tasks: SimpleQueue[HostTask | None] = SimpleQueue()
        self._work: deque[HostWork] = deque()
        self._given = self._ended = 0
        # when the oldest task under way became that; when the last one ended
        self._since = self._last_end = 0.0
        self._suspected: float | None = None
        self._failure: str | None = None
        self._problem: str | None = None
        self._given_up = False
        self._writing = threading.Lock()
        self._start(threads, cores)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: AttentionBatch
    ) -> HostTask:
        """Write n new keys and values, [n, num_kv_heads, head_dim] on the device, and attend for n
        queries, [n, num_heads, head_dim], one of each row; returns at once. They may be views of
        larger tensors, and must not be written to before the task is ready. The batch of these rows
        is on the CPU."""
        task = HostTask(
            layer, QkvTransfer(query, key, value, self._device), batch, lambda: self.problem
        )
        if self._given == self._ended:
            self._since = time.monotonic()
        self._given += 1
        self._tasks.put(task)
        return task

    def take_work(self) -> tuple[HostWork, ...]:
        """Finished work since the last call, in order."""
        return tuple([self._work.popleft() for _ in range(len(self._work))])

    @property
    def problem(self) -> str | None:
        """Why there will be no more results, because it failed, hangs or was closed; None while all
        is well."""
        if self._problem is None:
            self._problem = self._trouble()
            if self._problem is not None:
                self._given_up = True
        return self._problem

    def close(self) -> None:
        """End the thread, or give it up if it does not end within a second. Tasks that are left are
        dropped."""
        until = time.monotonic() + _CLOSING
        self._given_up = True
        self._problem = self._problem or "attention on the CPU was closed"
        self._tasks.put(None)
        # what it has begun to write is complete, and nothing follows
        if self._writing.acquire(timeout=_CLOSING):
            self._writing.release()
        self._thread.join(max(0.0, until - time.monotonic()))

    def _trouble(self) -> str | None:
        if self._failure is not None:
            return self._failure
        if not self._thread.is_alive():
            return "the thread that attends on the CPU has ended"
        now = time.monotonic()
        if self._given == self._ended or now - self._since <= self._patience:
            self._suspected = None
            return None
        if self._suspected is None:
            self._suspected = now
        if now - self._suspected < min(SECOND_LOOK, self._patience):
            return None
        return f"attention on the CPU has hung for {now - self._since:.0f} s"

    def _start(self, threads: int, cores: Sequence[int] | None) -> None:
        """Start the thread; returns when it takes tasks."""
        settled: SimpleQueue[OSError | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, args=(threads, cores, settled), name="host-attention", daemon=True
        )
        self._thread.start()
        if (error := settled.get()) is not None:
            self._thread.join()
            numbers = ", ".join(map(str, cores or ()))
            raise UsageError(
                f"host threads cannot run on the cores {numbers}: {error.strerror}"
            ) from error

    def _run(
        self, threads: int, cores: Sequence[int] | None, settled: "SimpleQueue[OSError | None]"
    ) -> None:
        try:
            if cores is not None and hasattr(os, "sched_setaffinity"):
                # its team, which the first task makes, inherits them
                os.sched_setaffinity(0, cores)
        except OSError as error:
            settled.put(error)
            return
        set_threads_of_this_thread(threads)
        settled.put(None)
        try:
            with torch.inference_mode():
                while (task := self._tasks.get()) is not None and self._attend(task):
                    pass
        except BaseException as error:
            self._failure = (
                f"attention on the CPU failed: {first_line(error) or type(error).__name__}"
            )

    def _attend(self, task: HostTask) -> bool:
        """Carry a task out; False once it was given up, and nothing may be written."""
        query, key, value = task.transfer.take()
        keys, values = self._keys[task.layer], self._values[task.layer]
        block_tables, query_starts, contexts, slots = task.batch.tensors
        with self._writing:
            if self._given_up:
                return False
            cache_write(key, value, keys, values, slots)
        result = task.transfer.make_room()
        paged_attention(
            result,
            query,
            keys,
            values,
            block_tables,
            query_starts,
            contexts,
            scale=self._config.softmax_scale,
            sliding_window=self._config.sliding_window(task.layer),
            soft_cap=self._config.attention.soft_cap,
        )
        now = time.monotonic()
        seconds = now - max(task.transfer.began, self._last_end)  # in the queue it costs nothing
        self._work.append(HostWork(contexts.shape[0], int(contexts.sum()), seconds))
        self._last_end = self._since = now
        self._ended += 1
        task.finish(result)
        return True


def set_threads_of_this_thread(threads: int) -> None:
    """Set how many threads share the torch work of the calling thread alone;
    `torch.set_num_threads` would also change threads that begin to compute later."""
    torch.get_num_threads()  # the first call in a thread sets the number that all have
    # a torch without OpenMP has the same threads for everyone
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(torch._C.__file__).omp_set_num_threads(threads)
