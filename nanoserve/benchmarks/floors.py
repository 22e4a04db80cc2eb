"""The least time a step can take: its bytes over the bandwidth, or its operations over the peak. No torch.

The count is of what every implementation must do: read each weight matrix that is used once, read the keys and
values of the whole context once, multiply. Activations, norms and softmax are left out, so the floor is below reach.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import msgspec

from nanoserve.config import ModelConfig
from nanoserve.costs.counts import ModelCounts, Precision
from nanoserve.costs.work import StepWork
from nanoserve.scheduler.plan import StepPlan

StepKind = Literal["decode", "prefill", "mixed"]
STEP_KINDS: tuple[StepKind, ...] = get_args(StepKind)


class StepShape(msgspec.Struct, frozen=True, kw_only=True):
    """How much one step holds."""

    sequences: int
    """Rows of the plan."""
    tokens: int
    """Positions computed."""
    decoding: int
    """Rows of one token."""
    sampled: int
    """Rows whose last position gets logits."""
    context: int
    """Keys that are read, summed over rows: each row reads its sequence up to its own last position."""
    attended: int
    """Pairs of query and key, summed over positions."""

    @classmethod
    def of(cls, plan: StepPlan) -> "StepShape":
        lengths = [len(row.tokens) for row in plan.rows]
        ends = [row.start + length for row, length in zip(plan.rows, lengths, strict=True)]
        pairs = [(row.start + 1 + end) * length // 2 for row, length, end in zip(plan.rows, lengths, ends, strict=True)]
        return cls(
            sequences=len(plan.rows),
            tokens=sum(lengths),
            decoding=lengths.count(1),
            sampled=sum(row.sample for row in plan.rows),
            context=sum(ends),
            attended=sum(pairs),
        )

    @property
    def kind(self) -> StepKind:
        """decode: every row is one token; prefill: none is; mixed: some are."""
        if self.decoding == self.sequences:
            return "decode"
        return "mixed" if self.decoding else "prefill"


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine can do at best."""

    bytes_per_second: float
    """Read from memory, or read and written: what measures it says which."""
    operations_per_second: float
    """A multiply-add counts as two."""

    def at_least(self, *bytes_per_second: float) -> "Limits":
        """Limits with the best bandwidth of these readings, if one is better."""
        return Limits(max(self.bytes_per_second, *bytes_per_second), self.operations_per_second)

    def seconds(self, num_bytes: float, operations: float) -> float:
        """The longer of the time to move these bytes and the time to compute these operations, in seconds."""
        return max(num_bytes / self.bytes_per_second, operations / self.operations_per_second)


class ModelCost:
    """Bytes and operations of steps of one model.

    Args:
        config: its shape.
        weight_bytes: bytes of one weight, which is also what one key or value number takes.
    """

    def __init__(self, config: ModelConfig, weight_bytes: int) -> None:
        bits = 8 * weight_bytes
        precision = Precision.of(bits)
        self._counts, self._weight_bytes = ModelCounts(config, precision=precision), weight_bytes

    def step_bytes(self, step: StepShape) -> float:
        """Bytes that must be read."""
        weights = sum(product.weight_bytes for product in self._counts.products(_work(step), 0))
        embeddings = step.tokens * self._counts.model.hidden_size * self._weight_bytes
        return weights + embeddings + self._counts.kv_bytes_per_token(0) * step.context

    def step_operations(self, step: StepShape) -> float:
        """Floating point operations of the matrix products."""
        multiplied = sum(product.flops for product in self._counts.products(_work(step), 0))
        return multiplied + self._counts.layer_flops_per_pair * self._counts.layers(0) * step.attended

    def floor_seconds(self, step: StepShape, limits: Limits) -> float:
        """The least time this step can take."""
        return limits.seconds(self.step_bytes(step), self.step_operations(step))


def _work(step: StepShape) -> StepWork:
    """Sum a step up for its matrix products, which do not depend on token positions."""
    return StepWork(decodes=step.tokens, sampled=step.sampled)
