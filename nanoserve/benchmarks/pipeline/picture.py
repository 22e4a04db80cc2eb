"""Runs of a pipeline as a picture: which micro-batch was where, and its tokens (gLLM, figure 1). Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from nanoserve.benchmarks.variants import KeptRun
from nanoserve.measures.charts import AnyPanel, Chart, Gantt, draw
from nanoserve.record.bubbles import stage_shares
from nanoserve.record.window import StepWindow, token_panels


def plot_runs(path: Path, title: str, shown: Sequence[KeptRun]) -> None:
    """A row for each run: some consecutive micro-batches on their way through the stages, and the tokens of all.

    Raises:
        RuntimeFailure: if the file cannot be written.
    """
    counts = [
        [(step, planned.decodes, planned.prompt_tokens) for step, planned in one.record.planned.items()]
        for one in shown
    ]
    titles = [f"{one.name}: tokens of each micro-batch" for one in shown]
    panels: list[AnyPanel] = []
    first: StepWindow | None = None
    for one, tokens in zip(shown, token_panels(titles, "micro-batch", counts), strict=True):
        shares = stage_shares(one.record, one.layouts[0].tensor_parallel)
        if shares:
            window = _window(one, first)
            first = first or window
            idle = sum(share.bubbles for share in shares) / len(shares)
            panels.append(window.gantt(f"{one.name}: which micro-batch is where; stages idle for {idle:.0%}"))
        else:
            panels.append(Gantt(title=f"{one.name}: one process, without stages", x="", rows=(), spans=(), end=1.0))
        panels.append(tokens)
    draw(Chart(title, panels, columns=2), path, panel_size=(7.5, 2.7))


def _window(shown: KeptRun, beside: StepWindow | None) -> StepWindow:
    """Where each stage's device worked on each plan, in seconds from the first arrival on."""
    record = shown.record
    window = StepWindow(record.arrivals[0].arrival_time, beside)
    stages = record.stages(shown.layouts[0].tensor_parallel)
    for planned, *times in zip(record.planned.values(), *stages, strict=True):
        window.on_step(planned, times)
    return window
