"""Figures of papers. A figure is a function that runs jobs and states their result in words,
numbers and a picture.

Each paper lives in a module of its own, which is imported when it is asked for.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, TypeVar

from nanoserve.commands.tables import Column
from nanoserve.errors import UsageError, shown
from nanoserve.lab.charts import Chart
from nanoserve.lab.papers.claims import Claim

Value = TypeVar("Value")
PAPERS = ("gllm", "seesaw", "apex", "lecture", "adaptive")
"""Names on the command line: modules of this package with a PAPER each."""


class SimulationJob(Hashable, Protocol):
    """Something to compute in a process of its own: it pickles, and equal jobs have equal
    outcomes."""

    def run(self) -> Any:
        """The outcome, which pickles."""


Outcomes = Mapping[Any, Any]  # outcomes by job
Run = Callable[[Iterable[SimulationJob]], Outcomes]
"""Runs jobs side by side, each once, and answers with the outcomes of these and of all before."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the runs are."""

    seeds: tuple[int, ...] = (0, 1, 2)  # every simulation is run once for each
    full: bool = False  # whether figures run at their full size, instead of one that takes minutes

    @property
    def first_seed(self) -> "Scale":
        """This scale with one seed, for searches and additional sweeps."""
        return Scale(self.seeds[:1], self.full)

    def pick(self, reduced: Value, full: Value) -> Value:
        return full if self.full else reduced


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a figure."""

    claims: Sequence[Claim] = ()  # rows of the claims table
    chart: Chart | None = None  # picture of the figure; None if it consists of numbers only
    rows: Sequence[Mapping[str, Any]] = ()  # all numbers of the figure, for the report


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperFigure:
    """One figure of a paper."""

    number: str  # in the paper, as ``--figure`` takes it
    title: str
    counted: str = ""
    """The computation in a few words, where no requests are simulated and the paper's setting says
    nothing."""
    make: Callable[[Scale, Run], Finding]
    """Runs what it needs and says what came out. It submits all jobs at once where it can, for they
    run side by side; what depends on outcomes (a setting that is searched for) takes a second
    round."""
    columns: Sequence[Column] = ()  # which of its numbers make a table; none for no table
    # whether a model runs for it, so that its numbers depend on this machine and its torch
    measured: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """A paper, as ``nanoserve bench paper`` knows it."""

    title: str
    setting: tuple[str, str]
    """Description of the reduced and of the full size, in a line each."""
    figures: Sequence[PaperFigure]  # in the order in which they run
    spread_over: str = "seeds"  # what the spread of a claim goes over

    def chosen(self, number: str | None) -> Sequence[PaperFigure]:
        """All figures, or the one of that number; a UsageError lists the numbers."""
        found = [figure for figure in self.figures if number in (None, figure.number)]
        if not found:
            known = ", ".join(figure.number for figure in self.figures)
            raise UsageError(
                f"{self.title} has no figure {shown(number)} here; choose one of {known}"
            )
        return found


def load_paper(name: str) -> Paper:
    """The paper of that name; a UsageError lists the names."""
    if name not in PAPERS:
        raise UsageError(f"unknown paper {shown(name)}; choose one of {', '.join(PAPERS)}")
    paper: Paper = import_module(f"nanoserve.lab.papers.{name}").PAPER
    return paper
