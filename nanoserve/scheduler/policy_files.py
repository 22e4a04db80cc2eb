"""Policies of a user's own: a class in a Python file that is named on the command line, and
executed."""

import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from nanoserve.errors import PolicyFailed, UsageError, first_line, shown
from nanoserve.scheduler.load import Decision, Load, Policy, policy_failures
from nanoserve.scheduler.optional import HostDecision
from nanoserve.utils.files import read_bytes


class _FromFile(Policy):
    """Stands before a user's class: the user reads one line about any exception or invalid decision
    of that class."""

    __slots__ = ()

    def decide(self, load: Load) -> Decision:
        with policy_failures(f"{type(self).__name__}.decide"):
            decision = super().decide(load)  # type: ignore[safe-super]  # the user's class follows in the order
            _check(decision)
        return decision


def _check(decision: Any) -> None:
    """Raises ValueError for what no scheduler could carry out."""
    if not isinstance(decision, Decision):
        raise ValueError(f"it answers {shown(decision)}, which is no Decision")
    if not isinstance(decision.host, HostDecision):
        raise ValueError(f"host must be a HostDecision, not {shown(decision.host)}")
    numbers = {
        "prefill_tokens": decision.prefill_tokens,
        "decodes": decision.decodes,
        "swap_out": decision.host.swap_out,
        "swap_in": decision.host.swap_in,
        "layout": decision.layout,
    }
    for name, value in numbers.items():
        if type(value) is not int or not 0 <= value <= sys.maxsize:
            raise ValueError(f"{name} must be a whole number from 0, not {shown(value)}")
    if not isinstance(decision.bound, str):
        raise ValueError(f"bound must be text, not {shown(decision.bound)}")
    host = decision.host
    if host.strategy != "device" or host.decodes != (0, 0) or host.alternatives != ():
        raise ValueError(
            "only policies of nanoserve have the CPU attend: leave the host's strategy and decodes "
            "out"
        )


@cache
def load_policy_class(path: str, name: str) -> type[Policy]:
    """The class of that name. The file is executed, as the user asked. Raises UsageError if it
    cannot be read, raises an error or has no such policy."""
    # dataclasses look for it there
    module = sys.modules[f"policy {path}"] = ModuleType(f"policy {path}")
    source = read_bytes(Path(path), UsageError)
    try:
        exec(compile(source, path, "exec"), module.__dict__)
        found = module.__dict__.get(name)
        if isinstance(found, type) and issubclass(found, Policy):
            return type(name, (_FromFile, found), {"__slots__": ()})
    except (Exception, SystemExit) as error:
        raise UsageError(f"--policy {path}: {type(error).__name__}: {first_line(error)}") from error
    classes = [
        key
        for key, one in vars(module).items()
        if getattr(one, "__module__", "") == module.__name__
    ]
    has = ", ".join(classes) or "no class"
    raise UsageError(
        f"--policy {path}:{name or 'NAME'}: the file has no such subclass of Policy; it has {has}"
    )


def start_policy(kind: type[Policy], parameters: Mapping[str, Any]) -> Policy:
    """A policy of the class. Raises UsageError for a parameter out of range, and for any error of a
    user's class."""
    if not issubclass(kind, _FromFile):
        return kind(**parameters)
    try:
        with policy_failures(kind.__name__, but=UsageError):
            return kind(**parameters)
    except PolicyFailed as error:
        raise UsageError(str(error)) from error
