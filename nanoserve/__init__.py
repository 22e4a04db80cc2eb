"""nanoserve: a compact LLM inference engine whose scheduling policies are swappable classes.

The names below are loaded on first use, so that importing the package imports nothing else.
"""

TYPE_CHECKING = False
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


def __getattr__(name: str) -> object:
    if name in _HOME_OF:
        from importlib import import_module

        if name == "LLM":
            from nanoserve.utils.threads import prepare_threads

            prepare_threads()  # its module imports torch
        return getattr(import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'nanoserve' has no attribute {name!r}")
