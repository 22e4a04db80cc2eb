"""From measured times to the few factors of the cost model (Efficiency) that a machine reaches with a model."""

from typing import Any

import msgspec
import numpy as np

from nanoserve.costs.counts import ModelCounts, Precision
from nanoserve.costs.hardware import Efficiency
from nanoserve.costs.profile import Profile
from nanoserve.costs.work import StepWork


def calibrate(profile: Profile) -> Efficiency:
    """The factors with which the cost model comes closest.

    ``matrix`` and ``attention`` are the shares of the peak that the largest measured sizes reach. ``memory`` and
    ``kernel_seconds`` are fitted together: of all shares in whole percents, with the best time per kernel for each, the
    pair with the least squared relative error over a layer of decoding, for every batch and context that was measured.
    ``step_seconds`` and ``row_seconds`` are the line through the smallest and the largest number of rows. A share is
    never above 1: what a small model reads from the processor's caches counts as read at full bandwidth.
    """
    fitted = _Fit(profile)
    memory, kernel_seconds = fitted.decode_factors()
    found = Efficiency(
        matrix=fitted.matrix,
        attention=fitted.attention_share(),
        memory=memory,
        processor=fitted.processor_share(),
        kernel_seconds=kernel_seconds,
    )
    step_seconds, row_seconds = _host_line(profile, found)
    return msgspec.structs.replace(found, step_seconds=step_seconds, row_seconds=row_seconds)


def _share(floor: float, seconds: float) -> float:
    return min(1.0, max(0.01, floor / seconds))


class _Fit:
    """Counts of one layer, the mean over all, beside its measured times."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._counts = ModelCounts(profile.model, precision=Precision.of(profile.bits))
        self.matrix = self._matrix_share()

    def _linear(self, tokens: int) -> list[tuple[float, float]]:
        """(bytes, operations) of each product of a layer, in parts of a layer where not all are equal."""
        layers, products = self._profile.model.num_layers, self._counts.products(StepWork(decodes=tokens), 0)
        return [(operator.bytes / layers, operator.flops / layers) for operator in products]

    def _attention(self, keys: int, bandwidth: Any, flops: float) -> Any:
        """The least seconds of a layer's decode attention over this many keys, for one bandwidth or several."""
        moving, computing = keys * self._counts.layer_kv_bytes, keys * self._counts.layer_flops_per_pair
        return np.maximum(moving / bandwidth, computing / flops)

    def _matrix_share(self) -> float:
        """Share of the peak between the last two sizes a factor of two apart, so that overheads cancel."""
        curve = self._profile.linear
        large = curve.sizes[-1]
        small = max([size for size in curve.sizes if size <= large / 2], default=curve.sizes[0])
        more = sum(flops for _, flops in self._linear(large)) - sum(flops for _, flops in self._linear(small))
        return _share(more / self._profile.device.flops, max(curve.at(large) - curve.at(small), 1e-12))

    def attention_share(self) -> float:
        curve = self._profile.prefill_attention
        pairs = curve.sizes[-1] * (curve.sizes[-1] + 1) / 2
        return _share(self._counts.layer_flops_per_pair * pairs / self._profile.device.flops, curve.seconds[-1])

    def processor_share(self) -> float:
        grid, host = self._profile.host_attention, self._profile.host
        keys = grid.batches[-1] * grid.contexts[-1]
        return _share(float(self._attention(keys, host.memory_bandwidth, host.flops)), grid.seconds[-1][-1])

    def decode_factors(self) -> tuple[float, float]:
        """(memory, kernel_seconds)."""
        device, linear, cells = self._profile.device, self._profile.linear, self._profile.decode_attention.cells()
        flops, shares = device.flops * self.matrix, np.arange(1, 101) / 100
        bandwidth = device.memory_bandwidth * shares
        measured, models = [], []  # of each cell; a layer of decoding without the gaps between kernels, by share
        for batch, context, seconds in cells:
            products = sum(np.maximum(size / bandwidth, count / flops) for size, count in self._linear(batch))
            measured.append(linear.at(batch) + seconds)
            models.append(self._attention(batch * context, bandwidth, flops) + products)
        seconds, model = np.array(measured), np.array(models).T
        gaps = np.maximum(0.0, ((seconds - model) / seconds**2).sum(axis=1) / (1 / seconds**2).sum())
        best = int(np.argmin((((model + gaps[:, None]) / seconds - 1) ** 2).sum(axis=1)))
        return float(shares[best]), float(gaps[best]) / Efficiency().kernels_per_layer


def _host_line(profile: Profile, found: Efficiency) -> tuple[float, float]:
    """(step_seconds, row_seconds): what a step takes beside its layers and beside the logits that the model counts."""
    costs = msgspec.structs.replace(profile, efficiency=found).step_costs()

    def beside(rows: int) -> float:
        head = costs.operator_seconds(costs.counts.product(costs.counts.head, rows))
        return max(0.0, profile.inputs.at(rows) + profile.engine.at(rows) + profile.head.at(rows) - head)

    few, many = profile.inputs.sizes[0], profile.inputs.sizes[-1]
    row_seconds = max(0.0, (beside(many) - beside(few)) / (many - few))
    return max(0.0, beside(few) - few * row_seconds), row_seconds
