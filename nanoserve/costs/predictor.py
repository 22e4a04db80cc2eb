"""Predictors, by which policies know step times in advance: from the cost model, or from a
profile."""

from collections.abc import Sequence
from math import inf

from nanoserve.costs.layout_profile import LayoutCosts
from nanoserve.costs.profile import Profile
from nanoserve.costs.step_costs import StepCosts
from nanoserve.scheduler.work import StepWork, Strategy


class CostPredictor:
    """The cost model of the first stage, the mean over its layers. `layouts` are all layouts, by
    number, to change to. A decode step of one stage takes ``num_layers * (linear_seconds +
    attention_seconds) + step_overhead_seconds``."""

    def __init__(self, costs: StepCosts, layouts: Sequence[StepCosts] = ()) -> None:
        self.num_layers = costs.num_layers
        self._costs, self._layouts, self._layers = costs, layouts, costs.counts.layers(0)
        stages = [costs.stage_seconds(costs.work([1]), stage) for stage in range(costs.num_stages)]
        self.slowest_share, self.overlaps = max(stages) / sum(stages), costs.machine.device.overlaps
        self.lone_share = 1.0
        if isinstance(costs, LayoutCosts):
            lone = [costs.lone_seconds(costs.work([1]), stage) for stage in range(costs.num_stages)]
            self.lone_share = sum(lone) / sum(stages)

    def linear_seconds(self, tokens: int) -> float:
        """Includes the CPU's work for each sequence; for prompts a few percent too much, at the
        default 10 us."""
        per_row = tokens * self._costs.efficiency.row_seconds / self.num_layers
        return self._costs.layers_seconds(tokens, 0) / self._layers + per_row

    def attention_seconds(self, context_tokens: int) -> float:
        if not context_tokens:
            return 0.0
        windowed = (context_tokens,) * len(self._costs.counts.windows)
        work = StepWork(decodes=1, decode_context=context_tokens, windowed_decode_context=windowed)
        return self._costs.attention_seconds(work, 0) / self._layers

    def prefill_attention_seconds(self, tokens: int) -> float:
        if not tokens:
            return 0.0
        return self._costs.attention_seconds(self._costs.work([], [(0, tokens)]), 0) / self._layers

    def host_attention_seconds(self, sequences: int, context_tokens: int) -> float:
        """Raises UsageError if the machine names no processor."""
        return self._costs.host_attention_seconds(
            context_tokens
        ) + self._costs.host_exchange_seconds(sequences)

    def step_overhead_seconds(self, rows: int = 1) -> float:
        costs, work = self._costs, StepWork(decodes=rows, sampled=rows)
        return costs.efficiency.step_seconds + sum(
            costs.ends_seconds(work, stage) for stage in range(costs.num_stages)
        )

    def slowdown(self, strategy: Strategy) -> float:
        return 1.0

    def swap_seconds(self, context_tokens: int) -> float:
        return max(
            self._costs.swap_seconds(context_tokens, stage)
            for stage in range(self._costs.num_stages)
        )

    def transition_seconds(self, layout: int) -> float:
        """The weights of that layout from host memory (Seesaw). Raises IndexError if there is no
        such layout."""
        costs = self._layouts[layout]
        return max(costs.reload_seconds(stage) for stage in range(costs.num_stages))


def layout_predictors(layouts: Sequence[StepCosts]) -> tuple[CostPredictor, ...]:
    """A predictor for each layout: the times of its steps, and of changing to the others."""
    return tuple(CostPredictor(costs, layouts) for costs in layouts)


class MeasuredPredictor:
    """A profile (APEX, section 3.4), its times made rising: policies search by bisection."""

    def __init__(self, profile: Profile) -> None:
        # the profile as it was measured
        self.num_layers, self.profile = profile.model.num_layers, profile
        self.slowest_share, self.lone_share, self.overlaps = 1.0, 1.0, True
        self._profile = profile = profile.rising()
        self._attention = profile.decode_attention.over_keys().rising()
        self._ends = (profile.inputs, profile.head, profile.engine)

    def linear_seconds(self, tokens: int) -> float:
        return self._profile.linear.at(tokens)

    def attention_seconds(self, context_tokens: int) -> float:
        return self._attention.at(context_tokens)

    def prefill_attention_seconds(self, tokens: int) -> float:
        return self._profile.prefill_attention.at(tokens)

    def host_attention_seconds(self, sequences: int, context_tokens: int) -> float:
        if sequences <= 0:
            return 0.0
        return self._profile.host_attention.at(sequences, context_tokens / sequences)

    def step_overhead_seconds(self, rows: int = 1) -> float:
        return sum([curve.at(rows) for curve in self._ends])

    def slowdown(self, strategy: Strategy) -> float:
        """The factor by which the device waits for memory that attention on the CPU reads
        meanwhile."""
        if strategy == "device":
            return 1.0
        return self._profile.beside_host

    def swap_seconds(self, context_tokens: int) -> float:
        return self._profile.swap_seconds(context_tokens)

    def transition_seconds(self, layout: int) -> float:
        if layout == 0:
            return 0.0
        return inf
