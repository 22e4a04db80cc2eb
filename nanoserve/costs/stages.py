"""Which layers each pipeline stage gets: the dearest stage is as cheap as can be, for it sets the pace of a pipeline.

The cost of a layer, of the embedding and of the head is the mean of its shares in the bytes of a decode step, bound by
memory, and in the operations of a mixed step, of whose tokens one in four is sampled. Both are counted exactly
(counts.py). So the head of Qwen2.5 0.5B, which costs as much as 5.9 layers in the one step and 2.2 in the other, counts
as 4. Tensor parallelism divides everything alike and is left out.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import inf
from typing import Literal

from nanoserve.config import ModelConfig
from nanoserve.costs.counts import LayerKind, ModelCounts, Operator
from nanoserve.costs.work import Chunk, StepWork
from nanoserve.errors import UsageError

_DECODES, _CONTEXT = 64, 512
"""Rows of both steps that decode, and the keys that each of them reads."""
_CHUNK = 3 * _DECODES
"""Tokens of a prompt in the mixed step, none of them its last."""
_UNITS = 10**9
"""Costs are integers, so that equal stages are equal: parts in a billion of the whole model."""


def stage_layers(
    model: ModelConfig, pipeline_parallel: int, pipeline_split: Sequence[int] | None = None, *, asked: str | None = None
) -> tuple[range, ...]:
    """The layers of each stage: as many as `pipeline_split` says, or divided by cost.

    `asked` are the option's words, for errors; None stands for --pp. Raises UsageError if the stages cannot be filled,
    or the split is not one of this model's layers.
    """
    if pipeline_parallel < 1:
        raise UsageError(f"--pp must be at least 1, not {pipeline_parallel}")
    if pipeline_parallel > model.num_layers:
        raise UsageError(
            f"{asked or f'--pp {pipeline_parallel}'}: the model has {model.num_layers} layers,"
            f" so there are at most {model.num_layers} stages"
        )
    if pipeline_split is not None:
        _check_split(pipeline_split, pipeline_parallel, model.num_layers)
    sizes = pipeline_split or divide_layers(model, pipeline_parallel)
    return tuple(range(first, after) for first, after in pairwise(accumulate(sizes, initial=0)))


@lru_cache(maxsize=1024)
def divide_layers(model: ModelConfig, stages: int) -> tuple[int, ...]:
    """How many layers each stage gets; the embedding belongs to the first, the head to the last."""
    if stages == 1:  # the counts of a layer are those of such a model
        return (model.num_layers,)
    decode, mixed = _shares(model, [], "bytes"), _shares(model, [(0, _CHUNK)], "flops")
    embedding, *layers, head = (round(_UNITS * sum(both) / 2) for both in zip(decode, mixed, strict=True))
    layers[0] += embedding
    layers[-1] += head
    return divide(layers, stages)


def divide(costs: Sequence[int], stages: int) -> tuple[int, ...]:
    """Cut a row of costs into `stages` pieces, none empty; returns how many entries each has.

    The dearest piece is as cheap as can be; of those divisions the most even one is taken (least sum of squares, so
    that keys and values are spread well too), and of equally even ones that with the smaller first pieces.
    O(stages * len(costs)^2).
    """
    sums = list(accumulate(costs, initial=0))
    # By position: the least cost of the dearest piece if the pieces so far end there; then the best such division.
    dearest: list[float] = [0] + [inf] * len(costs)
    for _ in range(stages):
        dearest = [
            min((max(dearest[cut], sums[end] - sums[cut]) for cut in range(end)), default=inf)
            for end in range(len(sums))
        ]
    most = dearest[-1]
    divisions: list[tuple[float, tuple[int, ...]]] = [(0, ())] + [(inf, ())] * len(costs)
    for _ in range(stages):
        divisions = [
            min(
                (
                    (divisions[cut][0] + (sums[end] - sums[cut]) ** 2, (*divisions[cut][1], end - cut))
                    for cut in range(end)
                    if sums[end] - sums[cut] <= most
                ),
                default=(inf, ()),
            )
            for end in range(len(sums))
        ]
    return divisions[-1][1]


def _check_split(split: Sequence[int], pipeline_parallel: int, num_layers: int) -> None:
    told = f"--pp-split {','.join(map(str, split))}"
    if len(split) != pipeline_parallel:
        raise UsageError(f"{told} names {len(split)} stages, but --pp is {pipeline_parallel}")
    if min(split) < 1:
        raise UsageError(f"{told}: every stage needs at least one layer")
    if sum(split) != num_layers:
        raise UsageError(f"{told} adds up to {sum(split)} layers, but the model has {num_layers}")


def _shares(model: ModelConfig, chunks: list[Chunk], measure: Literal["bytes", "flops"]) -> list[float]:
    """What the embedding, each layer and the head cost in a step with these chunks, as shares of the whole."""

    def cost(operators: Iterable[Operator]) -> float:
        return sum(getattr(operator, measure) for operator in operators)

    def layer_cost(kind: LayerKind) -> float:
        """The cost of one such layer, in a model of this layer alone."""
        moe = replace(model.moe, sparse_layers=frozenset({0})) if model.moe is not None and kind.sparse else None
        alone = ModelCounts(replace(model, num_layers=1, sliding_windows=(kind.window,), moe=moe))
        work = StepWork.of([_CONTEXT] * _DECODES, chunks, sampled=0, windows=alone.windows)
        return cost([*alone.products(work, 0), *alone.attention(work, 0)])

    kinds = [LayerKind(model.sliding_window(layer), model.is_sparse(layer)) for layer in range(model.num_layers)]
    costs = {kind: layer_cost(kind) for kind in dict.fromkeys(kinds)}
    counts = ModelCounts(model)
    embedding = cost([counts.embedding(_DECODES + sum(length for _, length in chunks))])
    parts = [embedding, *(costs[kind] for kind in kinds), cost([counts.product(counts.head, _DECODES)])]
    return [part / sum(parts) for part in parts]
