"""What runs next: policies, the Scheduler that carries them out, and the words it says to executors. No torch."""

from collections.abc import Callable

from nanoserve.errors import UsageError
from nanoserve.scheduler.baselines import ChunkedPrefill, DecodeFirst, PrefillFirst
from nanoserve.scheduler.load import Policy

POLICIES: dict[str, Callable[[int], Policy]] = {
    "prefill-first": PrefillFirst,
    "decode-first": DecodeFirst,
    "sarathi": ChunkedPrefill,
}
"""Choices of ``--policy``; each is called with the token budget of a step."""


def make_policy(name: str, token_budget: int) -> Policy:
    """The policy of that name.

    Raises:
        UsageError: for an unknown name or a budget below one token.
    """
    if name not in POLICIES:
        raise UsageError(f"unknown policy {name!r}; choose one of {', '.join(POLICIES)}")
    if token_budget < 1:
        raise UsageError(f"the token budget of a step must be at least 1, not {token_budget}")
    return POLICIES[name](token_budget)
