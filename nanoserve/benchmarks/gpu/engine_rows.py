"""The engine with random weights of real shapes, against the floor of the same run and against transformers."""

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from nanoserve.benchmarks.floors import Limits, ModelCost, StepShape
from nanoserve.benchmarks.gpu.engines import EngineShelf, TimedEngine
from nanoserve.benchmarks.gpu.model_checks import FAMILIES
from nanoserve.benchmarks.gpu.results import CannotRun, GpuCase
from nanoserve.benchmarks.gpu.setting import GpuSetting
from nanoserve.benchmarks.gpu.step_traces import trace_decode
from nanoserve.benchmarks.gpu.timing import DeviceTimer, TimeSpread
from nanoserve.benchmarks.report import Report
from nanoserve.measures.metrics import BatchRates, RequestTiming
from nanoserve.measures.workloads import PRESETS, Preset, RequestShape, random_prompts
from nanoserve.models.dtypes import format_name
from nanoserve.models.hub import SHAPES

SMALL, MIDDLE, LARGE = "qwen3-0.6b", "llama-3.1-8b", "qwen2.5-14b"
PRESET = "nano-vllm"
LONGEST_PROMPT = 8192
_REPEATS = 3
_TRANSFORMERS_SECONDS = 70.0
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSizes:
    """How much is asked of the engines."""

    prompt: int
    """Prompt tokens of requests whose decoding is timed or whose steps are traced."""
    output: int
    long_prompt: int
    batch: int
    """Requests at a time in the preset, and in the trace of many."""
    preset: Preset


FULL = EngineSizes(prompt=512, output=256, long_prompt=LONGEST_PROMPT, batch=256, preset=PRESETS[PRESET])
TINY = EngineSizes(prompt=12, output=8, long_prompt=40, batch=4, preset=Preset(6, (5, 20), (3, 9)))


@dataclass(frozen=True, slots=True)
class EngineBench:
    """What every row needs."""

    setting: GpuSetting
    limits: Limits
    shelf: EngineShelf

    @property
    def sizes(self) -> EngineSizes:
        return TINY if self.setting.dry_run else FULL

    def open(self, model: str, *, max_num_seqs: int) -> TimedEngine:
        """The engine of a model; in a dry run of a tiny one in its stead."""
        sizes = self.sizes
        longest = max(sizes.long_prompt, sizes.preset.input_range[1] + sizes.preset.output_range[1])
        dry = self.setting.dry_run
        return self.shelf.get(
            shape=self.shelf.config_file(model, FAMILIES["qwen3"]) if dry else model,
            dtype=format_name(self.setting.dtype),
            max_model_len=longest + sizes.output + 256,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=sizes.long_prompt,
            kv_cache_memory=16 * 2**20 if dry else None,
        )

    def cost(self, engine: TimedEngine) -> ModelCost:
        """Bytes and operations of the engine's steps."""
        return ModelCost(engine.llm.config, self.setting.dtype.itemsize)


def part_cases(setting: GpuSetting, report: Report, stack: ExitStack) -> Iterator[GpuCase]:
    """The small model in every way, then the larger ones; transformers before the largest, in case time runs out."""
    limits = DeviceTimer.on(setting, report).limits
    bench = EngineBench(setting, limits, EngineShelf(setting, stack))
    many = bench.sizes.batch
    yield from _model_cases(bench, SMALL, many)
    yield GpuCase(f"{SMALL}: steps of a full batch", partial(_trace, bench, SMALL, many, many))
    yield GpuCase(f"{SMALL}: preset", partial(_measure_preset, bench))
    yield from _model_cases(bench, MIDDLE, 8)
    yield GpuCase(f"{SMALL}: preset, transformers", partial(_measure_transformers, bench))
    yield from _model_cases(bench, LARGE, 8)


def _model_cases(bench: EngineBench, model: str, max_num_seqs: int) -> Iterator[GpuCase]:
    yield GpuCase(f"{model}: opening", partial(_measure_opening, bench, model, max_num_seqs))
    yield GpuCase(f"{model}: decode, batch 1", partial(_measure_decode, bench, model, max_num_seqs))
    yield GpuCase(f"{model}: prefill", partial(_measure_prefill, bench, model, max_num_seqs))
    yield GpuCase(f"{model}: steps of batch 1", partial(_trace, bench, model, max_num_seqs, 1))


def _measure_opening(bench: EngineBench, model: str, max_num_seqs: int) -> dict[str, Any]:
    """Weights drawn, layers compiled, graphs captured."""
    began = time.perf_counter()
    engine = bench.open(model, max_num_seqs=max_num_seqs)
    fields: dict[str, Any] = {
        "open_seconds": round(time.perf_counter() - began, 1),
        "dtype": engine.llm.engine_config.dtype,
        "max_model_len": engine.llm.max_model_len,
        "overlaps": engine.overlaps,
    }
    facts = engine.llm.gpu
    if facts is None:
        return fields
    free, total = torch.cuda.mem_get_info(bench.setting.device)
    memory = {"free_gib": round(free / 2**30, 1), "total_gib": round(total / 2**30, 1)}
    return fields | memory | dataclasses.asdict(facts)


def _measure_decode(bench: EngineBench, model: str, max_num_seqs: int) -> dict[str, Any]:
    """One request; the floor is that of a step in the middle of its answer."""
    engine, sizes = bench.open(model, max_num_seqs=max_num_seqs), bench.sizes
    tpot = TimeSpread.of([timing.tpot or 0.0 for timing in _run_alone(engine, sizes.prompt, sizes.output)])
    context = sizes.prompt + sizes.output // 2
    step = StepShape(sequences=1, tokens=1, decoding=1, sampled=1, context=context, attended=context)
    fields = {"tokens_per_s": 1e6 / tpot.us, "tpot_us": tpot, "bytes": bench.cost(engine).step_bytes(step)}
    return fields | _floor_fields(bench, engine, step, tpot)


def _measure_prefill(bench: EngineBench, model: str, max_num_seqs: int) -> dict[str, Any]:
    """One long prompt in one step, from its issue to its first token."""
    engine, length = bench.open(model, max_num_seqs=max_num_seqs), bench.sizes.long_prompt
    ttft = TimeSpread.of([timing.ttft for timing in _run_alone(engine, length, 1)])
    pairs = length * (length + 1) // 2
    step = StepShape(sequences=1, tokens=length, decoding=0, sampled=1, context=length, attended=pairs)
    fields = {"tokens": length, "tokens_per_s": length * 1e6 / ttft.us, "ttft_us": ttft}
    fields["operations"] = bench.cost(engine).step_operations(step)
    return fields | _floor_fields(bench, engine, step, ttft)


def _run_alone(engine: TimedEngine, prompt: int, output: int) -> list[RequestTiming]:
    """One request after another; the first one warms up and is left out."""
    vocabulary = engine.llm.config.vocab_size
    runs = [engine.driver.run(random_prompts([prompt], vocabulary, seed), [output]) for seed in range(_REPEATS + 1)]
    return [run.timings[0] for run in runs[1:]]


def _floor_fields(bench: EngineBench, engine: TimedEngine, step: StepShape, spread: TimeSpread) -> dict[str, float]:
    floor = bench.cost(engine).floor_seconds(step, bench.limits)
    return {"floor_us": floor * 1e6, "of_floor": floor * 1e6 / spread.us}


def _trace(bench: EngineBench, model: str, max_num_seqs: int, batch: int) -> dict[str, Any]:
    engine = bench.open(model, max_num_seqs=max_num_seqs)
    return {"batch": batch} | trace_decode(bench.setting, engine, batch=batch, context=bench.sizes.prompt)


def _preset(bench: EngineBench, vocab_size: int) -> tuple[list[RequestShape], list[tuple[int, ...]]]:
    shapes = bench.sizes.preset.draw(seed=0)
    return shapes, random_prompts([shape.input_tokens for shape in shapes], vocab_size, seed=0)


def _measure_preset(bench: EngineBench) -> dict[str, Any]:
    engine = bench.open(SMALL, max_num_seqs=bench.sizes.batch)
    shapes, prompts = _preset(bench, engine.llm.config.vocab_size)
    engine.driver.run(prompts, [2] * len(prompts))
    run = engine.driver.run(prompts, [shape.output_tokens for shape in shapes])
    rates = BatchRates.of(run.timings)
    return {
        "preset": PRESET,
        "requests": len(shapes),
        "output_tokens_per_s": rates.output,
        "total_tokens_per_s": rates.total,
        "run_seconds": max(timing.e2el for timing in run.timings),
        "engine_ms": statistics.median(step.engine_seconds for step in run.steps) * 1000,
    }


def _measure_transformers(bench: EngineBench) -> dict[str, Any]:
    """The preset by transformers' continuous batching, on a random model of this shape, warmed up.

    What is left after `_TRANSFORMERS_SECONDS` is given up: the rate is then that of the requests that ended until then,
    too low by what others had begun, and `cut` is true.

    Raises:
        CannotRun: where transformers cannot be imported, or knows no continuous batching.
    """
    bench.shelf.clear()  # both engines take what memory there is
    config = dict(FAMILIES["qwen3"] if bench.setting.dry_run else SHAPES[SMALL])
    shapes, prompts = _preset(bench, config["vocab_size"])
    if bench.setting.device.type != "cuda":
        raise CannotRun("needs a GPU")
    try:
        import transformers
    except ImportError as error:
        raise CannotRun(f"transformers is not importable ({error})") from error
    library = cast(Any, transformers)  # which is typed in part
    hf_config = library.AutoConfig.for_model(config.pop("model_type"), **config)
    from_config = library.AutoModelForCausalLM.from_config
    with bench.setting.device:
        model = from_config(hf_config, dtype=bench.setting.dtype, attn_implementation="sdpa").eval()
    if not hasattr(model, "continuous_batching_context_manager"):
        raise CannotRun("this version of transformers has no continuous batching")
    longest = max(shape.output_tokens for shape in shapes)
    generation = library.GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1)
    with model.continuous_batching_context_manager(
        generation_config=generation, block=True, timeout=10, workload_hints=_hints(shapes)
    ) as manager:
        _collect(manager, prompts[:8], [8] * len(prompts[:8]))
        began = time.perf_counter()
        lengths = _collect(manager, prompts, [shape.output_tokens for shape in shapes])
        seconds = time.perf_counter() - began
        if len(lengths) < len(prompts):
            manager.stop(block=True, timeout=10, hard_stop=True)  # leaving would wait for all requests
        attention = model.config._attn_implementation
    return {
        "output_tokens_per_s": sum(lengths) / seconds,
        "requests_done": len(lengths),
        "cut": len(lengths) < len(prompts),
        "attention": attention,
        "run_seconds": seconds,
    }


def _hints(shapes: Sequence[RequestShape]) -> Any:
    """What generate_batch tells the manager of the work to come."""
    from transformers.generation.continuous_batching.utils import WorkloadHints

    return WorkloadHints(
        max_prompt_length=max(shape.input_tokens for shape in shapes),
        max_generated_length=max(shape.output_tokens for shape in shapes),
        num_requests=len(shapes),
    )


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
