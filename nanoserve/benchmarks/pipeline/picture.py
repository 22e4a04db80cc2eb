"""Runs of a pipeline as a picture: which micro-batch was where, and its tokens (gLLM, figure 1). Needs matplotlib."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nanoserve.benchmarks.pipeline.running import PipelineRun
from nanoserve.benchmarks.pipeline.stages import parts_by_stage, stage_shares
from nanoserve.measures.chrome_trace import ChromeTraceFile
from nanoserve.measures.figures import save_figure, titled_figure
from nanoserve.runtime.trace.phases import step_tokens
from nanoserve.runtime.trace.traced_executor import RunTrace
from nanoserve.scheduler.plan import work_of
from nanoserve.simulator.pipeline import Passage
from nanoserve.simulator.plots import add_legend, draw_stages, draw_tokens
from nanoserve.simulator.window import StepWindow


@dataclass(frozen=True, slots=True)
class ShownRun:
    """A run, and what tells it from others."""

    name: str
    run: PipelineRun
    tensor_parallel: int


def plot_runs(path: Path, title: str, shown: Sequence[ShownRun]) -> None:
    """A row for each run: some consecutive micro-batches on their way through the stages, and the tokens of all.

    Raises:
        RuntimeFailure: if the file cannot be written.
    """
    figure = titled_figure(title, 15, 1.2 + 2.7 * len(shown))
    panels = figure.subplots(len(shown), 2, squeeze=False)
    counts = [[(plan.step, *step_tokens(plan)) for plan in one.run.record.plans] for one in shown]
    most = max(decodes + prompt for steps in counts for _, decodes, prompt in steps)
    for one, steps, (stages, tokens) in zip(shown, counts, panels, strict=True):
        shares = stage_shares(one.run, one.tensor_parallel)
        if shares:
            idle = sum(share.bubbles for share in shares) / len(shares)
            draw_stages(stages, _window(one), f"{one.name}: which micro-batch is where; stages idle for {idle:.0%}")
        else:
            stages.set_axis_off()
        draw_tokens(tokens, steps)
        tokens.set(title=f"{one.name}: tokens of each micro-batch", xlabel="micro-batch", ylim=(0, most * 1.05))
    add_legend(figure)
    save_figure(figure, path)


def _window(shown: ShownRun) -> StepWindow:
    """Where each stage's device worked on each plan, in seconds from the first arrival on."""
    record, window = shown.run.record, StepWindow()
    began = record.arrivals[0].arrival_time
    stages = parts_by_stage(shown.run, shown.tensor_parallel)
    for plan, *parts in zip(record.plans, *stages, strict=True):
        passages = [Passage(times.started - began, times.computed - began) for times in parts]
        window.on_step(record.handed_over[plan.step] - began, plan, work_of(plan.rows), passages)
    return window


class RunKeeper:
    """Keeps the last run of each variant to be drawn, and writes all runs into a trace as they are done.

    Args:
        file: of the trace; None writes none.
    """

    def __init__(self, file: ChromeTraceFile | None) -> None:
        self.last: dict[str, ShownRun] = {}  # by name
        self._file = file
        self._began: float | None = None

    def keep(self, shown: ShownRun) -> None:
        """A run is done.

        Raises:
            RuntimeFailure: if it cannot be written.
        """
        self.last[shown.name] = shown
        if self._began is None:
            self._began = shown.run.record.arrivals[0].arrival_time
        if self._file is not None:
            trace_run(self._file, self._began, shown.name, shown.run, shown.tensor_parallel)


def workers_of(name: str) -> str:
    """What the tracks of a run's workers stand under."""
    return f"{name}: workers"


def scheduler_of(name: str) -> str:
    """What those of its scheduler do."""
    return f"{name}: scheduler"


def trace_run(file: ChromeTraceFile, began: float, name: str, run: PipelineRun, tensor_parallel: int | None) -> None:
    """Write a run behind those before it, on tracks of its own.

    Args:
        began: what is 0 in the file, on the executors' clock.
        name: of the run.
        tensor_parallel: as `RunTrace` takes it.

    Raises:
        RuntimeFailure: if it cannot be written.
    """
    trace = RunTrace(
        file,
        began,
        tensor_parallel=tensor_parallel,
        workers=workers_of(name),
        scheduler=scheduler_of(name),
    )
    record = run.record
    submissions = [(record.handed_over[plan.step], plan) for plan in record.plans]
    results = [(known, record.results[step]) for step, known in record.known.items()]
    while submissions or results:
        if submissions and (not results or submissions[0][0] < results[0][0]):
            moment, plan = submissions.pop(0)
            trace.on_submit(plan, moment)
        else:
            known, result = results.pop(0)
            trace.on_result(result, known)
            if not run.stage_times:
                trace.on_computed(result, known)
    for times in sorted(run.stage_times, key=lambda times: times.step):
        trace.on_times(times)
    file.flush()
