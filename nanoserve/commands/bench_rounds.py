"""What benchmarks of contenders share: their model, the requests that fit, and rounds that are reported as they end."""

from typing import TYPE_CHECKING, Any

from nanoserve.commands.options import EngineOptions
from nanoserve.commands.terminal import load_progress, remark

if TYPE_CHECKING:
    from nanoserve.benchmarks.contenders import ContendersBench
    from nanoserve.benchmarks.report import Report
    from nanoserve.benchmarks.serving.work import Work
    from nanoserve.config import ModelConfig
    from nanoserve.models.hub import ResolvedModel


def resolved_model(engine: EngineOptions) -> "tuple[ResolvedModel, ModelConfig]":
    """The model, fetched if need be, and its shape."""
    from nanoserve.models.hub import resolve_model
    from nanoserve.runtime.model_loading import read_config

    with load_progress() as progress:
        resolved = resolve_model(engine.model, offline=engine.offline, progress=progress)
    return resolved, read_config(resolved)


def fitting_work(work: "Work", context: int, report: "Report") -> "Work":
    """The requests that a context has room for; the report says how many are left out."""
    fitting = work.fitting(context)
    if left_out := len(work.shapes) - len(fitting.shapes):
        report.note(f"{left_out} requests are longer than the context of {context} and left out")
    return fitting


def measure_rounds(bench: "ContendersBench[Any, Any, Any]", wanted: int, report: "Report", **facts: object) -> None:
    """Until enough rounds count; each goes into the report, with these facts, as it is done."""
    for number, done in enumerate(bench.rounds(wanted), start=1):
        remark(f"{bench.case}: round {number} is done")
        report.add({"case": bench.case, **facts, "round": done, "drift": done.drift, "counts": done.counts})
