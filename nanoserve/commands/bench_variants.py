"""What ``bench pipeline``, ``bench reshard`` and ``bench hybrid`` share: rounds of several variants on one engine."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from nanoserve.benchmarks.pipeline.running import make_requests
from nanoserve.benchmarks.report import Report
from nanoserve.benchmarks.tables import Column
from nanoserve.benchmarks.variants import Ratio, VariantsBench, VariantsRound, ratios, samples, summarize
from nanoserve.commands.bench_options import WORK_PANEL, print_counting, print_head
from nanoserve.commands.engine_options import MODEL_PANEL, EngineOptions, WorkersOptions
from nanoserve.commands.options import Options, option
from nanoserve.commands.progress import Progress, show_progress
from nanoserve.commands.terminal import remark
from nanoserve.config import ModelConfig
from nanoserve.engine_config import EngineConfig
from nanoserve.measures.chrome_trace import ChromeTraceFile
from nanoserve.measures.workloads import RequestShape
from nanoserve.models.hub import ResolvedModel, resolve_model
from nanoserve.processes.threads import threads_of_each
from nanoserve.request import Request

DEFAULT_MODEL = "dummy:qwen3-0.6b"
R = TypeVar("R", bound=VariantsRound[Any])
E = TypeVar("E")


class RoundsOptions(Options, panel=WORK_PANEL):
    """How often the variants take turns."""

    rounds: int = option(3, "Rounds that count.", minimum=1)


class RandomModelOptions(WorkersOptions):
    """Workers whose model has random weights, unless another is named."""

    model: str | None = option(
        DEFAULT_MODEL, "Directory, hub id or dummy:NAME.", "-m", metavar="MODEL", panel=MODEL_PANEL
    )


def resolved_model(engine: EngineOptions) -> tuple[ResolvedModel, ModelConfig]:
    """The model, fetched if need be, and its shape."""
    from nanoserve.runtime.launch.model_loading import read_config  # imports torch: the threads are set

    with show_progress() as progress:
        resolved = resolve_model(engine.model, offline=engine.offline, progress=progress)
    return resolved, read_config(resolved)


def opened_record(engine: WorkersOptions, opened: ExitStack) -> ChromeTraceFile | None:
    """The file of --record, which is closed with ``opened``; None without that option."""
    return None if engine.record is None else opened.enter_context(ChromeTraceFile(Path(engine.record)))


def opened_engine(opened: ExitStack, open_one: Callable[[Progress], E]) -> E:
    """An engine that is opened while its progress is shown, and closed with ``opened``."""
    with show_progress() as progress:
        engine: Any = open_one(progress)
    opened.callback(engine.close)
    return engine  # type: ignore[no-any-return]


def requests_maker(
    shapes: Sequence[RequestShape], vocab_size: int, seed: int, arrivals: Callable[[int], Sequence[float]] | None = None
) -> Callable[[int], list[Request]]:
    """Makes the requests of a round by its number, which gives the seed of their random prompts.

    Args:
        arrivals: their times, by that seed; None has all come at once.
    """

    def make(number: int) -> list[Request]:
        own = 1000 * seed + number
        times = [0.0] * len(shapes) if arrivals is None else arrivals(own)
        return make_requests(shapes, times, vocab_size, own)

    return make


def engine_facts(
    resolved: ResolvedModel, config: EngineConfig, model: ModelConfig, operators: str, *, compiled: bool
) -> dict[str, Any]:
    """What a report says about the engines, whatever they are compared for."""
    import torch

    from nanoserve.benchmarks.peers.weights import dtype_name

    return {
        "model": resolved.name,
        "dtype": dtype_name(config.dtype, model),
        "operators": operators,
        "layers": "compiled" if compiled else "eager",
        "threads": torch.get_num_threads(),
        "threads_of_a_worker": threads_of_each(config.num_workers),
    }


def measure_rounds(
    benches: Sequence[tuple[VariantsBench[Any, Any], Mapping[str, Any]]], wanted: int, report: Report
) -> None:
    """Warm up, then make rounds of each case until enough count; each goes into the report, with the facts of its case,
    as it is done."""
    total = 1 + wanted * len(benches)
    with show_progress() as progress:
        progress("rounds", 0, total)
        remark(f"warming up with {benches[0][0].case}")
        benches[0][0].warm_up()
        for place, (bench, facts) in enumerate(benches):
            remark(f"measuring {bench.case}")
            counted = 1 + place * wanted
            progress("rounds", counted, total)
            for done in bench.rounds(wanted):
                report.add({"case": bench.case, **facts, "round": done, "drift": done.drift, "counts": done.counts})
                counted += done.counts
                progress("rounds", counted, total)


def rounds_of(report: Report, kind: type[R]) -> list[R]:
    """The measured rounds, as they were before they became rows."""
    return [msgspec.convert(row["round"], kind) for row in report.rows]


def put_summary(
    report: Report, rounds: Sequence[VariantsRound[Any]], held: Sequence[tuple[str, str, str]], metrics: Sequence[str]
) -> tuple[list[dict[str, Any]], list[Ratio]]:
    """Medians, ratios and samples, which go into the report; prints the head of the tables.

    Args:
        held: what a pair of variants is called, and the two of them: the first over the second.
        metrics: what ratios are formed of.
    """
    summary, compared = summarize(rounds), ratios(rounds, held, metrics)
    report.put("summary", summary)
    report.put("ratios", compared)
    report.put("samples", samples(rounds, metrics))
    print_head(report)
    print_counting(rounds)
    return summary, compared


def ratio_text(ratio: Ratio) -> str:
    """A median and how far the rounds lie apart."""
    return f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def columns(*declared: tuple[str, ...]) -> list[Column]:
    """Columns, each as its heading, the path of its value and its format."""
    return [Column(*each) for each in declared]  # type: ignore[arg-type]  # no tuple gives a side
