"""Which papers there are; each lives in a module of its own, which is imported when it is asked for."""

from importlib import import_module

from nanoserve.errors import UsageError
from nanoserve.papers.framework import Paper

_MODULES = {"gllm": "gllm", "seesaw": "seesaw", "apex": "apex", "lecture": "lecture", "adaptive": "adaptive"}
"""The name on the command line, and the module of this package whose PAPER it is."""


def load_paper(name: str) -> Paper:
    """The paper of that name.

    Raises:
        UsageError: listing the names.
    """
    if name not in _MODULES:
        raise UsageError(f"unknown paper {name!r}; choose one of {', '.join(_MODULES)}")
    paper: Paper = import_module(f"nanoserve.papers.{_MODULES[name]}").PAPER
    return paper
