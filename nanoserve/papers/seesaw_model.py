"""Seesaw's figures 1, 4 and 15: what the cost model alone says of layouts, with nothing simulated.

The paper states neither the lengths of figures 1 and 15 nor those of figure 4. Assumed are 1,024 tokens for the first
two, and for figure 4 the longest requests of its own synthetic data (section 6.5): 3,000 tokens in and 0.3 times as
many out.
"""

from collections.abc import Sequence

import msgspec

from nanoserve.benchmarks.tables import Column
from nanoserve.costs import DoesNotFit, ParallelLayout, StepCosts, StepWork, load_machine, load_shape
from nanoserve.papers.charts import Chart, Curve, Panel
from nanoserve.papers.claims import Claim, Spread
from nanoserve.papers.framework import Finding, Job, Outcomes, PaperFigure, Scale
from nanoserve.papers.seesaw_settings import BLOCK_SIZE

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


def nothing_to_run(scale: Scale) -> Sequence[Job]:
    """Counting takes no processes."""
    return ()


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


def _figure_1(scale: Scale, outcomes: Outcomes) -> Finding:
    found = _breakdowns()
    names = tuple(found)
    pipeline, tensor = found[names[0]], found[names[-1]]
    claims = [
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
    return Finding(claims, Chart(title="Seesaw, figure 1: LLaMA2-13B, 16 sequences on 8 L4", panels=panels), rows, columns)


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


def _best_rate(machine: str, devices: int, rate: "object") -> float:
    """Over all layouts of so many devices that fit."""
    model, best = load_shape("llama-2-70b"), 0.0
    for degree in (1, 2, 4, 8):
        if devices % degree:
            continue
        layout = ParallelLayout(tensor_parallel=degree, pipeline_parallel=devices // degree)
        try:
            best = max(best, rate(StepCosts(model, load_machine(machine), layout)))  # type: ignore[operator]
        except DoesNotFit:
            continue
    return best


def _figure_4(scale: Scale, outcomes: Outcomes) -> Finding:
    rows, claims = [], []
    for machine in ("seesaw-a100-pcie", "seesaw-a100-nvlink"):
        prefill = _best_rate(machine, 4, prefill_rate)
        decode, together = (_best_rate(machine, devices, decode_rate) for devices in (4, 8))
        rows.append({"machine": machine, "prefill_4": prefill, "decode_4": decode, "decode_8": together})
        assumed = f"{_INPUT:,} tokens in, {_OUTPUT} out: the paper states no lengths; {machine}"
        claims += [
            Claim(
                figure="4",
                says="70B on 4 + 4 devices of 40 GiB: prefill over decode, requests/s",
                paper="more than 6x",
                ours=Spread.of([prefill / decode]),
                form="{:.1f}x",
                at_least=3,
                assumption=assumed + "; proportional to the length of answers",
            ),
            Claim(
                figure="4",
                says="decode on 4 devices over decode on 8",
                paper="15 %",
                ours=Spread.of([100 * decode / together]),
                form="{:.0f} %",
                at_most=25,
                assumption="90 % of the memory is usable: beside the weights, 4 devices keep KV for 51,000 tokens",
            ),
        ]
    panel = Panel(
        title=f"{_INPUT:,} tokens in, {_OUTPUT} out",
        x="",
        y="throughput (requests/s)",
        kind="bar",
        curves=tuple(
            Curve(label=label, xs=tuple(row["machine"] for row in rows), ys=tuple(row[key] for row in rows))
            for label, key in (
                ("prefill (4 GPUs)", "prefill_4"),
                ("decode (4 GPUs)", "decode_4"),
                ("decode (8 GPUs)", "decode_8"),
            )
        ),
    )
    columns = [
        Column("machine", "machine"),
        Column("prefill on 4, req/s", "prefill_4", ".2f"),
        Column("decode on 4", "decode_4", ".2f"),
        Column("decode on 8", "decode_8", ".2f"),
    ]
    return Finding(claims, Chart(title="Seesaw, figure 4: 70B disaggregated, 4 + 4", panels=(panel,)), rows, columns)


# ---- figure 15 --------------------------------------------------------------------------------------------------


def _replicated() -> list[dict[str, object]]:
    """Decoding with the largest batch, by layout; LLaMA2-13B on eight L4."""
    model, machine, rows = load_shape("llama-2-13b"), load_machine("seesaw-l4"), []
    for degree in (1, 2, 4, 8):
        layout = ParallelLayout(tensor_parallel=degree, data_parallel=8 // degree)
        costs = StepCosts(model, machine, layout)
        row: dict[str, object] = {"layout": f"TP{degree}DP{8 // degree}", "batch": 0}
        try:
            each = costs.memory.kv_blocks(BLOCK_SIZE) * BLOCK_SIZE // _LENGTH
        except DoesNotFit:
            rows.append(row)
            continue
        batch = each * layout.data_parallel
        parts = stage_parts(costs, costs.work([_LENGTH] * each), 0).scaled(_MILLISECONDS / batch)
        rows.append({**row, "batch": batch, **msgspec.structs.asdict(parts), "total": parts.total})
    return rows


def _figure_15(scale: Scale, outcomes: Outcomes) -> Finding:
    rows = _replicated()
    fitting = [row for row in rows if row["batch"]]
    first, last = fitting[0], fitting[-1]
    claims = [
        Claim(
            figure="15",
            says="the largest batch: TP8 over TP2DP4 (TP1DP8 does not fit)",
            paper="more (bars)",
            ours=Spread.of([float(str(last["batch"])) / float(str(first["batch"]))]),
            form="{:.2f}x",
            at_least=1.2,
            assumption="13B on 8 L4, as in figure 1; the paper names neither model nor device",
        ),
        Claim(
            figure="15",
            says="loading weights, per request: TP2DP4 over TP8",
            paper="more (bars)",
            ours=Spread.of([float(str(first["weights"])) / float(str(last["weights"]))]),
            form="{:.2f}x",
            at_least=2,
            assumption="sequences of 1,024 tokens",
        ),
    ]
    names = tuple(str(row["layout"]) for row in rows)

    def values(key: str) -> tuple[float, ...]:
        return tuple(float(str(row.get(key, 0.0))) for row in rows)

    panels = (
        Panel(
            title="runtime per request and token (none: out of memory)",
            x="layout",
            y="ms",
            kind="stack",
            curves=tuple(
                Curve(label=label, xs=names, ys=values(key))
                for label, key in (("load weight", "weights"), ("compute", "compute"), ("all-reduce", "communication"))
            ),
        ),
        Panel(title="largest batch", x="layout", y="batch size", kind="bar", curves=(Curve(label="", xs=names, ys=values("batch")),)),
    )
    columns = [
        Column("layout", "layout"),
        Column("largest batch", "batch", ",d"),
        Column("weights ms", "weights", ".2f"),
        Column("compute ms", "compute", ".2f"),
        Column("all-reduce ms", "communication", ".2f"),
        Column("total ms", "total", ".2f"),
    ]
    return Finding(claims, Chart(title="Seesaw, figure 15: data parallelism in decode, 13B on 8 L4", panels=panels), rows, columns)


FIGURES = (
    PaperFigure(number="1", title="prefill and decode by layout", jobs=nothing_to_run, evaluate=_figure_1),
    PaperFigure(number="4", title="prefill and decode on devices of their own", jobs=nothing_to_run, evaluate=_figure_4),
    PaperFigure(number="15", title="data parallelism in decode", jobs=nothing_to_run, evaluate=_figure_15),
)
