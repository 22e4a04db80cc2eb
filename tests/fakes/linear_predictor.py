"""LinearPredictor: a Predictor whose times can be told without a pencil."""

from dataclasses import dataclass

from nanoserve.scheduler.work import Strategy


@dataclass(frozen=True)
class LinearPredictor:
    """Every time is a constant, or a rate times a count.

    Attributes:
        num_layers: of the model.
        linear: seconds of a layer's linear part, whatever the rows ...
        row: ... and for each row.
        key: device attention, seconds per key.
        prompt_token: device attention, seconds per prompt token.
        host_key: CPU attention, seconds per key ...
        exchange: ... and for the exchange.
        overhead: seconds of a step, whatever it samples ...
        sampled_row: ... and for each row that it samples.
        swap_token: seconds per token moved.
        transition: seconds.
        slowest_share: of a step, that of the slowest stage.
        lone_share: of a step, what it takes while no other stage computes.
        overlaps: whether weights are read beside computing.
    """

    num_layers: int = 4
    linear: float = 1.0
    row: float = 0.0
    key: float = 0.001
    prompt_token: float = 0.0
    host_key: float = 0.01
    exchange: float = 0.0
    overhead: float = 0.0
    sampled_row: float = 0.0
    swap_token: float = 0.0
    transition: float = 0.0
    slowest_share: float = 1.0
    lone_share: float = 1.0
    overlaps: bool = False

    def linear_seconds(self, tokens: int) -> float:
        return self.linear + self.row * tokens

    def attention_seconds(self, context_tokens: int) -> float:
        return self.key * context_tokens

    def prefill_attention_seconds(self, tokens: int) -> float:
        return self.prompt_token * tokens

    def host_attention_seconds(self, sequences: int, context_tokens: int) -> float:
        return self.exchange + self.host_key * context_tokens

    def step_overhead_seconds(self, rows: int = 1) -> float:
        return self.overhead + self.sampled_row * rows

    def slowdown(self, strategy: Strategy) -> float:
        return 1.0

    def swap_seconds(self, context_tokens: int) -> float:
        return self.swap_token * context_tokens

    def transition_seconds(self, layout: int) -> float:
        return self.transition
