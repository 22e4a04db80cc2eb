"""CUDA graphs of the decode step: all its kernels are launched at once, which a host could not do one by one in time.

A graph has the addresses and shapes of its tensors built in. So there is one per number of rows, up to a bucket of
which a step is padded, and all read their inputs where `StaticInputs` keeps them.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nanoserve.models.attention import AttentionBatch
from nanoserve.models.hub import ProgressCallback
from nanoserve.runtime.step.forward_pass import ForwardFunction, StepInputs
from triton_ops.cache import SKIPPED_SLOT

LARGEST_BUCKET = 256
"""Rows: beyond it a step's kernels run longer than the host needs to launch them."""
STAGE = "capturing decode steps"


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """How many rows the graphs have, ascending: 1, 2, 4, 8, 16, 24 and so on, the last for all that may run."""
    largest = min(max_num_seqs, LARGEST_BUCKET)
    return (*(size for size in (1, 2, 4, *range(8, largest, 8)) if size < largest), largest)


class StaticInputs:
    """Where the graphs read a decode step: a bucket of B rows reads the first B of each tensor.

    A row that pads writes nowhere (slot -1) and attends over one token of some block; what it computes is ignored. Its
    other numbers are those of an earlier step, and valid ones.
    """

    @torch.inference_mode()  # as steps run: compiled code is made for tensors of one mode
    def __init__(self, *, most_rows: int, most_blocks: int, device: torch.device) -> None:
        self.most_blocks = most_blocks  # in a row of the longest sequence
        self._token_ids = torch.zeros(most_rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most_rows, dtype=torch.int64, device=device)
        self._batch = AttentionBatch(
            torch.zeros(most_rows, most_blocks, dtype=torch.int32, device=device),
            torch.arange(most_rows + 1, dtype=torch.int32, device=device),
            torch.ones(most_rows, dtype=torch.int32, device=device),
            torch.full((most_rows,), SKIPPED_SLOT, dtype=torch.int64, device=device),
        )

    def first(self, rows: int) -> StepInputs:
        tables, starts, contexts, slots = self._batch.tensors
        batch = AttentionBatch(tables[:rows], starts[: rows + 1], contexts[:rows], slots[:rows])
        return StepInputs(self._token_ids[:rows], self._positions[:rows], batch)


def fill(static: StepInputs, inputs: StepInputs) -> None:
    """Copy a decode step into a bucket's inputs, and make padding of the rows behind it."""
    new_tables, _, new_contexts, new_slots = inputs.batch.tensors
    tables, _, contexts, slots = static.batch.tensors
    rows, width = new_tables.shape
    torch._foreach_copy_(
        [static.token_ids[:rows], static.positions[:rows], slots[:rows]],
        [inputs.token_ids, inputs.positions, new_slots],
    )
    tables[:rows, :width].copy_(new_tables)
    contexts[:rows].copy_(new_contexts)
    if rows < len(contexts):
        slots[rows:].fill_(SKIPPED_SLOT)
        contexts[rows:].fill_(1)


class DecodeGraphs:
    """A ForwardFunction: decode steps that fit a bucket are replayed, all others run as they did before."""

    def __init__(self, forward: ForwardFunction, static: StaticInputs, buckets: Sequence[int]) -> None:
        """buckets: ascending; `static` has as many rows as the last."""
        self._forward = forward
        self._static = static
        self._buckets = tuple(buckets)
        # By bucket: the inputs that a graph reads, what replays it, and the hidden states that it writes.
        self._graphs: dict[int, tuple[StepInputs, Callable[[], None], Tensor]] = {}

    @torch.inference_mode()
    def capture(self, recorder: "CudaRecorder", progress: ProgressCallback | None = None) -> None:
        """Record all buckets, the largest first: the smaller ones find room in the memory that it took."""
        for done, rows in enumerate(reversed(self._buckets)):
            if progress is not None:
                progress(STAGE, done, len(self._buckets))
            inputs = self._static.first(rows)
            replay, hidden = recorder.record(lambda inputs=inputs: self._forward(inputs))  # type: ignore[misc]
            self._graphs[rows] = inputs, replay, hidden
        if progress is not None:
            progress(STAGE, len(self._buckets), len(self._buckets))

    def __call__(self, inputs: StepInputs) -> Tensor:
        rows, width = inputs.batch.block_tables.shape
        # A graph does not say how far it is in its layers.
        replayable = len(inputs.token_ids) == rows and inputs.computed is None
        if not replayable or rows > self._buckets[-1] or width > self._static.most_blocks:
            return self._forward(inputs)
        static, replay, hidden = self._graphs[self._buckets[bisect_left(self._buckets, rows)]]
        fill(static, inputs)
        replay()
        return hidden[:rows]


class CudaRecorder:
    """Records CUDA graphs that share one pool of memory: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Run a step whose tensors never move. Returns what replays it, and the tensor that then holds its result."""
        usual = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(usual)
        with torch.cuda.stream(self._stream):
            step()  # what happens once, such as compiling a kernel or claiming a workspace, must not be recorded
        usual.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                hidden = step()
        finally:
            torch.cuda.set_stream(usual)  # a recording that fails leaves its own in place
        return graph.replay, hidden
