"""The engine with random weights of real shapes, against the floor of the same run and against transformers."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch

from nanoserve.benchmarks.floors import ModelCost, StepShape
from nanoserve.benchmarks.gpu.engines import EngineShelf, TimedEngine
from nanoserve.benchmarks.gpu.model_checks import FAMILIES
from nanoserve.benchmarks.gpu.running import CannotRun, GpuCase
from nanoserve.benchmarks.gpu.setting import GpuSetting
from nanoserve.benchmarks.gpu.step_traces import trace_decode
from nanoserve.benchmarks.gpu.timing import DeviceTimer, TimeSpread
from nanoserve.benchmarks.report import Report
from nanoserve.measures.metrics import BatchRates, RequestTiming
from nanoserve.measures.workloads import PRESETS, Preset, random_prompts
from nanoserve.models.dtypes import format_name
from nanoserve.models.hub import SHAPES

SMALL, MIDDLE, LARGE = "qwen3-0.6b", "llama-3.1-8b", "qwen2.5-14b"
PRESET = "nano-vllm"
LONGEST_PROMPT = 8192
_REPEATS = 3
_TRANSFORMERS_SECONDS = 70.0
_POLL_SECONDS = 0.2

_Measure = Callable[[TimedEngine], dict[str, Any]]


def part_cases(setting: GpuSetting, report: Report, stack: ExitStack) -> Iterator[GpuCase]:
    """The small model in every way, then the larger ones; transformers before the largest, in case time runs out."""
    bench = EngineBench(setting, report, stack)
    many = partial(bench.trace, batch=bench.batch)
    yield from bench.model_cases(SMALL, bench.batch, {"steps of a full batch": many, "preset": bench.measure_preset})
    yield from bench.model_cases(MIDDLE, 8)
    yield GpuCase(f"{SMALL}: preset, transformers", bench.measure_transformers)
    yield from bench.model_cases(LARGE, 8)


class EngineBench:
    """Measures one model after another; in a dry run a tiny one stands for each of them."""

    def __init__(self, setting: GpuSetting, report: Report, stack: ExitStack) -> None:
        self._setting, self._limits = setting, DeviceTimer.on(setting, report).limits
        self._shelf = EngineShelf(setting, stack)
        # Tokens of requests that are timed or traced, of the prompt in one step, and requests at a time in the preset.
        sizes = (12, 8, 40, 4) if setting.dry_run else (512, 256, LONGEST_PROMPT, 256)
        self._prompt, self._output, self._long_prompt, self.batch = sizes
        self._preset = Preset(6, (5, 20), (3, 9)) if setting.dry_run else PRESETS[PRESET]
        self._shapes = self._preset.draw(seed=0)

    def model_cases(
        self, model: str, max_num_seqs: int, further: dict[str, _Measure] | None = None
    ) -> Iterator[GpuCase]:
        """What is measured of every model, and `further` cases of this one."""
        yield GpuCase(f"{model}: opening", partial(self._measure_opening, model, max_num_seqs))
        measures: dict[str, _Measure] = {
            "decode, batch 1": self._measure_decode,
            "prefill": self._measure_prefill,
            "steps of batch 1": partial(self.trace, batch=1),
            **(further or {}),
        }
        for name, measure in measures.items():
            yield GpuCase(f"{model}: {name}", partial(self._measure, measure, model, max_num_seqs))

    def _measure(self, measure: _Measure, model: str, max_num_seqs: int) -> dict[str, Any]:
        return measure(self._open(model, max_num_seqs))

    def _open(self, model: str, max_num_seqs: int) -> TimedEngine:
        dry = self._setting.dry_run
        longest = max(self._long_prompt, self._preset.input_range[1] + self._preset.output_range[1])
        return self._shelf.get(
            shape=self._shelf.config_file(model, FAMILIES["qwen3"]) if dry else model,
            dtype=format_name(self._setting.dtype),
            max_model_len=longest + self._output + 256,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self._long_prompt,
            kv_cache_memory=16 * 2**20 if dry else None,
        )

    def _measure_opening(self, model: str, max_num_seqs: int) -> dict[str, Any]:
        """Weights drawn, layers compiled, graphs captured."""
        began = time.perf_counter()
        engine = self._open(model, max_num_seqs)
        fields: dict[str, Any] = {
            "open_seconds": round(time.perf_counter() - began, 1),
            "dtype": engine.llm.engine_config.dtype,
            "max_model_len": engine.llm.max_model_len,
            "overlaps": engine.overlaps,
        }
        if engine.llm.gpu is None:
            return fields
        free, total = torch.cuda.mem_get_info(self._setting.device)
        memory = {"free_gib": round(free / 2**30, 1), "total_gib": round(total / 2**30, 1)}
        return fields | memory | dataclasses.asdict(engine.llm.gpu)

    def _measure_decode(self, engine: TimedEngine) -> dict[str, Any]:
        """One request; the floor is that of a step in the middle of its answer."""
        timings = self._run_alone(engine, self._prompt, self._output)
        tpot = TimeSpread.of([timing.tpot or 0.0 for timing in timings])
        context = self._prompt + self._output // 2
        step = StepShape(sequences=1, tokens=1, decoding=1, sampled=1, context=context, attended=context)
        cost = self._cost(engine)
        fields = {"tokens_per_s": 1e6 / tpot.us, "tpot_us": tpot, "bytes": cost.step_bytes(step)}
        return fields | self._floor_fields(cost, step, tpot)

    def _measure_prefill(self, engine: TimedEngine) -> dict[str, Any]:
        """One long prompt in one step, from its issue to its first token."""
        length = self._long_prompt
        ttft = TimeSpread.of([timing.ttft for timing in self._run_alone(engine, length, 1)])
        pairs = length * (length + 1) // 2
        step = StepShape(sequences=1, tokens=length, decoding=0, sampled=1, context=length, attended=pairs)
        cost = self._cost(engine)
        fields = {"tokens": length, "tokens_per_s": length * 1e6 / ttft.us, "ttft_us": ttft}
        return fields | {"operations": cost.step_operations(step)} | self._floor_fields(cost, step, ttft)

    def _run_alone(self, engine: TimedEngine, prompt: int, output: int) -> list[RequestTiming]:
        """One request after another; the first one warms up and is left out."""
        vocabulary = engine.llm.config.vocab_size
        runs = [engine.driver.run(random_prompts([prompt], vocabulary, seed), [output]) for seed in range(_REPEATS + 1)]
        return [run.timings[0] for run in runs[1:]]

    def _cost(self, engine: TimedEngine) -> ModelCost:
        return ModelCost(engine.llm.config, self._setting.dtype.itemsize)

    def _floor_fields(self, cost: ModelCost, step: StepShape, spread: TimeSpread) -> dict[str, float]:
        floor = cost.floor_seconds(step, self._limits)
        return {"floor_us": floor * 1e6, "of_floor": floor * 1e6 / spread.us}

    def trace(self, engine: TimedEngine, *, batch: int) -> dict[str, Any]:
        """Decode steps of a batch, with and without torch's profiler."""
        return {"batch": batch} | trace_decode(self._setting, engine, batch=batch, context=self._prompt)

    def _prompts(self, vocab_size: int) -> list[tuple[int, ...]]:
        """Prompts of the preset."""
        return random_prompts([shape.input_tokens for shape in self._shapes], vocab_size, seed=0)

    def measure_preset(self, engine: TimedEngine) -> dict[str, Any]:
        """The preset on this engine, warmed up with the same prompts."""
        prompts = self._prompts(engine.llm.config.vocab_size)
        engine.driver.run(prompts, [2] * len(prompts))
        run = engine.driver.run(prompts, [shape.output_tokens for shape in self._shapes])
        rates = BatchRates.of(run.timings)
        return {
            "preset": PRESET,
            "requests": len(prompts),
            "output_tokens_per_s": rates.output,
            "total_tokens_per_s": rates.total,
            "run_seconds": max(timing.e2el for timing in run.timings),
            "engine_ms": statistics.median(step.engine_seconds for step in run.steps) * 1000,
        }

    def measure_transformers(self) -> dict[str, Any]:
        """The preset by transformers' continuous batching, on a random model of this shape, warmed up.

        What is left after `_TRANSFORMERS_SECONDS` is given up: the rate is then that of the requests that ended until
        then, too low by what others had begun, and `cut` is true.

        Raises:
            CannotRun: where transformers cannot be imported, or knows no continuous batching.
        """
        setting = self._setting
        self._shelf.clear()  # both engines take what memory there is
        if setting.device.type != "cuda":
            raise CannotRun("needs a GPU")
        try:
            import transformers
            from transformers.generation.continuous_batching.utils import WorkloadHints
        except ImportError as error:
            raise CannotRun(f"transformers' continuous batching is not importable ({error})") from error
        library = cast(Any, transformers)  # which is typed in part
        config = dict(SHAPES[SMALL])
        prompts, lengths = self._prompts(config["vocab_size"]), [shape.output_tokens for shape in self._shapes]
        hf_config = library.AutoConfig.for_model(config.pop("model_type"), **config)
        with setting.device:
            from_config = library.AutoModelForCausalLM.from_config
            model = from_config(hf_config, dtype=setting.dtype, attn_implementation="sdpa").eval()
        generation = library.GenerationConfig(max_new_tokens=max(lengths), do_sample=False, eos_token_id=-1)
        hints: Any = WorkloadHints(
            max_prompt_length=max(map(len, prompts)), max_generated_length=max(lengths), num_requests=len(prompts)
        )
        with model.continuous_batching_context_manager(
            generation_config=generation, block=True, timeout=10, workload_hints=hints
        ) as manager:
            _collect(manager, prompts[:8], [8] * len(prompts[:8]))
            began = time.perf_counter()
            done = _collect(manager, prompts, lengths)
            seconds = time.perf_counter() - began
            if cut := len(done) < len(prompts):
                manager.stop(block=True, timeout=10, hard_stop=True)  # leaving would wait for all requests
            attention = model.config._attn_implementation
        return {
            "output_tokens_per_s": sum(done) / seconds,
            "requests_done": len(done),
            "cut": cut,
            "attention": attention,
            "run_seconds": seconds,
        }


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
