"""The engine with random weights of real shapes, against the floor of the same run and against transformers."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any, cast

import torch

from nanoserve.benchmarks.floors import ModelCost, StepShape
from nanoserve.benchmarks.gpu.device import GpuBench, TimeSpread
from nanoserve.benchmarks.gpu.models import EngineShelf, TimedEngine
from nanoserve.benchmarks.gpu.running import CannotRun, GpuCase, Row
from nanoserve.benchmarks.gpu.step_traces import trace_decode
from nanoserve.measures.metrics import BatchRates
from nanoserve.measures.workloads import PRESETS, Preset, random_prompts
from nanoserve.models.dtypes import format_name
from nanoserve.models.hub import SHAPES

SMALL, MIDDLE, LARGE = "qwen3-0.6b", "llama-3.1-8b", "qwen2.5-14b"
PRESET = "nano-vllm"
LONGEST_PROMPT = 8192
_REPEATS = 3
_TRANSFORMERS_SECONDS = 70.0
_POLL_SECONDS = 0.2

OpenEngine = Callable[[], TimedEngine]


def part_cases(bench: GpuBench, rows: list[Row]) -> Iterator[GpuCase]:
    """The small model in every way, then the larger ones; transformers before the largest, in case time runs out."""
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
        # Tokens of requests that are timed or traced, of the prompt in one step, and requests at a time in the preset.
        sizes = (12, 8, 40, 4) if bench.dry_run else (512, 256, LONGEST_PROMPT, 256)
        self._prompt, self._output, self._long_prompt, self.batch = sizes
        self._preset = Preset(6, (5, 20), (3, 9)) if bench.dry_run else PRESETS[PRESET]
        self._shapes = self._preset.draw(seed=0)

    def model_cases(self, model: str, max_num_seqs: int) -> Iterator[GpuCase]:
        """What is measured of every model, and what of the small one alone."""
        middle, length = self._prompt + self._output // 2, self._long_prompt
        pairs = length * (length + 1) // 2
        # A step in the middle of an answer, and one that is a whole prompt.
        decode = StepShape(sequences=1, tokens=1, decoding=1, sampled=1, context=middle, attended=middle)
        prefill = StepShape(sequences=1, tokens=length, decoding=0, sampled=1, context=length, attended=pairs)
        measures: dict[str, Callable[..., Row]] = {
            "opening": self._measure_opening,
            "decode, batch 1": partial(self._measure_alone, "tpot", decode, self._prompt, self._output),
            "prefill": partial(self._measure_alone, "ttft", prefill, length, 1),
            "steps of batch 1": partial(self._trace, 1),
        }
        if model == SMALL:
            measures |= {"steps of a full batch": partial(self._trace, self.batch), "preset": self._measure_preset}
        for name, measure in measures.items():
            yield GpuCase(f"{model}: {name}", partial(measure, partial(self._open, model, max_num_seqs)))

    def _open(self, model: str, max_num_seqs: int) -> TimedEngine:
        longest = max(self._long_prompt, self._preset.input_range[1] + self._preset.output_range[1])
        return self._shelf.get(
            "qwen3" if self._bench.dry_run else model,
            dtype=format_name(self._bench.dtype),
            max_model_len=longest + self._output + 256,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self._long_prompt,
            kv_cache_memory=16 * 2**20 if self._bench.dry_run else None,
        )

    def _measure_opening(self, open_engine: OpenEngine) -> Row:
        """Weights drawn, layers compiled, graphs captured."""
        began = time.perf_counter()
        engine = open_engine()
        fields: Row = {
            "open_seconds": round(time.perf_counter() - began, 1),
            "dtype": engine.llm.engine_config.dtype,
            "max_model_len": engine.llm.max_model_len,
            "overlaps": engine.in_flight > 1,
        }
        if engine.llm.gpu is None:
            return fields
        free, total = torch.cuda.mem_get_info(self._bench.device)
        memory = {"free_gib": round(free / 2**30, 1), "total_gib": round(total / 2**30, 1)}
        return fields | memory | dataclasses.asdict(engine.llm.gpu)

    def _measure_alone(self, metric: str, step: StepShape, prompt: int, output: int, open_engine: OpenEngine) -> Row:
        """One request after another, the first of which warms up and is left out, against the floor of a step.

        `metric`: "tpot", or "ttft" for a prompt in one step, from its issue to its first token.
        """
        engine = open_engine()
        config, cost = engine.llm.config, ModelCost(engine.llm.config, self._bench.dtype.itemsize)
        prompts = [random_prompts([prompt], config.vocab_size, seed) for seed in range(_REPEATS + 1)]
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
        return trace_decode(self._bench, open_engine(), batch=batch, context=self._prompt)

    def _preset_work(self, vocab_size: int) -> tuple[list[tuple[int, ...]], list[int]]:
        """Prompts of the preset, and tokens of their answers."""
        prompts = random_prompts([shape.input_tokens for shape in self._shapes], vocab_size, seed=0)
        return prompts, [shape.output_tokens for shape in self._shapes]

    def _measure_preset(self, open_engine: OpenEngine) -> Row:
        """The preset on this engine, warmed up with the same prompts."""
        engine = open_engine()
        prompts, lengths = self._preset_work(engine.llm.config.vocab_size)
        engine.driver.run(prompts, [2] * len(prompts))
        run = engine.driver.run(prompts, lengths)
        rates = BatchRates.of(run.timings)
        return {
            "preset": PRESET,
            "requests": len(prompts),
            "output_tokens_per_s": rates.output,
            "total_tokens_per_s": rates.total,
            "run_seconds": max(timing.e2el for timing in run.timings),
            "engine_ms": statistics.median(step.engine_seconds for step in run.steps) * 1000,
        }

    def measure_transformers(self) -> Row:
        """The preset by transformers' continuous batching, on a random model of this shape, warmed up.

        What is left after `_TRANSFORMERS_SECONDS` is given up: the rate is then that of the requests that ended until
        then, too low by what others had begun, and `cut` is true.
        """
        self._shelf.close()  # both engines take what memory there is
        if self._bench.dry_run:
            raise CannotRun("needs a GPU")
        try:
            import transformers
            from transformers.generation.continuous_batching.utils import WorkloadHints
        except ImportError as error:
            raise CannotRun(f"transformers' continuous batching is not importable ({error})") from error
        library = cast(Any, transformers)  # which is typed in part
        config = dict(SHAPES[SMALL])
        prompts, lengths = self._preset_work(config["vocab_size"])
        hf_config = library.AutoConfig.for_model(config.pop("model_type"), **config)
        with self._bench.device:
            from_config = library.AutoModelForCausalLM.from_config
            model = from_config(hf_config, dtype=self._bench.dtype, attn_implementation="sdpa").eval()
        generation = library.GenerationConfig(max_new_tokens=max(lengths), do_sample=False, eos_token_id=-1)
        hints: Any = WorkloadHints(
            max_prompt_length=max(map(len, prompts)), max_generated_length=max(lengths), num_requests=len(prompts)
        )
        with model.continuous_batching_context_manager(
            generation_config=generation, block=True, timeout=10, workload_hints=hints
        ) as manager:
            _collect(manager, prompts[:8], [8] * 8)
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
