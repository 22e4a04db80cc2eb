"""The same search for everybody: each system runs once with every setting of one list, and is judged by its best."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from nanoserve.papers.cases import Case
from nanoserve.papers.claims import Spread

Setting = TypeVar("Setting")

TOKEN_BUDGETS = (256, 512, 1024, 2048, 4096)
"""Tokens of a step: what all systems are tuned over, one after the other, in each case anew."""


def with_budgets(case: Case, budgets: Iterable[int] = TOKEN_BUDGETS) -> list[Case]:
    """The case with every token budget of the list."""
    return [
        msgspec.structs.replace(case, system=msgspec.structs.replace(case.system, token_budget=budget))
        for budget in budgets
    ]


def best(settings: Sequence[Setting], score: Callable[[Setting], float]) -> tuple[Setting, float]:
    """The setting of the highest score, the first of equals, and that score."""
    scored = [(score(setting), setting) for setting in settings]
    top = max(value for value, _ in scored)
    return next(setting for value, setting in scored if value == top), top


def over_seeds(case: Case, seeds: Iterable[int]) -> list[Case]:
    """The case with each seed."""
    return [msgspec.structs.replace(case, seed=seed) for seed in seeds]


def spread(cases: Iterable[Case], outcomes: Mapping[Any, Any], figure: Callable[[Any], float]) -> Spread:
    """One figure of the outcomes of these cases."""
    return Spread.of(figure(outcomes[case]) for case in cases)


def ratio(
    above: Iterable[Case], below: Iterable[Case], outcomes: Mapping[Any, Any], figure: Callable[[Any], float]
) -> Spread:
    """One figure of the first cases over that of the second ones, pair by pair: of equal seeds."""
    pairs = zip(above, below, strict=True)
    return Spread.of(figure(outcomes[first]) / figure(outcomes[second]) for first, second in pairs)
