"""``nanoserve simulate``: policies on hardware that nobody here has."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from nanoserve.commands.bench_options import RESULTS_PANEL, ResultOptions, kept, work_option
from nanoserve.commands.failures import EXIT_OK
from nanoserve.commands.fleet_options import FleetOptions, show_spread
from nanoserve.commands.options import option
from nanoserve.commands.simulate_measured import MeasuredHardware
from nanoserve.commands.simulate_options import HardwareOptions, PolicyOptions, WorkloadOptions
from nanoserve.commands.simulate_tiers import SimulatedHardware, TierOptions, tier_columns
from nanoserve.errors import UsageError

if TYPE_CHECKING:
    from nanoserve.benchmarks.report import Report
    from nanoserve.measures.chrome_trace import ChromeTraceFile
    from nanoserve.measures.slo import Slo
    from nanoserve.scheduler.load import Policy
    from nanoserve.simulator import Runtime
    from nanoserve.simulator.plots import PlottedRun


def simulate(
    *,
    policies: PolicyOptions,
    work: WorkloadOptions,
    hardware: HardwareOptions,
    tiers: TierOptions,
    fleet: FleetOptions,
    slo: Annotated[
        str | None,
        work_option("--slo", help="Milliseconds that a good answer keeps to.", metavar="ttft=X,tpot=X,e2el=X"),
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
      nanoserve simulate --policy throttling,throttling:iterations=4:threshold=0.1
      nanoserve simulate --rate 40 --requests 5000 --replicas 16 --router least-tokens --slo ttft=2000,tpot=100
      nanoserve simulate --policy seesaw --prefill-parallel P4 --decode-parallel T4 --host-kv-memory 80
    """
    from nanoserve.measures.chrome_trace import ChromeTraceFile
    from nanoserve.measures.slo import parse_slo
    from nanoserve.simulator.plots import plot_simulation

    chosen = policies.by_name()
    if trace_out is not None and len(chosen) > 1:
        raise UsageError("--trace-out takes one policy")
    fleet.check()
    limits, simulated, runtime = parse_slo(slo), tiers.simulated(hardware, policies.token_budget), hardware.runtime()
    setup = _Setup(policies, work, hardware, tiers, fleet, limits, simulated, runtime)
    settings = setup.settings()
    report = results.open_report("simulate", settings)
    place = _place(settings, simulated)
    with ExitStack() as files, kept(report, lambda: _show(report, work, place)):
        trace = None if trace_out is None else files.enter_context(ChromeTraceFile(trace_out))
        runs = [setup.run(name, policy, report, trace) for name, policy in chosen.items()]
        if results.plot is not None:
            plot_simulation(results.plot, f"{place}\n{_title(report, work)}", runs)
    return EXIT_OK


@dataclass(frozen=True, slots=True)
class _Setup:
    """What the options mean together, the same for every policy."""

    policies: PolicyOptions
    work: WorkloadOptions
    hardware: HardwareOptions
    tiers: TierOptions
    fleet: FleetOptions
    slo: "Slo | None"
    simulated: SimulatedHardware | MeasuredHardware
    runtime: "Runtime"

    def settings(self) -> dict[str, Any]:
        """For the report."""
        simulated = self.simulated
        return {
            **msgspec.to_builtins(self.hardware, enc_hook=str),
            **(simulated.facts if isinstance(simulated, MeasuredHardware) else {}),
            **msgspec.to_builtins(self.tiers),
            **msgspec.to_builtins(self.work, enc_hook=str),
            **msgspec.to_builtins(self.fleet),
            "slo_ms": self.slo and msgspec.to_builtins(self.slo),
            "kv_blocks": simulated.kv_blocks[0],
            "kv_blocks_of_layouts": simulated.kv_blocks,
            "host_blocks": simulated.host_blocks,
            "max_num_batched_tokens": self.policies.token_budget,
            "max_num_seqs": self.policies.max_num_seqs,
        }

    def run(self, name: str, policy: "Policy", report: "Report", trace: "ChromeTraceFile | None") -> "PlottedRun":
        """One policy's run, whose figures are a row of the report."""
        from nanoserve.record.trace import SimulationTrace
        from nanoserve.record.window import StepWindow
        from nanoserve.simulator import simulate as run
        from nanoserve.simulator.plots import PlottedRun

        simulated, window = self.simulated, StepWindow()
        traces = [] if trace is None else [SimulationTrace(trace, self.hardware.block_size)]
        result = run(
            policy,
            simulated.layouts[0],
            self.work.workload(),
            num_blocks=simulated.kv_blocks[0],
            block_size=self.hardware.block_size,
            max_num_seqs=self.policies.max_num_seqs,
            runtime=self.runtime,
            observers=(window, *traces),
            slo=self.slo,
            replicas=self.fleet.replicas,
            router=self.fleet.router,
            host_blocks=simulated.host_blocks,
            other_layouts=simulated.other_layouts,
            predictors=simulated.predictors,
        )
        report.add({"policy": name, "bubble_share": result.bubble_share, **msgspec.to_builtins(result)})
        return PlottedRun(name, result, window)


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
