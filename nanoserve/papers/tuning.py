"""The same search for everybody: each system runs once with every setting of one list, and is judged by its best."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from nanoserve.papers.cases import SystemCase
from nanoserve.papers.claims import Spread
from nanoserve.papers.framework import Outcomes

AnyCase = TypeVar("AnyCase", bound=SystemCase)

TOKEN_BUDGETS = (256, 512, 1024, 2048, 4096)
"""Tokens of a step: what all systems are tuned over, one after the other, in each case anew."""


def with_budget(case: AnyCase, token_budget: int) -> AnyCase:
    """The case with another token budget."""
    return replace(case, system=replace(case.system, token_budget=token_budget))


def tuned(
    cases: Sequence[AnyCase],
    run: Callable[[Iterable[AnyCase]], Outcomes],
    score: Callable[[Any], float],
    budgets: Sequence[int] = TOKEN_BUDGETS,
) -> list[AnyCase]:
    """Each case with the token budget of the list whose outcome scores highest, the first of equals."""
    outcomes = run(with_budget(case, budget) for case in cases for budget in budgets)

    def best(case: AnyCase) -> int:
        return max(budgets, key=lambda budget: score(outcomes[with_budget(case, budget)]))

    return [with_budget(case, best(case)) for case in cases]


def over_seeds(case: AnyCase, seeds: Iterable[int]) -> list[AnyCase]:
    """The case with each seed."""
    return [replace(case, seed=seed) for seed in seeds]


def spread(cases: Iterable[SystemCase], outcomes: Outcomes, figure: Callable[[Any], float]) -> Spread:
    """One figure of the outcomes of these cases."""
    return Spread.of(figure(outcomes[case]) for case in cases)


def ratio(
    above: Iterable[SystemCase], below: Iterable[SystemCase], outcomes: Outcomes, figure: Callable[[Any], float]
) -> Spread:
    """One figure of the first cases over that of the second ones, pair by pair: of equal seeds."""
    pairs = zip(above, below, strict=True)
    return Spread.of(figure(outcomes[first]) / figure(outcomes[second]) for first, second in pairs)
