"""The picture of a simulation: stages over time, tokens of each step (gLLM, figure 1), KV cache (Seesaw, figure 6)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nanoserve.measures.figures import save_figure, titled_figure
from nanoserve.record.window import StepWindow, WindowStep
from nanoserve.simulator.result import SimulationResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DECODES, _PROMPT, _IDLE = "#0072B2", "#E69F00", "#EEEEEE"
"""Blue and orange of Okabe and Ito's palette, which the colour-blind can tell apart."""
_LINES = (
    *("#332288", "#CC6677", "#117733", "#88CCEE", "#882255"),
    *("#999933", "#44AA99", "#AA4499", "#DDCC77", "#000000"),
)
"""Paul Tol's muted scheme, made for the same eyes, and black."""
_STYLES = ("-", "--", ":")
"""Of the tiers, in their order."""
_BAR_HEIGHT = 0.84
_NUMBER_BOX = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.75}
_DIGIT_SHARE = 0.011
"""Of the window's time: a bar that is as wide for each digit has room for its step's number."""


@dataclass(frozen=True, slots=True)
class PlottedRun:
    """What is drawn of one policy."""

    policy: str
    result: SimulationResult
    window: StepWindow
    """The steps whose way through the stages is shown."""


def plot_simulation(path: Path, title: str, runs: Sequence[PlottedRun]) -> None:
    """Write a PNG file.

    Raises:
        RuntimeFailure: if the file cannot be written.
    """
    save_figure(draw_simulation(title, runs), path)


def draw_simulation(title: str, runs: Sequence[PlottedRun]) -> "Figure":
    """A row for each policy, and below a panel in which their KV caches are compared."""
    figure = titled_figure(title, 15, 3.6 + 2.7 * len(runs))
    grid = figure.add_gridspec(len(runs) + 1, 2)
    most = max(decodes + prompt for run in runs for _, _, decodes, prompt in run.result.tokens_series)
    end = max(run.result.seconds for run in runs)
    for row, run in enumerate(runs):
        idle = f"stages idle for {run.result.bubble_share:.0%} of the whole run"
        draw_stages(figure.add_subplot(grid[row, 0]), run.window, f"{run.policy}: which step is where; {idle}")
        tokens = figure.add_subplot(grid[row, 1])
        draw_tokens(tokens, [counts for _, *counts in run.result.tokens_series])
        tokens.set(title=f"{run.policy}: tokens of each step", ylim=(0, most * 1.05))
    occupancy = figure.add_subplot(grid[len(runs), :])
    _draw_occupancy(occupancy, runs)
    occupancy.set_xlim(0, end)
    add_legend(figure)
    return figure


def add_legend(figure: "Figure") -> None:
    """What the colours of stages and tokens mean."""
    from matplotlib.patches import Patch

    names = ((_PROMPT, "prompt tokens"), (_DECODES, "decodes"), (_IDLE, "idle"))
    figure.legend(
        handles=[Patch(color=colour, label=name) for colour, name in names], loc="outside lower center", ncols=3
    )


def draw_stages(axes: "Axes", window: StepWindow, title: str) -> None:
    """A bar for each micro-batch in each stage."""
    steps, (start, end) = window.steps, window.span
    stages = max(len(step.spans) for step in steps)
    unit, per_second = ("ms", 1e3) if end - start < 1 else ("s", 1.0)
    span = (end - start) * per_second
    for stage in range(stages):
        axes.broken_barh([(0, span)], (stage - _BAR_HEIGHT / 2, _BAR_HEIGHT), color=_IDLE, zorder=0)
        for step in (one for one in steps if stage < len(one.spans)):  # layouts differ in their stages
            left, right = ((moment - start) * per_second for moment in step.spans[stage])
            _draw_passage(axes, stage, left, right - left, step)
            middle = (left + right) / 2
            if right - left > _DIGIT_SHARE * len(str(step.step)) * span and left >= 0 and right <= span:
                axes.annotate(
                    str(step.step),
                    (middle, stage),
                    ha="center",
                    va="center",
                    fontsize=7,
                    bbox=_NUMBER_BOX,
                    color="black",
                )
    axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    axes.set(xlim=(0, span), ylim=(stages - 0.5, -0.5), xlabel=f"{unit} from {start:,.1f} s on")
    axes.set_title(title)


def _draw_passage(axes: "Axes", stage: int, left: float, width: float, step: WindowStep) -> None:
    """Its height is split as its tokens are."""
    top, height = stage - _BAR_HEIGHT / 2, _BAR_HEIGHT
    tokens = step.decodes + step.prompt_tokens
    if not tokens:  # it lets the host go on
        return
    prompt = height * step.prompt_tokens / tokens
    axes.broken_barh([(left, width)], (top, prompt), color=_PROMPT, linewidth=0)
    axes.broken_barh([(left, width)], (top + prompt, height - prompt), color=_DECODES, linewidth=0)
    axes.broken_barh([(left, width)], (top, height), facecolor="none", edgecolor="white", linewidth=1)


def draw_tokens(axes: "Axes", counts: Sequence[Sequence[int]]) -> None:
    """Number, decodes and prompt tokens of each step, one upon the other."""
    steps, decodes, prompts = zip(*counts, strict=True)
    total = [one + other for one, other in zip(decodes, prompts, strict=True)]
    axes.fill_between(steps, decodes, step="post", color=_DECODES, linewidth=0)
    axes.fill_between(steps, decodes, total, step="post", color=_PROMPT, linewidth=0)
    axes.set(xlabel="step", ylabel="tokens in it")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.margins(x=0)
    axes.grid(axis="y", alpha=0.3)


def _draw_occupancy(axes: "Axes", runs: Sequence[PlottedRun]) -> None:
    for number, run in enumerate(runs):
        tiers = run.result.occupancies
        for (tier, points), style in zip(tiers.items(), _STYLES, strict=False):
            times, shares = zip(*points, strict=True)
            label = run.policy if len(tiers) == 1 else f"{run.policy}, {tier}"
            colour = _LINES[number % len(_LINES)]
            axes.step(times, [share * 100 for share in shares], style, where="post", color=colour, label=label)
    axes.set(title="KV cache in use", xlabel="s", ylabel="% of the blocks")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    axes.grid(alpha=0.3)
