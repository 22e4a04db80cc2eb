"""``nanoserve bench startup``: from a new process to its first tokens."""

from nanoserve.benchmarks.machine import ForeignLoad
from nanoserve.benchmarks.plots import plot_stacks
from nanoserve.benchmarks.report import Report
from nanoserve.benchmarks.starting import STAGES, TO_FIRST_TOKEN, drop_from_page_cache, library_directories, start_once
from nanoserve.benchmarks.tables import columns
from nanoserve.commands.bench_options import ResultOptions, operators_title, print_results
from nanoserve.commands.engine_options import EngineOptions
from nanoserve.commands.options import option
from nanoserve.commands.progress import watched
from nanoserve.commands.terminal import remark
from nanoserve.processes.temporary import temporary_directory

_STAGES = {name: f"stages.{name}" for name in STAGES}
_COLUMNS = columns(("", ("start", "case")), *((".2f", stage) for stage in _STAGES.items()), (".2f", "to_first_token"))


class StartupOptions(EngineOptions, ResultOptions):
    repeats: int = option(3, "Warm starts, after the first ever and a cold one.", minimum=1)


def run(options: StartupOptions) -> None:
    """The first start finds an empty cache, so it also builds the C++ operators and compiles the layers, which takes a
    minute or two. The next one is cold: the files of torch, nanoserve and the model were dropped from the page cache
    before, as far as no other process holds them.

    [bold]Example[/bold]

      nanoserve bench startup -m dummy:smollm2-135m
    """
    settings = options.settings()
    document = {"model": options.model, "repeats": options.repeats, "engine": settings}
    directory = options.find_model().directory
    model = options.model if directory is None else str(directory)  # with another cache the hub's could not be found
    with options.reported("startup", document, _show) as report, temporary_directory() as cache:
        for case in watched(["first ever", "cold", *["warm"] * options.repeats], "starts"):
            remark(f"starting a process, {case}")
            if case == "cold":
                drop_from_page_cache([*library_directories(), *([] if directory is None else [directory])])
            foreign = ForeignLoad()
            start = start_once(model, settings, options.threads, cache) | {"foreign_cores": foreign.read()}
            for fact in ("operators", "layers"):
                report.put(fact, start.pop(fact))
            report.add({"case": case, **start})


def _show(report: Report, options: ResultOptions) -> None:
    model = report.document["settings"]["model"] or "the bundled storyteller"
    title = f"seconds to start {model}, {operators_title(report.document)}"
    warm = [row["to_first_token"] for row in report.rows if row["case"] == "warm"]
    report.put("samples", {"warm": {"to_first_token_s": warm}})
    print_results(report, title, _COLUMNS)
    if options.plot is not None:
        first = {name: _STAGES[name] for name in TO_FIRST_TOKEN}
        stacks = {"to the first token": first, "until everything is built": _STAGES}
        plot_stacks(options.plot, report.titled(title), "{case}", "time since the start, s", stacks, report.rows)
