"""``nanoserve simulate``: policies on hardware that nobody here has."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from nanoserve.benchmarks.policy_names import parse_policies
from nanoserve.benchmarks.report import Report
from nanoserve.benchmarks.tables import Column, print_table
from nanoserve.commands.bench_options import RESULTS_PANEL, ResultOptions
from nanoserve.commands.options import option
from nanoserve.commands.simulate_options import (
    RUNTIMES,
    FleetOptions,
    HardwareOptions,
    PolicyOptions,
    SimulatedHardware,
    WorkloadOptions,
)
from nanoserve.costs.hardware import GIBI
from nanoserve.errors import UsageError
from nanoserve.measures.charts import draw
from nanoserve.measures.chrome_trace import ChromeTraceFile
from nanoserve.measures.metrics import Distribution, parse_slo
from nanoserve.record.trace import SimulationTrace
from nanoserve.record.window import StepWindow
from nanoserve.simulator import simulate
from nanoserve.simulator.fleet import check_replicas, make_router
from nanoserve.simulator.plots import PANEL_SIZE, PlottedRun, simulation_chart

_COLUMNS = [
    Column("policy", "policy"),
    Column("tok/s", "tokens_per_second", ",.0f"),
    Column("req/s", "requests_per_second", ",.2f"),
    Column("TTFT ms", "ttft_ms.mean", ",.0f"),
    Column("p99", "ttft_ms.p99", ",.0f"),
    Column("TPOT ms", "tpot_ms.mean", ",.1f"),
    Column("p99", "tpot_ms.p99", ",.1f"),
    Column("E2EL s", "e2el_s", ",.1f"),
    Column("bubbles", "bubble_share", ".1%"),
    Column("tokens/step", "tokens_per_step.mean", ",.0f"),
    Column("variation", "tokens_variation", ".2f"),
    Column("KV mean", "kv_occupancy", ".0%"),
    Column("KV peak", "kv_peak", ".0%"),
    Column("preempted", "preemptions", ",d"),
]
_SLO_COLUMNS = [Column("SLO", "slo_attainment", ".1%"), Column("goodput", "goodput", ",.2f")]
_TIER_COLUMNS = [
    Column("transitions", "transitions", ",d"),
    Column("take s", "transition_seconds", ",.1f"),
    Column("tokens out", "swapped_out_tokens", ",d"),
    Column("tokens in", "swapped_in_tokens", ",d"),
    Column("host mean", "host_occupancy", ".0%"),
    Column("host tokens", "host_tokens", ",d"),
    Column("CPU", "processor_share", ".0%"),
]
"""Shown if anything happened there."""
_SPREAD_COLUMNS = [
    Column("policy", "policy"),
    Column("requests", "requests"),
    Column("output tokens", "output_tokens"),
    Column("TTFT ms", "ttft_ms"),
    Column("TPOT ms", "tpot_ms"),
    Column("bubbles", "bubble_share"),
    Column("KV mean", "kv_occupancy"),
    Column("until s", "seconds"),
]


class SimulateOptions(
    PolicyOptions,
    WorkloadOptions,
    HardwareOptions,
    FleetOptions,
    ResultOptions,
    renamed={"--trace-out": "is now --record"},
):
    """All options of the command."""

    slo: str | None = option(
        None, "Milliseconds that a good answer keeps to, as ttft=2000,tpot=100,e2el=9000.", metavar="LIMITS"
    )
    record: Path | None = option(
        None,
        "Write the stages' time for Perfetto or chrome://tracing; one policy only.",
        metavar="FILE",
        panel=RESULTS_PANEL,
    )


def run(options: SimulateOptions) -> None:
    """Neither the hardware nor the model is needed: steps take as long as the cost model says (docs/costs.md).

    [bold]Examples[/bold]

      nanoserve simulate --policy sarathi,throttling,adaptive --rate 4
      nanoserve simulate -m qwen2.5-14b --lengths azure-conv --rate 2 \\
        --record stages.json
      nanoserve simulate --policy throttling,throttling:iterations=4:threshold=0.1
      nanoserve simulate --rate 40 --requests 5000 --replicas 16 \\
        --router least-tokens --slo ttft=2000,tpot=100
      nanoserve simulate --policy seesaw --prefill-parallel P4 \\
        --decode-parallel T4 --host-kv-memory 80GiB
    """
    chosen = parse_policies(options.policy, options.max_num_batched_tokens)
    if options.record is not None and len(chosen) > 1:
        raise UsageError("--record takes one policy")
    check_replicas(options.replicas)
    make_router(options.router)  # an unknown name is refused before anything runs
    slo = parse_slo(options.slo)
    hardware = SimulatedHardware.of(options, options.max_num_batched_tokens)
    settings = _settings(options, hardware) | {"slo_ms": slo and msgspec.to_builtins(slo)}
    place = _place(settings, hardware)
    reported = options.reported("simulate", settings, lambda report, options: _show(report, options, place))
    with reported as report, ExitStack() as files:
        trace = None if options.record is None else files.enter_context(ChromeTraceFile(options.record))
        runs: list[PlottedRun] = []
        for name, policy in chosen.items():
            window = StepWindow(beside=runs[0].window if runs else None)
            traces = [] if trace is None else [SimulationTrace(trace, options.block_size)]
            result = simulate(
                policy,
                hardware.layouts[0],
                options.workload(),
                num_blocks=hardware.kv_blocks[0],
                block_size=options.block_size,
                max_num_seqs=options.max_num_seqs,
                runtime=RUNTIMES[options.metadata],
                observers=(window, *traces),
                slo=slo,
                replicas=options.replicas,
                router=options.router,
                host_blocks=hardware.host_blocks,
                other_layouts=hardware.other_layouts,
                predictors=hardware.predictors,
            )
            report.add({"policy": name, "bubble_share": result.bubble_share, **msgspec.to_builtins(result)})
            runs.append(PlottedRun(name, result, window))
        if options.plot is not None:
            title = f"{place}\n{_title(report, options)}"
            draw(simulation_chart(title, runs), options.plot, panel_size=PANEL_SIZE)


def _settings(options: SimulateOptions, hardware: SimulatedHardware) -> dict[str, Any]:
    """What the report says about the options."""
    groups = (HardwareOptions, WorkloadOptions, FleetOptions)
    names = [declared.name for group in groups for declared in fields(group) if declared.name not in ("pp", "tp")]
    host_bytes = options.host_kv_bytes()
    return {
        **msgspec.to_builtins({name: getattr(options, name) for name in names}, enc_hook=str),
        "host_kv_memory": None if host_bytes is None else host_bytes / GIBI,
        "stages": options.pp,
        "tensor_parallel": options.tp,
        **hardware.facts,
        "kv_blocks": hardware.kv_blocks[0],
        "kv_blocks_of_layouts": hardware.kv_blocks,
        "host_blocks": hardware.host_blocks,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "max_num_seqs": options.max_num_seqs,
    }


def _place(settings: Mapping[str, Any], hardware: SimulatedHardware) -> str:
    """On what it ran, in one line."""
    several = f", {settings['replicas']} replicas ({settings['router']})" if settings["replicas"] > 1 else ""
    layout = f"{hardware.name}, {settings['metadata']} metadata, {hardware.blocks_name}{several}"
    return f"{settings['model']} on {settings['hardware']}, {layout}"


def _title(report: Report, options: WorkloadOptions) -> str:
    """What ran; a trace may have fewer requests than were asked for."""
    return f"{report.rows[0]['requests']} requests of {options.work_name}"


def _show(report: Report, options: SimulateOptions, place: str) -> None:
    print(f"simulated: {place}")
    rows = [{**row, "e2el_s": row["e2el_ms"]["mean"] / 1000} for row in report.rows]
    tiers = [column for column in _TIER_COLUMNS if any(row[column.path] for row in rows)]
    columns = [*_COLUMNS, *(_SLO_COLUMNS if report.document["settings"]["slo_ms"] else ()), *tiers]
    print_table(_title(report, options), columns, rows)
    if options.replicas > 1:
        print_table("least / mean / most of the replicas", _SPREAD_COLUMNS, map(_spread, report.rows))


def _spread(row: Mapping[str, Any]) -> dict[str, str | None]:
    """What the replicas did: the least, the mean and the most."""
    spread: dict[str, str | None] = {"policy": row["policy"]}
    for column in _SPREAD_COLUMNS[1:]:
        found = Distribution.of(replica[column.path] for replica in row["replicas"])
        if found is not None:
            pattern = ".2f" if found.max < 10 else ",.0f"
            spread[column.path] = " / ".join(format(value, pattern) for value in (found.min, found.mean, found.max))
    return spread
