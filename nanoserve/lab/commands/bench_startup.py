"""``nanoserve bench startup``: from a new process to its first tokens."""

import msgspec

from nanoserve.commands.engine_options import EngineOptions
from nanoserve.commands.options import option
from nanoserve.commands.tables import Column, columns
from nanoserve.commands.terminal import remark
from nanoserve.lab.benchmarks.machine import ForeignLoad
from nanoserve.lab.benchmarks.plots import plot_stacks
from nanoserve.lab.benchmarks.report import Report
from nanoserve.lab.benchmarks.rounds import MeasuredRound, counting_words, shown_rounds
from nanoserve.lab.benchmarks.starting import (
    STAGES,
    TO_FIRST_TOKEN,
    drop_from_page_cache,
    library_directories,
    start_once,
)
from nanoserve.lab.benchmarks.verdicts import spread_text
from nanoserve.lab.commands.bench_options import (
    ResultOptions,
    RoundOptions,
    operators_title,
    print_results,
)
from nanoserve.utils.temporary import temporary_directory

_STAGES = {name: f"stages.{name}" for name in STAGES}
_SHOWN = [
    (name, path) for name, path in _STAGES.items() if name not in ("second token", "third token")
]
_STAGE_COLUMNS = [Column(name, path, ".2f") for name, path in _SHOWN]
_COLUMNS = columns(("", ("start", "case"))) + _STAGE_COLUMNS + columns((".2f", "to_first_token"))


class Start(MeasuredRound, frozen=True, kw_only=True):
    """A start of a process: seconds of each stage, and up to the first token."""

    case: str
    stages: dict[str, float]
    to_first_token: float


class StartupOptions(RoundOptions, EngineOptions, ResultOptions):
    repeats: int = option(3, "Warm starts, after the first ever and a cold one.", minimum=1)


def run(options: StartupOptions) -> None:
    """The first start finds an empty cache, so it also builds the C++ operators and compiles the
    layers, which takes a minute or two. The next one is cold: the files of torch, nanoserve and the
    model were dropped from the page cache before, as far as no other process holds them.

    [bold]Example[/bold]

      nanoserve bench startup -m dummy:smollm2-135m
    """
    settings = options.settings()
    document = {"model": options.model, "repeats": options.repeats, "engine": settings}
    directory = options.find_model().directory
    model = options.model
    if directory is not None:
        model = str(directory)  # with another cache the hub's could not be found
    with options.reported("startup", document, _show) as report, temporary_directory() as cache:

        def start(case: str) -> Start:
            remark(f"starting a process, {case}")
            if case == "cold":
                dropped = library_directories()
                if directory is not None:
                    dropped.append(directory)
                drop_from_page_cache(dropped)
            foreign = ForeignLoad()
            found = start_once(model, settings, options.threads, cache)
            for fact in ("operators", "layers"):
                report.put(fact, found.pop(fact))
            return Start(case=case, foreign_cores=foreign.read(), **found)

        for case in ("first ever", "cold"):
            report.add(msgspec.to_builtins(start(case)))
        for done in options.repeating().rounds(lambda _: start("warm"), options.repeats):
            report.add({**msgspec.to_builtins(done), "counts": done.counts})


def _show(report: Report, options: ResultOptions) -> str:
    model = report.document["settings"]["model"] or "the bundled storyteller"
    title = f"seconds to start {model}, {operators_title(report.document)}"
    starts = msgspec.convert(report.rows, list[Start])
    warm = [one for one in starts if one.case == "warm"]
    counting = [one.to_first_token for one in warm if one.counts]
    report.put("samples", {"warm": {"to_first_token_s": counting}})
    print_results(report, title, _COLUMNS)
    if options.plot is not None:
        first = {name: _STAGES[name] for name in TO_FIRST_TOKEN}
        stacks = {"to the first token": first, "until everything is built": _STAGES}
        plot_stacks(
            options.plot,
            report.titled(title),
            "{case}",
            "time since the start, s",
            stacks,
            report.rows,
        )
    cold = [one.to_first_token for one in starts if one.case == "cold"]
    seconds = [one.to_first_token for one in shown_rounds(warm)]
    if not seconds:
        return "No warm start was measured."
    ratio = spread_text(one / cold[0] for one in seconds)
    taken = f"A warm start takes {spread_text(seconds)} s to the first token, {ratio} of a cold one"
    return f"{taken}; {counting_words(warm, 'warm starts')}."
