"""Sampling on a GPU: the functions of `triton_ops.sampling`, each made into a few kernels by
torch's compiler when it first runs."""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from triton_ops.sampling import perturb_likely

COMPILER: dict[str, Any] = {
    "backend": "inductor",
    # The noise of a token is some fifty operations. To compute them where they are read costs less
    # than to write the result for a whole vocabulary and read it again.
    "options": {"realize_opcount_threshold": 1000},
}
_PIECES, _ALIGNMENT = 32, 128
"""The vocabulary is cut into so many pieces, of a multiple of so many tokens each. One program for
each row would leave a GPU idle where rows are few."""
_LEAST_CANDIDATES = 64
"""The candidates of top_k are counted up to a power of two from here on: not every number of them
is compiled."""


def likeliest_tokens(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `triton_ops.sampling.likeliest_tokens`, compiled."""
    logits = logits.detach()  # what is marked is this view alone
    if len(logits) > 1:
        torch._dynamo.decorators.mark_dynamic(logits, 0)
    maxima, tokens, finite = compiled(likeliest_of_rows)(logits)
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
    """Compute `triton_ops.sampling.draw_tokens`, compiled.

    There is code for three ways: by top_k, by top_p, and by temperature alone. What costs little is
    part of each, whether a row uses it or not: min_p, and top_p among the candidates of top_k.
    """
    count, columns = len(rows), [rows, *settings]
    if len(logits) > 1:
        if count == 1:  # two rows at least: a single one among others has no code of its own
            columns = [torch.cat((column, column)) for column in columns]
        logits, maxima = logits.detach(), maxima.detach()
        mark_any_rows((logits, maxima), columns)
    if largest_top_k:
        power = max(_LEAST_CANDIDATES, 1 << (largest_top_k - 1).bit_length())
        draw = compiled(draw_by_top_k, min(power, logits.shape[1]))
    else:
        draw = compiled(draw_by_top_p if uses_top_p else draw_by_temperature)
    (tokens,) = draw(logits, maxima, *columns)
    return tokens[:count]


def largest_in_pieces(values: Tensor) -> tuple[Tensor, Tensor]:
    """values, float32 [R, V] -> the largest of each row, float32 [R], and its place, int64 [R]; of
    equal ones the first."""
    size = -(-values.shape[1] // (_PIECES * _ALIGNMENT)) * _ALIGNMENT
    padding = _PIECES * size - values.shape[1]
    padded = functional.pad(values, (0, padding), value=-torch.inf)
    pieces = padded.reshape(len(values), _PIECES, size)
    maxima, places = pieces.max(dim=2)
    largest, piece = maxima.max(dim=1, keepdim=True)
    return largest[:, 0], (piece * size + places.gather(1, piece))[:, 0]


def likeliest_of_rows(logits: Tensor) -> tuple[Tensor, ...]:
    """Compute `likeliest_tokens`: what is compiled."""
    maxima, tokens = largest_in_pieces(logits)
    return maxima, tokens, maxima.abs() < torch.inf


def draw_by_temperature(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Compute `draw_tokens` of these tensors where no row has a top_k or a top_p: what is
    compiled."""
    perturbed, _ = perturb_likely(*tensors, largest_top_k=0, uses_top_p=False, uses_min_p=True)
    return (largest_in_pieces(perturbed)[1],)


def draw_by_top_p(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Compute `draw_tokens` of these tensors where no row has a top_k: what is compiled. So much
    goes before its last pass that this need not be cut in pieces."""
    perturbed, _ = perturb_likely(*tensors, largest_top_k=0, uses_top_p=True, uses_min_p=True)
    return (perturbed.argmax(dim=1),)


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
