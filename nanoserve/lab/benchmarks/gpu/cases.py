"""A case of ``bench gpu``: what is measured or checked, and what becomes its row."""

from collections.abc import Callable
from typing import Any, NamedTuple

from nanoserve.errors import NanoserveError

_LONGEST_REASON = 300

Row = dict[str, Any]


class CannotRun(Exception):
    """Something cannot do this work here, such as a peer that is not installed; the message says
    why."""


class GpuCase(NamedTuple):
    """Something to measure or to check; `measure` gives the fields of its row."""

    name: str
    measure: Callable[[], Row]


def reason(error: BaseException) -> str:
    name = "" if isinstance(error, NanoserveError) else f"{type(error).__name__}: "
    return (name + " ".join(str(error).split()))[:_LONGEST_REASON]
