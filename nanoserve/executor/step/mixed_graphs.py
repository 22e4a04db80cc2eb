"""CUDA graphs of mixed steps: chunks of prompts, with or without single tokens beside them.

Nothing need be cut into pieces around attention: what attention launches follows from shapes alone.
So a step of any rows is padded to the numbers of tokens and of rows of a graph. A row that pads has
no tokens: its queries begin and end behind the last token. A token that pads belongs to no row: it
is written nowhere (slot -1), and attention leaves its result as the memory was, perhaps NaN. That
harms no other token: only attention mixes tokens, and experts multiply each one by itself. What
padding comes to is ignored.

**Where it pays.** Uncaptured, a step costs the host about 80 us for each compiled layer, whatever
its tokens: 28 * 80 us = 2.2 ms for Qwen3-0.6B. Captured, it costs the GPU the products of all
tokens of the graph, and above the smallest size less than half of them are padding. So a graph pays
as long as the GPU computes a layer for all its tokens within those 80 us. If that takes longer, the
host is ahead of the GPU anyway. A layer of Qwen3-0.6B has 15.7 million weights, so that 2^34
multiplications are those of 1,092 tokens: steps of up to 1,024 tokens are captured. A layer of
Llama-3.1-8B has 218 million, and the 78 tokens that they allow are too few to be worth a graph.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nanoserve.executor.step.decode_graphs import GraphRecorder
from nanoserve.executor.step.forward_pass import ForwardFunction, StepInputs
from nanoserve.models.attention import AttentionBatch
from nanoserve.models.hub import ProgressCallback
from triton_ops.cache import SKIPPED_SLOT
from triton_ops.gpu.configurations import line_of

TOKENS = (32, 64, 128, 256, 512, 1024)
"""Tokens of the graphs."""
SHARES = (8, 2)
"""Rows of the graphs, as divisors of their tokens: a few chunks, or a chunk beside many single
tokens. A row that pads costs little, but not nothing: each of its groups of heads has a program in
both launches of attention, which finds nothing to do."""
MULTIPLICATIONS = {8: 2**32, 9: 2**34, 10: 2**35}
"""How many a GPU does in 80 us, by line of generations (`line_of`): at 34 %, 43 % and 38 % of the
peaks in the data sheets of an A100, H200 and B200 (312, 989 and 2,250 * 10^12 operations a second,
two for each multiplication with its addition)."""
FEWEST_WORTHWHILE = 96
"""Tokens that must fit into the 80 us if any graph is to pay. Fewer tokens take no less time: at
those GPUs' 2, 4.8 and 8 * 10^12 bytes a second, reading the weights takes as long as the products
of 54, 90 and 107 tokens."""
STAGE = "capturing mixed steps"

Size = tuple[int, int]
"""Tokens and rows of a graph."""


def most_tokens(weights_of_layer: int, generation: int) -> int:
    """How many tokens the largest graph that pays has, a power of two; 0 if none pays. The layer
    has so many weights, and the GPU is of that generation."""
    found = MULTIPLICATIONS.get(line_of(generation), 0) // max(1, weights_of_layer)
    if found < FEWEST_WORTHWHILE:
        return 0
    largest: int = 1 << (found.bit_length() - 1)
    return min(largest, TOKENS[-1])


def mixed_sizes(largest: int, max_num_seqs: int) -> list[Size]:
    """Sizes of the graphs, ascending, where steps of up to `largest` tokens are captured, and so
    many rows may run: at most 12, each with fewer rows than tokens, as `paged_attention` takes as
    many rows as tokens for single tokens alone. The last number of tokens is `largest` itself:
    chunks often fill a step up to its limit."""
    if largest < TOKENS[0]:
        return []
    sizes = list[Size]()
    for tokens in (*(each for each in TOKENS if each < largest), largest):
        rows = {min(tokens // share, max_num_seqs) for share in SHARES}
        sizes.extend((tokens, each) for each in sorted(rows))
    return sizes


class MixedInputs:
    """Where the graphs read a mixed step: one of T tokens and R rows reads the first ones of each
    tensor. Tokens and tables of padding are those of an earlier step, and valid ones."""

    @torch.inference_mode()  # as steps run: compiled code is made for tensors of one mode
    def __init__(
        self, sizes: Sequence[Size], *, most_blocks: int, device: torch.device, groups: int = 1
    ) -> None:
        self.sizes = sizes  # as of `mixed_sizes`
        self.most_blocks = most_blocks  # in a row of the longest sequence
        most, rows = (max(numbers) for numbers in zip(*sizes, strict=True))
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._starts = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self._contexts = torch.ones(rows, dtype=torch.int32, device=device)
        # Of each cache group: block tables and slots.
        self._tables = [
            torch.zeros(rows, most_blocks, dtype=torch.int32, device=device) for _ in range(groups)
        ]
        self._slots = [
            torch.full((most,), SKIPPED_SLOT, dtype=torch.int64, device=device)
            for _ in range(groups)
        ]

    def first(self, tokens: int, rows: int) -> StepInputs:
        starts, contexts = self._starts[: rows + 1], self._contexts[:rows]
        batches = [
            AttentionBatch(tables[:rows], starts, contexts, slots[:tokens])
            for tables, slots in zip(self._tables, self._slots, strict=True)
        ]
        token_ids, positions = self._token_ids[:tokens], self._positions[:tokens]
        return StepInputs(token_ids, positions, batches[0], longest=tokens, more=tuple(batches[1:]))


def fill(static: StepInputs, inputs: StepInputs) -> None:
    """Copy a mixed step into a graph's inputs, and make padding of the tokens and rows behind
    it."""
    tokens, (rows, blocks) = len(inputs.token_ids), inputs.batch.block_tables.shape
    of_tokens = [
        (static.token_ids, inputs.token_ids),
        (static.positions, inputs.positions),
        *(
            (batch.slot_mapping, new.slot_mapping)
            for batch, new in zip(static.batches, inputs.batches, strict=True)
        ),
    ]
    targets, sources = zip(*of_tokens, strict=True)
    torch._foreach_copy_([target[:tokens] for target in targets], list(sources))
    starts, contexts = static.batch.query_starts, static.batch.context_lengths
    torch._foreach_copy_(
        [starts[: rows + 1], contexts[:rows]],
        [inputs.batch.query_starts, inputs.batch.context_lengths],
    )
    for batch, new in zip(static.batches, inputs.batches, strict=True):
        batch.block_tables[:rows, :blocks].copy_(new.block_tables)
        batch.slot_mapping[tokens:].fill_(SKIPPED_SLOT)
    starts[rows + 1 :].fill_(tokens)


class MixedGraphs:
    """A ForwardFunction: mixed steps that fit a graph are replayed, all other steps run as they did
    before. It is not for models with recurrent states or canvases, nor for steps with draft
    tokens."""

    def __init__(
        self, forward: ForwardFunction, static: MixedInputs, others: ForwardFunction
    ) -> None:
        """forward: what is captured; others: runs the steps that are not."""
        self._forward, self._others = forward, others
        self._static = static
        # By size: the inputs that a graph reads, what replays it, and the hidden states that it
        # writes.
        self._graphs: dict[Size, tuple[StepInputs, Callable[[], None], Tensor]] = {}

    @torch.inference_mode()
    def capture(self, recorder: GraphRecorder, progress: ProgressCallback | None = None) -> None:
        """Record all graphs, the largest first, as `DecodeGraphs.capture` does. What they read is a
        step of rows without tokens."""
        sizes = sorted(self._static.sizes, reverse=True)
        for done, size in enumerate(sizes):
            if progress is not None:
                progress(STAGE, done, len(sizes))
            inputs = self._static.first(*size)
            replay, hidden = recorder.record(lambda inputs=inputs: self._forward(inputs))  # type: ignore[misc]
            self._graphs[size] = inputs, replay, hidden
        if progress is not None:
            progress(STAGE, len(sizes), len(sizes))

    def __call__(self, inputs: StepInputs) -> Tensor:
        size = self._size_for(inputs)
        if size is None:
            return self._others(inputs)
        static, replay, hidden = self._graphs[size]
        fill(static, inputs)
        replay()
        return hidden[: len(inputs.token_ids)]

    def _size_for(self, inputs: StepInputs) -> Size | None:
        """The smallest size that a step fits; None if it runs in another way."""
        rows, blocks = inputs.batch.block_tables.shape
        # A graph does not say how far it is in its layers.
        if inputs.computed is not None or inputs.longest == 1 or blocks > self._static.most_blocks:
            return None
        tokens = len(inputs.token_ids)
        fitting = (size for size in self._static.sizes if size[0] >= tokens and size[1] >= rows)
        return next(fitting, None)
