"""The harness of ``bench pipeline``, ``bench reshard`` and ``bench hybrid``, which are presets of
it.

A preset opens engines, and says which variants there are, which metrics a run has, and what is
shown.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from nanoserve.commands.engine_options import MODEL_PANEL, WorkersOptions
from nanoserve.commands.options import option
from nanoserve.commands.progress import show_progress
from nanoserve.commands.tables import Column, columns, print_table
from nanoserve.commands.terminal import remark
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import UsageError
from nanoserve.lab.benchmarks.policies.metrics import Picture
from nanoserve.lab.benchmarks.policies.rounds import (
    Bench,
    Ratio,
    Run,
    pairs,
    ratios,
    samples,
    summarize,
)
from nanoserve.lab.benchmarks.policies.variants import OpenEngine
from nanoserve.lab.benchmarks.rounds import counting_words
from nanoserve.lab.benchmarks.verdicts import of_variants
from nanoserve.lab.charts import Chart, draw
from nanoserve.lab.commands.bench_options import (
    ResultOptions,
    RoundOptions,
    kept,
    print_head,
    settled_operators,
)
from nanoserve.record.chrome_trace import ChromeTraceFile
from nanoserve.record.trace import RunTrace
from nanoserve.utils.threads import threads_of_each


class VariantsOptions(RoundOptions, ResultOptions, WorkersOptions):
    """How often the variants take turns, on which workers, and where results go."""

    rounds: int = option(3, "Rounds that count.", minimum=1)

    def config(self, policy: str | None = None) -> EngineConfig:
        """How the engines run; each run's own scheduler has a policy of its own, and runs share one
        trace. Raises UsageError if they are left open."""
        if self.parallel is not None:
            raise UsageError(
                "this command compares layouts that are named: leave out --parallel auto"
            )
        return EngineConfig(**{**WorkersOptions.settings(self), "policy": policy, "trace": None})


class RandomModelOptions(VariantsOptions):
    """`VariantsOptions` with random weights unless another model is named."""

    model: str | None = option(
        "dummy:qwen3-0.6b",
        "Directory, hub id or dummy:NAME.",
        "-m",
        metavar="MODEL",
        panel=MODEL_PANEL,
    )


class Table(NamedTuple):
    """A table of the results; without rows it is left out."""

    heading: str
    columns: Sequence[Column]
    rows: Iterable[Mapping[str, Any]]
    keys: int = 2


class Comparison(ABC):
    """Variants side by side. The report has ``settings`` beside the options of `reported`."""

    kind: ClassVar[str]  # name of the benchmark in reports
    reported: ClassVar[Sequence[str]]  # options whose values the report has
    ratios: ClassVar[Mapping[str, str]] = {"output_tokens_per_s": "tok/s"}
    """Metrics that ratios are formed of, and their names in tables. Reports have all of these
    metrics, tables the metrics that they name."""
    pairs = staticmethod(pairs)  # the variants that ratios are formed of

    def __init__(self, options: VariantsOptions, config: EngineConfig, **settings: Any) -> None:
        self.config, self.seed, self._options = config, options.seed or 0, options
        chosen = {name: getattr(options, name) for name in ("rounds", "max_num_batched_tokens")}
        chosen |= {name: getattr(options, name) for name in self.reported}
        self.settings = {**settings, **chosen, "seed": self.seed}
        self.report = options.open_report(self.kind, self.settings)
        self.facts: dict[str, Any] = {}  # about the engines, in the report
        self.engines: list[OpenEngine] = []
        self.benches: list[Bench] = []
        self.opened = ExitStack()  # closes the engines and the trace
        self._trace: ChromeTraceFile | None = None
        self._began: float | None = None  # the first run, for the trace

    @abstractmethod
    def prepare(self) -> dict[str, Any]:
        """Open the engines and add a bench for each case; returns facts about the engines for the
        report."""

    @property
    @abstractmethod
    def title(self) -> str:
        """Name the measured setting, for titles of tables and pictures."""

    @abstractmethod
    def tables(
        self, summary: Sequence[Mapping[str, Any]], compared: Sequence[Ratio]
    ) -> Iterable[Table]:
        """The tables, from medians and ratios."""

    @staticmethod
    @abstractmethod
    def picture(benches: Sequence[Bench]) -> Picture:
        """The panels of --plot."""

    def notes(self) -> Iterable[str]:
        """Sentences above the tables; their figures may be put into the report."""
        return ()

    def run(self) -> None:
        """Measure, and show what was measured until the end, Ctrl-C or a failure."""
        options = self._options
        operators = settled_operators(options.threads)
        with self.opened:
            if options.record is not None:
                self._trace = self.opened.enter_context(ChromeTraceFile(Path(options.record)))
            self.opened.enter_context(kept(self.report, self._show))
            import torch  # the threads are set

            from nanoserve.executor.start.model_loading import read_config
            from nanoserve.lab.benchmarks.peers.weights import dtype_name
            from nanoserve.lab.benchmarks.roofline import BandwidthProbe

            self.resolved = options.find_model()
            self.model = read_config(self.resolved, self.config.quantization, self.config.device)
            self.probe = BandwidthProbe()
            self.bench = partial(Bench, seed=self.seed, probe=self.probe.read, keep=self._keep)
            prepared, layers = self.prepare(), "eager"
            if all(engine.compiled for engine in self.engines):
                layers = "compiled"
            self.facts = {
                "model": self.resolved.name,
                "dtype": dtype_name(self.config.dtype, self.model),
                "operators": operators,
                "layers": layers,
                "threads": torch.get_num_threads(),
                "threads_of_a_worker": threads_of_each(self.config.num_workers),
                **prepared,
            }
            self.report.put("engine", self.facts)
            self._measure(options.rounds)

    def open(
        self, announced: str, open_engine: Callable[..., OpenEngine], *arguments: Any, **facts: Any
    ) -> OpenEngine:
        """Open an engine for all rounds while its progress is shown; the end of the comparison
        closes it."""
        remark(announced)
        with show_progress() as progress:
            self.engines.append(open_engine(self.opened, *arguments, progress, **facts))
        return self.engines[-1]

    def _keep(self, name: str, run: Run) -> None:
        """Write a run into the trace, on tracks of its own."""
        self._began = self._began or run.record.arrivals[0].arrival_time
        if self._trace is not None:
            trace = RunTrace(
                self._trace,
                self._began,
                layouts=run.variant.layouts,
                reports_times=bool(run.record.stage_times),
                host_link_bandwidth=run.variant.engine.host_link_bandwidth,
                name=name,
            )
            for event in run.record.events:
                trace(event)

    def _measure(self, wanted: int) -> None:
        """Warm up, then make rounds of each case until enough count; the report keeps each as it
        ends."""
        total, repeating = 1 + wanted * len(self.benches), self._options.repeating()
        with show_progress() as progress:
            progress("rounds", 0, total)
            remark(f"warming up with {self.benches[0].case}")
            for variant in self.benches[0].variants:
                variant.run(self.benches[0].requests(0))
            for place, bench in enumerate(self.benches):
                remark(f"measuring {bench.case}")
                counted = 1 + place * wanted
                progress("rounds", counted, total)
                for done in repeating.rounds(bench.round, wanted):
                    bench.done.append(done)
                    row = {
                        "case": bench.case,
                        **bench.facts,
                        "round": done,
                        "drift": done.drift,
                        "counts": done.counts,
                    }
                    self.report.add(row)
                    counted += done.counts
                    progress("rounds", counted, total)

    def _show(self) -> str:
        summary, compared = self._put_summary()
        notes = list(self.notes())
        print_head(self.report)
        for note in notes:
            print(note)
        for table in self.tables(summary, compared):
            if rows := list(table.rows):
                print_table(table.heading, table.columns, rows, keys=table.keys)
        if self._options.plot is not None:
            panels, number, size = self.picture(self.benches)
            title = self.title
            if not self.benches[0].facts:
                title = f"{title}, last round"
            draw(
                Chart(self.report.titled(title), panels, number),
                self._options.plot,
                panel_size=size,
            )
        done = [done for bench in self.benches for done in bench.done]
        return f"{of_variants(self.report.document['ratios'])}; {counting_words(done)}."

    def _put_summary(self) -> tuple[list[dict[str, Any]], list[Ratio]]:
        """Medians, ratios and samples, which go into the report; where there are several cases,
        each with its case."""
        summary: list[dict[str, Any]] = []
        compared: list[Ratio] = []
        put: list[Any] = []
        sampled: dict[str, Any] = {}
        for bench in self.benches:
            held = ratios(bench.done, self.pairs(bench.variants), list(self.ratios))
            found = samples(bench.done, list(self.ratios))
            rows = summarize(bench.done)
            if bench.facts:
                texts = {(one.variants.partition(" over ")[0], one.state): one.text for one in held}
                rows = [
                    {**row, "case": bench.case, "ratio": texts.get((row["variant"], row["state"]))}
                    for row in rows
                ]
                found = {f"{bench.case}, {name}": figures for name, figures in found.items()}
            summary += rows
            compared += held
            if bench.facts:
                put += [{"case": bench.case, "ratio": one} for one in held]
            else:
                put += held
            sampled |= found
        for name, value in (("summary", summary), ("ratios", put), ("samples", sampled)):
            self.report.put(name, value)
        return summary, compared

    def ratio_table(self, heading: str, compared: Sequence[Ratio]) -> Table:
        """A row for each pair and bandwidth state, with all metrics."""
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        for one in compared:
            row = rows.setdefault(
                (one.variants, one.state), {"variants": one.variants, "state": one.state}
            )
            row |= {"rounds": one.rounds, one.metric: one.text}
        shown = [Column(name, metric) for metric, name in self.ratios.items() if name]
        return Table(
            heading, columns(("", "variants", ("read", "state"), "rounds")) + shown, rows.values()
        )
