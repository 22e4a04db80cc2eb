"""Policies as commands and benchmarks name them: "sarathi,throttling:iterations=4:without_wt"."""

import math
from collections.abc import Callable
from typing import Any

from nanoserve.errors import UsageError
from nanoserve.scheduler.load import Policy
from nanoserve.scheduler.policies import POLICIES, make_policy

_PARSERS: dict[type, Callable[[str], Any]] = {bool: {"true": True, "false": False}.__getitem__, int: int, float: float}


def parse_policies(text: str, token_budget: int) -> dict[str, Policy]:
    """Policies by name, from names separated by commas. Raises UsageError as `named_policy`, and for a repeated one."""
    names = [part.strip() for part in text.split(",")]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"{twice} is named twice: give each parameters of its own, as throttling:iterations=4")
    return {name: named_policy(name, token_budget) for name in names}


def named_policy(text: str, token_budget: int) -> Policy:
    """The policy of a name that parameters may follow: "throttling:iterations=4:without_wt". Raises UsageError for an
    unknown name or parameter, or one out of its range."""
    name, *words = text.split(":")
    defaults = POLICIES[name].defaults if name in POLICIES else {}
    parameters: dict[str, Any] = {}
    for word in words:
        key, equals, value = (piece.strip() for piece in word.partition("="))
        if key in parameters:
            raise UsageError(f"{key} is given twice: {text!r:.60}")
        kind = type(defaults.get(key, 0.0))
        try:
            parameters[key] = _PARSERS[kind](value if equals else "true")
        except (KeyError, ValueError):
            parameters[key] = math.nan
        if not -math.inf < parameters[key] < math.inf:
            wanted = f"{key} is a whole number, " if kind is int else ""
            raise UsageError(f"{wanted}{word!r:.60} is no parameter such as iterations=4 or without_wt")
    return make_policy(name, token_budget, parameters)
