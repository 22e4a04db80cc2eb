"""Drafters for the executor without a model: what it will say, and what it will not."""

from collections.abc import Sequence

from nanoserve.scheduler.plan import Begin
from tests.fakes.memory_checking_executor import Drafter, next_token


def knows(prefix: Sequence[int], begin: Begin, count: int) -> list[int]:
    """Always right."""
    tokens = list(prefix)
    for _ in range(count):
        tokens.append(next_token(tokens, begin))
    return tokens[len(prefix) :]


def errs(prefix: Sequence[int], begin: Begin, count: int) -> list[int]:
    """Always wrong."""
    return [(token + 1) % 50 for token in knows(prefix, begin, count)]


def sometimes(prefix: Sequence[int], begin: Begin, count: int) -> list[int]:
    """Right for a while, and sometimes with fewer draft tokens than were asked for."""
    right = sum(prefix) % 4
    return (knows(prefix, begin, count)[:right] + [1] * count)[: max(0, count - sum(prefix) % 2)]


def nothing(prefix: Sequence[int], begin: Begin, count: int) -> list[int]:
    """Beside n-grams, which the scheduler looks up itself."""
    return []


DRAFTERS: dict[str, Drafter] = {
    "knows": knows,
    "errs": errs,
    "sometimes": sometimes,
    "ngram": nothing,
}
