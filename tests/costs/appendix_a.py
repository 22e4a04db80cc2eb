"""Seesaw's Appendix A as the paper prints it, to hold the exact model against.

It leaves out embedding and head, activations, latencies and overheads, and takes every efficiency
for 1; where the printed text is wrong the correction is said.
"""

from dataclasses import dataclass

from nanoserve.config.model_config import ModelConfig
from nanoserve.layout import ParallelLayout

_NUMBER = 2
"""Bytes of a number: the paper assumes 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The rows of Seesaw's table 3, in seconds for one layer on one device."""

    linear_move: float
    linear_compute: float
    attention_move: float
    attention_compute: float
    network: float

    @property
    def layer(self) -> float:
        """A.1: T_L = max(linear_move, linear_compute) + max(attention_move, attention_compute) +
        T_nw."""
        return (
            max(self.linear_move, self.linear_compute)
            + max(self.attention_move, self.attention_compute)
            + self.network
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendixA:
    """Seesaw, Appendix A, with its symbols spelled out."""

    layers: int
    """L."""
    layer_weights: int
    """W, parameters of a layer."""
    query_heads: int
    kv_heads: int
    head_dim: int
    """Hq, hkv, d."""
    bandwidth: float
    """B_HBM, bytes per second."""
    flops: float
    """FLOPS, operations per second."""
    all_reduce_bandwidth: float
    """B_ar(TP), *algorithm* bandwidth: bytes of the tensor over the time of an all-reduce. From bus
    bandwidth it is that times t / (2 (t - 1))."""

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        *,
        bandwidth: float,
        flops: float,
        all_reduce_bandwidth: float = float("inf"),
    ) -> "AppendixA":
        """The closed forms of a dense model."""
        attention = model.hidden_size * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
        return cls(
            layers=model.num_layers,
            layer_weights=attention + 3 * model.hidden_size * model.intermediate_size,
            query_heads=model.num_heads,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            bandwidth=bandwidth,
            flops=flops,
            all_reduce_bandwidth=all_reduce_bandwidth,
        )

    def prefill(self, batch: float, length: float) -> Times:
        """Table 3, first row: ``batch`` whole prompts of ``length`` tokens.

        Attention computes 2 b hq s^2 d operations, as a causal one does; the printed b hq s^2 d^2
        has a head size too many.
        """
        tokens, numbers = batch * length, self.query_heads * self.head_dim
        return Times(
            linear_move=_NUMBER * self.layer_weights / self.bandwidth,
            linear_compute=2 * tokens * self.layer_weights / self.flops,
            attention_move=_NUMBER
            * tokens
            * (numbers + 2 * self.kv_heads * self.head_dim)
            / self.bandwidth,
            attention_compute=2 * tokens * length * numbers / self.flops,
            network=2 * _NUMBER * tokens * numbers / self.all_reduce_bandwidth,
        )

    def decode(self, batch: float, context: float) -> Times:
        """Table 3, second row: one token for each of ``batch`` sequences of ``context`` tokens.

        Attention computes 4 b hq s d operations; the printed 2 b hq s d^2 has a head size too many.
        """
        numbers = self.query_heads * self.head_dim
        return Times(
            linear_move=_NUMBER * self.layer_weights / self.bandwidth,
            linear_compute=2 * batch * self.layer_weights / self.flops,
            attention_move=2
            * _NUMBER
            * batch
            * context
            * self.kv_heads
            * self.head_dim
            / self.bandwidth,
            attention_compute=4 * batch * context * numbers / self.flops,
            network=2 * _NUMBER * batch * numbers / self.all_reduce_bandwidth,
        )

    def stage_seconds(self, times: Times, layout: ParallelLayout) -> float:
        """A.3, the equation before (1): T_stage of a micro-batch of b / (PP DP), from the times of
        all b."""
        tensor, stages, replicas = (
            layout.tensor_parallel,
            layout.pipeline_parallel,
            layout.data_parallel,
        )
        linear = max(times.linear_move / tensor, times.linear_compute / layout.devices)
        attention = max(times.attention_move, times.attention_compute) / layout.devices
        return self.layers / stages * (linear + attention + times.network / (stages * replicas))

    def throughput(self, batch: float, times: Times, layout: ParallelLayout) -> float:
        """Equation (1), inverted: steps' requests per second, (b / PP) / T_stage (printed as
        b/PP/T)."""
        return batch / layout.pipeline_parallel / self.stage_seconds(times, layout)

    def largest_batch(self, memory_bytes: float, length: float, layout: ParallelLayout) -> float:
        """A.3: b_max = DP (M TP PP - 2 L W) / (4 L hkv d s), for devices of M bytes; negative if
        weights do not fit."""
        together = memory_bytes * layout.tensor_parallel * layout.pipeline_parallel
        left = together - _NUMBER * self.layers * self.layer_weights
        per_sequence = 2 * _NUMBER * self.layers * self.kv_heads * self.head_dim * length
        return layout.data_parallel * left / per_sequence
