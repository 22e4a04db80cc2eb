"""The engine with random weights of real shapes, against the floor of the same run and against
transformers.

Decode steps also run under torch's profiler, whose trace is JSON with times in microseconds.
"""

import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from nanoserve.config.published_shapes import published_shapes
from nanoserve.engine.engine import Engine
from nanoserve.errors import RuntimeFailure
from nanoserve.lab.benchmarks.driving import EngineRun
from nanoserve.lab.benchmarks.floors import Limits, ModelCost
from nanoserve.lab.benchmarks.gpu.cases import CannotRun, GpuCase, Row
from nanoserve.lab.benchmarks.gpu.device import GpuBench, TimeSpread
from nanoserve.lab.benchmarks.gpu.models import EngineShelf, TimedEngine
from nanoserve.lab.workloads import PRESETS, Preset, random_prompts
from nanoserve.models.dtypes import format_name
from nanoserve.record.metrics import BatchRates
from nanoserve.request import Request, RequestShape, SamplingParams
from nanoserve.scheduler.work import StepWork
from nanoserve.utils.temporary import temporary_directory

SMALL, MIDDLE, LARGE = "qwen3-0.6b", "llama-3.1-8b", "qwen2.5-14b"
PRESET = "nano-vllm"
TEMPERATURE = 0.6
"""The temperature at which nano-vllm and mini-sglang run the preset."""
LONGEST_PROMPT = 8192
_REPEATS = 3
_TRANSFORMERS_SECONDS = 70.0
_POLL_SECONDS = 0.2

OpenEngine = Callable[[], TimedEngine]


def part_cases(bench: GpuBench, rows: list[Row]) -> Iterator[GpuCase]:
    """The small model in every way, then the larger ones; transformers before the largest, in case
    time runs out."""
    with closing(EngineShelf(bench)) as shelf:
        measuring = EngineBench(bench, shelf)
        yield from measuring.model_cases(SMALL, measuring.batch)
        yield from measuring.model_cases(MIDDLE, 8)
        yield GpuCase(f"{SMALL}: preset, transformers", measuring.measure_transformers)
        yield from measuring.model_cases(LARGE, 8)


class EngineBench:
    """Measures one model after another; in a dry run a tiny one stands for each of them."""

    def __init__(self, bench: GpuBench, shelf: EngineShelf) -> None:
        self._bench, self._shelf = bench, shelf
        # Tokens of requests that are timed or traced, of the prompt in one step, and requests at a
        # time in the preset.
        self._prompt, self._output, self._long_prompt, self.batch = 512, 256, LONGEST_PROMPT, 256
        self._preset = PRESETS[PRESET]
        if bench.dry_run:
            self._prompt, self._output, self._long_prompt, self.batch = 12, 8, 40, 4
            self._preset = Preset(6, (5, 20), (3, 9))
        self._shapes = self._preset.draw(seed=0)

    def model_cases(self, model: str, max_num_seqs: int) -> Iterator[GpuCase]:
        """Make the cases of this model. Two cases are measured of the small model alone."""
        middle, length = self._prompt + self._output // 2, self._long_prompt
        # A step in the middle of an answer, and one that is a whole prompt.
        decode, prefill = StepWork.of([middle]), StepWork.of(chunks=[(0, length)])
        measures: dict[str, Callable[..., Row]] = {
            "opening": self._measure_opening,
            "decode, batch 1": partial(
                self._measure_alone, "tpot", decode, self._prompt, self._output
            ),
            "prefill": partial(self._measure_alone, "ttft", prefill, length, 1),
            "steps of batch 1": partial(self._trace, 1),
        }
        if model == SMALL:
            measures |= {
                "steps of a full batch": partial(self._trace, self.batch),
                "preset": partial(self._measure_preset, 0.0),
                f"preset, temperature {TEMPERATURE}": partial(self._measure_preset, TEMPERATURE),
            }
        for name, measure in measures.items():
            yield GpuCase(
                f"{model}: {name}", partial(measure, partial(self._open, model, max_num_seqs))
            )

    def _open(self, model: str, max_num_seqs: int) -> TimedEngine:
        longest = max(self._long_prompt, self._preset.input_range[1] + self._preset.output_range[1])
        memory = None
        if self._bench.dry_run:
            model, memory = "qwen3", 16 * 2**20
        return self._shelf.get(
            model,
            dtype=format_name(self._bench.dtype),
            max_model_len=longest + self._output + 256,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self._long_prompt,
            kv_cache_memory=memory,
        )

    def _measure_opening(self, open_engine: OpenEngine) -> Row:
        """Weights drawn, layers compiled, graphs captured."""
        began = time.perf_counter()
        engine = open_engine()
        fields: Row = {
            "open_seconds": round(time.perf_counter() - began, 1),
            "dtype": engine.llm.built.config.dtype,
            "max_model_len": engine.llm.built.max_model_len,
            "overlaps": engine.in_flight > 1,
        }
        if engine.llm.built.gpu is None:
            return fields
        free, total = torch.cuda.mem_get_info(self._bench.device)
        memory = {"free_gib": round(free / 2**30, 1), "total_gib": round(total / 2**30, 1)}
        return fields | memory | dataclasses.asdict(engine.llm.built.gpu)

    def _measure_alone(
        self, metric: str, step: StepWork, prompt: int, output: int, open_engine: OpenEngine
    ) -> Row:
        """One request after another, the first of which warms up and is left out, against the floor
        of a step. `metric`: "tpot", or "ttft" for a prompt in one step, from its issue to its first
        token."""
        engine = open_engine()
        config, cost = (
            engine.llm.built.model,
            ModelCost(engine.llm.built.model, self._bench.dtype.itemsize),
        )
        prompts = [
            random_prompts([prompt], config.vocab_size, seed) for seed in range(_REPEATS + 1)
        ]
        runs = [engine.driver.run(one, [output]) for one in prompts]
        spread = TimeSpread.of([getattr(run.timings[0], metric) or 0.0 for run in runs[1:]])
        floor_us = 1e6 * cost.floor_seconds(step, self._bench.limits)
        return {
            "tokens": step.tokens,
            "tokens_per_s": step.tokens * 1e6 / spread.us,
            f"{metric}_us": spread,
            "bytes": cost.step_bytes(step),
            "operations": cost.step_operations(step),
            "floor_us": floor_us,
            "of_floor": floor_us / spread.us,
        }

    def _trace(self, batch: int, open_engine: OpenEngine) -> Row:
        """`step_us` without the profiler, the trace's summary, and what is idle when the work that
        the trace saw is held against steps without the profiler, whose own cost lies on the
        host."""
        engine = open_engine()
        with _decoding(engine, batch, self._prompt) as inner:
            _take(inner, _SETTLING_STEPS)
            unprofiled = TimeSpread.of(_take(inner, _TIMED_STEPS))
            found = summarize_trace(_trace_events(self._bench, inner))
        fields: Row = {
            "batch": batch,
            "unprofiled_step_us": unprofiled,
            "overlaps": engine.in_flight > 1,
        }
        if found is None:
            return fields
        idle = max(0.0, 1 - found["busy"] * found["step_us"] / unprofiled.us)
        return {**fields, **found, "idle_without_profiler": idle}

    def _measure_preset(self, temperature: float, open_engine: OpenEngine) -> Row:
        """The preset on this engine, warmed up with the same prompts, against its floor."""
        engine = open_engine()
        preset = PresetRun(engine, self._shapes, temperature)
        preset.warm_up()
        run = preset.run()
        rates = BatchRates.of(run.timings)
        cost = ModelCost(engine.llm.built.model, self._bench.dtype.itemsize)
        floor_rate = preset_floor_rate(cost, self._shapes, self._bench.limits)
        return {
            "preset": PRESET,
            "requests": len(self._shapes),
            "temperature": temperature,
            "output_tokens_per_s": rates.output,
            "total_tokens_per_s": rates.total,
            "run_seconds": max(timing.e2el for timing in run.timings),
            "floor_output_tokens_per_s": floor_rate,
            "of_floor": rates.output / floor_rate,
        }

    def measure_transformers(self) -> Row:
        """The preset by transformers' continuous batching, on a random model of this shape, warmed
        up. What is left after `_TRANSFORMERS_SECONDS` is given up: the rate is then that of the
        requests that ended until then, too low by what others had begun, and `cut` is true."""
        self._shelf.close()  # both engines take what memory there is
        if self._bench.dry_run:
            raise CannotRun("needs a GPU")
        try:
            import transformers
            from transformers.generation.continuous_batching.utils import WorkloadHints
        except ImportError as error:
            raise CannotRun(
                f"transformers' continuous batching is not importable ({error})"
            ) from error
        library = cast(Any, transformers)  # which is typed in part
        config = dict(published_shapes()[SMALL])
        prompts, lengths = preset_work(self._shapes, config["vocab_size"])
        hf_config = library.AutoConfig.for_model(config.pop("model_type"), **config)
        with self._bench.device:
            from_config = library.AutoModelForCausalLM.from_config
            model = from_config(
                hf_config, dtype=self._bench.dtype, attn_implementation="sdpa"
            ).eval()
        generation = library.GenerationConfig(
            max_new_tokens=max(lengths), do_sample=False, eos_token_id=-1
        )
        hints: Any = WorkloadHints(
            max_prompt_length=max(map(len, prompts)),
            max_generated_length=max(lengths),
            num_requests=len(prompts),
        )
        with model.continuous_batching_context_manager(
            generation_config=generation, block=True, timeout=10, workload_hints=hints
        ) as manager:
            _collect(manager, prompts[:8], [8] * 8)
            began = time.perf_counter()
            done = _collect(manager, prompts, lengths)
            seconds = time.perf_counter() - began
            if cut := len(done) < len(prompts):
                # leaving would wait for all requests
                manager.stop(block=True, timeout=10, hard_stop=True)
            attention = model.config._attn_implementation
        return {
            "output_tokens_per_s": sum(done) / seconds,
            "requests_done": len(done),
            "cut": cut,
            "attention": attention,
            "run_seconds": seconds,
        }


def preset_work(
    shapes: Sequence[RequestShape], vocab_size: int
) -> tuple[list[tuple[int, ...]], list[int]]:
    """Prompts of these requests, and tokens of their answers."""
    prompts = random_prompts([shape.input_tokens for shape in shapes], vocab_size, seed=0)
    return prompts, [shape.output_tokens for shape in shapes]


def preset_floor_rate(cost: ModelCost, shapes: Sequence[RequestShape], limits: Limits) -> float:
    """The most output tokens per second that these requests can have."""
    output_tokens = sum(shape.output_tokens for shape in shapes)
    return output_tokens / cost.requests_floor_seconds(shapes, limits)


class PresetRun:
    """The requests of a preset on one engine, all at one temperature."""

    def __init__(
        self, engine: TimedEngine, shapes: Sequence[RequestShape], temperature: float
    ) -> None:
        self._driver = engine.driver
        self._params = SamplingParams(temperature=temperature)
        self._prompts, self._lengths = preset_work(shapes, engine.llm.built.model.vocab_size)

    def warm_up(self) -> None:
        """Answer every prompt with two tokens."""
        self._driver.run(self._prompts, [2] * len(self._prompts), self._params)

    def run(self) -> EngineRun:
        return self._driver.run(self._prompts, self._lengths, self._params)


def _collect(manager: Any, prompts: Sequence[tuple[int, ...]], lengths: Sequence[int]) -> list[int]:
    """How many tokens each request that ended in time was given."""
    deadline = time.perf_counter() + _TRANSFORMERS_SECONDS
    for prompt, length in zip(prompts, lengths, strict=True):
        manager.add_request(list(prompt), max_new_tokens=length, eos_token_id=-1)
    done: list[int] = []
    while len(done) < len(prompts) and time.perf_counter() < deadline:
        result = manager.get_result(timeout=_POLL_SECONDS)
        if result is not None and result.is_finished():
            if result.error is not None:
                raise CannotRun(f"a request failed: {result.error}")
            done.append(len(result.generated_tokens))
        elif result is None and not manager.is_running():
            raise CannotRun("its generation thread ended")
    return done


STEP_MARK = "nanoserve step"  # what the host's share of every step is called in the trace
_DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCH_KINDS = ("cuda_runtime", "cuda_driver")
_SETTLING_STEPS = 8
_TIMED_STEPS = 32
_TRACED_STEPS = 16


class _Work(NamedTuple):
    start: float
    end: float
    is_kernel: bool


def summarize_trace(events: Iterable[Mapping[str, Any]]) -> dict[str, float] | None:
    """Summarize the events of a trace; None unless at least two of its steps launched kernels, as
    on a CPU.

    A kernel belongs to the step whose mark its launch lies in, by the correlation that the profiler
    gives both; those of a CUDA graph have the one of the graph's launch. The last step is left out:
    nothing says when it ended. "step_us" is the median time from the first kernel of a step to the
    first of the next. Shares are of all time: "busy" with any work, "idle_between_steps" from the
    last work of a step to the next one's first kernel, "idle_within_steps" else.
    """
    steps = [step for step in _work_of_steps(list(events)) if any(work.is_kernel for work in step)]
    if len(steps) < 2:
        return None
    starts = [min(work.start for work in step if work.is_kernel) for step in steps]
    total, last = starts[-1] - starts[0], len(steps) - 1
    whole = sorted(work for step in steps for work in step)
    ends = [max(work.end for work in step) for step in steps[:last]]
    between = sum(
        _idle(whole, ended, following) for ended, following in zip(ends, starts[1:], strict=True)
    )
    idle = _idle(whole, starts[0], starts[-1])
    kernels = [work.end - work.start for step in steps[:last] for work in step if work.is_kernel]
    return {
        "steps": last,
        "kernels_per_step": len(kernels) / last,
        "kernel_us": statistics.fmean(kernels),
        "step_us": statistics.median(
            after - before for before, after in itertools.pairwise(starts)
        ),
        "busy": 1 - idle / total,
        "idle_between_steps": between / total,
        "idle_within_steps": (idle - between) / total,
    }


def _work_of_steps(events: Sequence[Mapping[str, Any]]) -> list[list[_Work]]:
    """List the work that each marked step launched, in the order of the steps."""

    def correlation(event: Mapping[str, Any]) -> Any:
        return event.get("args", {}).get("correlation")

    launches = (event for event in events if event.get("cat") in _LAUNCH_KINDS and "dur" in event)
    launched = {correlation(event): event["ts"] for event in launches}
    marked = [
        event
        for event in events
        if event.get("name") == STEP_MARK and event.get("cat") == "user_annotation"
    ]
    steps: dict[float, list[_Work]] = {
        mark["ts"]: [] for mark in sorted(marked, key=lambda mark: mark["ts"])
    }
    for event in events:
        at = launched.get(correlation(event))
        if at is None or event.get("cat") not in _DEVICE_KINDS:
            continue
        for mark in marked:
            if mark["ts"] <= at <= mark["ts"] + mark["dur"]:
                steps[mark["ts"]].append(
                    _Work(event["ts"], event["ts"] + event["dur"], event["cat"] == "kernel")
                )
    return list(steps.values())


def _idle(work: Sequence[_Work], start: float, end: float) -> float:
    """Microseconds from start to end in which none of the work, which is sorted by its start, goes
    on."""
    idle, known = 0.0, start
    for one in work:
        idle += max(0.0, min(one.start, end) - known)
        known = max(known, one.end)
    return idle + max(0.0, end - known)


@contextmanager
def _decoding(engine: TimedEngine, batch: int, context: int) -> Iterator[Engine]:
    """Within it the engine has `batch` requests, all past their prompts of `context` tokens."""
    inner, names = engine.llm.engine, [f"traced-{place}" for place in range(batch)]
    steps = _SETTLING_STEPS + _TIMED_STEPS + 2 * _TRACED_STEPS
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=steps + batch + 8)
    prompts = random_prompts([context] * batch, engine.llm.built.model.vocab_size, seed=0)
    waiting = set(names)
    try:
        for name, prompt in zip(names, prompts, strict=True):
            inner.add(Request(name, prompt, params, seed=0, arrival_time=inner.now()))
        while waiting:
            for update in inner.step():
                if update.sequence.error is not None:
                    raise RuntimeFailure(update.sequence.error)
                waiting.discard(update.request_id)
        yield inner
    finally:
        for name in names:
            inner.stop(name)
        while inner.has_work:  # what is in flight still has these names
            inner.step()


def _take(engine: Engine, steps: int) -> list[float]:
    """Seconds of each."""
    times = [time.perf_counter()]
    for _ in range(steps):
        engine.step()
        times.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(times)]


def _trace_events(bench: GpuBench, engine: Engine) -> list[dict[str, Any]]:
    activities = [ProfilerActivity.CPU]
    if not bench.dry_run:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        _take(engine, _TRACED_STEPS)  # the profiler's own first steps are slow
        for _ in range(_TRACED_STEPS):
            with record_function(STEP_MARK):
                engine.step()
        bench.synchronize()
    with temporary_directory() as directory:
        path = directory / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(
            path.read_text(encoding="utf-8", errors="replace")
        )["traceEvents"]
        return events
