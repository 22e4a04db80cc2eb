"""``nanoserve analyze``: where the time of a model on a machine goes, by counting alone."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from nanoserve.commands.bench_options import ResultOptions, work_option
from nanoserve.commands.failures import EXIT_OK
from nanoserve.commands.options import MODEL_PANEL, option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanoserve.benchmarks.report import Report
    from nanoserve.costs.analysis import Analysis, OperatorRow

HARDWARE_PANEL = "Hardware"


def _model_option(*names: str, help: str, metavar: str) -> Any:
    return option(*names, panel=MODEL_PANEL, help=help, metavar=metavar, envvar=None)


def _hardware_option(*names: str, help: str, metavar: str = "N", **settings: Any) -> Any:
    return option(*names, panel=HARDWARE_PANEL, help=help, metavar=metavar, envvar=None, **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionOptions:
    """How many bits a number takes."""

    weight_bits: Annotated[
        int, _model_option("--weight-bits", help="Bits of a weight: 4, 8, 16 or 32.", metavar="N")
    ] = 16
    kv_bits: Annotated[
        int, _model_option("--kv-bits", help="Bits of a key or value number: 4, 8, 16 or 32.", metavar="N")
    ] = 16


def analyze(
    *,
    model: Annotated[
        str,
        _model_option("--model", "-m", help="Published model, config.json, or directory with one.", metavar="MODEL"),
    ],
    hardware: Annotated[
        str, _hardware_option("--hardware", help="Device or machine, or a .toml file that adds one.", metavar="NAME")
    ],
    tensor_parallel: Annotated[int, _hardware_option("--tp", help="Tensor parallel degree.", min=1)] = 1,
    pipeline_parallel: Annotated[int, _hardware_option("--pp", help="Pipeline stages.", min=1)] = 1,
    batch: Annotated[
        str | None, work_option("--batch", help="Sequences decoding; default: up to what fits.", metavar="N,N,...")
    ] = None,
    input_tokens: Annotated[int, work_option("--input", help="Tokens of a prompt.", min=1, max=2**20)] = 1024,
    output_tokens: Annotated[int, work_option("--output", help="Tokens of an answer.", min=1, max=2**20)] = 256,
    precision: PrecisionOptions,
    results: ResultOptions,
) -> int:
    """Count a model's operations and bytes, and say what each takes on hardware that need not be here.

    For a prompt and for a step of decoding: what each operator computes and moves, what bounds it, and its share of
    the time. Then latency and throughput against batch size, up to what the KV cache can hold. No model is loaded and
    nothing is measured: docs/costs.md has the formulas and the few factors.

    [bold]Examples[/bold]

      nanoserve analyze -m llama-3.1-8b --hardware h100
      nanoserve analyze -m qwen2.5-32b --hardware gllm-l20 --pp 4 --input 222 --output 127 --plot roofline.png
    """
    from nanoserve.costs import ParallelLayout, Precision, StepCosts, load_machine, load_shape
    from nanoserve.costs.analysis import Analysis
    from nanoserve.measures.workloads import parse_sizes

    batches = None if batch is None else sorted(set(parse_sizes(batch, "--batch")))
    bits = Precision(weight_bits=precision.weight_bits, kv_bits=precision.kv_bits)
    layout = ParallelLayout(tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel)
    costs = StepCosts(load_shape(model), load_machine(hardware), layout, bits)
    analysis = Analysis(costs, input_tokens, output_tokens)
    batches = batches or analysis.default_batches()

    settings = {"model": model, "hardware": hardware, "layout": layout.name, "input": input_tokens}
    settings |= {"output": output_tokens, "weight_bits": precision.weight_bits, "kv_bits": precision.kv_bits}
    report = results.open_report("analyze", settings)
    for size in batches:
        report.add(_batch_fields(analysis, size))
    phases = _phases(analysis, batches)
    report.put("operators", [row for rows in phases.values() for row in rows])
    report.finish()
    title = f"{model} on {hardware}, layout {layout.name}, {input_tokens:,} + {output_tokens:,} tokens"
    if results.plot is not None:
        from nanoserve.benchmarks.analysis_plot import plot_analysis

        plot_analysis(results.plot, title, analysis, phases, [analysis.batch_row(size) for size in batches])
    _show(analysis, title, phases, report)
    return EXIT_OK


def _phases(analysis: "Analysis", batches: "Sequence[int]") -> "dict[str, list[OperatorRow]]":
    """The operators of a prompt, and of decoding at the largest of the batch sizes that fits."""
    shown = max((size for size in batches if size <= analysis.largest_batch), default=batches[0])
    prefill, decode = analysis.prefill_work(), analysis.decode_work(shown)
    one_of = f" (a micro-batch of {decode.decodes:,})" if decode.decodes < shown else ""
    return {
        f"prefill of {analysis.input_tokens:,} tokens": analysis.operator_rows("prefill", prefill),
        f"decode of {shown:,} sequences{one_of}": analysis.operator_rows("decode", decode),
    }


def _batch_fields(analysis: "Analysis", batch: int) -> dict[str, Any]:
    row = analysis.batch_row(batch)
    return {
        "batch": batch,
        "tpot_ms": row.tpot * 1e3,
        "tokens_per_s": row.tokens_per_second,
        "tokens_per_s_with_prefill": row.tokens_per_second_with_prefill,
        "kv_share": row.kv_share,
        "fits": row.fits,
    }


def _show(analysis: "Analysis", title: str, phases: "dict[str, list[OperatorRow]]", report: "Report") -> None:
    from nanoserve.benchmarks.tables import Column, print_table

    print(title)
    _print_head(analysis)
    operators = [
        Column("operator", "operator"),
        Column("GFLOP", "gflop", ",.1f"),
        Column("MB", "megabytes", ",.1f"),
        Column("FLOP/byte", "intensity", ",.1f"),
        Column("bound", "bound"),
        Column("ms", "milliseconds", ",.3f"),
        Column("share", "share", ".1%"),
    ]
    for phase, rows in phases.items():
        total = sum(row.seconds for row in rows)
        print_table(f"{phase}: {total * 1e3:,.2f} ms", operators, map(_operator_fields, rows))
    batches = [
        Column("batch", "batch", ",d"),
        Column("TPOT ms", "tpot_ms", ",.2f"),
        Column("tok/s", "tokens_per_s", ",.0f"),
        Column("with prefill", "tokens_per_s_with_prefill", ",.0f"),
        Column("of KV memory", "kv_share", ".0%"),
        Column("fits", "mark"),
    ]
    marked = [row | {"mark": "yes" if row["fits"] else "no"} for row in report.rows]
    print_table(f"decode at a context of {analysis.context:,} tokens", batches, marked)


def _operator_fields(row: "OperatorRow") -> dict[str, Any]:
    return {
        "operator": row.operator,
        "gflop": row.flops / 1e9 if row.flops else None,
        "megabytes": row.bytes / 1e6 if row.bytes else None,
        "intensity": row.intensity,
        "bound": row.bound,
        "milliseconds": row.seconds * 1e3,
        "share": row.share,
    }


def _print_head(analysis: "Analysis") -> None:
    from nanoserve.costs.analysis import BLOCK_SIZE
    from nanoserve.costs.hardware import GIBI, GIGA

    costs, memory = analysis.costs, analysis.costs.memory
    device = costs.machine.device
    fullest = max(range(costs.num_stages), key=memory.weight_bytes)
    print(
        f"{device.name}: {device.flops / 1e12:,.4g} TFLOPS, {device.memory_bandwidth / GIGA:,.4g} GB/s,"
        f" {device.intensity:.0f} FLOP/byte; {costs.machine.source}"
    )
    left, tokens = memory.kv_bytes(fullest) / GIBI, analysis.blocks * BLOCK_SIZE
    print(
        f"each device: {memory.weight_bytes(fullest) / GIBI:.1f} GiB of weights, {left:.1f} GiB for keys and values:"
        f" {tokens:,} tokens, {analysis.largest_batch:,} sequences of"
        f" {analysis.input_tokens:,} + {analysis.output_tokens:,}"
    )
