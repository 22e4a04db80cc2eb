"""``nanoserve bench gpu``: correctness, kernels and engine on one GPU, against what the same run
measures."""

from pathlib import Path

from nanoserve.commands.options import Options, option
from nanoserve.commands.terminal import remark
from nanoserve.errors import RuntimeFailure, UsageError, shown
from nanoserve.lab.benchmarks.gpu.markdown import to_markdown
from nanoserve.lab.benchmarks.gpu.running import BUDGETS, PARTS, TUNING, read_results, run_parts
from nanoserve.lab.commands.bench_options import RESULTS_PANEL, make_directory
from nanoserve.utils.interrupts import deferred_interrupts
from nanoserve.utils.threads import prepare_threads


def _parse_budgets(text: str, flag: str) -> dict[str, float]:
    budgets = {}
    for word in text.split(","):
        name, _, seconds = word.partition("=")
        if name not in BUDGETS or not (seconds.isascii() and seconds.isdigit()):
            raise UsageError(
                f"{flag} takes PART=SECONDS such as kernels=60,engine=300, not {shown(word)}"
            )
        budgets[name] = float(seconds)
    return budgets


class GpuOptions(Options):
    part: list[str] | None = option(
        None, "correctness, kernels or engine (may be repeated).", metavar="NAME"
    )
    budget: dict[str, float] | None = option(
        None,
        "Seconds of a part: kernels=60,engine=300.",
        metavar="PART=N,...",
        parse=_parse_budgets,
    )
    dry_run: bool = option(False, "Run every part on the CPU, with a few tiny cases.")
    tune: bool = option(
        False,
        "Instead, try configurations of the attention programs and write the table of the best "
        "ones.",
    )
    out: Path | None = option(
        None, "Write every part's figures here.", metavar="DIR", panel=RESULTS_PANEL
    )
    table: Path | None = option(
        None,
        "Measure nothing: print the tables of such a directory, or of a file of results.",
        metavar="PATH",
        panel=RESULTS_PANEL,
    )


def run(options: GpuOptions) -> int | None:
    """It takes less than eight minutes. Every figure is on disk as soon as it is known; the same
    command with the same --out goes on where it was interrupted. Exit code 1 says that something
    computed wrongly.

    [bold]Examples[/bold]

      nanoserve bench gpu --out results
      nanoserve bench gpu --out results --part kernels --budget kernels=200
      nanoserve bench gpu --out trial --dry-run
      nanoserve bench gpu --out tuned --tune
      nanoserve bench gpu --table results
    """
    if options.table is not None:
        print(to_markdown(read_results(options.table)), end="")
        return None
    if options.out is None:
        raise UsageError("--out DIR is needed: that is where the figures go")
    if options.tune and (options.dry_run or options.part):
        raise UsageError(
            "--tune measures on a GPU, and nothing else: leave out --dry-run and --part"
        )
    for name in options.part or ():
        if name not in PARTS:
            raise UsageError(f"--part {shown(name)} is not one of {', '.join(PARTS)}")
    parts = [name for name in PARTS if not options.part or name in options.part]
    if options.tune:
        parts = [TUNING]
    prepare_threads()
    if not options.dry_run:
        with deferred_interrupts():  # torch goes on half imported, and fails later in its own words
            from nanoserve.executor.start.model_loading import check_cuda
            from nanoserve.lab.benchmarks.gpu.device import INSTEAD
        # which leaves its memory free for the measurements
        check_cuda(asked="bench gpu", instead=INSTEAD)
    make_directory(options.out)
    try:
        written = run_parts(
            options.out, parts, {**BUDGETS, **(options.budget or {})}, dry_run=options.dry_run
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"{options.out} keeps what was measured; the same command goes on there"
        ) from None
    if options.tune:
        remark(f"the new table is {written}: it takes the place of triton_ops/gpu/{written.name}")
        return None
    results = read_results(written)
    print(to_markdown(results), end="")
    remark(f"all of it is in {written}")
    rows = results["parts"].get("correctness", {}).get("rows", ())
    if any(row.get("ok") is False or "error" in row for row in rows):
        return RuntimeFailure.exit_code
    return None
