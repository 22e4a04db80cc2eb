"""LayoutProfile: step times on several worker processes, measured for each tensor degree while all
work."""

from collections.abc import Mapping

import msgspec

from nanoserve.config.model_config import ModelConfig
from nanoserve.costs.counts import Precision
from nanoserve.costs.curves import MeasuredCurve, MeasuredGrid
from nanoserve.costs.hardware import Efficiency, MachineSpeeds
from nanoserve.costs.profile import ProfileFile, measured_attention
from nanoserve.costs.step_costs import StepCosts
from nanoserve.errors import UsageError
from nanoserve.layout import ParallelLayout
from nanoserve.scheduler.work import StepWork

_STEADY = 1.5  # most of an upper quartile over the lower


class DegreeTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one worker's shard at one tensor degree, while the other workers compute the
    same."""

    # over tokens, without attention, with its all-reduces and a share of the embedding
    layer: MeasuredCurve
    # like `layer`, while no other stage computes; None if there is no other
    lone: MeasuredCurve | None
    decode_attention: MeasuredGrid  # of one layer
    prefill_attention: MeasuredCurve  # of one layer, over the tokens of one whole prompt
    head: MeasuredCurve  # logits, gathered, and greedy sampling, over sampled rows


class LayoutProfile(ProfileFile, frozen=True, kw_only=True, tag="nanoserve-layouts/1"):
    """Times of a model on worker processes that measured together."""

    devices: int
    bits: int  # of weights, keys and values
    # free on each device; where that is the CPU, half of it is for weights and KV, half the host's
    memory_bytes: float
    speeds: MachineSpeeds
    send: MeasuredCurve | None  # between neighbours, over bytes; None for one worker
    # scheduling a step, telling the workers, preparing inputs and hearing the answer, over rows
    step: MeasuredCurve
    degrees: Mapping[int, DegreeTimes]  # by tensor degree
    built: bool  # whether everything ran compiled that an engine would run compiled

    @property
    def steady(self) -> bool:
        """Whether the samples of a layer are alike, because other programs left the processors
        alone."""
        layers = [times.layer for times in self.degrees.values()]
        for layer in layers:
            for low, high in zip(layer.low, layer.high, strict=True):
                if high >= _STEADY * low:
                    return False
        return True

    def costs(self, model: ModelConfig, layout: ParallelLayout) -> "LayoutCosts":
        """Step times of one replica in a layout. Raises UsageError if the layout does not suit the
        model, or its tensor degree was not measured."""
        return LayoutCosts(self, model, layout)


class LayoutCosts(StepCosts):
    """StepCosts whose layers, attention, logits and sends take what was measured; copies, and what
    fits, follow the machine's speeds and memory."""

    def __init__(self, profile: LayoutProfile, model: ModelConfig, layout: ParallelLayout) -> None:
        degree = layout.tensor_parallel
        if degree not in profile.degrees:
            raise UsageError(
                f"a tensor degree of {degree} was not measured: use one of {list(profile.degrees)}"
            )
        self.profile, self.times = profile, profile.degrees[degree]
        few, many = profile.step.sizes[0], profile.step.sizes[-1]
        row_seconds = max(0.0, (profile.step.at(many) - profile.step.at(few)) / (many - few))
        factors = msgspec.structs.replace(
            Efficiency.ideal(),
            usable_memory=Efficiency().usable_memory,
            step_seconds=max(0.0, profile.step.at(few) - few * row_seconds),
            row_seconds=row_seconds,
        )
        devices, memory = profile.devices, profile.memory_bytes
        machine = profile.speeds.machine(
            devices=devices, memory_bytes=memory, host_memory_bytes=devices * memory
        )
        super().__init__(model, machine, layout, Precision.of(profile.bits), factors)

    def _layers(self, tokens: int, stage: int) -> float:
        return self.counts.layers(stage) * self.times.layer.at(tokens)

    def attention_seconds(self, work: StepWork, stage: int) -> float:
        layers: dict[int, int] = {}
        for kind, count in self.counts.stages[stage].items():
            layers[kind.window] = layers.get(kind.window, 0) + count
        grid, prompts = self.times.decode_attention, self.times.prefill_attention
        return measured_attention(work, layers, self.counts.windows, grid, prompts)

    def lone_seconds(self, work: StepWork, stage: int) -> float:
        """``stage_seconds`` while no other stage computes, and the memory's bandwidth is this one's
        alone."""
        seconds, times = self.stage_seconds(work, stage), self.times
        if times.lone is None:
            return seconds
        return seconds * times.lone.at(work.tokens) / times.layer.at(work.tokens)

    def _embedding(self, tokens: int) -> float:
        return 0.0  # part of the layers

    def _head(self, sampled: int) -> float:
        return self.times.head.at(sampled)

    def send_seconds(self, work: StepWork, stage: int) -> float:
        if stage == self.num_stages - 1 or not work.tokens or self.profile.send is None:
            return 0.0
        return self.profile.send.at(self.counts.activation_bytes(work.tokens))
