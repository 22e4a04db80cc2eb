"""``nanoserve bench gpu``: correctness, kernels and engine on one GPU, against what the same run measures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from nanoserve.commands.bench_options import RESULTS_PANEL, WORK_PANEL, make_directory, work_option
from nanoserve.commands.failures import EXIT_FAILURE, EXIT_OK
from nanoserve.commands.options import option, switch
from nanoserve.commands.terminal import remark
from nanoserve.errors import UsageError
from nanoserve.processes.interrupts import deferred_interrupts
from nanoserve.processes.threads import prepare_threads


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOptions:
    """What is measured, and where the figures go."""

    out: Annotated[
        Path | None,
        option("--out", panel=RESULTS_PANEL, help="Write every part's figures here.", metavar="DIR", envvar=None),
    ] = None
    part: Annotated[
        list[str] | None,
        work_option("--part", help="correctness, kernels or engine; several times for several.", metavar="NAME"),
    ] = None
    budget: Annotated[
        str | None, work_option("--budget", help="Seconds of a part: kernels=60,engine=300.", metavar="PART=N,...")
    ] = None
    dry_run: Annotated[
        bool,
        switch("--dry-run", panel=WORK_PANEL, help="Run every part on the CPU, with a few tiny cases.", envvar=None),
    ] = False
    tune: Annotated[
        bool,
        switch(
            "--tune",
            panel=WORK_PANEL,
            help="Instead, try configurations of the attention programs and write the table of the best ones.",
            envvar=None,
        ),
    ] = False
    table: Annotated[
        Path | None,
        option(
            "--table",
            panel=RESULTS_PANEL,
            help="Measure nothing: print the tables of such a directory, or of a file of results.",
            metavar="PATH",
            envvar=None,
        ),
    ] = None


def gpu(*, work: GpuOptions) -> int:
    """Check every kernel and model family on this GPU, time the kernels beside their peers, time the engine.

    Is given less than eight minutes. Every figure is on disk as soon as it is known; the same command with the same
    --out goes on where it was interrupted. Exit code 1 says that something computed wrongly.

    [bold]Examples[/bold]

      nanoserve bench gpu --out results
      nanoserve bench gpu --out results --part kernels --budget kernels=200
      nanoserve bench gpu --out trial --dry-run
      nanoserve bench gpu --out tuned --tune
      nanoserve bench gpu --table results
    """
    from nanoserve.benchmarks.gpu.markdown import to_markdown
    from nanoserve.benchmarks.gpu.results import PARTS, TUNED_FILE, TUNING, read_results
    from nanoserve.benchmarks.gpu.running import BUDGETS

    if work.table is not None:
        print(to_markdown(read_results(work.table)), end="")
        return EXIT_OK
    if work.out is None:
        raise UsageError("--out DIR is needed: that is where the figures go")
    if work.tune and (work.dry_run or work.part):
        raise UsageError("--tune measures on a GPU, and nothing else: leave out --dry-run and --part")
    parts = (TUNING,) if work.tune else _chosen(work.part, PARTS)
    budgets = {**BUDGETS, **_budgets(work.budget, tuple(BUDGETS))}
    prepare_threads()
    if not work.dry_run:
        _check_gpu()
    together = _measured(work.out, parts, budgets, dry_run=work.dry_run)
    if together is None:
        remark(f"the new table is {work.out / TUNED_FILE}: it takes the place of triton_ops/gpu/{TUNED_FILE}")
        return EXIT_OK
    results = read_results(together)
    print(to_markdown(results), end="")
    remark(f"all of it is in {together}")
    rows = results["parts"].get("correctness", {}).get("rows", ())
    return EXIT_FAILURE if any(row.get("ok") is False or "error" in row for row in rows) else EXIT_OK


def _measured(out: Path, parts: Sequence[str], budgets: Mapping[str, float], *, dry_run: bool) -> Path | None:
    """The file with all results, once there are any; None if a new table of configurations was the aim."""
    from nanoserve.benchmarks.gpu.running import PartRunner, worker_command

    make_directory(out)
    try:
        return PartRunner(out, worker_command(out, dry_run=dry_run), dry_run=dry_run).run(parts, budgets)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{out} keeps what was measured; the same command goes on there") from None


def _check_gpu() -> None:
    with deferred_interrupts():  # torch goes on half imported, and fails later in its own words
        from nanoserve.benchmarks.gpu.setting import check_gpu
    check_gpu()


def _chosen(names: list[str] | None, known: tuple[str, ...]) -> tuple[str, ...]:
    """In their own order, whatever order they were asked for in."""
    for name in names or ():
        if name not in known:
            raise UsageError(f"--part {name!r} is not one of {', '.join(known)}")
    return tuple(name for name in known if not names or name in names)


def _budgets(text: str | None, known: tuple[str, ...]) -> Mapping[str, float]:
    budgets = {}
    for word in text.split(",") if text else ():
        name, _, seconds = word.partition("=")
        if name not in known or not (seconds.isascii() and seconds.isdigit()):
            raise UsageError(f"--budget takes PART=SECONDS such as kernels=60,engine=300, not {word!r}")
        budgets[name] = float(seconds)
    return budgets
