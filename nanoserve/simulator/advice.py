"""Advice: the predicted throughput of the chosen layouts for given requests, and of the best other layouts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nanoserve.costs import ParallelLayout, StepCosts
from nanoserve.engine_config import DEFAULT_POLICY, POLICY_OF_TWO_LAYOUTS
from nanoserve.measures.workloads import RequestShape
from nanoserve.scheduler.policies import make_policy
from nanoserve.simulator.planning import CacheLimits, Candidate, PlannedWork, find_candidates

_SAMPLED_REQUESTS, _SAMPLED_TOKENS = 200, 16_000
"""Most requests and answer tokens that are simulated: each candidate takes a few tenths of a second."""
_TOP = 2
_WORTH_SAYING = 1.05


@dataclass(frozen=True, slots=True)
class LayoutForecast:
    """The predicted throughput of a layout or a pair of layouts."""

    layouts: tuple[ParallelLayout, ...]
    """One layout, or that of prompts and that of answers; both contain the data parallel degree."""
    tokens_per_second: float
    """Throughput of all devices; prompt and answer tokens both count."""

    @property
    def name(self) -> str:
        return "->".join(layout.name for layout in self.layouts)

    @property
    def options(self) -> str:
        """The command-line options that select these layouts."""
        if len(self.layouts) > 1:
            prompts, answers = (layout.name.lower() for layout in self.layouts)
            return f"--prefill-parallel {prompts} --decode-parallel {answers}"
        layout = self.layouts[0]
        degrees = layout.data_parallel, layout.pipeline_parallel, layout.tensor_parallel
        named = zip(("--dp", "--pp", "--tp"), degrees, strict=True)
        return " ".join(f"{option} {degree}" for option, degree in named if degree > 1)


@dataclass(frozen=True, slots=True)
class Advice:
    """Forecasts for the same requests: for the layouts that were asked for, and the best others, the fastest first."""

    chosen: LayoutForecast
    others: tuple[LayoutForecast, ...]

    @property
    def better(self) -> LayoutForecast | None:
        """The fastest alternative, if it is predicted to be more than 5 % faster than the chosen layouts."""
        best = max(self.others, key=lambda one: one.tokens_per_second, default=self.chosen)
        return best if best.tokens_per_second > _WORTH_SAYING * self.chosen.tokens_per_second else None

    @property
    def text(self) -> str:
        """The advice for the user, in one to three lines."""
        lines = [
            f"predicted: {self.chosen.tokens_per_second:,.0f} tokens/s under {self.chosen.name},"
            " prompts and answers together, if every answer is as long as it may be"
        ]
        if self.others:
            named = (f"{one.name} {one.tokens_per_second:,.0f}" for one in self.others)
            lines.append(f"other layouts of the same devices: {', '.join(named)} tokens/s")
        if self.better is not None:
            faster = self.better.tokens_per_second / self.chosen.tokens_per_second - 1
            lines.append(f"{self.better.name} is predicted to be {faster:.0%} faster: {self.better.options}")
        return "\n".join(lines)


def advise(
    costs_of: Callable[[ParallelLayout], StepCosts],
    chosen: Sequence[ParallelLayout],
    shapes: Sequence[RequestShape],
    *,
    limits: CacheLimits,
    policy: str,
    token_budget: int,
    max_num_seqs: int,
) -> Advice:
    """Compare what was chosen with the best others on the same devices, for a closed batch.

    All are estimated. What was chosen, the two best single layouts and the two best pairs are also simulated, with
    requests taken evenly from all of them, within about two seconds; what simulation makes of the estimate for these
    corrects the estimate for all. ``chosen`` is one layout, or that of prompts and that of answers, with equal data
    parallel degrees. Answers of unknown length count as long as they may become. ``policy`` holds under single layouts.

    Raises UsageError if what was chosen does not suit the model or the machine, or the memory does not suffice.
    """
    work, sampled = PlannedWork(tuple(shapes)), PlannedWork(_sample(shapes))
    candidates = find_candidates(costs_of, chosen[0].devices, work, limits=limits)
    mine = candidates.named("->".join(layout.name for layout in chosen))
    alone = DEFAULT_POLICY if policy == POLICY_OF_TWO_LAYOUTS else policy

    def forecast(candidate: Candidate) -> LayoutForecast:
        part = replace(candidate, work=sampled)
        rules = make_policy(POLICY_OF_TWO_LAYOUTS if candidate.is_pair else alone, token_budget)
        simulated = sampled.tokens / part.simulate(rules, max_num_seqs).seconds
        layouts = tuple(replace(costs.layout, data_parallel=candidate.replicas) for costs in candidate.layouts)
        return LayoutForecast(layouts, candidate.tokens_per_second * simulated / part.tokens_per_second)

    others = [forecast(one) for one in candidates.best(_TOP).fitting if one is not mine]
    others.sort(key=lambda one: one.tokens_per_second, reverse=True)
    return Advice(forecast(mine), tuple(others))


def _sample(shapes: Sequence[RequestShape]) -> tuple[RequestShape, ...]:
    """Take as many shapes as can be simulated, evenly over all of them."""
    mean = sum(shape.output_tokens for shape in shapes) / len(shapes)
    count = max(1, min(len(shapes), _SAMPLED_REQUESTS, int(_SAMPLED_TOKENS / mean)))
    return tuple(shapes[place * len(shapes) // count] for place in range(count))
