"""What benchmarks of variants share: their model, the requests that fit, and rounds that are reported as they end."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nanoserve.commands.options import EngineOptions
from nanoserve.commands.progress import show_progress
from nanoserve.commands.terminal import remark

if TYPE_CHECKING:
    from nanoserve.benchmarks.report import Report
    from nanoserve.benchmarks.serving.work import Work
    from nanoserve.benchmarks.variants import VariantsBench
    from nanoserve.config import ModelConfig
    from nanoserve.models.hub import ResolvedModel


def resolved_model(engine: EngineOptions) -> "tuple[ResolvedModel, ModelConfig]":
    """The model, fetched if need be, and its shape."""
    from nanoserve.models.hub import resolve_model
    from nanoserve.runtime.launch.model_loading import read_config

    with show_progress() as progress:
        resolved = resolve_model(engine.model, offline=engine.offline, progress=progress)
    return resolved, read_config(resolved)


def fitting_work(work: "Work", context: int, report: "Report") -> "Work":
    """The requests that a context has room for; the report says how many are left out."""
    fitting = work.fitting(context)
    if left_out := len(work.shapes) - len(fitting.shapes):
        report.note(f"{left_out} requests are longer than the context of {context} and left out")
    return fitting


def measure_rounds(
    benches: "Sequence[tuple[VariantsBench[Any, Any], dict[str, Any]]]", wanted: int, report: "Report"
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
