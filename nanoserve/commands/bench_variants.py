"""The harness of ``bench pipeline``, ``bench reshard`` and ``bench hybrid``, which are presets of it.

A preset says which metrics a run has, which variants form pairs, and what is shown. Its command opens engines and names
variants and cases; the rest is here: the machine's facts, rounds, a report that is kept after each, ratios and tables.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from nanoserve.benchmarks.cpu_load import ForeignLoad
from nanoserve.benchmarks.policies.rounds import (
    Bench,
    KeptRuns,
    Measure,
    Pair,
    Ratio,
    pairs,
    ratios,
    samples,
    summarize,
)
from nanoserve.benchmarks.policies.variants import OpenEngine, Variant
from nanoserve.benchmarks.report import Report
from nanoserve.benchmarks.tables import Column, print_table
from nanoserve.commands.bench_options import (
    WORK_PANEL,
    ResultOptions,
    kept,
    print_counting,
    print_head,
    settled_operators,
)
from nanoserve.commands.engine_options import MODEL_PANEL, Progress, WorkersOptions
from nanoserve.commands.failures import EXIT_OK
from nanoserve.commands.options import option
from nanoserve.commands.progress import show_progress
from nanoserve.commands.terminal import remark
from nanoserve.config import ModelConfig
from nanoserve.engine_config import EngineConfig
from nanoserve.measures.chrome_trace import ChromeTraceFile
from nanoserve.measures.workloads import RequestShape
from nanoserve.models.hub import ResolvedModel, resolve_model
from nanoserve.processes.threads import threads_of_each

DEFAULT_MODEL = "dummy:qwen3-0.6b"


class VariantsOptions(ResultOptions, WorkersOptions, panel=WORK_PANEL):
    """How often the variants take turns, on which workers, and where results go."""

    rounds: int = option(3, "Rounds that count.", minimum=1)


class RandomModelOptions(VariantsOptions):
    """The same, with random weights unless another model is named."""

    model: str | None = option(
        DEFAULT_MODEL, "Directory, hub id or dummy:NAME.", "-m", metavar="MODEL", panel=MODEL_PANEL
    )


class Table(NamedTuple):
    """A table of the results; without rows it is left out."""

    heading: str
    columns: Sequence[Column]
    rows: Iterable[Mapping[str, Any]]
    keys: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """What variants are compared by."""

    kind: str
    """Name of the benchmark in reports."""
    ratios: Mapping[str, str]
    """Metrics that ratios are formed of, and what tables call them."""
    tables: Callable[[Report, Sequence[Mapping[str, Any]], Sequence[Ratio]], Iterable[Table]]
    """Makes the tables of a report from its summary and ratios."""
    plot: Callable[[Path, Report, KeptRuns, Sequence[Bench]], None]
    pairs: Callable[[Sequence[Variant]], list[Pair]] = pairs
    by_case: bool = False
    """Whether there may be several cases, which summaries and ratios then name."""
    notes: Callable[[Report, Sequence[Bench]], Iterable[str]] = lambda report, benches: ()
    """Sentences above the tables, from figures that it may put into the report."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What the command opens for a preset, and what all its rounds share."""

    options: VariantsOptions
    config: EngineConfig
    report: Report
    opened: ExitStack
    """Closes what was opened."""
    resolved: ResolvedModel
    model: ModelConfig
    kept: KeptRuns
    engines: list[OpenEngine] = field(default_factory=list)

    @property
    def seed(self) -> int:
        return self.options.seed or 0

    @cached_property
    def probe(self) -> Any:
        """A BandwidthProbe; it imports torch."""
        from nanoserve.benchmarks.roofline import BandwidthProbe

        return BandwidthProbe()

    @cached_property
    def foreign(self) -> ForeignLoad:
        return ForeignLoad()

    def open(self, announced: str, open_engine: Callable[[Progress], OpenEngine]) -> OpenEngine:
        """Open an engine for all rounds while its progress is shown; the end of the comparison closes it."""
        remark(announced)
        with show_progress() as progress:
            self.engines.append(open_engine(progress))
        self.opened.callback(self.engines[-1].close)
        return self.engines[-1]

    def bench(
        self,
        case: str,
        shapes: Sequence[RequestShape],
        variants: Sequence[Variant],
        measure: Measure,
        *,
        rate: float = float("inf"),
        facts: Mapping[str, Any] | None = None,
    ) -> Bench:
        """The rounds of a case; ``facts`` are what reports say about it beside its name."""
        prefix = "" if facts is None else f"{case}, "
        return Bench(
            case=case,
            facts=facts or {},
            variants=variants,
            shapes=shapes,
            vocab_size=self.model.vocab_size,
            seed=self.seed,
            rate=rate,
            measure=measure,
            probe=self.probe.read,
            foreign=self.foreign,
            keep=lambda run: self.kept.keep(prefix + run.variant.name, run),
        )

    def engine_facts(self, operators: str) -> dict[str, Any]:
        """What the report says about the engines, whatever they are compared for."""
        import torch

        from nanoserve.benchmarks.peers.weights import dtype_name

        return {
            "model": self.resolved.name,
            "dtype": dtype_name(self.config.dtype, self.model),
            "operators": operators,
            "layers": "compiled" if all(engine.compiled for engine in self.engines) else "eager",
            "threads": torch.get_num_threads(),
            "threads_of_a_worker": threads_of_each(self.config.num_workers),
        }


def compare(
    preset: Preset,
    options: VariantsOptions,
    config: EngineConfig,
    settings: Mapping[str, Any],
    names: Sequence[str],
    prepare: Callable[[Comparison], tuple[Sequence[Bench], dict[str, Any]]],
) -> int:
    """Measure the variants of a preset, and show what was measured until the end, Ctrl-C or a failure.

    Args:
        settings, names: what the report says about the options: by name, and options that it says as they are.
        prepare: opens engines and returns a bench for each case, with facts about the engines.
    """
    chosen = {**settings, **{name: getattr(options, name) for name in names}, "seed": options.seed or 0}
    report = options.open_report(preset.kind, chosen)
    operators = settled_operators(options.threads)
    benches: list[Bench] = []
    with ExitStack() as opened:
        file = None if options.record is None else opened.enter_context(ChromeTraceFile(Path(options.record)))
        kept_runs = KeptRuns(file)
        opened.enter_context(kept(report, lambda: _show(preset, report, options, kept_runs, benches)))
        from nanoserve.runtime.launch.model_loading import read_config  # imports torch: the threads are set

        with show_progress() as progress:
            resolved = resolve_model(options.model, offline=options.offline, progress=progress)
        comparison = Comparison(
            options=options,
            config=config,
            report=report,
            opened=opened,
            resolved=resolved,
            model=read_config(resolved),
            kept=kept_runs,
        )
        prepared, facts = prepare(comparison)
        benches += prepared
        report.put("engine", {**comparison.engine_facts(operators), **facts})
        _measure(benches, options.rounds, report)
    return EXIT_OK


def _measure(benches: Sequence[Bench], wanted: int, report: Report) -> None:
    """Warm up, then make rounds of each case until enough count; the report keeps each as it ends."""
    total = 1 + wanted * len(benches)
    with show_progress() as progress:
        progress("rounds", 0, total)
        remark(f"warming up with {benches[0].case}")
        benches[0].warm_up()
        for place, bench in enumerate(benches):
            remark(f"measuring {bench.case}")
            counted = 1 + place * wanted
            progress("rounds", counted, total)
            for done in bench.rounds(wanted):
                row = {"case": bench.case, **bench.facts, "round": done, "drift": done.drift, "counts": done.counts}
                report.add(row)
                counted += done.counts
                progress("rounds", counted, total)


def _show(
    preset: Preset, report: Report, options: VariantsOptions, kept_runs: KeptRuns, benches: Sequence[Bench]
) -> None:
    measured = [bench for bench in benches if bench.done]
    summary, compared = _put_summary(preset, report, measured)
    notes = list(preset.notes(report, measured))
    print_head(report)
    print_counting([done for bench in measured for done in bench.done])
    for note in notes:
        print(note)
    for table in preset.tables(report, summary, compared):
        if rows := list(table.rows):
            print_table(table.heading, table.columns, rows, keys=table.keys)
    if options.plot is not None:
        preset.plot(options.plot, report, kept_runs, measured)


def _put_summary(preset: Preset, report: Report, benches: Sequence[Bench]) -> tuple[list[dict[str, Any]], list[Ratio]]:
    """Medians, ratios and samples, which go into the report; where there are several cases, each with its case."""
    summary: list[dict[str, Any]] = []
    compared: list[Ratio] = []
    put: list[Any] = []
    sampled: dict[str, Any] = {}
    for bench in benches:
        held = ratios(bench.done, preset.pairs(bench.variants), list(preset.ratios))
        compared += held
        found = samples(bench.done, list(preset.ratios))
        if preset.by_case:
            texts = {(one.variants.partition(" over ")[0], one.state): one.text for one in held}
            rows = ({**row, "ratio": texts.get((row["variant"], row["state"]))} for row in summarize(bench.done))
            summary += [{"case": bench.case, **row} for row in rows]
            put += [{"case": bench.case, "ratio": one} for one in held]
            sampled |= {f"{bench.case}, {name}": figures for name, figures in found.items()}
        else:
            summary, put, sampled = summarize(bench.done), [*held], found
    for name, value in {"summary": summary, "ratios": put, "samples": sampled}.items():
        report.put(name, value)
    return summary, compared


def ratio_table(preset_ratios: Mapping[str, str], heading: str, compared: Sequence[Ratio]) -> Table:
    """A row for each pair and bandwidth state, with all metrics."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for one in compared:
        row = rows.setdefault((one.variants, one.state), {"variants": one.variants, "state": one.state})
        row |= {"rounds": one.rounds, one.metric: one.text}
    shown = ((name, metric) for metric, name in preset_ratios.items())
    names = columns(("variants", "variants"), ("read", "state"), ("rounds", "rounds"), *shown)
    return Table(heading, names, rows.values())


def columns(*declared: tuple[str, ...]) -> list[Column]:
    """Columns, each as its heading, the path of its value and its format."""
    return [Column(*each) for each in declared]  # type: ignore[arg-type]  # no tuple gives a side
