"""``nanoserve simulate``: policies on hardware that nobody here has."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from nanoserve.commands.bench_options import RESULTS_PANEL, WORK_PANEL, ResultOptions, kept
from nanoserve.commands.failures import EXIT_OK
from nanoserve.commands.fleet_options import FleetOptions, show_spread
from nanoserve.commands.options import option
from nanoserve.commands.simulate_measured import MeasuredHardware
from nanoserve.commands.simulate_options import MOST_AT_A_TIME, HardwareOptions, WorkloadOptions
from nanoserve.commands.simulate_tiers import SimulatedHardware, TierOptions, tier_columns
from nanoserve.errors import UsageError

if TYPE_CHECKING:
    from nanoserve.benchmarks.report import Report
    from nanoserve.scheduler.load import Policy


def simulate(
    *,
    policy: Annotated[
        str,
        option("--policy", panel=WORK_PANEL, help="See nanoserve policies.", metavar="NAME,NAME,...", envvar=None),
    ] = "throttling",
    parameters: Annotated[
        str | None,
        option("--set", panel=WORK_PANEL, help="The policy's parameters.", metavar="NAME=VALUE,...", envvar=None),
    ] = None,
    token_budget: Annotated[
        int,
        option(
            "--max-num-batched-tokens",
            panel=WORK_PANEL,
            help="Token budget of a step.",
            min=1,
            max=MOST_AT_A_TIME,
            envvar=None,
        ),
    ] = 2048,
    max_num_seqs: Annotated[
        int,
        option(
            "--max-num-seqs", panel=WORK_PANEL, help="Most sequences at a time.", min=1, max=MOST_AT_A_TIME, envvar=None
        ),
    ] = 2048,
    work: WorkloadOptions,
    hardware: HardwareOptions,
    tiers: TierOptions,
    fleet: FleetOptions,
    slo: Annotated[
        str | None,
        option(
            "--slo",
            panel=WORK_PANEL,
            help="Milliseconds that a good answer keeps to.",
            metavar="ttft=X,tpot=X,e2el=X",
            envvar=None,
        ),
    ] = None,
    results: ResultOptions,
    trace_out: Annotated[
        Path | None,
        option(
            "--trace-out",
            panel=RESULTS_PANEL,
            help="Write the stages' time for chrome://tracing; one policy only.",
            metavar="FILE",
            envvar=None,
        ),
    ] = None,
) -> int:
    """Run the scheduler in virtual time: the same classes as in the engine, over a model of hardware and links.

    [bold]Examples[/bold]

      nanoserve simulate --policy sarathi,throttling,adaptive --rate 4
      nanoserve simulate --model qwen2.5-14b --lengths azure-conv --rate 2 --trace-out stages.json
      nanoserve simulate --policy throttling --set iterations=4,threshold=0.1 --lengths 512+128
      nanoserve simulate --rate 40 --requests 5000 --replicas 16 --router least-tokens --slo ttft=2000,tpot=100
      nanoserve simulate --policy seesaw --prefill-parallel P4 --decode-parallel T4 --host-kv-memory 80
    """
    from nanoserve.benchmarks.slo import parse_slo
    from nanoserve.simulator import simulate as run
    from nanoserve.simulator.chrome_trace import ChromeTrace
    from nanoserve.simulator.plots import PlottedRun, plot_simulation
    from nanoserve.simulator.window import StepWindow

    policies = _policies(policy, token_budget, parameters)
    if trace_out is not None and len(policies) > 1:
        raise UsageError("--trace-out takes one policy")
    fleet.check()
    limits = parse_slo(slo)
    simulated, runtime = tiers.simulated(hardware), hardware.runtime()
    settings = {
        **msgspec.to_builtins(hardware, enc_hook=str),
        **(simulated.facts if isinstance(simulated, MeasuredHardware) else {}),
        **msgspec.to_builtins(tiers),
        **msgspec.to_builtins(work, enc_hook=str),
        **msgspec.to_builtins(fleet),
        "slo_ms": limits and msgspec.to_builtins(limits),
        "kv_blocks": simulated.kv_blocks[0],
        "kv_blocks_of_layouts": simulated.kv_blocks,
        "host_blocks": simulated.host_blocks,
        "parameters": parameters,
        "max_num_batched_tokens": token_budget,
        "max_num_seqs": max_num_seqs,
    }
    report = results.open_report("simulate", settings)
    runs: list[PlottedRun] = []
    place = _place(settings, simulated)
    with ExitStack() as files, kept(report, lambda: _show(report, work, place)):
        traces = [] if trace_out is None else [files.enter_context(ChromeTrace(trace_out))]
        for name, chosen in policies.items():
            window = StepWindow()
            result = run(
                chosen,
                simulated.layouts[0],
                work.workload(),
                num_blocks=simulated.kv_blocks[0],
                block_size=hardware.block_size,
                max_num_seqs=max_num_seqs,
                runtime=runtime,
                observers=(window, *traces),
                slo=limits,
                replicas=fleet.replicas,
                router=fleet.router,
                host_blocks=simulated.host_blocks,
                other_layouts=simulated.other_layouts,
                predictors=simulated.predictors,
                tier_observers=traces,
            )
            report.add({"policy": name, "bubble_share": result.bubble_share, **msgspec.to_builtins(result)})
            runs.append(PlottedRun(name, result, window))
        if results.plot is not None:
            plot_simulation(results.plot, f"{place}\n{_title(report, work)}", runs)
    return EXIT_OK


def _policies(names: str, token_budget: int, parameters: str | None) -> dict[str, "Policy"]:
    from nanoserve.scheduler.registry import make_policy, parse_parameters

    return {name: make_policy(name, token_budget, parse_parameters(name, parameters)) for name in names.split(",")}


def _place(settings: dict[str, Any], simulated: SimulatedHardware | MeasuredHardware) -> str:
    """On what it ran, in one line."""
    several = f", {settings['replicas']} replicas ({settings['router']})" if settings["replicas"] > 1 else ""
    layout = f"{simulated.name}, {settings['metadata']} metadata, {simulated.blocks_name}{several}"
    return f"{settings['model']} on {settings['hardware']}, {layout}"


def _title(report: "Report", work: WorkloadOptions) -> str:
    """What ran; a trace may have fewer requests than were asked for."""
    return f"{report.rows[0]['requests']} requests of {work.name}"


def _show(report: "Report", work: WorkloadOptions, place: str) -> None:
    from nanoserve.benchmarks.tables import Column, print_table

    columns = [
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
    settings = report.document["settings"]
    if settings["slo_ms"]:
        columns += [Column("SLO", "slo_attainment", ".1%"), Column("goodput", "goodput", ",.2f")]
    print(f"simulated: {place}")
    rows = [{**row, "e2el_s": row["e2el_ms"]["mean"] / 1000} for row in report.rows]
    print_table(_title(report, work), columns + tier_columns(rows), rows)
    if settings["replicas"] > 1:
        show_spread(report)
