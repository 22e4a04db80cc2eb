"""DistortedPredictor: a Predictor whose every part is wrong by its own factor, which may change
with the size."""

from dataclasses import dataclass

from nanoserve.scheduler.predictor import Predictor
from nanoserve.scheduler.work import Strategy


@dataclass(frozen=True)
class DistortedPredictor:
    """Each time is the true one times a factor and a power of its size.

    Attributes:
        true: whose times they are.
        linear, attention, prefill_attention, host_attention, overhead: the factors.
        hybrid: how much longer steps take that use the host.
        power: of the size over 64 rows, or over 16384 keys; a power of 0.1 is a third more for 16
            times the size.
    """

    true: Predictor
    linear: float = 1.0
    attention: float = 1.0
    prefill_attention: float = 1.0
    host_attention: float = 1.0
    overhead: float = 1.0
    power: float = 0.0
    hybrid: float = 1.0

    @property
    def num_layers(self) -> int:
        return self.true.num_layers

    @property
    def slowest_share(self) -> float:
        return self.true.slowest_share

    @property
    def lone_share(self) -> float:
        return self.true.lone_share

    @property
    def overlaps(self) -> bool:
        return self.true.overlaps

    def linear_seconds(self, tokens: int) -> float:
        return self.linear * self._tilt(tokens, 64) * self.true.linear_seconds(tokens)

    def attention_seconds(self, context_tokens: int) -> float:
        return (
            self.attention
            * self._tilt(context_tokens, 16384)
            * self.true.attention_seconds(context_tokens)
        )

    def prefill_attention_seconds(self, tokens: int) -> float:
        return self.prefill_attention * self.true.prefill_attention_seconds(tokens)

    def host_attention_seconds(self, sequences: int, context_tokens: int) -> float:
        true = self.true.host_attention_seconds(sequences, context_tokens)
        return self.host_attention * self._tilt(context_tokens, 16384) * true

    def step_overhead_seconds(self, rows: int = 1) -> float:
        return self.overhead * self.true.step_overhead_seconds(rows)

    def slowdown(self, strategy: Strategy) -> float:
        return 1.0 if strategy == "device" else self.hybrid

    def swap_seconds(self, context_tokens: int) -> float:
        return self.true.swap_seconds(context_tokens)

    def transition_seconds(self, layout: int) -> float:
        return self.true.transition_seconds(layout)

    def _tilt(self, size: int, middle: int) -> float:
        return (max(size, 1) / middle) ** self.power
