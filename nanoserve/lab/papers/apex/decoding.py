"""APEX, sections 2.4, 3.2 and 3.3, without prompts: how fast CPUs attend, and what that can gain at
most.

One step after another is run on the simulator's device and CPU (simulator/host_attention.py), for
the number of host sequences that the policy itself decides on, and held against the closed forms of
nanoserve/costs/closed_forms.py.
"""

from functools import partial
from itertools import product

import msgspec

from nanoserve.commands.tables import columns
from nanoserve.costs.closed_forms import (
    overlap_gain_bound,
    pipelining_break_even,
    pipelining_speedup_bound,
)
from nanoserve.costs.predictor import CostPredictor
from nanoserve.costs.step_costs import StepCosts
from nanoserve.lab.charts import Chart, panel
from nanoserve.lab.papers.apex.settings import A10, PAPERS_SHARE, T4, Platform
from nanoserve.lab.papers.claims import Ours, claims
from nanoserve.lab.papers.framework import Finding, Run, Scale
from nanoserve.lab.simulator.host_attention import HostAttention, HostToken, Processor, SubBatch
from nanoserve.record.metrics import Spread
from nanoserve.scheduler.load import Load
from nanoserve.scheduler.optional import HostLoad
from nanoserve.scheduler.plan import Answer
from nanoserve.scheduler.policies.apex import AsymmetricPipelining

_CYCLES = 3
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
_CONTEXT_OF_FIGURE_1B = 1024


class DecodeCase(msgspec.Struct, frozen=True, kw_only=True):
    """Decodes alone, all of one length; a SimulationJob."""

    platform: Platform
    decodes: int
    """Decodes on the device: B in the paper."""
    host_sequences: int  # sequences in host memory: C in the paper
    context: int  # keys of each
    # share of the CPUs' data sheet that attention reaches; None is the default
    processor: float | None = None

    def run(self) -> "DecodeOutcome":
        """Alone, pipelined and overlapped."""
        costs = self.platform.costs(self.processor)
        device = costs.work([self.context] * self.decodes)
        step = costs.stage_seconds(device, 0)
        overlapped, steps = self._overlapped(costs)
        predictor = CostPredictor(costs)
        attention = predictor.attention_seconds(self.decodes * self.context)
        # Unlike the predictor's, without what each row costs the engine: that is once in a step, as
        # the head is.
        linear = costs.layers_seconds(self.decodes, 0) / costs.num_layers
        beside = step / costs.num_layers - linear - attention
        host = predictor.host_attention_seconds(
            self.host_sequences, self.host_sequences * self.context
        )
        ratio = self.host_sequences / host * attention / self.decodes
        numbers = {"decodes": self.decodes, "host_sequences": self.host_sequences, "beside": beside}
        gain = overlap_gain_bound(
            linear, attention, speed_ratio=ratio, layers=costs.num_layers, **numbers
        )
        return DecodeOutcome(
            pipelined=self._pipelined(costs) * step / self.decodes,
            pipelined_bound=pipelining_speedup_bound(
                linear, attention, speed_ratio=ratio, **numbers
            ),
            overlapped=overlapped * step / self.decodes,
            overlapped_bound=1 + gain,
            steps_per_token=steps,
            layers=costs.num_layers,
            speed_ratio=1 / ratio,
            break_even=pipelining_break_even(linear, attention),
        )

    def _host(self, first: int, count: int) -> dict[int, HostToken]:
        return {
            number: HostToken(self.context, Answer(number))
            for number in range(first, first + count)
        }

    def _pipelined(self, costs: StepCosts) -> float:
        """Tokens per second of a step as NEO decides it: asymmetric, or the device alone."""
        decision = AsymmetricPipelining(self.decodes).decide(self._load(CostPredictor(costs))).host
        device = costs.work([self.context] * self.decodes)
        if decision.strategy == "device":
            return self.decodes / costs.stage_seconds(device, 0)
        first, second = decision.decodes
        passage = HostAttention(costs, Processor()).asymmetric(
            SubBatch(device, list(self._host(0, first).values())),
            SubBatch(costs.work(), list(self._host(first, second).values())),
            0.0,
        )
        return (self.decodes + first + second) / (passage.end - passage.start)

    def _overlapped(self, costs: StepCosts) -> tuple[float, float]:
        """Tokens per second, and the steps that a host token takes, over some cohorts one after the
        other."""
        attention, device = (
            HostAttention(costs, Processor()),
            costs.work([self.context] * self.decodes),
        )
        now, steps, tokens = 0.0, 0, 0
        while tokens < _CYCLES * self.host_sequences:
            beginning: dict[int, HostToken] = {}
            if not attention.under_way:
                beginning = self._host(0, self.host_sequences)
            passage, answers = attention.overlap(steps, device, beginning, now)
            now, steps, tokens = passage.end, steps + 1, tokens + len(answers)
        return (steps * self.decodes + tokens) / now, steps / _CYCLES

    def _load(self, predictor: CostPredictor) -> Load:
        """The load that a policy sees: a full device, and host sequences that are ready."""
        return Load(
            previous=None,
            waiting_tokens=0,
            first_waiting_tokens=0,
            running_decodes=self.decodes,
            ready_decodes=self.decodes,
            ready_prefills=0,
            context_tokens=self.decodes * self.context,
            free_blocks=0,
            total_blocks=1,
            block_size=1,
            free_slots=0,
            host=HostLoad(
                decodes=self.host_sequences,
                ready=self.host_sequences,
                context_tokens=self.host_sequences * self.context,
                total_blocks=1,
            ),
            predictor=predictor,
        )


class DecodeOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Throughput over that of the device alone, the most that closed forms allow, and what these
    are made of."""

    pipelined: float
    pipelined_bound: float
    overlapped: float
    overlapped_bound: float
    steps_per_token: float
    """Steps that a host sequence takes for a token under overlap."""
    layers: int
    speed_ratio: float
    break_even: float
    """Both sides of inequality (6)."""


def _cases() -> list[DecodeCase]:
    """The device full, and up to 30 times as many host sequences: fast CPUs, and those of the
    paper."""
    cases = []
    platforms = ((A10, 500), (A10, 1000), (A10, 2000), (T4, 250), (T4, 500))
    processors = ((None, (1, 4, 16)), (PAPERS_SHARE, (4, 10, 30)))
    for (platform, context), (processor, hosts) in product(platforms, processors):
        decodes = platform.costs().memory.kv_blocks(1) // context
        shared = partial(
            DecodeCase, platform=platform, decodes=decodes, context=context, processor=processor
        )
        cases += [shared(host_sequences=host * decodes) for host in hosts]
    return cases


def bounds(scale: Scale, run: Run) -> Finding:
    """Decodes alone: what asymmetric pipelining and overlap gain, beside their closed forms."""
    found = run(cases := _cases())
    outcomes: dict[DecodeCase, DecodeOutcome] = {case: found[case] for case in cases}
    rows = [
        {
            "platform": case.platform.name,
            "decodes": case.decodes,
            "context": case.context,
            "host": case.host_sequences,
            "share": 100 * (case.processor or case.platform.costs().efficiency.processor),
            **msgspec.to_builtins(one),
        }
        for case, one in outcomes.items()
    ]
    every = list(outcomes.values())
    ours: Ours = {
        "bounds asymmetric": max(one.pipelined / max(1.0, one.pipelined_bound) for one in every),
        "bounds overlap": max((one.overlapped - 1) / (one.overlapped_bound - 1) for one in every),
        "bounds steps": Spread.of(
            one.steps_per_token - one.layers
            for case, one in outcomes.items()
            if case.processor is None
        ),
    }
    for platform in (A10, T4):
        slow = [
            one
            for case, one in outcomes.items()
            if (case.platform, case.processor) == (platform, PAPERS_SHARE)
        ]
        ours[f"bounds {platform.name}"] = Spread.of(
            one.speed_ratio / one.break_even for one in slow
        )
    return Finding(claims("apex", ours), None, rows)


BOUND_COLUMNS = columns(
    ("", "platform"),
    (",d", ("B", "decodes"), "context", ("C", "host")),
    (".0f", ("CPU share, %", "share")),
    (
        ".3f",
        ("asymmetric", "pipelined"),
        ("bound", "pipelined_bound"),
        ("overlap", "overlapped"),
        ("bound", "overlapped_bound"),
    ),
    (".0f", ("steps a token", "steps_per_token")),
    (".1f", ("NG / NC", "speed_ratio"), ("pays below", "break_even")),
)


def processor_speed(scale: Scale, run: Run) -> Finding:
    """Figure 1b: decode attention of one layer on the device and on the CPU, by batch size."""
    ours: Ours = {}
    panels, rows = [], []
    for platform in (A10, T4):
        predictor = CostPredictor(platform.costs())
        device = [
            1e6 * predictor.attention_seconds(batch * _CONTEXT_OF_FIGURE_1B) for batch in _BATCHES
        ]
        cpu = [
            1e6 * predictor.host_attention_seconds(batch, batch * _CONTEXT_OF_FIGURE_1B)
            for batch in _BATCHES
        ]
        rows += [
            {"platform": platform.name, "batch": batch, "device_us": one, "cpu_us": other}
            for batch, one, other in zip(_BATCHES, device, cpu, strict=True)
        ]
        four = _BATCHES.index(4)
        ours[f"1b {platform.name}"] = cpu[four] / device[four]
        heights = {"device": device, "CPU": cpu}
        title, y = f"{platform.name}, {platform.model}", "attention of one layer, us"
        panels.append(panel(title, "batch size", y, _BATCHES, heights, log_x=True, log_y=True))
    chart = Chart("APEX, figure 1b: attention over 1024 keys on our platforms", panels, columns=2)
    return Finding(claims("apex", ours), chart, rows)
