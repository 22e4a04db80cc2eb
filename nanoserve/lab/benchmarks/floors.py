"""The least time a step can take: its bytes over the bandwidth, or its operations over the peak. No
torch.

Counted are each used weight and the keys and values of the whole context, read once, recurrent
states, read and written, and the products; the rest is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec.structs import replace as replace_fields

from nanoserve.config.model_config import ModelConfig
from nanoserve.costs.counts import ModelCounts, Precision
from nanoserve.request import RequestShape
from nanoserve.scheduler.plan import StepPlan
from nanoserve.scheduler.work import Chunk, StepWork, work_of

STEP_KINDS = ("decode", "prefill", "mixed")


def step_work(plan: StepPlan, windows: Sequence[int] = ()) -> StepWork:
    """A plan's rows, summed up for a model with these ``windows``. A row of no tokens finishes what
    an earlier one began; it counts as an empty chunk."""

    def sum_up(contexts: list[int], chunks: list[Chunk], sampled: int) -> StepWork:
        decodes = StepWork.of(contexts, sampled=sampled, windows=windows)
        return replace_fields(decodes, chunks=tuple(chunks))

    return work_of(plan.rows, sum_up)


def step_kind(work: StepWork) -> str:
    """decode: every row is one token; prefill: none is; mixed: some are."""
    if not work.chunks:
        return "decode"
    if work.decodes:
        return "mixed"
    return "prefill"


@dataclass(frozen=True, slots=True)
class Limits:
    """Highest speeds that the machine can reach."""

    bytes_per_second: float  # read from memory, or read and written: what measures it says which
    operations_per_second: float  # a multiply-add counts as two

    def at_least(self, *bytes_per_second: float) -> "Limits":
        """Limits with the best bandwidth of these readings, if one is better."""
        return Limits(max(self.bytes_per_second, *bytes_per_second), self.operations_per_second)

    def or_better(self, other: "Limits") -> "Limits":
        """The better bandwidth and the better peak of the two."""
        best = max(self.operations_per_second, other.operations_per_second)
        return replace(self.at_least(other.bytes_per_second), operations_per_second=best)

    def seconds(self, num_bytes: float, operations: float) -> float:
        """The longer of the time to move these bytes and the time to compute these operations, in
        seconds."""
        return max(num_bytes / self.bytes_per_second, operations / self.operations_per_second)


class ModelCost:
    """Bytes and operations of steps of a model, each of whose numbers takes ``number_bytes`` bytes:
    weights that are not quantized, keys and values."""

    def __init__(self, config: ModelConfig, number_bytes: int) -> None:
        self._counts = ModelCounts(config, precision=Precision.of(8 * number_bytes))
        self.windows = self._counts.windows

    def step_bytes(self, work: StepWork) -> float:
        counts = self._counts
        embeddings = counts.embedding(work.tokens).weight_bytes
        weights = sum(operator.weight_bytes for operator in counts.products(work, 0))
        attention = counts.attention(work, 0)
        kept = sum(operator.kv_bytes + operator.state_bytes for operator in attention)
        return weights + embeddings + kept

    def step_operations(self, work: StepWork) -> float:
        """Floating point operations of the matrix products."""
        products = sum(operator.flops for operator in self._counts.products(work, 0))
        return products + sum(operator.flops for operator in self._counts.attention(work, 0))

    def floor_seconds(self, work: StepWork, limits: Limits) -> float:
        return limits.seconds(self.step_bytes(work), self.step_operations(work))

    def requests_floor_seconds(self, shapes: Sequence[RequestShape], limits: Limits) -> float:
        """The floor of requests that are issued together: of one step with all prompts, which gives
        each its first token, and of the decode steps behind it. Every request that has not ended
        takes part in each of them."""
        whole = [(0, shape.input_tokens) for shape in shapes]
        seconds = self.floor_seconds(StepWork.of(chunks=whole, windows=self.windows), limits)
        for known in range(1, max(shape.output_tokens for shape in shapes)):
            contexts = [
                shape.input_tokens + known for shape in shapes if shape.output_tokens > known
            ]
            step = StepWork.of(contexts, windows=self.windows)
            seconds += self.floor_seconds(step, limits)
        return seconds
