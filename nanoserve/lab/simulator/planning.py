"""Which parallel layout, or pair of layouts, serves a workload best on given devices: counted, then
simulated.

``find_candidates`` makes all layouts D x T x P of the devices, and the pairs of layouts of which
one computes prompts and the other one answers (Seesaw), as far as they suit the model, the machine
and its memory. Each has an estimate from the round times of the cost model, good enough to say
which of them are worth simulating.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations, product
from typing import NamedTuple

from nanoserve.costs.analysis import BLOCK_SIZE, Analysis
from nanoserve.costs.hardware import GIBI
from nanoserve.costs.predictor import layout_predictors
from nanoserve.costs.step_costs import DoesNotFit, StepCosts
from nanoserve.errors import UsageError
from nanoserve.lab.simulator.result import SimulationResult
from nanoserve.lab.simulator.simulation import simulate
from nanoserve.lab.simulator.workload import Workload, burst, poisson_arrivals
from nanoserve.layout import ParallelLayout
from nanoserve.request import RequestShape
from nanoserve.scheduler.load import Policy
from nanoserve.scheduler.windows import most_blocks, most_tokens

MOST_DEVICES = 4096
_LITTLE_ITERATIONS = 20
_QUANTILES = 64  # of the answer lengths, to estimate how a batch shrinks


@dataclass(frozen=True)
class PlannedWork:
    """Requests to plan for; raises UsageError for a rate that is not above 0."""

    shapes: tuple[RequestShape, ...]  # length of each request, in tokens
    rate: float | None = None
    """Requests per second of Poisson arrivals; None means a closed batch that arrives all at
    once."""
    seed: int = 0

    def __post_init__(self) -> None:
        self.workload()  # refuses the rate

    def share(self, replicas: int) -> "PlannedWork":
        """Requests of one of ``replicas`` replicas that take turns: the one with the longest answer
        finishes last."""
        shares = [self.shapes[turn::replicas] for turn in range(min(replicas, len(self.shapes)))]
        longest = max(shares, key=lambda shapes: max(shape.output_tokens for shape in shapes))
        return PlannedWork(longest, self.rate and self.rate / replicas, self.seed)

    def workload(self) -> Workload:
        if self.rate is None:
            return Workload(burst(), self.shapes)
        return Workload(poisson_arrivals(self.rate, self.seed), self.shapes)

    @cached_property
    def mean_output(self) -> float:
        return sum(shape.output_tokens for shape in self.shapes) / len(self.shapes)

    @cached_property
    def input_tokens(self) -> int:
        return sum(shape.input_tokens for shape in self.shapes)

    def output_quantiles(self, number: int) -> list[int]:
        """At most ``number`` lengths of answers, evenly over the requests, ascending; the longest
        is the last."""
        ordered = sorted(shape.output_tokens for shape in self.shapes)
        count = min(number, len(ordered))
        return [ordered[(place + 1) * len(ordered) // count - 1] for place in range(count)]

    @cached_property
    def tokens(self) -> int:
        return sum(shape.total_tokens for shape in self.shapes)

    @cached_property
    def longest(self) -> int:
        return max(shape.total_tokens for shape in self.shapes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLimits:
    """Limits of KV caches; None stands for all that weights leave."""

    device_bytes: float | None = None  # bytes on all devices of one replica together
    host_bytes: float | None = None  # bytes of host memory for all replicas together


@dataclass(frozen=True)
class Candidate:
    """A way to use the devices: whole replicas, each in one layout, or in one for prompts and
    another for answers."""

    layouts: tuple[StepCosts, ...]  # the step times of a replica in its layout, or in both
    kv_blocks: tuple[int, ...]  # KV blocks of a replica in each layout
    host_blocks: int  # KV blocks of a replica in host memory; 0 with one layout
    replicas: int
    work: PlannedWork
    """The total of all replicas."""
    states: int | None = None
    """Sequences of a replica that have a place for their recurrent states; None without states."""

    @property
    def name(self) -> str:
        """The name in the papers' notation, such as D2T2P4 or P4->T4."""
        return "->".join(
            replace(costs.layout, data_parallel=self.replicas).name for costs in self.layouts
        )

    @property
    def is_pair(self) -> bool:
        return len(self.layouts) > 1

    @cached_property
    def tokens_per_second(self) -> float:
        """Estimated throughput of a closed batch, input and output tokens, of all replicas."""
        return self.work.tokens / sum(self.phases.values())

    @cached_property
    def phases(self) -> dict[str, float]:
        """Estimated seconds of each part of a closed batch.

        All prompts at the pace of a full pipeline; then answers in full rounds, until no more
        requests wait, and in rounds of those that are left as one after the other ends: few long
        answers take long. With two layouts also the transitions, and KV out and in where that takes
        longer than computing meanwhile.
        """
        share = self.work.share(self.replicas)
        prompts, answers = (
            len(share.shapes) * self._analyses[0].prefill_seconds,
            self._answers_seconds(share),
        )
        changing = 0.0
        if self.is_pair:
            first, second = layout_predictors(self.layouts)
            prompts = max(prompts, first.swap_seconds(share.input_tokens))
            answers = max(answers, second.swap_seconds(share.input_tokens))
            kept = most_blocks(
                self.layouts[0].counts.groups.windows, self._analyses[0].input_tokens, BLOCK_SIZE
            )
            cycles = -(-len(share.shapes) // max(1, self.host_blocks // kept))
            changing = cycles * first.transition_seconds(1) + (
                cycles - 1
            ) * second.transition_seconds(0)
        return {"prompts": prompts, "answers": answers, "changes of layout": changing}

    @cached_property
    def latency(self) -> float:
        """Estimated seconds from arrival to last token at the work's rate, infinite for a rate
        beyond capacity.

        The batch is what Little's law says: requests per second times the seconds that each stays.
        """
        rate = (self.work.rate or 0.0) / self.replicas
        decoding, found, batch = self._analyses[-1], 0.0, 1
        full = max(1, decoding.largest_batch)
        busy = (
            self._analyses[0].prefill_seconds
            + self.work.mean_output * decoding.batch_row(full).tpot / full
        )
        if rate * busy >= 1:
            return math.inf
        alone = self.layouts[0].step_seconds(self._analyses[0].prefill_work())
        for _ in range(_LITTLE_ITERATIONS):
            found = alone + self.work.mean_output * decoding.batch_row(batch).tpot
            batch = max(1, min(decoding.largest_batch, round(rate * found)))
        return found

    def estimate(self) -> tuple[float, float]:
        """Sort key: the best comes first."""
        if self.work.rate is None:
            return 0.0, -self.tokens_per_second
        return self.latency, -self.tokens_per_second

    @property
    def estimate_text(self) -> str:
        throughput = f"estimated {self.tokens_per_second:,.0f} tokens/s"
        if self.work.rate is None:
            return throughput
        if math.isinf(self.latency):
            return f"{throughput}, less than {self.work.rate:g} requests a second"
        return f"estimated {self.latency:,.1f} s from arrival to last token"

    def simulate(self, policy: Policy, max_num_seqs: int) -> SimulationResult:
        """One replica with its share of the work, and KV blocks that hold its longest request."""
        if self.states is not None:
            max_num_seqs = min(max_num_seqs, self.states)
        return simulate(
            policy,
            self.layouts[0],
            self.work.share(self.replicas).workload(),
            num_blocks=self.kv_blocks[0],
            block_size=BLOCK_SIZE,
            windows=self.layouts[0].counts.groups.windows,
            max_num_seqs=max_num_seqs,
            host_blocks=self.host_blocks,
            other_layouts=list(zip(self.layouts[1:], self.kv_blocks[1:], strict=True)),
            predictors=layout_predictors(self.layouts),
        )

    @cached_property
    def _analyses(self) -> list[Analysis]:
        inputs, outputs = self.work.input_tokens / len(self.work.shapes), self.work.mean_output
        input_tokens, output_tokens = max(1, round(inputs)), max(1, round(outputs))
        return [Analysis(costs, input_tokens, output_tokens) for costs in self.layouts]

    def _answers_seconds(self, work: PlannedWork) -> float:
        decoding, requests = self._analyses[-1], len(work.shapes)
        full = max(1, min(decoding.largest_batch, requests))
        seconds = (requests - full) * work.mean_output * decoding.batch_row(full).tpot / full
        ends, before = work.output_quantiles(_QUANTILES), 0.0
        for place, end in enumerate(ends):
            left = max(1, round(full * (1 - place / len(ends))))
            seconds += (end - before) * decoding.batch_row(left).tpot
            before = end
        return seconds


class LeftOut(NamedTuple):
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Candidates:
    fitting: tuple[Candidate, ...]
    left_out: tuple[LeftOut, ...]

    def named(self, name: str) -> Candidate:
        """The layout or pair of that name; raises UsageError with the reason if it is left out."""
        found = {one.name: one for one in self.fitting}
        if name not in found:
            reasons = [one.reason for one in self.left_out if one.name == name]
            reasons.append("one of its layouts does not fit")
            raise UsageError(f"{name}: {reasons[0]}")
        return found[name]

    def best(self, top: int) -> "Candidates":
        """Keep the ``top`` layouts and the ``top`` pairs with the best estimates, best first; leave
        the others out."""
        ranked = sorted(self.fitting, key=Candidate.estimate)
        alone = [one for one in ranked if not one.is_pair][:top]
        pairs = [one for one in ranked if one.is_pair][:top]
        chosen = alone + pairs
        others = [
            LeftOut(one.name, f"not simulated: {one.estimate_text}")
            for one in ranked
            if one not in chosen
        ]
        return Candidates(
            tuple(sorted(chosen, key=Candidate.estimate)), tuple(others) + self.left_out
        )


def find_candidates(
    costs_of: Callable[[ParallelLayout], StepCosts],
    devices: int,
    work: PlannedWork,
    *,
    limits: CacheLimits | None = None,
    step_tokens: int = 0,
) -> Candidates:
    """Every way to use all of the devices, where memory for ``step_tokens``, those of the largest
    step, stays free. ``costs_of`` gives the step times of one replica in a layout, on one machine
    for all.

    Pairs are for closed batches: requests that arrive during a change of layout would wait. Raises
    UsageError if there is no way, saying what the layout lacks that comes closest, and for more
    devices than MOST_DEVICES.
    """
    if devices > MOST_DEVICES:
        raise UsageError(f"plans are for {MOST_DEVICES} devices at most, not {devices}")
    limits = limits or CacheLimits()
    fitting: list[Candidate] = []
    left_out: list[LeftOut] = []
    refused: list[tuple[float, UsageError]] = []
    for layout in all_layouts(devices):
        weights = math.inf
        try:
            costs = costs_of(replace(layout, data_parallel=1))
            weights = max(
                costs.counts.stage_weight_bytes(stage) for stage in range(costs.num_stages)
            )
            fitting.append(_candidate(costs, layout.data_parallel, work, limits, step_tokens))
        except UsageError as error:
            left_out.append(LeftOut(layout.name, str(error)))
            refused.append((weights, error))
    if not fitting:
        raise min(refused, key=lambda one: one[0])[1]
    has_states = fitting[0].states is not None
    has_host_memory = fitting[0].layouts[0].machine.host_memory_bytes > 0
    if has_states or work.rate is not None or not has_host_memory:
        why = "need host memory: none is known"
        if has_states:
            why = "are for models without recurrent states, which stay on their devices"
        elif work.rate is not None:
            why = "are for closed batches: without a rate"
        left_out.append(LeftOut("pairs of layouts", why))
        return Candidates(tuple(fitting), tuple(left_out))
    for one, two in [
        pair for pair in permutations(fitting, 2) if pair[0].replicas == pair[1].replicas
    ]:
        try:
            fitting.append(_pair(one, two, limits))
        except UsageError as error:
            left_out.append(LeftOut(f"{one.name}->{two.name}", str(error)))
    return Candidates(tuple(fitting), tuple(left_out))


def all_layouts(devices: int) -> Iterator[ParallelLayout]:
    """Yield all D x T x P that take exactly ``devices`` devices, few replicas first."""
    divisors = [number for number in range(1, devices + 1) if devices % number == 0]
    for replicas, tensor in product(divisors, repeat=2):
        if devices % (replicas * tensor) == 0:
            stages = devices // (replicas * tensor)
            yield ParallelLayout(
                data_parallel=replicas, tensor_parallel=tensor, pipeline_parallel=stages
            )


def _candidate(
    costs: StepCosts, replicas: int, work: PlannedWork, limits: CacheLimits, step_tokens: int
) -> Candidate:
    """One layout; raises UsageError if the weights, or the longest request, do not fit."""
    states = _states(costs, work, limits, step_tokens)
    blocks = costs.memory.kv_blocks(BLOCK_SIZE, step_tokens, states or 0)
    if limits.device_bytes is not None:
        kv_bytes = limits.device_bytes - (states or 0) * costs.counts.all_state_bytes
        blocks = min(blocks, costs.memory.host_kv_blocks(kv_bytes, BLOCK_SIZE))
    if work.longest > (
        tokens := most_tokens(costs.counts.groups.windows, blocks, BLOCK_SIZE, work.longest)
    ):
        missing = f"{work.longest - tokens:,} fewer than the longest request"
        raise DoesNotFit(f"its KV cache holds {tokens:,} tokens, {missing}")
    return Candidate((costs,), (blocks,), 0, replicas, work, states)


def _states(
    costs: StepCosts, work: PlannedWork, limits: CacheLimits, step_tokens: int
) -> int | None:
    """Sequences whose recurrent states get a place: as many as fit with the keys and values of the
    mean request, at least one. None for a model without states."""
    counts = costs.counts
    if counts.recurrent is None:
        return None
    mean = -(-work.tokens // len(work.shapes))
    blocks = most_blocks(counts.groups.windows, mean, BLOCK_SIZE)
    fitting = min(len(work.shapes), costs.memory.sequences(blocks, BLOCK_SIZE, step_tokens))
    if limits.device_bytes is not None:
        kv_bytes = blocks * BLOCK_SIZE * counts.groups.block_numbers * counts.precision.kv_bytes
        fitting = min(fitting, int(limits.device_bytes // (kv_bytes + counts.all_state_bytes)))
    return max(1, fitting)


def _pair(prompts: Candidate, answers: Candidate, limits: CacheLimits) -> Candidate:
    """Both on the same devices; raises UsageError if host memory does not hold the weights and the
    longest prompt."""
    costs = prompts.layouts[0]
    machine, devices = costs.machine, costs.layout.devices
    weights = (
        sum(costs.counts.stage_weight_bytes(stage) for stage in range(costs.num_stages))
        * costs.layout.tensor_parallel
    )
    share = machine.host_memory_bytes * devices / machine.devices_per_node
    room = share * costs.efficiency.usable_memory - weights
    if limits.host_bytes is not None:
        room = min(room, limits.host_bytes / prompts.replicas)
    blocks = costs.memory.host_kv_blocks(max(0.0, room), BLOCK_SIZE)
    if prompts.work.longest > (
        tokens := most_tokens(costs.counts.groups.windows, blocks, BLOCK_SIZE, prompts.work.longest)
    ):
        raise DoesNotFit(
            f"{share / GIBI:.0f} GiB of host memory hold the weights ({weights / GIBI:.0f} GiB)"
            f" and {tokens:,} tokens of KV cache, less than the longest request"
        )
    layouts, kv_blocks = prompts.layouts + answers.layouts, prompts.kv_blocks + answers.kv_blocks
    return Candidate(layouts, kv_blocks, blocks, prompts.replicas, prompts.work)
