"""CUDA graphs of the decode step: all its kernels are launched at once, which a host could not do
one by one in time.

A graph has the addresses and shapes of its tensors built in. So there is one per number of rows, up
to a bucket of which a step is padded, and all read their inputs where `StaticInputs` keeps them.
Where tokens are drafted, there are also graphs of several tokens a row, for few rows: with many
rows draft tokens seldom pay.

A graph of a tensor-parallel rank has the collectives of its group in it. Since it is padded, either
all ranks of the group replay a step, or none does: they record the same graphs (`RanksRecorder`),
and whether a step fits one follows from its plan, which all ranks get. Between the stages of a
pipeline, hidden states are sent and received outside the graphs.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from nanoserve.executor.step.forward_pass import ForwardFunction, StepInputs
from nanoserve.models.attention import AttentionBatch
from nanoserve.models.hub import ProgressCallback
from triton_ops.cache import SKIPPED_SLOT

LARGEST_BUCKET = 1024
"""Rows: beyond it a step's kernels run longer than the host needs to launch them, also for small
models."""
FINE_BUCKETS = 256
"""Up to so many rows a step is padded by 7 rows at most, beyond it by 63."""
WIDTHS = (2, 4, 8)
"""Tokens of a row in graphs of steps with draft tokens: a row's draft tokens are at most 7, and it
is padded."""
LARGEST_DRAFT_BUCKET = 32
STAGE = "capturing decode steps"

Recorded = TypeVar("Recorded")
"""The result of a step that is recorded: a tensor, or an object that has tensors."""


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """How many rows the graphs have, ascending: 1, 2, 4, 8, 16, 24 and so on, from 256 on 320, 384
    and so on, the last for all that may run."""
    largest = min(max_num_seqs, LARGEST_BUCKET)
    sizes = (1, 2, 4, *range(8, FINE_BUCKETS, 8), *range(FINE_BUCKETS, LARGEST_BUCKET, 64))
    return (*(size for size in sizes if size < largest), largest)


def graph_sizes(buckets: Sequence[int], *, draft_tokens: bool) -> list[tuple[int, int]]:
    """Rows and tokens per row of each graph, ascending in both."""
    sizes = [(rows, 1) for rows in buckets]
    if draft_tokens:
        sizes.extend(
            (rows, width) for width in WIDTHS for rows in buckets if rows <= LARGEST_DRAFT_BUCKET
        )
    return sizes


class StaticInputs:
    """Where the graphs read a decode step: a bucket of B rows of W tokens reads the first B or B *
    W of each tensor.

    What pads writes nowhere (slot -1), and what it computes is ignored; within a row it stands
    behind the tokens, which do not see it. A row that pads attends over W tokens of some block. Its
    other numbers are those of an earlier step, and valid ones.
    """

    @torch.inference_mode()  # as steps run: compiled code is made for tensors of one mode
    def __init__(
        self,
        sizes: Sequence[tuple[int, int]],
        *,
        most_blocks: int,
        device: torch.device,
        groups: int = 1,
        hidden_states: tuple[int, torch.dtype] | None = None,
    ) -> None:
        """hidden_states: size and dtype of the vectors that a later stage of a pipeline begins
        with; None in the first stage."""
        self.sizes = sizes  # as of `graph_sizes`
        self.most_blocks = most_blocks  # in a row of the longest sequence
        most_rows, most_width = max(rows for rows, _ in sizes), max(width for _, width in sizes)
        tokens = max(rows * width for rows, width in sizes)
        self._token_ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        blocks = most_blocks
        if most_width > 1:
            blocks += most_width  # what pads a row stands behind its last block, perhaps
        # Of each cache group: block tables and slots.
        self._tables = [
            torch.zeros(most_rows, blocks, dtype=torch.int32, device=device) for _ in range(groups)
        ]
        self._starts = {
            width: torch.arange(0, (most_rows + 1) * width, width, dtype=torch.int32, device=device)
            for _, width in sizes
        }
        self._contexts = torch.ones(most_rows, dtype=torch.int32, device=device)
        self._slots = [
            torch.full((tokens,), SKIPPED_SLOT, dtype=torch.int64, device=device)
            for _ in range(groups)
        ]
        self._hidden_states: Tensor | None = None
        if hidden_states is not None:
            hidden_size, dtype = hidden_states
            self._hidden_states = torch.zeros(tokens, hidden_size, dtype=dtype, device=device)

    def first(self, rows: int, width: int = 1) -> StepInputs:
        tokens, starts = rows * width, self._starts[width][: rows + 1]
        batches = [
            AttentionBatch(tables[:rows], starts, self._contexts[:rows], slots[:tokens])
            for tables, slots in zip(self._tables, self._slots, strict=True)
        ]
        token_ids, positions = self._token_ids[:tokens], self._positions[:tokens]
        hidden = None if self._hidden_states is None else self._hidden_states[:tokens]
        return StepInputs(token_ids, positions, batches[0], width, hidden, more=tuple(batches[1:]))


def fill(static: StepInputs, inputs: StepInputs, places: Tensor | None = None) -> None:
    """Copy a decode step into a bucket's inputs, and make padding of the rows behind it. places:
    int64, which of the step's tokens stands in each place of the bucket, -1 where it is padded;
    None where rows have one token."""
    _, starts, new_contexts, _ = inputs.batch.tensors
    contexts = static.batch.context_lengths
    rows, width = inputs.batch.block_tables.shape
    tokens = rows
    sources = [batch.slot_mapping for batch in inputs.batches] + [
        inputs.token_ids,
        inputs.positions,
    ]
    targets = [batch.slot_mapping for batch in static.batches] + [
        static.token_ids,
        static.positions,
    ]
    if places is not None:
        tokens = len(places)
        sources = [source[places.clamp(min=0)] for source in sources]
        for slots in sources[: len(static.batches)]:
            slots.masked_fill_(places < 0, SKIPPED_SLOT)
        new_contexts = new_contexts - starts.diff() + static.longest
    _fill_hidden_states(static, inputs, places)
    torch._foreach_copy_([target[:tokens] for target in targets], sources)
    for batch, new in zip(static.batches, inputs.batches, strict=True):
        batch.block_tables[:rows, :width].copy_(new.block_tables)
    contexts[:rows].copy_(new_contexts)
    if rows < len(contexts):
        for batch in static.batches:
            batch.slot_mapping[tokens:].fill_(SKIPPED_SLOT)
        contexts[rows:].fill_(static.longest)


def _fill_hidden_states(static: StepInputs, inputs: StepInputs, places: Tensor | None) -> None:
    """Copy what the stage before has computed, if there is one."""
    target, hidden = static.intermediate_hidden_states, inputs.intermediate_hidden_states
    if target is None or hidden is None:
        return
    if places is not None:
        hidden = hidden[places.clamp(min=0)]
    target[: len(hidden)].copy_(hidden)


def padded_places(query_starts: Tensor, width: int) -> Tensor:
    """Which token stands in each place of rows that are padded behind to `width`: int64 [R *
    width], -1 for padding."""
    places = query_starts[:-1, None].long() + torch.arange(width, device=query_starts.device)
    return places.masked_fill_(places >= query_starts[1:, None], -1).flatten()


class DecodeGraphs:
    """A ForwardFunction: decode steps that fit a bucket are replayed, all others run as they did
    before."""

    def __init__(
        self, forward: ForwardFunction, static: StaticInputs, *, sends: bool = False
    ) -> None:
        """sends: whether hidden states are still being sent to the stage behind when the next step
        runs. They are copied then, since the next replay writes where this one did."""
        self._forward = forward
        self._static = static
        self._sends = sends
        self._buckets: dict[int, list[int]] = {}  # by width
        for rows, width in static.sizes:
            self._buckets.setdefault(width, []).append(rows)
        # By bucket and width: the inputs that a graph reads, what replays it, and the hidden states
        # that it writes.
        self._graphs: dict[tuple[int, int], tuple[StepInputs, Callable[[], None], Tensor]] = {}

    @torch.inference_mode()
    def capture(self, recorder: "GraphRecorder", progress: ProgressCallback | None = None) -> None:
        """Record all buckets, the largest first: the smaller ones find room in the memory that it
        took."""
        sizes = sorted(self._static.sizes, key=lambda size: size[0] * size[1], reverse=True)
        for done, (rows, width) in enumerate(sizes):
            if progress is not None:
                progress(STAGE, done, len(sizes))
            inputs = self._static.first(rows, width)
            replay, hidden = recorder.record(lambda inputs=inputs: self._forward(inputs))  # type: ignore[misc]
            self._graphs[rows, width] = inputs, replay, hidden
        if progress is not None:
            progress(STAGE, len(sizes), len(sizes))

    def __call__(self, inputs: StepInputs) -> Tensor:
        rows, blocks = inputs.batch.block_tables.shape
        width = next((width for width in self._buckets if width >= inputs.longest), None)
        # A graph does not say how far it is in its layers.
        if width is None or inputs.computed is not None or blocks > self._static.most_blocks:
            return self._forward(inputs)
        buckets = self._buckets[width]
        if rows > buckets[-1]:
            return self._forward(inputs)
        static, replay, hidden = self._graphs[buckets[bisect_left(buckets, rows)], width]
        if width == 1:
            fill(static, inputs)
            replay()
            return hidden[:rows].clone() if self._sends else hidden[:rows]
        places = padded_places(inputs.batch.query_starts, width)
        fill(static, inputs, places)
        replay()
        # Padding lands behind the last token: nothing here may wait for the device to count what is
        # none.
        count = len(inputs.token_ids)
        own = hidden.new_empty(count + 1, hidden.shape[1])
        return own.index_copy_(0, places.where(places >= 0, count), hidden[: len(places)])[:count]


class GraphRecorder(Protocol):
    """Records graphs."""

    def record(self, step: Callable[[], Recorded]) -> tuple[Callable[[], None], Recorded]:
        """Run a step whose tensors never move. Returns what replays it, and its result, whose
        tensors each replay fills anew. Raises RuntimeError if the step cannot be recorded."""


class CudaRecorder:
    """Records CUDA graphs that share one pool of memory: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Callable[[], Recorded]) -> tuple[Callable[[], None], Recorded]:
        """Record as `GraphRecorder.record` says."""
        usual = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(usual)
        with torch.cuda.stream(self._stream):
            # what happens once, such as compiling a kernel or claiming a workspace, must not be
            # recorded
            step()
        usual.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads go on using the device: those of swaps and of attention on the CPU
            with torch.cuda.graph(
                graph,
                pool=self._pool,
                stream=self._stream,
                capture_error_mode="thread_local",
            ):
                result = step()
        finally:
            torch.cuda.set_stream(usual)  # a recording that fails leaves its own in place
        return graph.replay, result
