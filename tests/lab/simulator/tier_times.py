"""Step times for tests of host memory, host attention and layouts: so much per layer, token, key
and block."""

from dataclasses import dataclass

from nanoserve.scheduler.work import StepWork
from tests.lab.simulator.linear_times import LinearTimes


@dataclass(frozen=True)
class TierTimes(LinearTimes):
    """Every layer takes the same time, in every stage; ``stage_seconds`` is the sum of its
    parts."""

    num_layers: int = 3
    layer: float = 1.0
    token: float = 0.0
    key: float = 0.0
    ends: float = 0.0
    sample: float = 0.0
    swap_token: float = 1.0
    reload: float = 5.0
    host_key: float = 1.0
    host_row: float = 0.0

    def stage_seconds(self, work: StepWork, stage: int) -> float:
        layers = self.layers_seconds(work.tokens, stage) + self.attention_seconds(work, stage)
        return layers + self.ends_seconds(work, stage) if work.tokens else 0.0

    def layers_seconds(self, tokens: int, stage: int) -> float:
        return (
            self.num_layers / self.num_stages * (self.layer + self.token * tokens)
            if tokens
            else 0.0
        )

    def attention_seconds(self, work: StepWork, stage: int) -> float:
        return self.num_layers / self.num_stages * self.key * work.decode_context

    def ends_seconds(self, work: StepWork, stage: int) -> float:
        return (self.ends if work.tokens else 0.0) + self.sample * work.sampled

    def swap_seconds(self, tokens: int, stage: int) -> float:
        return self.swap_token * tokens / self.num_stages

    def reload_seconds(self, stage: int) -> float:
        return self.reload / self.num_stages

    def host_attention_seconds(self, context: int) -> float:
        return self.host_key * context

    def host_exchange_seconds(self, rows: int) -> float:
        return self.host_row * rows
