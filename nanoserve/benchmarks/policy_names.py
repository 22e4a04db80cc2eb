"""Policies as commands and benchmarks name them: "sarathi,throttling:iterations=4:without_wt"."""

import math
from typing import Any

from nanoserve.errors import UsageError
from nanoserve.scheduler.load import Policy
from nanoserve.scheduler.policies import POLICIES, make_policy


def parse_policies(text: str, token_budget: int) -> dict[str, Policy]:
    """Policies by name, from names separated by commas: "sarathi,throttling,throttling:without_wt".

    Raises:
        UsageError: as `named_policy`, and for a repeated name.
    """
    names = [part.strip() for part in text.split(",")]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"{twice} is named twice: give each parameters of its own, as throttling:iterations=4")
    return {name: named_policy(name, token_budget) for name in names}


def named_policy(text: str, token_budget: int) -> Policy:
    """The policy of a name that parameters may follow: "throttling:iterations=4:without_wt".

    Raises:
        UsageError: for an unknown name or parameter, or one out of its range.
    """
    name, *words = text.split(":")
    defaults = POLICIES[name].defaults if name in POLICIES else {}
    parameters: dict[str, Any] = {}
    for word in words:
        key, equals, value = (piece.strip() for piece in word.partition("="))
        if key in parameters:
            raise UsageError(f"{key} is given twice: {text!r:.60}")
        try:
            parameters[key] = _parse(value if equals else "true", defaults.get(key))
        except (KeyError, ValueError):
            wanted = f"{key} is a whole number, " if type(defaults.get(key)) is int else ""
            raise UsageError(f"{wanted}{word!r:.60} is no parameter such as iterations=4 or without_wt") from None
    return make_policy(name, token_budget, parameters)


def _parse(text: str, default: Any) -> float:
    """A value of the default's type; a float where there is no default.

    Raises:
        KeyError: if a flag is neither true nor false.
        ValueError: if it is no finite number, or not a whole one where that is wanted.
    """
    if isinstance(default, bool):
        return {"true": True, "false": False}[text]
    number = int(text) if isinstance(default, int) else float(text)
    if not -math.inf < number < math.inf:
        raise ValueError(f"{text} is not finite")
    return number
