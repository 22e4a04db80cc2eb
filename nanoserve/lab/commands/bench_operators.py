"""``nanoserve bench operators``: the operators against the floor of the machine and against stock
torch."""

from collections.abc import Sequence
from typing import Any

import msgspec

from nanoserve.commands.options import option
from nanoserve.commands.progress import show_progress
from nanoserve.commands.tables import Column, columns, print_table
from nanoserve.commands.terminal import remark
from nanoserve.errors import UsageError, shown
from nanoserve.lab.benchmarks.machine import ForeignLoad
from nanoserve.lab.benchmarks.report import Report
from nanoserve.lab.benchmarks.rounds import counting_words, in_states
from nanoserve.lab.benchmarks.verdicts import spread_text
from nanoserve.lab.commands.bench_options import (
    ResultOptions,
    RoundOptions,
    print_head,
    settled_operators,
)
from nanoserve.lab.workloads import parse_sizes
from nanoserve.utils.threads import MOST_THREADS

_REACHED = Column("share of the floor that is reached, %", "of_floor", ".0%")
_COLUMNS = columns(
    ("", "case", ("read", "state"), "route"),
    (",.0f", "us"),
    (".0%", "of_floor"),
    (".2f", ("x slower than ours", "ours_is_faster"), "low", "high"),
)


def _parse_cells(text: str, flag: str) -> list[tuple[int, int]]:
    cells = []
    for part in text.split(","):
        batch, _, context = part.partition("x")
        try:
            cells.append((parse_sizes(batch, flag)[0], parse_sizes(context, flag)[0]))
        except UsageError:
            raise UsageError(
                f"{flag} takes sequences x context such as 16x2048,4x512, not {shown(part)}"
            ) from None
    return cells


class OperatorsOptions(RoundOptions, ResultOptions):
    cells: Sequence[tuple[int, int]] = option(
        "16x2048,4x512", "Attention: sequences x context.", metavar="NxN,...", parse=_parse_cells
    )
    prompts: tuple[int, ...] = option(
        "128,512,2048",
        "Attention and recurrent states of prompts: tokens.",
        metavar="N,N,...",
        parse=parse_sizes,
    )
    rows: tuple[int, ...] = option(
        "1,4,16,64,512",
        "Linear layers: rows of input. Sampling and recurrent states: those up to 16.",
        metavar="N,N,...",
        parse=parse_sizes,
    )
    rounds: int = option(5, "Rounds that count, for each case.", minimum=1)
    dtype: str = option(
        "bfloat16",
        "Number format; float32 for attention only.",
        choices=("bfloat16", "float16", "float32"),
    )
    threads: int | None = option(
        None, "CPU threads; default: one per physical core.", minimum=1, maximum=MOST_THREADS
    )


def run(options: OperatorsOptions) -> None:
    """Linear layers and the vocabulary are those of Qwen3-0.6B, recurrent states have 16 heads of
    128, state spaces 3,072 channels. Routes take turns within a round; a
    round counts only if the machine's read bandwidth before and after it differs by less than 10 %,
    and others keep at most 0.2 cores busy. Shares are of the least time in which the bytes can be
    read and the products computed.

    [bold]Examples[/bold]

      nanoserve bench operators --rows 1,4 --json operators.json
      nanoserve bench operators --cells 1x128,16x2048 --rounds 9
    """
    settings = {
        "cells": options.cells,
        "prompts": options.prompts,
        "rows": options.rows,
        "rounds": options.rounds,
    }
    with options.reported("operators", settings, _show) as report, show_progress() as progress:
        in_use = settled_operators(options.threads)
        import torch

        from nanoserve.lab.benchmarks.operators import (
            PACKED_BITS,
            SAMPLERS,
            all_cases,
            linear_sizes,
            measure_case,
            packed_sizes,
            recurrent_steps,
            sampled_rows,
        )
        from nanoserve.lab.benchmarks.roofline import STAGE, BandwidthProbe, machine_limits

        remark(f"{STAGE} ...")
        probe, number_format, repeating = (
            BandwidthProbe(),
            getattr(torch, options.dtype),
            options.repeating(),
        )
        peak = machine_limits(number_format, probe, progress=progress).operations_per_second
        facts = {"operators": in_use, "dtype": options.dtype, "threads": torch.get_num_threads()}
        report.put("engine", facts | {"limit_gflops": peak / 1e9})
        linear = sum(len(counts) for _, counts in linear_sizes(options.rows, number_format))
        packed = len(PACKED_BITS) * sum(
            len(counts) for _, counts in packed_sizes(options.rows, number_format)
        )
        sampling = len(SAMPLERS) * len(sampled_rows(options.rows))
        attention = 2 * len(options.cells) + len(options.prompts)
        recurrent = 4 * len(recurrent_steps(options.prompts, options.rows))
        cases = all_cases(options.cells, options.prompts, options.rows, number_format)
        for place, case in enumerate(cases):
            progress("cases", place, attention + recurrent + linear + packed + sampling)
            remark(f"measuring {case.name}")
            machine: dict[str, Any] = {"probe": probe.read, "foreign": ForeignLoad(), "peak": peak}
            for done in measure_case(case, rounds=options.rounds, repeating=repeating, **machine):
                report.add(
                    {"case": case.name, "round": done, "drift": done.drift, "counts": done.counts}
                )


def _show(report: Report, options: ResultOptions) -> str:
    from nanoserve.lab.benchmarks.operators import (
        OURS,
        STOCK_ROUTES,
        OperatorRound,
        samples,
        summarize,
    )

    done = [msgspec.convert(row["round"], OperatorRound) for row in report.rows]
    summary = summarize(done)
    report.put("summary", summary)
    report.put("samples", samples(done))
    if beaten := [one for one, _ in in_states(done) if not one.has_floor]:
        cases = ", ".join(dict.fromkeys(one.case for one in beaten))
        report.note(
            f"rounds in which a route took less than the floor tell no shares of it: {cases}"
        )
    print_head(report)
    facts = report.document["engine"]
    operators = facts["operators"].partition(" (")[0]
    title = f"{OURS}'s operators ({operators}), {facts['dtype']}, {facts['threads']} threads"
    print_table(f"{title}; peak {facts['limit_gflops']:,.0f} GFLOP/s", _COLUMNS, summary)
    options.draw_bars(report, title, "{case} {route} ({state})", [_REACHED], summary)
    slower = [row["ours_is_faster"] for row in summary if row["route"] in STOCK_ROUTES]
    shares = [
        row["of_floor"] for row in summary if row["route"] == OURS and row["of_floor"] is not None
    ]
    reached = ""
    if shares:
        reached = f" and reach {spread_text(shares, '.0%')} of the machine's floor"
    return (
        f"{OURS}'s operators are {spread_text(slower)} times as fast as stock torch{reached}; "
        f"{counting_words(done)}."
    )
