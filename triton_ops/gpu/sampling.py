"""Sampling on a GPU: which programs run, and how they divide rows and vocabulary. torch's compiler
makes draws by top_k into a few kernels when they first run.

Nothing here waits for the GPU: what is launched follows from shapes and from which settings are in
use. So it may be captured in a CUDA graph.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from triton_ops.gpu.devices import gpu_of
from triton_ops.gpu.kernels.sampling import draw_likely, find_likeliest, narrow_top_p
from triton_ops.gpu.sampling_constants import (
    BLOCK,
    DIGIT_BITS,
    NARROWING_WARPS,
    NUM_WARPS,
    PASSES,
    most_counted_rows,
    pieces_of_row,
)
from triton_ops.sampling import perturb_likely

COMPILER: dict[str, Any] = {
    "backend": "inductor",
    # What is computed of a logit is many operations. To compute them where they are read costs less
    # than to write the result for a whole vocabulary and read it again.
    "options": {"realize_opcount_threshold": 1000},
}
_LEAST_CANDIDATES = 64
"""The candidates of top_k are counted up to a power of two from here on: not every number of them
is compiled."""


def likeliest_tokens(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `triton_ops.sampling.likeliest_tokens` in one launch."""
    logits, count = _in_rows(logits), len(logits)
    maxima = logits.new_empty(count, dtype=torch.float32)
    tokens, finite = (maxima.new_empty(count, dtype=each) for each in (torch.int64, torch.bool))
    if count:
        launch = _Launch(logits, count)
        with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
            find_likeliest[launch.grid](
                maxima,
                tokens,
                finite.view(torch.uint8),
                launch.bests(),
                launch.arrivals,
                logits,
                *launch.sizes,
                BLOCK=BLOCK,
                num_warps=NUM_WARPS,
            )
    return maxima, tokens, finite


def draw_tokens(
    logits: Tensor,
    maxima: Tensor,
    rows: Tensor,
    *settings: Tensor,
    largest_top_k: int,
    uses_top_p: bool,
    uses_min_p: bool,
) -> Tensor:
    """Compute `triton_ops.sampling.draw_tokens`.

    There are three ways: by top_k, which torch's compiler makes, by top_p, and by temperature
    alone. What costs little is part of each, whether a row uses it or not: min_p, and top_p among
    the candidates of top_k.
    """
    if largest_top_k:
        return _draw_by_top_k(logits, maxima, rows, *settings, largest_top_k=largest_top_k)
    keys, temperature, _, top_p, min_p = (each.contiguous() for each in settings)
    logits, rows = _in_rows(logits), rows.contiguous()
    tokens = torch.empty_like(rows)
    if len(rows) == 0:
        return tokens
    launch = _Launch(logits, len(rows))
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        least = None
        if uses_top_p:
            least = _least_of_top_p(launch, logits, maxima, rows, temperature, top_p)
        draw_likely[launch.grid](
            tokens,
            launch.bests(),
            launch.arrivals,
            logits,
            maxima,
            rows,
            keys,
            temperature,
            min_p,
            least,
            *launch.sizes,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
    return tokens


def _least_of_top_p(
    launch: "_Launch",
    logits: Tensor,
    maxima: Tensor,
    rows: Tensor,
    temperature: Tensor,
    top_p: Tensor,
) -> Tensor:
    """Find the least scaled logit that top_p keeps in each row, float32 [G], in a launch for each
    digit, and one more."""
    count = len(rows)
    least = maxima.new_empty(count)
    prefixes, needed = rows.new_empty(count), rows.new_empty(count)
    zeros = rows.new_zeros(len(PASSES), count, 1 << DIGIT_BITS)
    for histograms, (shift, low) in zip(zeros, PASSES, strict=True):
        narrow_top_p[launch.grid](
            least,
            prefixes,
            needed,
            histograms,
            launch.arrivals,
            logits,
            maxima,
            rows,
            temperature,
            top_p,
            *launch.sizes,
            BLOCK=BLOCK,
            SHIFT=shift,
            DIGIT_BITS=DIGIT_BITS,
            LOW=low,
            num_warps=NARROWING_WARPS,
        )
    return least


def _in_rows(logits: Tensor) -> Tensor:
    """Logits whose rows are contiguous each."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


class _Launch:
    """How programs divide `count` rows of logits, and what they share."""

    def __init__(self, logits: Tensor, count: int) -> None:
        vocab_size, device = logits.shape[1], logits.device
        multiprocessors = gpu_of(device).multiprocessors
        pieces, blocks = pieces_of_row(count, vocab_size, multiprocessors)
        self.grid = (count, pieces)
        self.sizes = (vocab_size, blocks, logits.stride(0))
        self.arrivals = arrival_counters(device, most_counted_rows(multiprocessors))

    def bests(self) -> Tensor:
        """Scratch memory for what each program finds; not read where a row has one program."""
        return self.arrivals.new_empty(self.grid, dtype=torch.int64)


@cache
def arrival_counters(device: torch.device, number: int) -> Tensor:
    """Return a device's counters of programs that have read their piece of a row.

    They are zero whenever no sampling runs: the last program to count resets its counter. So they
    are made once, by the step that runs before the first graph is captured, and shared by all.
    """
    return torch.zeros(number, dtype=torch.int32, device=device)


def _draw_by_top_k(
    logits: Tensor, maxima: Tensor, rows: Tensor, *settings: Tensor, largest_top_k: int
) -> Tensor:
    """Compute `draw_tokens` where each row has a top_k, compiled."""
    count, columns = len(rows), [rows, *settings]
    if len(logits) > 1:
        if count == 1:  # two rows at least: a single one among others has no code of its own
            columns = [torch.cat((column, column)) for column in columns]
        logits, maxima = logits.detach(), maxima.detach()  # what is marked are these views alone
        mark_any_rows((logits, maxima), columns)
    power = max(_LEAST_CANDIDATES, 1 << (largest_top_k - 1).bit_length())
    (tokens,) = compiled(draw_by_top_k, min(power, logits.shape[1]))(logits, maxima, *columns)
    return tokens[:count]


def draw_by_top_k(candidates: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Compute `draw_tokens` of these tensors where each row has a top_k, the largest one being
    `candidates` or less: what is compiled."""
    perturbed, ids = perturb_likely(
        *tensors, largest_top_k=candidates, uses_top_p=True, uses_min_p=True
    )
    winners = perturbed.argmax(dim=1, keepdim=True)
    return (ids.gather(1, winners)[:, 0],)


def mark_any_rows(batch: Sequence[Tensor], columns: Sequence[Tensor]) -> None:
    """Have torch compile for any number of rows in the batch, and for any number that is drawn."""
    for tensor in batch:
        torch._dynamo.decorators.mark_unbacked(tensor, 0)
    for tensor in columns:
        torch._dynamo.decorators.mark_dynamic(tensor, 0)


# ---- compiling -----------------------------------------------------------------------------------


@cache
def compiled(function: Callable[..., tuple[Tensor, ...]], *options: int) -> "CompiledFunction":
    """The compiled form of a function with these options, which come before its tensors."""
    return CompiledFunction(function, options)


class CompiledFunction:
    """A function of tensors that is compiled when it first runs: for one row, and for any number of
    more. If it cannot be compiled, it runs as it is, and one notice says so."""

    def __init__(
        self, function: Callable[..., tuple[Tensor, ...]], options: tuple[int, ...]
    ) -> None:
        self._plain, self._options = function, options
        # torch compiles one code object at most 8 times: each has its own
        code: Any = function
        own = FunctionType(code.__code__.replace(), code.__globals__, code.__name__)
        self._compiled: Callable[..., tuple[Tensor, ...]] | None
        self._compiled = torch.compile(own, fullgraph=True, **COMPILER)
        self._has_run = False

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if self._compiled is not None:
            try:
                outputs = self._compiled(*self._options, *tensors)
            except Exception as error:  # torch's compiler may fail in any way
                if self._has_run or isinstance(error, torch.OutOfMemoryError):
                    raise
                self._compiled = None
                notice = "nanoserve: sampling runs uncompiled, which is slower: %s"
                logging.getLogger("nanoserve").warning(notice, str(error).splitlines()[0])
            else:
                self._has_run = True
                return outputs
        return self._plain(*self._options, *tensors)
