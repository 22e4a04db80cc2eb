"""``nanoserve analyze``: where the time of a model on a machine goes, by counting alone."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from nanoserve.commands.engine_options import MODEL_PANEL, quantization_option
from nanoserve.commands.options import HARDWARE_PANEL, option
from nanoserve.commands.tables import columns, print_table
from nanoserve.costs.analysis import Analysis, BatchRow, OperatorRow
from nanoserve.costs.counts import Precision
from nanoserve.costs.hardware import GIBI, GIGA, MEBI, load_machine
from nanoserve.costs.step_costs import StepCosts
from nanoserve.errors import UsageError, shown
from nanoserve.lab.benchmarks.report import Report
from nanoserve.lab.charts import AnyPanel, Chart, ChartCurve, Note, Panel, draw
from nanoserve.lab.commands.bench_options import ResultOptions
from nanoserve.lab.workloads import parse_lengths, parse_sizes
from nanoserve.layout import ParallelLayout
from nanoserve.models.hub import find_shape
from nanoserve.request import RequestShape

Phases = Mapping[str, Sequence[OperatorRow]]
Point = tuple[float, float]

_OPERATOR_COLUMNS = columns(
    ("", "operator"),
    (",.1f", ("GFLOP", "gflop"), ("MB", "megabytes"), ("FLOP/byte", "intensity")),
    ("", "bound"),
    (",.3f", ("ms", "milliseconds")),
    (".1%", "share"),
)
_BATCH_COLUMNS = columns(
    (",d", "batch"),
    (",.2f", ("TPOT ms", "tpot_ms")),
    (",.0f", ("tok/s", "tokens_per_s"), ("with prefill", "tokens_per_s_with_prefill")),
    (".0%", ("of KV memory", "kv_share")),
    ("", ("fits", "mark")),
)
_STYLES = (("o", 12), ("s", -30))
"""Marker of prefill and decode, and by how many points their names are moved where the other phase
has points."""
_NEARBY = 1.6  # points whose coordinates differ by less than this factor share a label


def _parse_length(text: str, flag: str) -> RequestShape:
    shape, *others = parse_lengths(text, flag)
    if others:
        raise UsageError(f"{flag} takes one length here, not {shown(text)}")
    return shape


class AnalyzeOptions(ResultOptions):
    batch_sizes: tuple[int, ...] | None = option(
        None, "Sequences decoding; default: up to what fits.", metavar="N,N,...", parse=parse_sizes
    )
    lengths: RequestShape = option(
        "1024+256", "Tokens of a prompt and of its answer.", metavar="IN+OUT", parse=_parse_length
    )
    model: str = option(
        "qwen3-8b",
        "Published model, .gguf file, config.json or its directory.",
        "-m",
        metavar="MODEL",
        panel=MODEL_PANEL,
    )
    quantization: str | None = quantization_option()
    weight_bits: int = option(
        16, "Bits of a weight that is not quantized: 4, 8, 16 or 32.", panel=MODEL_PANEL
    )
    kv_bits: int = option(16, "Bits of a key or value number: 4, 8, 16 or 32.", panel=MODEL_PANEL)
    hardware: str = option(
        "h100",
        "Device or machine, or a .toml file that adds one.",
        metavar="NAME",
        panel=HARDWARE_PANEL,
    )
    tp: int = option(1, "Tensor parallel degree.", minimum=1, panel=HARDWARE_PANEL)
    pp: int = option(1, "Pipeline stages.", minimum=1, panel=HARDWARE_PANEL)


def run(options: AnalyzeOptions) -> None:
    """For a prompt and for a step of decoding: what each operator computes and moves, what bounds
    it, and its share of the time. Then latency and throughput against batch size, up to what the KV
    cache can hold. No model is loaded and nothing is measured: docs/costs.md has the formulas and
    the few factors.

    [bold]Examples[/bold]

      nanoserve analyze -m llama-3.1-8b --hardware h100 --quantization int4
      nanoserve analyze -m qwen2.5-32b --hardware gllm-l20 --pp 4 \\
        --lengths 222+127 --plot roofline.png
    """
    lengths = options.lengths
    precision = Precision(weight_bits=options.weight_bits, kv_bits=options.kv_bits)
    layout = ParallelLayout(tensor_parallel=options.tp, pipeline_parallel=options.pp)
    shape, machine = find_shape(options.model, options.quantization), load_machine(options.hardware)
    costs = StepCosts(shape, machine, layout, precision)
    analysis = Analysis(costs, lengths.input_tokens, lengths.output_tokens)
    batches = sorted(options.batch_sizes or analysis.default_batches())

    settings = {
        name: getattr(options, name)
        for name in ("model", "quantization", "hardware", "weight_bits", "kv_bits")
    }
    settings |= {
        "layout": layout.name,
        "input": lengths.input_tokens,
        "output": lengths.output_tokens,
    }
    report = options.open_report("analyze", settings)
    rows = [analysis.batch_row(size) for size in batches]
    for row in rows:
        rates = {"tpot_ms": row.tpot * 1e3, "tokens_per_s": row.tokens_per_second}
        rates |= {"tokens_per_s_with_prefill": row.tokens_per_second_with_prefill}
        report.add({"batch": row.batch, **rates, "kv_share": row.kv_share, "fits": row.fits})
    # Decoding is shown at the largest of the batch sizes that fits.
    largest = max((size for size in batches if size <= analysis.largest_batch), default=batches[0])
    decode = analysis.decode_work(largest)
    decoding = f"decode of {largest:,} sequences"
    if decode.decodes < largest:
        decoding += f" (a micro-batch of {decode.decodes:,})"
    phases = {
        f"prefill of {analysis.input_tokens:,} tokens": analysis.operator_rows(
            "prefill", analysis.prefill_work()
        ),
        decoding: analysis.operator_rows("decode", decode),
    }
    report.put("operators", [row for operators in phases.values() for row in operators])
    report.finish()
    tokens = f"{lengths.input_tokens:,} + {lengths.output_tokens:,} tokens"
    model = " in ".join(filter(None, (options.model, options.quantization)))
    title = f"{model} on {options.hardware}, layout {layout.name}, {tokens}"
    if options.plot is not None:
        draw(_chart(title, analysis, phases, rows), options.plot, panel_size=(6.0, 4.6))
    _show(analysis, title, phases, report)


def _show(analysis: Analysis, title: str, phases: Phases, report: Report) -> None:
    costs, device = analysis.costs, analysis.costs.machine.device
    weight_bytes = costs.counts.stage_weight_bytes
    fullest = max(range(costs.num_stages), key=weight_bytes)
    left = costs.memory.kv_bytes(fullest) / GIBI
    print(title)
    print(
        f"{device.name}: {device.flops / 1e12:,.4g} TFLOPS, {device.memory_bandwidth / GIGA:,.4g} "
        "GB/s,"
        f" {device.intensity:.0f} FLOP/byte; {costs.machine.source}"
    )
    kept = f"keys and values: {analysis.kv_tokens:,} tokens"
    if costs.counts.recurrent is not None:
        state = costs.counts.state_bytes(fullest) / MEBI
        kept = f"keys, values and states: {state:.1f} MiB of state in a sequence"
    print(
        f"each device: {weight_bytes(fullest) / GIBI:.1f} GiB of weights, {left:.1f} GiB for "
        f"{kept}, {analysis.largest_batch:,} sequences of {analysis.input_tokens:,} +"
        f" {analysis.output_tokens:,}"
    )
    for phase, operators in phases.items():
        milliseconds = 1e3 * sum(row.seconds for row in operators)
        rows = [
            msgspec.to_builtins(row)
            | {
                "gflop": row.flops / 1e9 or None,
                "megabytes": row.bytes / 1e6 or None,
                "milliseconds": row.seconds * 1e3,
            }
            for row in operators
        ]
        print_table(f"{phase}: {milliseconds:,.2f} ms", _OPERATOR_COLUMNS, rows)
    marks = {True: "yes", False: "no"}
    marked = [row | {"mark": marks[row["fits"]]} for row in report.rows]
    print_table(f"decode at a context of {analysis.context:,} tokens", _BATCH_COLUMNS, marked)


def _chart(title: str, analysis: Analysis, phases: Phases, batches: Sequence[BatchRow]) -> Chart:
    """Operators under the roofline; tokens per second and time per token against the sequences that
    decode."""
    panels: list[AnyPanel] = [_roofline(analysis, phases)]
    fits, xs = analysis.largest_batch, [row.batch for row in batches]
    rates = [row.tokens_per_second for row in batches]
    for y, heights in (
        ("tokens per second", rates),
        ("ms per token", [row.tpot * 1e3 for row in batches]),
    ):
        note = Note(f"KV cache full: {fits:,}", fits, max(heights) / 25, right=-4)
        axes: dict[str, Any] = {
            "title": f"decoding: {y}",
            "x": "sequences decoding",
            "y": y,
            "log_x": True,
        }
        if fits:
            axes |= {"notes": [note], "vertical_marks": [fits]}
        panels.append(Panel(curves=[ChartCurve("", xs, heights)], **axes))
    return Chart(title, panels, columns=3)


def _roofline(analysis: Analysis, phases: Phases) -> Panel:
    """Operations per second against operations per byte: under a slope of bandwidth and a ceiling
    of peak."""
    device = analysis.costs.machine.device
    found = {
        phase: [
            (row.operator, (row.intensity, row.flops / row.seconds))
            for row in rows
            if row.intensity
        ]
        for phase, rows in phases.items()
    }
    everything = [point for named in found.values() for _, point in named]
    intensities = [device.intensity] + [x for x, _ in everything]
    least, most = min(intensities) / 3, max(intensities)
    knees = (least, device.intensity, most * most / least)  # the right half has room for names
    ceiling = [min(device.flops, knee * device.memory_bandwidth) for knee in knees]
    curves = [ChartCurve("", knees, ceiling, style="k-")]
    notes = [
        Note(
            f"{device.name}: {device.intensity:.0f} FLOP/byte", device.intensity, device.flops, up=8
        )
    ]
    for number, ((phase, named), (marker, lower)) in enumerate(
        zip(found.items(), _STYLES, strict=True), start=1
    ):
        points = [point for _, point in named]
        xs, ys = zip(*points, strict=True)
        curves.append(ChartCurve(phase, xs, ys, style=marker))
        # names of points that lie near each other, by the place of the first
        groups: dict[Point, list[str]] = {}
        for name, point in named:
            place = next((place for place in groups if _are_near(point, place)), point)
            groups.setdefault(place, []).append(name)
        for place, names in groups.items():
            # The rightmost of the points beside it, of whichever phase: names behind it hide none
            # of them.
            end = max(point for point in everything if _are_near(point, place))
            up = lower
            if end in points:
                up = -2
            notes.append(Note(", ".join(names), end[0], end[1], right=8, up=up, curve=number))
    title, y = "operators under the roofline", "FLOP per second and device"
    return Panel(
        title=title, x="FLOP per byte", y=y, curves=curves, log_x=True, log_y=True, notes=notes
    )


def _are_near(one: Point, other: Point) -> bool:
    return all(
        1 / _NEARBY < mine / theirs < _NEARBY for mine, theirs in zip(one, other, strict=True)
    )
