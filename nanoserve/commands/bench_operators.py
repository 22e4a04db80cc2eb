"""``nanoserve bench operators``: the operators against the floor of the machine and against stock torch."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from nanoserve.commands.bench_options import ResultOptions, kept, print_head, settled_operators, work_option
from nanoserve.commands.failures import EXIT_OK
from nanoserve.commands.progress import show_progress
from nanoserve.commands.terminal import remark
from nanoserve.errors import UsageError
from nanoserve.processes.threads import MOST_THREADS

if TYPE_CHECKING:
    from nanoserve.benchmarks.operators import OperatorCase
    from nanoserve.benchmarks.report import Report

DTYPES = ("bfloat16", "float16", "float32")


def operators(
    *,
    cells: Annotated[
        str, work_option("--cells", help="Attention: sequences x context.", metavar="NxN,...")
    ] = "16x2048,4x512",
    rows: Annotated[
        str, work_option("--rows", help="Linear layers: rows of input.", metavar="N,N,...")
    ] = "1,4,16,64,512",
    rounds: Annotated[int, work_option("--rounds", help="Rounds that count, for each case.", min=1)] = 5,
    dtype: Annotated[
        str,
        work_option("--dtype", help=f"Number format: {' or '.join(DTYPES)}, for attention only.", metavar="NAME"),
    ] = "bfloat16",
    threads: Annotated[
        int | None,
        work_option("--threads", help="CPU threads; default: one per physical core.", min=1, max=MOST_THREADS),
    ] = None,
    results: ResultOptions,
) -> int:
    """Time paged attention, the same on the host tier, and the linear layers in the shapes of Qwen3-0.6B, beside stock
    torch doing the same.

    Routes take turns within a round; a round counts only if the machine's read bandwidth before and after it differs
    by less than 10 %. Shares are of the least time in which the bytes can be read and the products computed.

    [bold]Examples[/bold]

      nanoserve bench operators --rows 1,4 --json operators.json
      nanoserve bench operators --cells 1x128,16x2048 --rounds 9
    """
    from nanoserve.measures.workloads import parse_sizes

    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    batches = [_cell(text) for text in cells.split(",")]
    counts = parse_sizes(rows, "--rows")
    settings = {"cells": batches, "rows": counts, "rounds": rounds}
    report = results.open_report("operators", settings)
    in_use = settled_operators(threads)
    with kept(report, lambda: _show(report, results)):
        _measure(batches, counts, dtype, rounds, report, in_use)
    return EXIT_OK


def _cell(text: str) -> tuple[int, int]:
    from nanoserve.measures.workloads import parse_sizes

    batch, _, context = text.partition("x")
    try:
        return parse_sizes(batch, "--cells")[0], parse_sizes(context, "--cells")[0]
    except UsageError:
        raise UsageError(f"--cells takes sequences x context such as 16x2048,4x512, not {text!r}") from None


def _measure(
    cells: Sequence[tuple[int, int]], rows: Sequence[int], dtype: str, rounds: int, report: "Report", in_use: str
) -> None:
    import torch

    from nanoserve.benchmarks.cpu_load import ForeignLoad
    from nanoserve.benchmarks.operators import count_linear_cases, measure_case
    from nanoserve.benchmarks.roofline import STAGE, BandwidthProbe, machine_limits

    remark(f"{STAGE} ...")
    probe, number_format = BandwidthProbe(), getattr(torch, dtype)
    with show_progress() as progress:
        limits = machine_limits(number_format, probe, progress=progress)
    facts = {"operators": in_use, "dtype": dtype, "threads": torch.get_num_threads()}
    report.put("engine", facts | {"limit_gflops": limits.operations_per_second / 1e9})
    total = 2 * len(cells) + count_linear_cases(rows, number_format)
    with show_progress() as progress:
        for place, case in enumerate(_cases(cells, rows, number_format)):
            progress("cases", place, total)
            remark(f"measuring {case.name}")
            foreign = ForeignLoad()
            for done in measure_case(
                case, rounds=rounds, probe=probe.read, foreign=foreign, peak=limits.operations_per_second
            ):
                report.add({"case": case.name, "round": done, "drift": done.drift, "counts": done.counts})


def _cases(cells: Sequence[tuple[int, int]], rows: Sequence[int], dtype: Any) -> Iterator["OperatorCase"]:
    from nanoserve.benchmarks.operators import attention_case, host_attention_case, linear_cases

    for batch, context in cells:
        yield attention_case(batch, context, dtype)
        with host_attention_case(batch, context, dtype) as case:
            yield case
    yield from linear_cases(rows, dtype)


def _show(report: "Report", results: ResultOptions) -> None:
    import msgspec

    from nanoserve.benchmarks.operators import OURS, OperatorRound, samples, summarize
    from nanoserve.benchmarks.plots import plot_bars
    from nanoserve.benchmarks.tables import Column, print_table

    done = [msgspec.convert(row["round"], OperatorRound) for row in report.rows]
    summary = summarize(done)
    report.put("summary", summary)
    report.put("samples", samples(done))
    print_head(report)
    print(f"{sum(one.counts for one in done)} of {len(done)} rounds count (read bandwidth drift below 10 %)")
    if not summary:
        return
    share = Column("of floor", "of_floor", ".0%")
    columns = [
        Column("case", "case"),
        Column("read", "state"),
        Column("route", "route"),
        Column("rounds", "rounds"),
        Column("us", "us", ",.0f"),
        Column("GB/s", "gb_per_s", ",.1f"),
        Column("GFLOP/s", "gflops", ",.0f"),
        share,
        Column("x slower than ours", "ours_is_faster", ",.2f"),
        Column("low", "low", ",.2f"),
        Column("high", "high", ",.2f"),
    ]
    facts = report.document["engine"]
    title = (
        f"{OURS}'s operators ({facts['operators'].partition(' (')[0]}), {facts['dtype']}, {facts['threads']} threads"
    )
    print_table(f"{title}; peak {facts['limit_gflops']:,.0f} GFLOP/s", columns, summary)
    if results.plot is not None:
        plot_bars(results.plot, report.titled(title), "{case} {route} ({state})", [share], summary)
