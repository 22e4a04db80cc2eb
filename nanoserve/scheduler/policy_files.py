"""Policies of a user's own: a class in a Python file that is named on the command line, and executed."""

import ast
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from nanoserve.errors import PolicyFailed, UsageError, first_line, shown
from nanoserve.request import Request, SamplingParams
from nanoserve.scheduler.load import Decision, Load, Policy, policy_failures
from nanoserve.scheduler.ordering import Ordering
from nanoserve.utils.files import read_bytes

_SAMPLES = (  # idle, busy, and without a free block
    Load(None, 100, 100, 0, 0, 0, 0, 60, 60, 16, 4),
    Load(Decision(32, 3), 900, 300, 7, 3, 1, 500, 20, 60, 16, 2, steps_in_flight=1, pipeline_depth=2),
    Load(Decision(32, 8), 900, 300, 8, 8, 0, 960, 0, 60, 16, 2),
)
_SAMPLE_REQUEST = Request("sample", (1, 2, 3), SamplingParams(), seed=0, priority=1, user="somebody")


class _FromFile(Policy):
    """What stands before a user's class: whatever it raises or answers, the user reads one line about it."""

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
    for name in ("prefill_tokens", "decodes", "swap_out", "swap_in", "layout"):
        value = getattr(decision, name)
        if type(value) is not int or not 0 <= value <= sys.maxsize:
            raise ValueError(f"{name} must be a whole number from 0, not {shown(value)}")
    if not isinstance(decision.bound, str):
        raise ValueError(f"bound must be text, not {shown(decision.bound)}")
    if decision.strategy != "device" or decision.host_decodes != (0, 0) or decision.alternatives != ():
        raise ValueError("only policies of nanoserve have the CPU attend: leave strategy and host_decodes out")


@cache
def load_policy_class(path: str, name: str) -> type[Policy]:
    """The class of that name. The file is executed. Raises UsageError if it cannot be read, imports torch, raises or
    has no such policy."""
    module = sys.modules[f"policy {path}"] = ModuleType(f"policy {path}")  # dataclasses look for it there
    source, had_torch = read_bytes(Path(path), UsageError), "torch" in sys.modules
    try:
        tree = ast.parse(source, path)
        imports_torch = any(map(_imports_torch, ast.walk(tree)))
        if not imports_torch:
            exec(compile(tree, path, "exec"), module.__dict__)  # the user named this file to have it executed
        if imports_torch or ("torch" in sys.modules and not had_torch):  # by another module
            raise ImportError("a policy decides by the Load alone, without torch")
        found = module.__dict__.get(name)
        if isinstance(found, type) and issubclass(found, Policy):
            return type(name, (_FromFile, found), {"__slots__": ()})
    except (Exception, SystemExit) as error:
        raise UsageError(f"--policy {path}: {type(error).__name__}: {first_line(error)}") from error
    classes = [key for key, one in vars(module).items() if getattr(one, "__module__", "") == module.__name__]
    has = ", ".join(classes) or "no class"
    raise UsageError(f"--policy {path}:{name or 'NAME'}: the file has no such subclass of Policy; it has {has}")


def _imports_torch(node: ast.AST) -> bool:
    imported = [one.name for one in node.names] if isinstance(node, ast.Import) else []
    imported += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    return any(name.partition(".")[0] == "torch" for name in imported)


def start_policy(kind: type[Policy], parameters: Mapping[str, Any]) -> Policy:
    """A policy of the class; one from a file after it has answered for a few loads and a request. Raises UsageError for
    a parameter out of range, and if anything is wrong with the class."""
    if not issubclass(kind, _FromFile):
        return kind(**parameters)
    try:
        with policy_failures(kind.__name__, but=UsageError):
            policy = kind(**parameters)
        for load in _SAMPLES:
            policy.decide(load)
        Ordering(policy).rank(_SAMPLE_REQUEST)
    except PolicyFailed as error:
        raise UsageError(str(error)) from error
    return policy
