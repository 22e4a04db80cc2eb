"""Predictor: what the scheduler and its policies ask for the times of future steps. The cost model
implements it."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from nanoserve.scheduler.work import StepFeatures, Strategy


class Predictor(Protocol):
    """Times of future steps: seconds of one layer of one stage, unless a name says otherwise."""

    num_layers: int  # of the model, whatever the number of stages
    slowest_share: float  # of a decode step's time, that of the slowest stage; 1 with one stage
    lone_share: float  # of a decode step's time, what it takes while no other stage uses the memory
    # whether the device computes while it reads the weights; else each step pays for both
    overlaps: bool

    def linear_seconds(self, tokens: int) -> float:
        """The linear layers for this many tokens, with everything beside them except attention."""

    def attention_seconds(self, context_tokens: int) -> float:
        """Decode attention on the device over `context_tokens` keys, summed over sequences. With
        sliding windows this is an upper limit: the sequences' own lengths are not known."""

    def prefill_attention_seconds(self, tokens: int) -> float:
        """Attention of one prompt of this many tokens, from its beginning. For several short
        prompts that is too much, for a chunk far into a prompt, which reads earlier keys, too
        little."""

    def host_attention_seconds(self, sequences: int, context_tokens: int) -> float:
        """Decode attention on the CPU over this many keys, with moving queries, keys, values and
        results."""

    def step_overhead_seconds(self, rows: int = 1) -> float:
        """Time of a whole step outside its layers, with `rows` sampled rows."""

    def slowdown(self, strategy: Strategy) -> float:
        """The factor by which a step of that strategy takes longer than its parts; 1 if it was not
        measured."""

    def swap_seconds(self, context_tokens: int) -> float:
        """The KV of this many tokens, all layers, one way between device and host; the slowest
        stage counts."""

    def transition_seconds(self, layout: int) -> float:
        """Changing from the current layout to that one, with nothing in flight; the slowest stage
        counts."""


@runtime_checkable
class LearningPredictor(Predictor, Protocol):
    """A Predictor that learns from the times of the steps that it predicted."""

    @property
    def corrections(self) -> Mapping[str, float]:
        """The factor by which each part of a prediction is corrected now."""

    def step_seconds(self, work: StepFeatures) -> float:
        """The device's time of a step."""

    def observe(self, work: StepFeatures, seconds: float) -> None:
        """Learn from a step's time."""

    def observe_host(self, sequences: int, context_tokens: int, seconds: float) -> None:
        """Learn from the time of one layer's attention on the CPU."""
