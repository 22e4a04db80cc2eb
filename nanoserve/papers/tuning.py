"""The same search for everybody: each system runs once with every setting of one list, and is judged by its best."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from nanoserve.papers.cases import Case
from nanoserve.papers.claims import Spread
from nanoserve.papers.framework import Run

TOKEN_BUDGETS = (256, 512, 1024, 2048, 4096)
"""Tokens of a step: what all systems are tuned over, one after the other, in each case anew."""


def with_budget(case: Case, token_budget: int) -> Case:
    """The case with another token budget."""
    return replace(case, system=replace(case.system, token_budget=token_budget))


def tuned(
    cases: Sequence[Case], run: Run, score: Callable[[Any], float], budgets: Sequence[int] = TOKEN_BUDGETS
) -> list[Case]:
    """Each case with the token budget of the list whose outcome scores highest, the first of equals."""
    outcomes = run(with_budget(case, budget) for case in cases for budget in budgets)

    def best(case: Case) -> int:
        return max(budgets, key=lambda budget: score(outcomes[with_budget(case, budget)]))

    return [with_budget(case, best(case)) for case in cases]


def over_seeds(case: Case, seeds: Iterable[int]) -> list[Case]:
    """The case with each seed."""
    return [replace(case, seed=seed) for seed in seeds]


def spread(cases: Iterable[Case], outcomes: Mapping[Any, Any], figure: Callable[[Any], float]) -> Spread:
    """One figure of the outcomes of these cases."""
    return Spread.of(figure(outcomes[case]) for case in cases)


def ratio(
    above: Iterable[Case], below: Iterable[Case], outcomes: Mapping[Any, Any], figure: Callable[[Any], float]
) -> Spread:
    """One figure of the first cases over that of the second ones, pair by pair: of equal seeds."""
    pairs = zip(above, below, strict=True)
    return Spread.of(figure(outcomes[first]) / figure(outcomes[second]) for first, second in pairs)
