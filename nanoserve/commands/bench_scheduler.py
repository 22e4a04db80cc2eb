"""``nanoserve bench scheduler``: what deciding costs per step, in pure Python."""

from typing import TYPE_CHECKING, Annotated

import msgspec

from nanoserve.commands.bench_options import ResultOptions, kept, print_head, work_option
from nanoserve.commands.failures import EXIT_OK
from nanoserve.commands.progress import watched

if TYPE_CHECKING:
    from nanoserve.benchmarks.report import Report


def scheduler(
    *,
    sequences: Annotated[
        str, work_option("--sequences", help="Running sequences.", metavar="N,N,...")
    ] = "1,4,16,64,128,256",
    context: Annotated[int, work_option("--context", help="Tokens of each at the start.", min=1, max=100_000)] = 512,
    steps: Annotated[int, work_option("--steps", help="Steps measured.", min=1, max=100_000)] = 200,
    policy: Annotated[str, work_option("--policy", help="Scheduling policy.", metavar="NAME")] = "sarathi",
    results: ResultOptions,
) -> int:
    """Time the scheduler alone: a plan for so many decoding sequences, and taking its result back. No model runs.

    [bold]Example[/bold]

      nanoserve bench scheduler --sequences 64,256,1024
    """
    from nanoserve.benchmarks.cpu_load import ForeignLoad
    from nanoserve.measures.workloads import parse_sizes
    from nanoserve.runtime.profiling.scheduler_cost import measure_scheduler
    from nanoserve.scheduler import make_policy

    sizes = parse_sizes(sequences, "--sequences")
    make_policy(policy, 1)  # an unknown name is told before anything runs
    report = results.open_report("scheduler", {"context": context, "steps": steps, "policy": policy})
    with kept(report, lambda: _show(report, results)):
        for size in watched(sizes, "sizes"):
            foreign = ForeignLoad()
            cost = measure_scheduler(size, context=context, steps=steps, policy=policy)
            facts = {"case": f"{size} sequences", **msgspec.to_builtins(cost), "foreign_cores": foreign.read()}
            report.add(facts)
    return EXIT_OK


def _show(report: "Report", results: ResultOptions) -> None:
    from nanoserve.benchmarks.plots import plot_bars
    from nanoserve.benchmarks.tables import Column, print_table

    columns = [
        Column("sequences", "sequences", ",d"),
        Column("schedule ms", "schedule_ms", ".3f"),
        Column("apply ms", "apply_ms", ".3f"),
        Column("both ms", "step_ms", ".3f"),
        Column("slowest ms", "slowest_ms", ".3f"),
        Column("us per sequence", "microseconds_per_sequence", ".2f"),
        Column("foreign cores", "foreign_cores", ".2f"),
    ]
    settings = report.document["settings"]
    title = f"scheduler per step, {settings['policy']}, context {settings['context']}, {settings['steps']} steps"
    print_head(report)
    print_table(title, columns, report.rows)
    if results.plot is not None:
        plot_bars(results.plot, report.titled(title), "{case}", [Column("both ms", "step_ms", ".3f")], report.rows)
