"""Runs of a pipeline as a picture: which micro-batch was where, and its tokens (gLLM, figure 1). Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from nanoserve.benchmarks.variants import KeptRun
from nanoserve.measures.figures import save_figure, titled_figure
from nanoserve.record.bubbles import stage_shares
from nanoserve.record.window import StepWindow
from nanoserve.simulator.plots import add_legend, draw_stages, draw_tokens


def plot_runs(path: Path, title: str, shown: Sequence[KeptRun]) -> None:
    """A row for each run: some consecutive micro-batches on their way through the stages, and the tokens of all.

    Raises:
        RuntimeFailure: if the file cannot be written.
    """
    figure = titled_figure(title, 15, 1.2 + 2.7 * len(shown))
    panels = figure.subplots(len(shown), 2, squeeze=False)
    counts = [
        [(step, planned.decodes, planned.prompt_tokens) for step, planned in one.record.planned.items()]
        for one in shown
    ]
    most = max(decodes + prompt for steps in counts for _, decodes, prompt in steps)
    for one, steps, (stages, tokens) in zip(shown, counts, panels, strict=True):
        shares = stage_shares(one.record, one.layouts[0].tensor_parallel)
        if shares:
            idle = sum(share.bubbles for share in shares) / len(shares)
            draw_stages(stages, _window(one), f"{one.name}: which micro-batch is where; stages idle for {idle:.0%}")
        else:
            stages.set_axis_off()
        draw_tokens(tokens, steps)
        tokens.set(title=f"{one.name}: tokens of each micro-batch", xlabel="micro-batch", ylim=(0, most * 1.05))
    add_legend(figure)
    save_figure(figure, path)


def _window(shown: KeptRun) -> StepWindow:
    """Where each stage's device worked on each plan, in seconds from the first arrival on."""
    record = shown.record
    window = StepWindow(record.arrivals[0].arrival_time)
    stages = record.stages(shown.layouts[0].tensor_parallel)
    for planned, *times in zip(record.planned.values(), *stages, strict=True):
        window.on_step(planned, times)
    return window
