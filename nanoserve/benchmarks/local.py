"""One engine in this process, measured beside the machine it runs on."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from nanoserve.benchmarks.cpu_load import ForeignLoad
from nanoserve.benchmarks.driving import EngineDriver, EngineRun
from nanoserve.benchmarks.floors import ModelCost, StepShape
from nanoserve.benchmarks.roofline import STAGE, BandwidthProbe, machine_limits
from nanoserve.benchmarks.settling import settle_operators
from nanoserve.benchmarks.step_summary import summarize_steps
from nanoserve.errors import UsageError
from nanoserve.llm import LLM
from nanoserve.measures.metrics import MILLISECONDS, BatchRates, request_distributions
from nanoserve.measures.workloads import RequestShape, random_prompts
from nanoserve.models.dtypes import resolve_dtype
from nanoserve.models.hub import ProgressCallback

_WARM_UP = RequestShape(8, 4)
_STEP_TOKENS = 32
"""A step reads all weights, which takes about as long as computing so many tokens: the measure of what is done."""

_TELL_SECONDS = 1.0
"""To draw takes a millisecond or two, which the run has to bear."""


class LocalBench:
    """Measures an open LLM; the machine's limits are looked at once, its bandwidth around every measurement.

    Args:
        announce: is told, in a line, what is waited for before anything is measured.
        progress: is told how far that is, and then how far the runs are.
        probes: whether to look at the machine: without, no figure is held against its limits.
    """

    def __init__(
        self, llm: LLM, *, seed: int, announce: Callable[[str], None], progress: ProgressCallback, probes: bool
    ) -> None:
        import torch

        self._llm = llm
        self._driver = EngineDriver(llm.engine, self._count)
        self._seed = seed
        self._progress = progress
        self._done = self._expected = 0
        self._told = 0.0
        dtype = resolve_dtype(llm.engine_config.dtype, torch.device(llm.engine_config.device), llm.config.dtype)
        operators = settle_operators(announce)
        llm.prepare(lambda stage, done, _: None if done else announce(f"{stage}, once on this machine ..."))
        self._cost = ModelCost(llm.config, dtype.itemsize)
        self._probe = self._limits = None
        if probes:
            announce(f"{STAGE} ...")
            self._probe = BandwidthProbe()
            self._limits = machine_limits(dtype, self._probe, progress=progress)
        self._foreign = ForeignLoad()
        self.facts: dict[str, Any] = {
            "model": llm.model_name,
            "dtype": str(dtype).removeprefix("torch."),
            "operators": operators,
            "layers": "compiled" if llm.compiled else "eager",
            "threads": torch.get_num_threads(),
            "policy": llm.engine_config.policy_name,
        }
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
        """These requests will be run together so many times: what progress is told is how much of it is done."""
        steps = max(shape.output_tokens for shape in shapes)
        self._expected += runs * (_STEP_TOKENS * steps + sum(shape.total_tokens for shape in shapes))

    def _count(self, step: StepShape) -> None:
        self._done += _STEP_TOKENS + step.tokens
        if (now := time.monotonic()) - self._told > _TELL_SECONDS:
            self._told = now
            self._progress("all runs", min(self._done, self._expected), self._expected)

    def warm_up(self, shapes: Sequence[RequestShape]) -> None:
        """Run these, unmeasured."""
        self._run(list(shapes) or [_WARM_UP], repeat=0)

    def measure(self, case: str, shapes: Sequence[RequestShape], *, repeats: int) -> dict[str, Any]:
        """A report's row for requests that are issued together, ``repeats`` times over."""
        before = self._bandwidth()
        self._foreign.read()
        runs = [self._run(shapes, repeat) for repeat in range(1, repeats + 1)]
        foreign = self._foreign.read()
        after = self._bandwidth()
        steps = [step for run in runs for step in run.steps]
        facts = {"case": case, "requests": len(shapes), "repeats": repeats}
        readings = [*before, *after]
        beside = {"read_gb_per_s": [reading / 1e9 for reading in readings], "foreign_cores": foreign}
        # The machine may be faster now than it was ever seen.
        limits = None if self._limits is None else self._limits.at_least(*readings)
        return facts | timing_fields(runs) | {"steps": summarize_steps(steps, self._cost, limits)} | beside

    def _bandwidth(self) -> list[float]:
        """A reading, where the machine is looked at."""
        return [] if self._probe is None else [self._probe.read()]

    def _run(self, shapes: Sequence[RequestShape], repeat: int) -> EngineRun:
        lengths = [shape.input_tokens for shape in shapes]
        prompts = random_prompts(lengths, self._llm.config.vocab_size, self._seed + repeat)
        return self._driver.run(prompts, [shape.output_tokens for shape in shapes])


def timing_fields(runs: Sequence[EngineRun]) -> dict[str, Any]:
    """Latencies over the requests of all runs, mean rates, and each run's own figures as samples for ``bench diff``."""
    rates = [BatchRates.of(run.timings) for run in runs]
    samples = {
        "ttft_ms": [MILLISECONDS * _mean([timing.ttft for timing in run.timings]) for run in runs],
        "tpot_ms": [MILLISECONDS * _mean([timing.tpot for timing in run.timings]) for run in runs],
        "output_tokens_per_s": [rate.output for rate in rates],
    }
    return {
        **request_distributions([timing for run in runs for timing in run.timings]),
        "prefill_tokens_per_s": _mean([rate.prefill for rate in rates]),
        "decode_tokens_per_s": _mean([rate.decode for rate in rates]) or None,
        "output_tokens_per_s": _mean([rate.output for rate in rates]),
        "total_tokens_per_s": _mean([rate.total for rate in rates]),
        "requests_per_s": _mean([len(run.timings) / max(timing.e2el for timing in run.timings) for run in runs]),
        "seconds": _mean([max(timing.e2el for timing in run.timings) for run in runs]),
        "samples": samples,
    }


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0
