"""``nanoserve simulate``: policies on hardware that nobody here has."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from nanoserve.benchmarks.policy_names import parse_policies
from nanoserve.benchmarks.report import Report
from nanoserve.benchmarks.tables import columns, print_table
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
from nanoserve.layout import ParallelLayout
from nanoserve.measures.charts import draw
from nanoserve.measures.chrome_trace import ChromeTraceFile
from nanoserve.measures.metrics import Distribution, parse_slo
from nanoserve.record.trace import RunTrace
from nanoserve.record.window import StepWindow
from nanoserve.simulator import OtherLayout, simulate
from nanoserve.simulator.fleet import check_replicas, make_router
from nanoserve.simulator.plots import PANEL_SIZE, PlottedRun, simulation_chart

_COLUMNS = columns(
    ("", "policy"),
    (",.0f", ("tok/s", "tokens_per_second")),
    (",.2f", ("req/s", "requests_per_second")),
    (",.0f", ("TTFT ms", "ttft_ms.mean"), ("p99", "ttft_ms.p99")),
    (",.1f", ("TPOT ms", "tpot_ms.mean"), ("p99", "tpot_ms.p99"), ("E2EL s", "e2el_s")),
    (".1%", ("bubbles", "bubble_share")),
    (",.0f", ("tokens/step", "tokens_per_step.mean")),
    (".2f", ("variation", "tokens_variation")),
    (".0%", ("KV mean", "kv_occupancy"), ("KV peak", "kv_peak")),
    (",d", ("preempted", "preemptions")),
)
_SLO_COLUMNS = columns((".1%", ("SLO", "slo_attainment")), (",.2f", "goodput"))
_TIER_COLUMNS = columns(  # shown if anything happened there
    (",d", "transitions"),
    (",.1f", ("take s", "transition_seconds")),
    (",d", ("tokens out", "swapped_out_tokens"), ("tokens in", "swapped_in_tokens")),
    (".0%", ("host mean", "host_occupancy")),
    (",d", "host_tokens"),
    (".0%", ("CPU", "processor_share")),
)
_SPREAD_COLUMNS = columns(
    ("", "policy", "requests", "output_tokens", ("TTFT ms", "ttft_ms"), ("TPOT ms", "tpot_ms")),
    ("", ("bubbles", "bubble_share"), ("KV mean", "kv_occupancy"), ("until s", "seconds")),
)


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
    pairs = list(zip(hardware.layouts, hardware.kv_blocks, strict=True))
    settings = _settings(options, hardware) | {"slo_ms": slo and msgspec.to_builtins(slo)}
    place = _place(settings, hardware)
    reported = options.reported("simulate", settings, lambda report, options: _show(report, options, place))
    # All devices of a simulated stage are one worker, which is named by its stage if there is one layout.
    layouts = options.layouts() if len(hardware.layouts) > 1 else (ParallelLayout(),)
    with reported as report, ExitStack() as files:
        trace = None if options.record is None else files.enter_context(ChromeTraceFile(options.record))
        runs: list[PlottedRun] = []
        for name, policy in chosen.items():
            window = StepWindow(beside=runs[0].window if runs else None)
            traces = [] if trace is None else [RunTrace(trace, 0.0, layouts=layouts)]
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
                other_layouts=[OtherLayout(*pair) for pair in pairs[1:]],
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
    blocks = " -> ".join(f"{number:,d}" for number in hardware.kv_blocks) + " KV blocks"
    host = f", {hardware.host_blocks:,d} in host memory" if hardware.host_blocks else ""
    several = f", {settings['replicas']} replicas ({settings['router']})" if settings["replicas"] > 1 else ""
    layout = f"{hardware.name}, {settings['metadata']} metadata, {blocks}{host}{several}"
    return f"{settings['model']} on {settings['hardware']}, {layout}"


def _title(report: Report, options: WorkloadOptions) -> str:
    """What ran; a trace may have fewer requests than were asked for."""
    return f"{report.rows[0]['requests']} requests of {options.work_name}"


def _show(report: Report, options: SimulateOptions, place: str) -> None:
    print(f"simulated: {place}")
    rows = [{**row, "e2el_s": row["e2el_ms"]["mean"] / 1000} for row in report.rows]
    tiers = [column for column in _TIER_COLUMNS if any(row[column.path] for row in rows)]
    slo = _SLO_COLUMNS if report.document["settings"]["slo_ms"] else []
    print_table(_title(report, options), [*_COLUMNS, *slo, *tiers], rows)
    if options.replicas > 1:
        print_table("least / mean / most of the replicas", _SPREAD_COLUMNS, map(_spread, report.rows))


def _spread(row: Mapping[str, Any]) -> dict[str, str | None]:
    """What the replicas did: the least, the mean and the most."""
    spread: dict[str, str | None] = {"policy": row["policy"]}
    for column in _SPREAD_COLUMNS[1:]:
        if (found := Distribution.of(replica[column.path] for replica in row["replicas"])) is not None:
            shown = ".2f" if found.max < 10 else ",.0f"
            spread[column.path] = f"{found.min:{shown}} / {found.mean:{shown}} / {found.max:{shown}}"
    return spread
