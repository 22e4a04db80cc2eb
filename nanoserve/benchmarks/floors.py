"""The least time a step can take: its bytes over the bandwidth, or its operations over the peak. No torch.

Counted are each used weight and the keys and values of the whole context, read once, and the products; the rest is not.
"""

from dataclasses import dataclass

import msgspec

from nanoserve.config import ModelConfig
from nanoserve.costs.counts import ModelCounts, Operator, Precision
from nanoserve.costs.work import StepWork, chunk_pairs
from nanoserve.scheduler.plan import StepPlan

STEP_KINDS = ("decode", "prefill", "mixed")


class StepShape(msgspec.Struct, frozen=True, kw_only=True):
    """How much one step holds."""

    sequences: int  # rows of the plan
    tokens: int  # positions computed
    decoding: int  # rows of one token
    sampled: int  # rows whose last position gets logits
    context: int  # keys that are read, summed over rows: each row reads its sequence up to its own last position
    attended: int  # pairs of query and key, summed over positions

    @classmethod
    def of(cls, plan: StepPlan) -> "StepShape":
        rows = [(row.start, len(row.tokens)) for row in plan.rows]
        return cls(
            sequences=len(rows),
            tokens=sum(length for _, length in rows),
            decoding=sum(length == 1 for _, length in rows),
            sampled=sum(row.sample for row in plan.rows),
            context=sum(start + length for start, length in rows),
            attended=sum(chunk_pairs(start, length) for start, length in rows),
        )

    @property
    def kind(self) -> str:
        """decode: every row is one token; prefill: none is; mixed: some are."""
        if self.decoding == self.sequences:
            return "decode"
        return "mixed" if self.decoding else "prefill"


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine can do at best."""

    bytes_per_second: float  # read from memory, or read and written: what measures it says which
    operations_per_second: float  # a multiply-add counts as two

    def at_least(self, *bytes_per_second: float) -> "Limits":
        """Limits with the best bandwidth of these readings, if one is better."""
        return Limits(max(self.bytes_per_second, *bytes_per_second), self.operations_per_second)

    def seconds(self, num_bytes: float, operations: float) -> float:
        """The longer of the time to move these bytes and the time to compute these operations, in seconds."""
        return max(num_bytes / self.bytes_per_second, operations / self.operations_per_second)


class ModelCost:
    """Bytes and operations of steps of a model, each of whose weights, keys and values takes ``weight_bytes`` bytes."""

    def __init__(self, config: ModelConfig, weight_bytes: int) -> None:
        self._counts = ModelCounts(config, precision=Precision.of(8 * weight_bytes))

    def step_bytes(self, step: StepShape) -> float:
        counts = self._counts
        embeddings = step.tokens * counts.model.hidden_size * counts.precision.other_bytes
        weights = sum(operator.weight_bytes for operator in self._products(step))
        return weights + embeddings + counts.kv_bytes_per_token(0) * step.context

    def step_operations(self, step: StepShape) -> float:
        """Floating point operations of the matrix products."""
        pairs = self._counts.layer_flops_per_pair * self._counts.layers(0) * step.attended
        return sum(operator.flops for operator in self._products(step)) + pairs

    def floor_seconds(self, step: StepShape, limits: Limits) -> float:
        return limits.seconds(self.step_bytes(step), self.step_operations(step))

    def _products(self, step: StepShape) -> list[Operator]:
        """The step's matrix products, which do not depend on token positions."""
        return list(self._counts.products(StepWork(decodes=step.tokens, sampled=step.sampled), 0))
