"""Engines in this process, measured beside the machine they run on."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from nanoserve.errors import RuntimeFailure, UsageError
from nanoserve.lab.benchmarks.driving import (
    EngineDriver,
    EngineRun,
    StepRecord,
    StepSummary,
    summarize_steps,
)
from nanoserve.lab.benchmarks.floors import Limits, ModelCost
from nanoserve.lab.benchmarks.machine import ForeignLoad
from nanoserve.lab.benchmarks.report import Report
from nanoserve.lab.benchmarks.roofline import STAGE, BandwidthProbe, machine_limits
from nanoserve.lab.benchmarks.rounds import (
    GIGA,
    MeasuredRound,
    Repeating,
    counting_words,
    most_known,
    shown_rounds,
)
from nanoserve.lab.benchmarks.settling import settle
from nanoserve.lab.workloads import LocalCase, random_prompts
from nanoserve.llm import LLM
from nanoserve.models.dtypes import DTYPES
from nanoserve.models.hub import ProgressCallback
from nanoserve.record.metrics import MILLISECONDS, BatchRates, mean_of_known, request_distributions
from nanoserve.request import RequestShape
from nanoserve.scheduler.work import StepWork

# reading all weights takes about as long as computing this many tokens; progress counts both
_STEP_TOKENS = 32
_TELL_SECONDS = 1.0  # drawing takes a millisecond or two of the run's own time


class LocalBench:
    """Measures one open LLM, or an eager and a compiled one of a model, in interleaved runs. Raises
    RuntimeFailure if both are eager. With ``probes`` the machine's limits are measured once, and
    its bandwidth around every run."""

    def __init__(
        self,
        llms: Sequence[LLM],
        *,
        seed: int,
        announce: Callable[[str], None],
        progress: ProgressCallback,
        probes: bool,
        repeating: Repeating,
    ) -> None:
        self._llm = llm = llms[0]
        self._seed, self._announce, self._progress, self._repeating = (
            seed,
            announce,
            progress,
            repeating,
        )
        self.longest = llm.built.max_model_len
        self._done, self._expected, self._told = 0, 0, 0.0
        facts = [settle(each, announce) for each in llms]
        self.facts = facts[0]
        self._dtype = dtype = DTYPES[self.facts["dtype"]]
        self._cost, self._foreign = ModelCost(llm.built.model, dtype.itemsize), ForeignLoad()
        self._drivers: dict[str, EngineDriver] = {}
        for one in llms:
            layers = "eager"
            if one.built.compiled:
                layers = "compiled"
            self._drivers[layers] = EngineDriver(one.built.engine, self._count, self._cost.windows)
        if len(self._drivers) < len(llms):
            reason = "layers cannot be compiled on this machine"
            raise RuntimeFailure(f"{reason}, so there is nothing to compare eager ones with")
        self.facts["layers"] = " and ".join(self._drivers)
        self._rounds: list[LocalRound] = []  # of all cases
        self._steps: list[list[StepRecord]] = []  # of each row of the report
        self._probe: BandwidthProbe | None = None
        self._limits: Limits | None = None
        if probes:
            announce(f"{STAGE} ...")
            self._probe = BandwidthProbe()
            self._take_limits(machine_limits(dtype, self._probe, progress=progress))

    def run(self, cases: Sequence[LocalCase], report: Report, *, repeats: int) -> None:
        """Measure each case: rows, and ratios of two engines. Raises UsageError if a request is too
        long."""
        for case in cases:
            longest = max(shape.total_tokens for shape in case.shapes)
            if longest > self.longest:
                raise UsageError(
                    f"{case.name} needs a context of {longest} tokens, but it holds "
                    f"{self.longest}; "
                    "choose shorter requests, another --model or a larger --kv-cache-memory"
                )
            for shapes, runs in ((case.warm_up, 1), (case.shapes, repeats)):
                steps = max(shape.output_tokens for shape in shapes)
                tokens = _STEP_TOKENS * steps + sum(shape.total_tokens for shape in shapes)
                self._expected += runs * len(self._drivers) * tokens
        ratios: list[dict[str, Any]] = []
        for case in cases:
            self._announce(f"measuring {case.announced}")
            rows = self._measure(case, repeats)
            for row in rows:
                report.add(row)
            self._hold_against_floors(report)
            report.put("counting", counting_words(self._rounds, "runs"))
            if len(rows) > 1:
                ratios += compiled_ratios(case.name, rows)
                report.put("ratios", ratios)

    def _count(self, step: StepWork) -> None:
        self._done += _STEP_TOKENS + step.tokens
        if (now := time.monotonic()) - self._told > _TELL_SECONDS:
            self._told = now
            self._progress("all runs", min(self._done, self._expected), self._expected)

    def _measure(self, case: LocalCase, repeats: int) -> list[dict[str, Any]]:
        """A report's row for each engine, its steps not yet summarized. Of two engines, a case ends
        in its layers."""
        for driver in self._drivers.values():
            self._run(driver, case.warm_up, repeat=0)
        rounds = list(self._repeating.rounds(partial(self._round, case), repeats))
        self._rounds += rounds
        shown = shown_rounds(rounds)
        readings = [reading for one in shown for reading in one.readings]
        if self._limits is not None:
            # the machine may be faster than it was ever seen
            self._take_limits(self._limits.at_least(*readings))
        beside: dict[str, Any] = {
            "read_gb_per_s": [reading / GIGA for reading in readings],
            "foreign_cores": most_known(one.foreign_cores for one in shown),
            "rounds": [one.facts for one in rounds],
            "steps": {},
        }
        rows = []
        for layers in self._drivers:
            name = case.name
            if len(self._drivers) > 1:
                name = f"{case.name} {layers}"
            facts = {"case": name, "requests": len(case.shapes), "repeats": len(shown)}
            runs = [one.runs[layers] for one in shown]
            self._steps.append([step for run in runs for step in run.steps])
            rows.append(facts | timing_fields(runs) | beside)
        return rows

    def _round(self, case: LocalCase, number: int) -> "LocalRound":
        """Run the case once on each engine; the first one alternates."""
        readings = self._bandwidth()
        self._foreign.read()
        drivers = list(self._drivers.items())
        if number % 2 == 0:
            drivers.reverse()
        runs = {layers: self._run(driver, case.shapes, number) for layers, driver in drivers}
        foreign = self._foreign.read()
        readings += self._bandwidth()
        return LocalRound(foreign_cores=foreign, readings=tuple(readings), runs=runs)

    def _hold_against_floors(self, report: Report) -> None:
        """Summarize the steps of all rows so far. If some took less than the least time there is,
        the machine's limits are measured again; if some still do, these limits are wrong, and no
        row tells shares."""
        found = self._summaries(self._limits)
        if any(map(_beats_floor, found)):
            assert self._probe is not None and self._limits is not None, "there are floors"
            self._announce(
                "steps took less than the least time there is: looking at the machine again ..."
            )
            again = machine_limits(self._dtype, self._probe, progress=self._progress)
            self._take_limits(self._limits.or_better(again))
            found = self._summaries(self._limits)
        self.facts["floor_holds"] = not any(map(_beats_floor, found))
        if not self.facts["floor_holds"]:
            found = self._summaries(None)
        for place, summary in enumerate(found):
            report.update(place, {"steps": summary})
        report.put("engine", self.facts)

    def _summaries(self, limits: Limits | None) -> list[dict[str, StepSummary]]:
        return [summarize_steps(steps, self._cost, limits) for steps in self._steps]

    def _take_limits(self, limits: Limits) -> None:
        self._limits = limits
        self.facts["limit_read_gb_per_s"] = limits.bytes_per_second / GIGA
        self.facts["limit_gflops"] = limits.operations_per_second / GIGA

    def _bandwidth(self) -> list[float]:
        if self._probe is None:
            return []
        return [self._probe.read()]

    def _run(self, driver: EngineDriver, shapes: Sequence[RequestShape], repeat: int) -> EngineRun:
        lengths = [shape.input_tokens for shape in shapes]
        prompts = random_prompts(lengths, self._llm.built.model.vocab_size, self._seed + repeat)
        return driver.run(prompts, [shape.output_tokens for shape in shapes])


class LocalRound(MeasuredRound, frozen=True, kw_only=True):
    """A case once on each engine, between readings of the bandwidth if there is a probe."""

    readings: tuple[float, ...]  # in bytes per second
    runs: dict[str, EngineRun]  # by the engine's layers

    @property
    def facts(self) -> dict[str, Any]:
        """Its conditions, for a report."""
        bandwidths = [reading / GIGA for reading in self.readings]
        return {
            "read_gb_per_s": bandwidths,
            "foreign_cores": self.foreign_cores,
            "counts": self.counts,
        }


def _beats_floor(summary: Mapping[str, StepSummary]) -> bool:
    return any(steps.beats_floor for steps in summary.values())


def timing_fields(runs: Sequence[EngineRun]) -> dict[str, Any]:
    """Latencies over the requests of all runs, mean rates, and each run's own figures as samples
    for ``bench diff``."""
    rates = [BatchRates.of(run.timings) for run in runs]
    seconds = [max(timing.e2el for timing in run.timings) for run in runs]
    samples = {
        "ttft_ms": [
            MILLISECONDS * mean_of_known(timing.ttft for timing in run.timings) for run in runs
        ],
        "tpot_ms": [
            MILLISECONDS * mean_of_known(timing.tpot for timing in run.timings) for run in runs
        ],
        "output_tokens_per_s": [rate.output for rate in rates],
    }
    means = {
        f"{name}_tokens_per_s": mean_of_known(getattr(rate, name) for rate in rates)
        for name in ("prefill", "decode", "output", "total")
    }
    return {
        **request_distributions([timing for run in runs for timing in run.timings]),
        **means,
        "decode_tokens_per_s": means["decode_tokens_per_s"] or None,
        "requests_per_s": mean_of_known(
            len(run.timings) / length for run, length in zip(runs, seconds, strict=True)
        ),
        "seconds": mean_of_known(seconds),
        "samples": samples,
    }


def compiled_ratios(case: str, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compare the rows of an eager and a compiled engine: for each metric the median and the
    extremes of the ratios within a round. Above 1 the compiled layers are faster, whichever way the
    metric counts."""
    samples = {row["case"].rpartition(" ")[2]: row["samples"] for row in rows}
    found = []
    for metric, compiled in samples["compiled"].items():
        pairs = [
            (one, other)
            for one, other in zip(compiled, samples["eager"][metric], strict=True)
            if one and other
        ]
        if metric.endswith("_per_s"):
            ratios = [one / other for one, other in pairs]
        else:
            ratios = [other / one for one, other in pairs]
        if ratios:
            spread = {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
            found.append({"case": case, "metric": metric, "rounds": len(ratios), **spread})
    return found
