"""Seesaw's figures 1, 4 and 15: what the cost model alone says of layouts, with nothing simulated.

The paper states neither the lengths of figures 1 and 15 nor those of figure 4. Assumed are 1,024 tokens for the first
two, and for figure 4 the longest requests of its own synthetic data (section 6.5): 3,000 tokens in and 0.3 times as
many out.
"""

from collections.abc import Callable, Sequence

import msgspec

from nanoserve.benchmarks.tables import Column
from nanoserve.costs import DoesNotFit, ParallelLayout, StepCosts, StepWork, load_machine, load_shape
from nanoserve.papers.charts import Chart, Curve, Panel
from nanoserve.papers.claims import Claim, Spread
from nanoserve.papers.framework import Finding, Run, Scale
from nanoserve.papers.seesaw.settings import BLOCK_SIZE

_BATCH, _LENGTH = 16, 1024
_INPUT, _OUTPUT = 3000, 900
_MILLISECONDS = 1e3


class Parts(msgspec.Struct, frozen=True):
    """Seconds, by what they are spent on.

    Attributes:
        weights: reading weights, where a product is bound by memory.
        compute: everything else that devices do themselves.
        communication: all-reduces, and activations on their way to the next stage.
    """

    weights: float
    compute: float
    communication: float

    @property
    def total(self) -> float:
        return self.weights + self.compute + self.communication

    def scaled(self, factor: float) -> "Parts":
        """So many times as long."""
        return Parts(self.weights * factor, self.compute * factor, self.communication * factor)


def stage_parts(costs: StepCosts, work: StepWork, stage: int) -> Parts:
    """What a stage spends a micro-batch's time on."""
    weights = sum(
        costs.operator_seconds(one) * one.weight_bytes / one.bytes
        for one in costs.counts.operators(work, stage)
        if not costs.is_compute_bound(one)
    )
    reduces = costs.all_reduce_seconds(work, stage)
    compute = costs.stage_seconds(work, stage) - weights - reduces
    return Parts(weights, compute, reduces + costs.send_seconds(work, stage))


def batch_parts(costs: StepCosts, work: StepWork) -> Parts:
    """The same of all micro-batches of a full pipeline, each as ``work``: of its slowest stage."""
    stages = range(costs.num_stages)
    return max((stage_parts(costs, work, stage) for stage in stages), key=lambda parts: parts.total).scaled(len(stages))


# ---- figure 1 ---------------------------------------------------------------------------------------------------


def _breakdowns() -> dict[str, tuple[Parts, Parts]]:
    """Prefill and decode of a batch, by layout; LLaMA2-13B on eight L4."""
    model, machine, found = load_shape("llama-2-13b"), load_machine("seesaw-l4"), {}
    for degree in (1, 2, 4, 8):
        layout = ParallelLayout(tensor_parallel=degree, pipeline_parallel=8 // degree)
        costs = StepCosts(model, machine, layout)
        rows = _BATCH // costs.num_stages
        prefill = batch_parts(costs, costs.work([], [(0, _LENGTH)] * rows))
        decode = batch_parts(costs, costs.work([_LENGTH] * rows))
        found[f"TP{degree}PP{8 // degree}"] = (prefill, decode)
    return found


def layouts(scale: Scale, run: Run) -> Finding:
    """Figure 1: what prefill and decode spend their time on, by layout."""
    found = _breakdowns()
    names = tuple(found)
    rows = [
        {
            "layout": name,
            **{
                f"{phase}_{part}_ms": getattr(parts, part) * _MILLISECONDS
                for phase, parts in zip(("prefill", "decode"), pair, strict=True)
                for part in ("communication", "compute", "weights", "total")
            },
        }
        for name, pair in found.items()
    ]
    panels = tuple(
        _stacked(title, names, [pair[number] for pair in found.values()])
        for number, title in enumerate(("(a) prefill", "(b) decode"))
    )
    columns = [
        Column("layout", "layout"),
        *(
            Column(f"{phase} {part} ms", f"{phase}_{part}_ms", ",.1f")
            for phase in ("prefill", "decode")
            for part in ("communication", "compute", "weights", "total")
        ),
    ]
    chart = Chart(title="Seesaw, figure 1: LLaMA2-13B, 16 sequences on 8 L4", panels=panels)
    return Finding(_claims_1(found["TP1PP8"], found["TP8PP1"]), chart, rows, columns)


def _claims_1(pipeline: tuple[Parts, Parts], tensor: tuple[Parts, Parts]) -> list[Claim]:
    return [
        Claim(
            figure="1a",
            says="prefill of 13B on 8 L4: TP8 takes longer than PP8",
            paper="more (bars)",
            ours=Spread.of([tensor[0].total / pipeline[0].total]),
            form="{:.2f}x",
            at_least=1.5,
            assumption="prompts of 1,024 tokens; PCIe 4.0 x8 at 75 %",
        ),
        Claim(
            figure="1b",
            says="decode of 13B on 8 L4: PP8 takes longer than TP8",
            paper="more (bars)",
            ours=Spread.of([pipeline[1].total / tensor[1].total]),
            form="{:.2f}x",
            at_least=1.5,
            assumption="16 sequences in all, so 2 a micro-batch of PP8: each reads all weights of its stage",
        ),
    ]


def _stacked(title: str, names: tuple[str, ...], parts: Sequence[Parts]) -> Panel:
    """The paper's axes: the longest is 1."""
    longest = max(one.total for one in parts)
    return Panel(
        title=title,
        x="layout",
        y="normalized time",
        kind="stack",
        curves=tuple(
            Curve(label=label, xs=names, ys=tuple(getattr(one, part) / longest for one in parts))
            for label, part in (
                ("weight transfer", "weights"),
                ("compute", "compute"),
                ("communication", "communication"),
            )
        ),
    )


# ---- figure 4 ---------------------------------------------------------------------------------------------------


def prefill_rate(costs: StepCosts) -> float:
    """Prompts a second that a full pipeline computes."""
    return costs.num_stages / batch_parts(costs, costs.work([], [(0, _INPUT)])).total


def decode_rate(costs: StepCosts) -> float:
    """Requests a second whose answers are decoded, with as many sequences as memory holds.

    Raises:
        DoesNotFit: if the weights leave no room.
    """
    context = _INPUT + _OUTPUT // 2
    rows = costs.memory.kv_blocks(BLOCK_SIZE) * BLOCK_SIZE // context // costs.num_stages
    if not rows:
        return 0.0
    return rows * costs.num_stages / batch_parts(costs, costs.work([context] * rows)).total / _OUTPUT


def _best_rate(machine: str, devices: int, rate: Callable[[StepCosts], float]) -> float:
    """Over all layouts of so many devices that fit."""
    model, best = load_shape("llama-2-70b"), 0.0
    for degree in (1, 2, 4, 8):
        if devices % degree:
            continue
        layout = ParallelLayout(tensor_parallel=degree, pipeline_parallel=devices // degree)
        try:
            best = max(best, rate(StepCosts(model, load_machine(machine), layout)))
        except DoesNotFit:
            continue
    return best


class _Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Requests a second, with the best layout of each part of a machine."""

    machine: str
    prefill_4: float
    decode_4: float
    decode_8: float

    @classmethod
    def of(cls, machine: str) -> "_Rates":
        return cls(
            machine=machine,
            prefill_4=_best_rate(machine, 4, prefill_rate),
            decode_4=_best_rate(machine, 4, decode_rate),
            decode_8=_best_rate(machine, 8, decode_rate),
        )

    def claims(self) -> list[Claim]:
        """What the paper says of them."""
        assumed = f"{self.machine}; {_INPUT:,} tokens in, {_OUTPUT} out: the paper states no lengths"
        return [
            Claim(
                figure="4",
                says="70B on 4 + 4 devices of 40 GiB: prompts a second over answers a second",
                paper="more than 6x",
                ours=Spread.of([self.prefill_4 / self.decode_4]),
                form="{:.1f}x",
                at_least=4,
                assumption=assumed + "; it grows with the answers",
            ),
            Claim(
                figure="4",
                says="answers a second of 4 devices over those of 8",
                paper="15 %",
                ours=Spread.of([100 * self.decode_4 / self.decode_8]),
                form="{:.0f} %",
                at_most=25,
                assumption=f"{self.machine}; 90 % of the memory is usable: beside the weights 4 hold 43,000 tokens",
            ),
        ]


def disaggregation(scale: Scale, run: Run) -> Finding:
    """Figure 4: 70B on devices of their own for prompts and answers."""
    found = [_Rates.of(machine) for machine in ("seesaw-a100-pcie", "seesaw-a100-nvlink")]
    machines = tuple(one.machine for one in found)
    panel = Panel(
        title=f"{_INPUT:,} tokens in, {_OUTPUT} out",
        x="",
        y="throughput (requests/s)",
        kind="bar",
        curves=(
            Curve(label="prefill (4 GPUs)", xs=machines, ys=tuple(one.prefill_4 for one in found)),
            Curve(label="decode (4 GPUs)", xs=machines, ys=tuple(one.decode_4 for one in found)),
            Curve(label="decode (8 GPUs)", xs=machines, ys=tuple(one.decode_8 for one in found)),
        ),
    )
    columns = [
        Column("machine", "machine"),
        Column("prefill on 4, req/s", "prefill_4", ".2f"),
        Column("decode on 4", "decode_4", ".2f"),
        Column("decode on 8", "decode_8", ".2f"),
    ]
    chart = Chart(title="Seesaw, figure 4: 70B disaggregated, 4 + 4", panels=(panel,))
    return Finding(
        [claim for one in found for claim in one.claims()], chart, [*map(msgspec.structs.asdict, found)], columns
    )


# ---- figure 15 --------------------------------------------------------------------------------------------------


class _Replicas(msgspec.Struct, frozen=True, kw_only=True):
    """Decoding with the largest batch there is; milliseconds for a token of one request.

    Attributes:
        batch: of all replicas; 0 where the model does not fit.
    """

    layout: str
    batch: int = 0
    weights: float = 0.0
    compute: float = 0.0
    communication: float = 0.0

    @classmethod
    def of(cls, tensor: int) -> "_Replicas":
        """LLaMA2-13B on eight L4, so many of them dividing every layer."""
        layout = ParallelLayout(tensor_parallel=tensor, data_parallel=8 // tensor)
        costs, name = (
            StepCosts(load_shape("llama-2-13b"), load_machine("seesaw-l4"), layout),
            f"TP{tensor}DP{8 // tensor}",
        )
        try:
            each = costs.memory.kv_blocks(BLOCK_SIZE) * BLOCK_SIZE // _LENGTH
        except DoesNotFit:
            return cls(layout=name)
        batch = each * layout.data_parallel
        parts = stage_parts(costs, costs.work([_LENGTH] * each), 0).scaled(_MILLISECONDS / batch)
        return cls(layout=name, batch=batch, **msgspec.structs.asdict(parts))


def data_parallelism(scale: Scale, run: Run) -> Finding:
    """Figure 15: what replicas cost in decoding."""
    found = [_Replicas.of(degree) for degree in (1, 2, 4, 8)]
    columns = [
        Column("layout", "layout"),
        Column("largest batch", "batch", ",d"),
        Column("weights ms", "weights", ".2f"),
        Column("compute ms", "compute", ".2f"),
        Column("all-reduce ms", "communication", ".2f"),
    ]
    chart = Chart(title="Seesaw, figure 15: data parallelism in decode, 13B on 8 L4", panels=_panels_15(found))
    return Finding(_claims_15(found[0], found[1], found[-1]), chart, [*map(msgspec.structs.asdict, found)], columns)


def _claims_15(does_not_fit: _Replicas, replicated: _Replicas, divided: _Replicas) -> list[Claim]:
    return [
        Claim(
            figure="15",
            says="TP1DP8: the largest batch",
            paper="out of memory",
            ours=Spread.of([does_not_fit.batch]),
            form="{:.0f}",
            at_most=0,
            assumption="13B on 8 L4, as in figure 1; the paper names neither model nor device",
        ),
        Claim(
            figure="15",
            says="the largest batch: TP8 over TP2DP4",
            paper="more (bars)",
            ours=Spread.of([divided.batch / replicated.batch]),
            form="{:.2f}x",
            at_least=1.2,
            assumption="13B on 8 L4, sequences of 1,024 tokens",
        ),
        Claim(
            figure="15",
            says="loading weights, per request: TP2DP4 over TP8",
            paper="more (bars)",
            ours=Spread.of([replicated.weights / divided.weights]),
            form="{:.2f}x",
            at_least=2,
            assumption="4 times the weights for each device, and the smaller batch",
        ),
    ]


def _panels_15(found: Sequence[_Replicas]) -> tuple[Panel, ...]:
    names = tuple(one.layout for one in found)
    return (
        Panel(
            title="runtime per request and token (none: out of memory)",
            x="layout",
            y="ms",
            kind="stack",
            curves=(
                Curve(label="load weight", xs=names, ys=tuple(one.weights for one in found)),
                Curve(label="compute", xs=names, ys=tuple(one.compute for one in found)),
                Curve(label="all-reduce", xs=names, ys=tuple(one.communication for one in found)),
            ),
        ),
        Panel(
            title="largest batch",
            x="layout",
            y="batch size",
            kind="bar",
            curves=(Curve(label="", xs=names, ys=tuple(float(one.batch) for one in found)),),
        ),
    )
