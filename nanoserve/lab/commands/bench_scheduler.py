"""``nanoserve bench scheduler``: what deciding costs per step, in pure Python."""

from statistics import median

from nanoserve.commands.options import option
from nanoserve.commands.progress import watched
from nanoserve.commands.tables import columns
from nanoserve.executor.profiling.scheduler_cost import measure_scheduler
from nanoserve.lab.benchmarks.machine import ForeignLoad
from nanoserve.lab.benchmarks.plots import plot_stacks
from nanoserve.lab.benchmarks.report import Report
from nanoserve.lab.benchmarks.rounds import MeasuredRound, counting_words, shown_rounds
from nanoserve.lab.benchmarks.verdicts import spread_text
from nanoserve.lab.commands.bench_options import ResultOptions, RoundOptions, print_results
from nanoserve.lab.workloads import parse_sizes
from nanoserve.scheduler import make_policy

_PARTS = {"schedule": "schedule_ms", "apply": "apply_ms"}
_COLUMNS = columns(
    (",d", "sequences"),
    (".3f", "schedule_ms", "apply_ms", ("both ms", "step_ms"), "slowest_ms"),
    (".2f", ("us per sequence", "microseconds_per_sequence"), "foreign_cores"),
)


class Decided(MeasuredRound, frozen=True, kw_only=True):
    """The steps of one number of sequences: how long scheduling and applying each took, in
    seconds."""

    seconds: list[tuple[float, float]]


class SchedulerOptions(RoundOptions, ResultOptions):
    sequences: tuple[int, ...] = option(
        "1,4,16,64,128,256", "Running sequences.", metavar="N,N,...", parse=parse_sizes
    )
    context: int = option(512, "Tokens of each at the start.", minimum=1, maximum=100_000)
    steps: int = option(200, "Steps measured.", minimum=1, maximum=100_000)
    policy: str = option("sarathi", "Scheduling policy.", metavar="NAME")


def run(options: SchedulerOptions) -> None:
    """No model runs.

    [bold]Example[/bold]

      nanoserve bench scheduler --sequences 64,256,1024
    """
    make_policy(options.policy, 1)  # an unknown name is told before anything runs
    settings = {"context": options.context, "steps": options.steps, "policy": options.policy}
    with options.reported("scheduler", settings, _show) as report:
        repeating, tried = options.repeating(), list[Decided]()
        for size in watched(options.sequences, "sizes"):

            def decide(_: int, size: int = size) -> Decided:
                foreign = ForeignLoad()
                found = measure_scheduler(
                    size, context=options.context, steps=options.steps, policy=options.policy
                )
                return Decided(foreign_cores=foreign.read(), seconds=list(found))

            several = list(repeating.rounds(decide, 1))
            tried += several
            chosen = shown_rounds(several)[-1]
            load, seconds = chosen.foreign_cores, chosen.seconds
            both = list(map(sum, seconds))
            schedule, apply = map(median, zip(*seconds, strict=True))
            times = {
                "schedule": schedule,
                "apply": apply,
                "step": median(both),
                "slowest": max(both),
            }
            row = {"microseconds_per_sequence": 1e6 * median(both) / size, "foreign_cores": load}
            row |= {f"{name}_ms": 1e3 * value for name, value in times.items()}
            report.add({"case": f"{size} sequences", "sequences": size, **row})
            report.put("counting", counting_words(tried, "runs"))


def _show(report: Report, options: SchedulerOptions) -> str:
    title = (
        f"scheduler per step, {options.policy}, context {options.context}, {options.steps} steps"
    )
    print_results(report, title, _COLUMNS)
    if options.plot is not None:
        plot_stacks(
            options.plot,
            report.titled(title),
            "{case}",
            "time of a step, ms",
            {"": _PARTS},
            report.rows,
        )
    each = spread_text(row["microseconds_per_sequence"] for row in report.rows)
    apart = spread_text(row["slowest_ms"] / row["step_ms"] for row in report.rows)
    words = (
        f"Deciding takes {each} us a sequence, and the slowest step {apart} times the median one"
    )
    return f"{words}; {report.document['counting']}."
