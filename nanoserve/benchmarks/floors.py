"""The least time a step can take: its bytes over the read bandwidth, or its operations over the peak. No torch.

The count is of what every implementation must do: read each weight matrix that is used once, read the keys and
values of the whole context once, multiply. Activations, norms and softmax are left out, so the floor is below reach.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import msgspec

from nanoserve.config import ModelConfig
from nanoserve.scheduler.plan import StepPlan

StepKind = Literal["decode", "prefill", "mixed"]
STEP_KINDS: tuple[StepKind, ...] = get_args(StepKind)


class StepShape(msgspec.Struct, frozen=True, kw_only=True):
    """How much one step holds.

    Attributes:
        sequences: rows of the plan.
        tokens: positions computed.
        decoding: rows of one token.
        sampled: rows whose last position gets logits.
        context: keys that are read, summed over rows: each row reads its sequence up to its own last position.
        attended: pairs of query and key, summed over positions.
    """

    sequences: int
    tokens: int
    decoding: int
    sampled: int
    context: int
    attended: int

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
    """What the machine can do at best: bytes read per second, and multiply-adds counted as two operations."""

    read_bytes_per_second: float
    operations_per_second: float

    def at_least(self, *read_bytes_per_second: float) -> "Limits":
        """The same with the best of these readings, where one was better."""
        return Limits(max(self.read_bytes_per_second, *read_bytes_per_second), self.operations_per_second)

    def seconds(self, num_bytes: float, operations: float) -> float:
        """The longer of reading so much and computing so much."""
        return max(num_bytes / self.read_bytes_per_second, operations / self.operations_per_second)


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Bytes and operations of steps of one model.

    Args:
        config: its shape.
        weight_bytes: bytes of one weight, which is also what one key or value number takes.
    """

    config: ModelConfig
    weight_bytes: int

    def step_bytes(self, step: StepShape) -> float:
        """Bytes that must be read."""
        config = self.config
        weights = sum(self._layer_weights(layer, step.tokens) for layer in range(config.num_layers))
        head = config.vocab_size * config.hidden_size if step.sampled else 0
        keys_and_values = 2 * config.num_layers * config.num_kv_heads * config.head_dim * step.context
        embeddings = step.tokens * config.hidden_size
        return self.weight_bytes * (weights + head + keys_and_values + embeddings)

    def step_operations(self, step: StepShape) -> float:
        """Floating point operations of the matrix products."""
        config = self.config
        per_token = sum(self._layer_weights_per_token(layer) for layer in range(config.num_layers))
        head = config.vocab_size * config.hidden_size * step.sampled
        attention = 2 * config.num_layers * config.num_heads * config.head_dim * step.attended
        return 2.0 * (per_token * step.tokens + head + attention)

    def floor_seconds(self, step: StepShape, limits: Limits) -> float:
        """The least time this step can take."""
        return limits.seconds(self.step_bytes(step), self.step_operations(step))

    def _attention_weights(self) -> int:
        config = self.config
        return config.hidden_size * config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)

    def _layer_weights(self, layer: int, tokens: int) -> float:
        """Weights of a layer that a step of so many tokens reads, on average where experts are chosen."""
        config = self.config
        if config.moe is None or not config.is_sparse(layer):
            return self._attention_weights() + 3 * config.hidden_size * config.intermediate_size
        moe = config.moe
        used = moe.num_experts * (1 - (1 - moe.experts_per_token / moe.num_experts) ** tokens)
        experts = used * 3 * config.hidden_size * moe.intermediate_size
        return self._attention_weights() + experts + moe.num_experts * config.hidden_size

    def _layer_weights_per_token(self, layer: int) -> float:
        return self._layer_weights(layer, 1)
