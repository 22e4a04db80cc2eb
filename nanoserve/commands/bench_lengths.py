"""How long the requests of a benchmark are: a preset, a trace, or all alike."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from nanoserve.commands.bench_options import MOST_REQUESTS, work_option
from nanoserve.errors import UsageError

if TYPE_CHECKING:
    from nanoserve.benchmarks.serving.work import Work

DEFAULT_PRESET = "cpu-small"
DEFAULT_REQUESTS = 32
_LONGEST = 2**20
"""Tokens, as in traces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthOptions:
    """How long requests are."""

    preset: Annotated[
        str | None,
        work_option("--preset", help="Lengths: nano-vllm, cpu or cpu-small (default).", metavar="NAME"),
    ] = None
    trace: Annotated[Path | None, work_option("--trace", help="Lengths from a CSV file.", metavar="FILE")] = None
    input_tokens: Annotated[int | None, work_option("--input", help="Length of every prompt.", min=1, max=_LONGEST)] = (
        None
    )
    output_tokens: Annotated[
        int | None, work_option("--output", help="Length of every answer.", min=1, max=_LONGEST)
    ] = None
    requests: Annotated[int | None, work_option("--requests", help="Requests of a run.", min=1, max=MOST_REQUESTS)] = (
        None
    )

    def read(self, seed: int, *, traced: bool = False) -> "Work":
        """The same for the same seed; with the times of the trace if they are wanted.

        Raises:
            UsageError: for options that contradict each other, and for traces that cannot be read.
        """
        from nanoserve.benchmarks.serving.work import Work
        from nanoserve.measures.workloads import PRESETS, RequestShape, read_arrivals, read_trace

        fixed = (self.input_tokens, self.output_tokens)
        if sum([self.preset is not None, self.trace is not None, fixed != (None, None)]) > 1:
            raise UsageError("give --preset, --trace or --input and --output, one of them")
        if traced and self.trace is None:
            raise UsageError("--arrivals trace needs the --trace whose times they are")
        if self.trace is not None:
            times = read_arrivals(self.trace, self.requests) if traced else None
            return Work(self.trace.name, read_trace(self.trace, self.requests), times)
        if self.input_tokens is not None and self.output_tokens is not None:
            shape = RequestShape(self.input_tokens, self.output_tokens)
            return Work(f"{shape.input_tokens}+{shape.output_tokens}", [shape] * (self.requests or DEFAULT_REQUESTS))
        if fixed != (None, None):
            raise UsageError("--input and --output go together")
        name = self.preset or DEFAULT_PRESET
        if name not in PRESETS:
            raise UsageError(f"--preset {name!r:.40} is not one of {', '.join(PRESETS)}")
        preset = PRESETS[name]
        return Work(name, replace(preset, requests=self.requests or preset.requests).draw(seed))
