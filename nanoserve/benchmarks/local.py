"""Engines in this process, measured beside the machine they run on."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanoserve.benchmarks.cpu_load import ForeignLoad
from nanoserve.benchmarks.driving import EngineDriver, EngineRun, summarize_steps
from nanoserve.benchmarks.floors import ModelCost, StepShape
from nanoserve.benchmarks.roofline import STAGE, BandwidthProbe, machine_limits
from nanoserve.benchmarks.settling import settle
from nanoserve.errors import RuntimeFailure, UsageError
from nanoserve.llm import LLM
from nanoserve.measures.metrics import MILLISECONDS, BatchRates, mean_of_known, request_distributions
from nanoserve.measures.workloads import RequestShape, random_prompts
from nanoserve.models.dtypes import DTYPES
from nanoserve.models.hub import ProgressCallback

_WARM_UP = RequestShape(8, 4)
_STEP_TOKENS = 32
"""Reading all weights in a step takes about as long as computing this many tokens; progress counts both."""

_TELL_SECONDS = 1.0
"""To draw takes a millisecond or two, which the run has to bear."""


class LocalBench:
    """Measures open LLMs of one model. The machine's limits are measured once, its bandwidth around every measurement.

    Args:
        llms: one, or an eager and a compiled one, whose runs are interleaved.
        announce: takes a line that says what is waited for before anything is measured.
        progress: is told how far that is, and then how far the runs are.
        probes: whether to measure the machine. Without, no figure is compared with its limits.

    Raises:
        RuntimeFailure: if two LLMs are given and the layers of both are eager.
    """

    def __init__(
        self,
        llms: Sequence[LLM],
        *,
        seed: int,
        announce: Callable[[str], None],
        progress: ProgressCallback,
        probes: bool,
    ) -> None:
        self._llm = llm = llms[0]
        self._seed = seed
        self._progress = progress
        self._done = self._expected = 0
        self._told = 0.0
        self.facts, *_ = [settle(each, announce) for each in llms]
        dtype = DTYPES[self.facts["dtype"]]
        self._drivers = {_layers(each): EngineDriver(each.engine, self._count) for each in llms}
        if len(self._drivers) < len(llms):
            raise RuntimeFailure(
                "layers cannot be compiled on this machine, so there is nothing to compare eager ones with"
            )
        self._cost = ModelCost(llm.config, dtype.itemsize)
        self._probe = self._limits = None
        if probes:
            announce(f"{STAGE} ...")
            self._probe = BandwidthProbe()
            self._limits = machine_limits(dtype, self._probe, progress=progress)
        self._foreign = ForeignLoad()
        self.facts["layers"] = " and ".join(self._drivers)
        if self._limits is not None:
            self.facts["limit_read_gb_per_s"] = self._limits.bytes_per_second / 1e9
            self.facts["limit_gflops"] = self._limits.operations_per_second / 1e9

    def check_fits(self, shapes: Sequence[RequestShape], what: str) -> None:
        """Raise UsageError if a request is longer than the context."""
        longest = max(shape.total_tokens for shape in shapes)
        if longest > self._llm.max_model_len:
            raise UsageError(
                f"{what} needs a context of {longest} tokens, but it holds {self._llm.max_model_len}; "
                "choose shorter requests, another --model or a larger --kv-cache-memory"
            )

    def expect(self, shapes: Sequence[RequestShape], *, runs: int) -> None:
        """Count the work of these requests, run together `runs` times on each engine, for the progress display."""
        steps = max(shape.output_tokens for shape in shapes)
        self._expected += (
            runs * len(self._drivers) * (_STEP_TOKENS * steps + sum(shape.total_tokens for shape in shapes))
        )

    def _count(self, step: StepShape) -> None:
        self._done += _STEP_TOKENS + step.tokens
        if (now := time.monotonic()) - self._told > _TELL_SECONDS:
            self._told = now
            self._progress("all runs", min(self._done, self._expected), self._expected)

    def warm_up(self, shapes: Sequence[RequestShape]) -> None:
        """Run these, unmeasured."""
        for driver in self._drivers.values():
            self._run(driver, list(shapes) or [_WARM_UP], repeat=0)

    def measure(self, case: str, shapes: Sequence[RequestShape], *, repeats: int) -> list[dict[str, Any]]:
        """Run requests that are issued together, ``repeats`` times on each engine.

        Returns:
            A report's rows, one for each engine. With two engines a row's case ends in its layers.
        """
        before = self._bandwidth()
        self._foreign.read()
        runs: dict[str, list[EngineRun]] = {layers: [] for layers in self._drivers}
        for repeat in range(1, repeats + 1):
            drivers = list(self._drivers.items())
            for layers, driver in drivers if repeat % 2 else reversed(drivers):
                runs[layers].append(self._run(driver, shapes, repeat))
        foreign = self._foreign.read()
        readings = [*before, *self._bandwidth()]
        beside = {"read_gb_per_s": [reading / 1e9 for reading in readings], "foreign_cores": foreign}
        # The machine may be faster now than it was ever seen.
        limits = None if self._limits is None else self._limits.at_least(*readings)
        rows = []
        for layers, done in runs.items():
            facts = {"case": f"{case} {layers}" if len(runs) > 1 else case, "requests": len(shapes), "repeats": repeats}
            steps = summarize_steps([step for run in done for step in run.steps], self._cost, limits)
            rows.append(facts | timing_fields(done) | {"steps": steps} | beside)
        return rows

    def _bandwidth(self) -> list[float]:
        """A reading, where the machine is looked at."""
        return [] if self._probe is None else [self._probe.read()]

    def _run(self, driver: EngineDriver, shapes: Sequence[RequestShape], repeat: int) -> EngineRun:
        lengths = [shape.input_tokens for shape in shapes]
        prompts = random_prompts(lengths, self._llm.config.vocab_size, self._seed + repeat)
        return driver.run(prompts, [shape.output_tokens for shape in shapes])


def timing_fields(runs: Sequence[EngineRun]) -> dict[str, Any]:
    """Latencies over the requests of all runs, mean rates, and each run's own figures as samples for ``bench diff``."""
    rates = [BatchRates.of(run.timings) for run in runs]
    seconds = [max(timing.e2el for timing in run.timings) for run in runs]
    samples = {
        "ttft_ms": [MILLISECONDS * mean_of_known([timing.ttft for timing in run.timings]) for run in runs],
        "tpot_ms": [MILLISECONDS * mean_of_known([timing.tpot for timing in run.timings]) for run in runs],
        "output_tokens_per_s": [rate.output for rate in rates],
    }
    return {
        **request_distributions([timing for run in runs for timing in run.timings]),
        "prefill_tokens_per_s": mean_of_known([rate.prefill for rate in rates]),
        "decode_tokens_per_s": mean_of_known([rate.decode for rate in rates]) or None,
        "output_tokens_per_s": mean_of_known([rate.output for rate in rates]),
        "total_tokens_per_s": mean_of_known([rate.total for rate in rates]),
        "requests_per_s": mean_of_known(len(run.timings) / length for run, length in zip(runs, seconds, strict=True)),
        "seconds": mean_of_known(seconds),
        "samples": samples,
    }


def compiled_ratios(case: str, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What compiling gains, from the rows of an eager and a compiled engine: for each metric the median and the
    extremes of the ratios within a round. Above 1 the compiled layers are faster, whichever way the metric counts."""
    samples = {row["case"].rpartition(" ")[2]: row["samples"] for row in rows}
    found = []
    for metric, compiled in samples["compiled"].items():
        pairs = [(one, other) for one, other in zip(compiled, samples["eager"][metric], strict=True) if one and other]
        ratios = [one / other if metric.endswith("_per_s") else other / one for one, other in pairs]
        if ratios:
            spread = {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
            found.append({"case": case, "metric": metric, "rounds": len(ratios), **spread})
    return found


def _layers(llm: LLM) -> str:
    return "compiled" if llm.compiled else "eager"
