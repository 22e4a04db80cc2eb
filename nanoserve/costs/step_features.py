"""StepFeatures: what a step's time depends on, made from its plan before it runs and from its result afterwards."""

from typing import Literal

import msgspec

from nanoserve.costs.work import StepWork

Strategy = Literal["device", "asymmetric", "overlap"]
"""How a step treats sequences whose KV is in host memory: "device", none begins a token in it; "asymmetric", two
sub-batches alternate between device and CPU within the step (NEO); "overlap", their attention runs beside the steps,
and they advance by one layer a step (APEX). Where a step is decided to be the device's alone, those that are under way
advance too, and its plan says "overlap"."""


class HostBatch(msgspec.Struct, frozen=True):
    """Host sequences that take part in a step and are equally far."""

    sequences: int
    """How many."""
    context_tokens: int
    """Keys that their attention reads in each layer, summed over them."""
    attended: int = 0
    """Layers whose attention the CPU was given before the step; 0 for those that begin their token. The last of these
    layers is not passed yet."""

    @property
    def first_layer(self) -> int:
        """The layer whose linear part they reach next."""
        return max(0, self.attended - 1)


class StepFeatures(msgspec.Struct, frozen=True, kw_only=True):
    """A step, reduced to what its time depends on."""

    strategy: Strategy
    """How host sequences take part."""
    device: StepWork
    """The rows whose KV is on the device."""
    host: tuple[HostBatch, ...] = ()
    """In an overlapped step, those that begin a token and those that join the device's rows in a layer: before the
    step, all that may. In an asymmetric one, sub-batch 0, with the device's rows."""
    host_second: tuple[HostBatch, ...] = ()
    """Sub-batch 1 of an asymmetric step."""

    @property
    def sampled(self) -> int:
        """Rows that get logits. An overlapped step counts those on the device: few host rows end beside them."""
        ending = (*self.host, *self.host_second) if self.strategy == "asymmetric" else ()
        return self.device.sampled + sum([batch.sequences for batch in ending])
