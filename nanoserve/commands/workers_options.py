"""Options of the commands whose model may be divided over several worker processes."""

from dataclasses import dataclass, replace
from typing import Annotated, Any

from nanoserve.commands.options import EngineOptions, at_most, option, parsed_bytes
from nanoserve.engine_config import MOST_PARALLEL, PAIR_OPTIONS
from nanoserve.errors import UsageError
from nanoserve.layout import ParallelLayout
from nanoserve.processes.threads import MOST_THREADS

WORKERS_PANEL = "Workers"
_TRACE_HELP = "Write what each worker did when, for Perfetto or chrome://tracing."


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersOptions(EngineOptions):
    """An engine whose model may be divided over several worker processes, and whose run can be drawn."""

    dp: Annotated[
        int,
        option(
            "--dp",
            panel=WORKERS_PANEL,
            help="Whole engines, each with workers of its own: a request goes to the least busy.",
            min=1,
            callback=at_most(MOST_PARALLEL),
        ),
    ] = 1
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
    prefill_parallel: Annotated[
        str | None,
        option(
            PAIR_OPTIONS[0],
            panel=WORKERS_PANEL,
            help="Layout for prompts, as p4 or d2t2p2; with the next one, instead of --pp and --tp.",
            metavar="NAME",
        ),
    ] = None
    decode_parallel: Annotated[
        str | None,
        option(
            PAIR_OPTIONS[1],
            panel=WORKERS_PANEL,
            help="Layout for decodes, as t4: the same workers with other shares of the weights.",
            metavar="NAME",
        ),
    ] = None
    host_kv_memory: Annotated[
        str | None,
        option(
            "--host-kv-memory",
            panel=WORKERS_PANEL,
            help="Host memory for KV blocks, as 4GiB; default: from what is free if layouts or policy need it.",
            metavar="SIZE",
        ),
    ] = None
    host_threads: Annotated[
        int | None,
        option(
            "--host-threads",
            panel=WORKERS_PANEL,
            help="CPU threads that attend in host memory; default: half of the cores, with a GPU all but two.",
            min=1,
            callback=at_most(MOST_THREADS),
        ),
    ] = None
    profile: Annotated[
        str | None,
        option(
            "--profile",
            panel=WORKERS_PANEL,
            help="What nanoserve profile measured here, to predict steps by; default: measured at start.",
            metavar="FILE",
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
            UsageError: for a size, a split or a layout that is none, and two layouts that do not suit each other.
        """
        first, *others = self.layouts()
        return {
            **EngineOptions.settings(self),
            "pipeline_parallel": first.pipeline_parallel,
            "tensor_parallel": first.tensor_parallel,
            "pipeline_split": parsed_split(self.pp_split),
            "data_parallel": first.data_parallel,
            "decode_layout": replace(others[0], data_parallel=1) if others else None,
            "host_kv_memory": parsed_bytes(self.host_kv_memory),
            "host_threads": self.host_threads,
            "profile": self.profile,
            "trace": self.trace_out,
        }

    def layouts(self) -> tuple[ParallelLayout, ...]:
        """Of all engines together: the only one, or that of prompts and that of decodes.

        Raises:
            UsageError: for what is no layout, one without the other, or another number of engines in each.
        """
        prefill, decode = self.prefill_parallel, self.decode_parallel
        if prefill is None and decode is None:
            return (ParallelLayout(data_parallel=self.dp, tensor_parallel=self.tp, pipeline_parallel=self.pp),)
        first, second = PAIR_OPTIONS
        if prefill is None or decode is None:
            raise UsageError(f"give both {first} and {second}, or neither")
        if (self.dp, self.pp, self.tp, self.pp_split) != (1, 1, 1, None):
            raise UsageError(f"{first} and {second} replace --dp, --pp, --tp and --pp-split: leave these out")
        pair = ParallelLayout.parse(prefill), ParallelLayout.parse(decode)
        if pair[0].data_parallel != pair[1].data_parallel:
            raise UsageError(
                f"{first} {pair[0].name} and {second} {pair[1].name} differ in D, the number of whole engines: "
                "it stays the same"
            )
        return pair


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


def parsed_split(layers: str | None) -> tuple[int, ...] | None:
    """The layers of each stage, as --pp-split names them.

    Raises:
        UsageError: for what is no list of numbers.
    """
    if layers is None:
        return None
    words = layers.split(",")
    if not all(word.isascii() and word.isdigit() and len(word) < 6 for word in words):
        raise UsageError(f"--pp-split {layers!r:.40} is no list of layers such as 14,14")
    return tuple(int(word) for word in words)
