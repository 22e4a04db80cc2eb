"""The chart of a simulation: stages over time, tokens of each step (gLLM, figure 1), KV cache (Seesaw, figure 6)."""

from collections.abc import Sequence
from dataclasses import dataclass

from nanoserve.measures.charts import AnyPanel, Chart, ChartCurve, Panel
from nanoserve.record.window import StepWindow, token_panels
from nanoserve.simulator.result import SimulationResult

PANEL_SIZE = (7.5, 2.7)
_TIER_STYLES = ("-", "--", ":")


@dataclass(frozen=True, slots=True)
class PlottedRun:
    policy: str
    result: SimulationResult
    window: StepWindow


def simulation_chart(title: str, runs: Sequence[PlottedRun]) -> Chart:
    """One row for each policy, and below them one panel that compares their KV caches."""
    counts = [[counts for _, *counts in run.result.tokens_series] for run in runs]
    tokens = token_panels([f"{run.policy}: tokens of each step" for run in runs], "step", counts)
    panels: list[AnyPanel] = []
    curves = []
    for number, (run, panel) in enumerate(zip(runs, tokens, strict=True)):
        idle = f"stages idle for {run.result.bubble_share:.0%} of the whole run"
        panels += [run.window.gantt(f"{run.policy}: which step is where; {idle}"), panel]
        tiers = run.result.occupancies
        for (tier, points), style in zip(tiers.items(), _TIER_STYLES, strict=False):
            times, shares = zip(*points, strict=True)
            label = run.policy if len(tiers) == 1 else f"{run.policy}, {tier}"
            curves.append(ChartCurve(label, times, [100 * share for share in shares], style=f"C{number % 10}{style}"))
    kv = Panel(title="KV cache in use", x="time, s", y="% of the blocks", curves=curves, kind="step")
    return Chart(title, [*panels, kv], columns=2)
