"""Seesaw's figures 1, 4 and 15: what the cost model alone says about layouts, with nothing
simulated.

The paper states neither the lengths of figures 1 and 15 nor those of figure 4. Assumed are 1,024
tokens for the first two, and for figure 4 the longest requests of its own synthetic data (section
6.5): 3,000 tokens in and 0.3 times as many out.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from nanoserve.commands.tables import columns
from nanoserve.config.published_shapes import load_shape
from nanoserve.costs.hardware import load_machine
from nanoserve.costs.step_costs import DoesNotFit, StepCosts
from nanoserve.lab.charts import Chart, panel
from nanoserve.lab.papers.cases import BLOCK_SIZE
from nanoserve.lab.papers.claims import Ours, claims
from nanoserve.lab.papers.framework import Finding, Run, Scale
from nanoserve.lab.papers.seesaw.settings import NVLINK, PCIE
from nanoserve.layout import ParallelLayout
from nanoserve.scheduler.work import StepWork

_BATCH, _LENGTH = 16, 1024
_INPUT, _OUTPUT = 3000, 900
_PARTS = {"communication": "communication", "compute": "compute", "weights": "weight transfer"}
"""Fields of Parts, and their labels in figure 1."""


class Parts(msgspec.Struct, frozen=True):
    """Seconds, by what they are spent on."""

    weights: float  # reading weights, where a product is bound by memory
    compute: float  # everything else that devices do themselves
    communication: float  # all-reduces, and activations on their way to the next stage

    @property
    def total(self) -> float:
        return self.weights + self.compute + self.communication

    def scaled(self, factor: float) -> "Parts":
        return Parts(self.weights * factor, self.compute * factor, self.communication * factor)


def stage_parts(costs: StepCosts, work: StepWork, stage: int) -> Parts:
    """Divide a stage's time for a micro-batch into its parts."""
    weights = sum(
        costs.operator_seconds(one) * one.weight_bytes / one.bytes
        for one in costs.counts.operators(work, stage)
        if not costs.is_compute_bound(one)
    )
    reduces = costs.all_reduce_seconds(work, stage)
    compute = costs.stage_seconds(work, stage) - weights - reduces
    return Parts(weights, compute, reduces + costs.send_seconds(work, stage))


def batch_parts(costs: StepCosts, work: StepWork) -> Parts:
    """The parts of all micro-batches of a full pipeline, each as ``work``, by its slowest stage."""
    stages = range(costs.num_stages)
    return max(
        (stage_parts(costs, work, stage) for stage in stages), key=lambda parts: parts.total
    ).scaled(len(stages))


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


_PARTS_AND_TOTAL = [*_PARTS, "total"]
_FIELDS = [(phase, part) for phase in ("prefill", "decode") for part in _PARTS_AND_TOTAL]
LAYOUT_COLUMNS = columns(
    ("", "layout"),
    (",.1f", *((f"{phase} {part} ms", f"{phase}_{part}_ms") for phase, part in _FIELDS)),
)


def layouts(scale: Scale, run: Run) -> Finding:
    """Figure 1: what prefill and decode spend their time on, by layout."""
    found = _breakdowns()
    rows: list[dict[str, Any]] = []
    for name, (prefill, decode) in found.items():
        row: dict[str, Any] = {
            f"prefill_{part}_ms": 1e3 * getattr(prefill, part) for part in _PARTS_AND_TOTAL
        }
        row |= {f"decode_{part}_ms": 1e3 * getattr(decode, part) for part in _PARTS_AND_TOTAL}
        rows.append(row | {"layout": name})
    panels = []
    for number, title in enumerate(("(a) prefill", "(b) decode")):
        longest = max(pair[number].total for pair in found.values())  # 1 on the paper's axes
        heights = {
            label: [getattr(pair[number], part) / longest for pair in found.values()]
            for part, label in reversed(_PARTS.items())
        }
        panels.append(panel(title, "layout", "normalized time", list(found), heights, kind="stack"))
    pipeline, tensor = found["TP1PP8"], found["TP8PP1"]
    ours = {
        "1 prefill": tensor[0].total / pipeline[0].total,
        "1 decode": pipeline[1].total / tensor[1].total,
    }
    chart = Chart("Seesaw, figure 1: LLaMA2-13B, 16 sequences on 8 L4", panels)
    return Finding(claims("seesaw", ours), chart, rows)


def prefill_rate(costs: StepCosts) -> float:
    """Prompts a second that a full pipeline computes."""
    return costs.num_stages / batch_parts(costs, costs.work([], [(0, _INPUT)])).total


def decode_rate(costs: StepCosts) -> float:
    """Requests a second whose answers are decoded, with as many sequences as memory holds. Raises
    DoesNotFit."""
    context = _INPUT + _OUTPUT // 2
    rows = costs.memory.kv_blocks(BLOCK_SIZE) * BLOCK_SIZE // context // costs.num_stages
    if not rows:
        return 0.0
    return (
        rows * costs.num_stages / batch_parts(costs, costs.work([context] * rows)).total / _OUTPUT
    )


def _best_rate(machine: str, devices: int, rate: Callable[[StepCosts], float]) -> float:
    """The best rate of all layouts of these devices that fit."""
    model, best = load_shape("llama-2-70b"), 0.0
    for degree in (one for one in (1, 2, 4, 8) if devices % one == 0):
        layout = ParallelLayout(tensor_parallel=degree, pipeline_parallel=devices // degree)
        with suppress(DoesNotFit):
            best = max(best, rate(StepCosts(model, load_machine(machine), layout)))
    return best


DISAGGREGATION_COLUMNS = columns(
    ("", "machine"),
    (
        ".2f",
        ("prefill on 4, req/s", "prefill_4"),
        ("decode on 4", "decode_4"),
        ("decode on 8", "decode_8"),
    ),
)


def disaggregation(scale: Scale, run: Run) -> Finding:
    """Figure 4: 70B on devices of their own for prompts and answers."""
    measured = {
        "prefill_4": (4, prefill_rate),
        "decode_4": (4, decode_rate),
        "decode_8": (8, decode_rate),
    }
    rows: list[dict[str, Any]] = []
    ours: Ours = {}
    for machine in (PCIE, NVLINK):
        rates = {
            name: _best_rate(machine, devices, rate) for name, (devices, rate) in measured.items()
        }
        rows.append({"machine": machine, **rates})
        ours[f"4 prompts {machine}"] = rates["prefill_4"] / rates["decode_4"]
        ours[f"4 answers {machine}"] = 100 * rates["decode_4"] / rates["decode_8"]
    labels = {
        "prefill (4 GPUs)": "prefill_4",
        "decode (4 GPUs)": "decode_4",
        "decode (8 GPUs)": "decode_8",
    }
    heights = {label: [row[name] for row in rows] for label, name in labels.items()}
    title = f"{_INPUT:,} tokens in, {_OUTPUT} out"
    machines = [row["machine"] for row in rows]
    bars = panel(title, "", "throughput (requests/s)", machines, heights, kind="bar")
    chart = Chart("Seesaw, figure 4: 70B disaggregated, 4 + 4", [bars])
    return Finding(claims("seesaw", ours), chart, rows)


def _decoding(tensor: int) -> dict[str, Any]:
    """LLaMA2-13B on eight L4 with the largest batch of all replicas; ms for a token of one request,
    0 if none fits."""
    layout = ParallelLayout(tensor_parallel=tensor, data_parallel=8 // tensor)
    costs = StepCosts(load_shape("llama-2-13b"), load_machine("seesaw-l4"), layout)
    each, parts = 0, Parts(0.0, 0.0, 0.0)
    with suppress(DoesNotFit):
        each = costs.memory.kv_blocks(BLOCK_SIZE) * BLOCK_SIZE // _LENGTH
        parts = stage_parts(costs, costs.work([_LENGTH] * each), 0).scaled(
            1e3 / (each * layout.data_parallel)
        )
    batch = each * layout.data_parallel
    return {"layout": f"TP{tensor}DP{8 // tensor}", "batch": batch, **msgspec.structs.asdict(parts)}


REPLICA_COLUMNS = columns(
    ("", "layout"),
    (",d", ("largest batch", "batch")),
    (
        ".2f",
        ("weights ms", "weights"),
        ("compute ms", "compute"),
        ("all-reduce ms", "communication"),
    ),
)


def data_parallelism(scale: Scale, run: Run) -> Finding:
    """Figure 15: what replicas cost in decoding."""
    rows = [_decoding(degree) for degree in (1, 2, 4, 8)]
    does_not_fit, replicated, divided = rows[0], rows[1], rows[-1]
    ours = {
        "15 fits": does_not_fit["batch"],
        "15 batch": divided["batch"] / replicated["batch"],
        "15 weights": replicated["weights"] / divided["weights"],
    }
    names = [row["layout"] for row in rows]
    parts = {"load weight": "weights", "compute": "compute", "all-reduce": "communication"}
    times = {label: [row[part] for row in rows] for label, part in parts.items()}
    batches = {"": [float(row["batch"]) for row in rows]}
    panels = [
        panel(
            "runtime per request and token (none: out of memory)",
            "layout",
            "ms",
            names,
            times,
            kind="stack",
        ),
        panel("largest batch", "layout", "batch size", names, batches, kind="bar"),
    ]
    chart = Chart("Seesaw, figure 15: data parallelism in decode, 13B on 8 L4", panels)
    return Finding(claims("seesaw", ours), chart, rows)
