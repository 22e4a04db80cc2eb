"""nanoserve: a compact LLM inference engine whose scheduling policies are swappable classes.

Importing the package imports no torch: the names below are loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nanoserve.threads import prepare_threads

if TYPE_CHECKING:
    from nanoserve.llm import LLM
    from nanoserve.request import CompletionOutput, RequestOutput, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

_HOME_OF = {
    "LLM": "nanoserve.llm",
    "CompletionOutput": "nanoserve.request",
    "RequestOutput": "nanoserve.request",
    "SamplingParams": "nanoserve.request",
}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        if name == "LLM":
            prepare_threads()  # its module imports torch
        return getattr(import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'nanoserve' has no attribute {name!r}")
