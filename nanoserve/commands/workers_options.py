"""Options of the commands whose model may be divided over several worker processes."""

from dataclasses import dataclass
from typing import Annotated, Any

from nanoserve.commands.options import EngineOptions, at_most, option
from nanoserve.config import MOST_PARALLEL
from nanoserve.errors import UsageError

WORKERS_PANEL = "Workers"
_TRACE_HELP = "Write what each worker did when, for Perfetto or chrome://tracing."


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersOptions(EngineOptions):
    """An engine whose model may be divided over several worker processes, and whose run can be drawn."""

    pp: Annotated[
        int,
        option(
            "--pp",
            panel=WORKERS_PANEL,
            help="Pipeline stages: each worker has some of the layers.",
            min=1,
            callback=at_most(MOST_PARALLEL),
        ),
    ] = 1
    tp: Annotated[
        int,
        option(
            "--tp",
            panel=WORKERS_PANEL,
            help="Tensor parallel degree: so many workers share each layer.",
            min=1,
            callback=at_most(MOST_PARALLEL),
        ),
    ] = 1
    pp_split: Annotated[
        str | None,
        option(
            "--pp-split",
            panel=WORKERS_PANEL,
            help="Layers of each stage, as 14,14; default: by cost.",
            metavar="N,N",
        ),
    ] = None
    # Where --trace names the lengths of requests, a file that is read, this one must not take its variable.
    trace_out: Annotated[
        str | None,
        option(
            "--trace-out",
            panel=WORKERS_PANEL,
            help=_TRACE_HELP,
            metavar="FILE",
        ),
    ] = None

    def settings(self) -> dict[str, Any]:
        """What LLM takes, without the model and the threads.

        Raises:
            UsageError: for a size or a split that is none.
        """
        return {
            **EngineOptions.settings(self),
            "pipeline_parallel": self.pp,
            "tensor_parallel": self.tp,
            "pipeline_split": _split(self.pp_split),
            "trace": self.trace_out,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions(WorkersOptions):
    """The same for the commands whose own options leave --trace free."""

    trace_out: Annotated[
        str | None,
        option(
            "--trace",
            "--trace-out",
            panel=WORKERS_PANEL,
            envvar="NANOSERVE_TRACE_OUT",
            help=_TRACE_HELP,
            metavar="FILE",
        ),
    ] = None


def _split(layers: str | None) -> tuple[int, ...] | None:
    if layers is None:
        return None
    words = layers.split(",")
    if not all(word.isascii() and word.isdigit() and len(word) < 6 for word in words):
        raise UsageError(f"--pp-split {layers!r:.40} is no list of layers such as 14,14")
    return tuple(int(word) for word in words)
