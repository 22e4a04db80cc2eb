"""Check on a GPU what `nanoserve bench gpu` leaves out: `python -m scripts.gpu_checks
tokens|step|layers|sampling|preset|products [--device cpu]`.

`tokens`: engines of small random models on the GPU, eagerly and with graphs, against the CPU's
tokens in float32. `step`: when each stage of opening began, how long a decode step takes, and its
kernels by name, from torch's trace. `layers`: the layers of a decode step of few rows, fused and
compiled. `sampling`: the sampler as engines run it against its operators in plain torch on the same
device, their times and tokens, and the CPU's tokens. `preset`: the preset of 256 requests greedily
and at a temperature, in turns. `products`: products with packed matrices, and of one row with what
stands around it in a layer, in CUDA graphs over copies of the matrix, so that no cache holds it;
that part needs a GPU, the others can be tried on a CPU.
"""

import argparse
import json
import statistics
import sys
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from nanoserve.errors import NanoserveError
from nanoserve.executor.compile.fused_layer import FusedLayer
from nanoserve.executor.compile.layer_runner import LayerRunner
from nanoserve.executor.sampling.sampler import SamplingRows, SamplingState, sample
from nanoserve.executor.step.forward_pass import ForwardPass, StepInputs, make_caches
from nanoserve.executor.step.staging import Staging
from nanoserve.lab.benchmarks.floors import ModelCost
from nanoserve.lab.benchmarks.gpu.correctness import random_logits
from nanoserve.lab.benchmarks.gpu.device import GpuBench
from nanoserve.lab.benchmarks.gpu.engine import (
    LONGEST_PROMPT,
    PRESET,
    TEMPERATURE,
    PresetRun,
    preset_floor_rate,
)
from nanoserve.lab.benchmarks.gpu.models import EngineShelf
from nanoserve.lab.benchmarks.rounds import rotated
from nanoserve.lab.benchmarks.verdicts import spread_text
from nanoserve.lab.workloads import PRESETS, Preset, random_prompts
from nanoserve.llm import LLM
from nanoserve.models import dummy
from nanoserve.models.attention import AttentionBatch
from nanoserve.models.dtypes import format_name
from nanoserve.models.dummy import make_dummy_model
from nanoserve.models.hub import DUMMY_PREFIX
from nanoserve.models.tensor_parts import TensorPart
from nanoserve.record.metrics import BatchRates
from nanoserve.request import Request, SamplingParams
from nanoserve.scheduler.plan import Begin
from triton_ops import fused_linear, pack, packed_linear, reference_operators, round_to_nearest

VOCAB_SIZE = 4096  # of the tokenizer of dummy models
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LAYERS = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 20,
}
GEMMA = {**LAYERS, "head_dim": 64, "query_pre_attn_scalar": 24}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA4 = {
    "num_hidden_layers": 6,
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 20,
    "layer_types": LAYERS["layer_types"] * 2,  # type: ignore[operator]
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 64},
    "gemma2": {**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    "gemma3_text": GEMMA,
    "gemma4_text": GEMMA4,
    "olmo3": LAYERS,
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "cohere2": {**LAYERS, "logit_scale": 1.0},
    "gpt_oss": {
        "head_dim": 32,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "sliding_window": 20,
        "rope_parameters": YARN,
    },
}
LENGTHS = (5, 14, 33, 62, 90, 7, 40, 21)
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=24)
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
VARIANTS: dict[str, tuple[SamplingParams, dict[str, Any]]] = {
    "sampled": (
        SamplingParams(temperature=0.9, top_p=0.95, top_k=100, seed=5, n=3, max_tokens=20),
        {},
    ),
    "penalties": (
        SamplingParams(
            temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.3, max_tokens=20
        ),
        {},
    ),
    "JSON": (SamplingParams(temperature=0.8, seed=1, max_tokens=60, json_schema=SCHEMA), {}),
    "n-grams": (GREEDY, {"speculate": "ngram"}),
    "draft model": (GREEDY, {"speculate": "draft:storyteller-draft"}),
    "int4": (GREEDY, {"quantization": "int4:64"}),
    "hybrid": (
        GREEDY,
        {"policy": "hybrid", "host_kv_memory": 64 << 20, "kv_cache_memory": 2 << 20},
    ),
}


def draw_on_the_cpu(
    filling: Sequence[tuple[TensorPart, torch.Tensor]], generator: torch.Generator
) -> None:
    """Draw the same weights on every device, wide enough that all of them leave their mark on the
    logits. The generator is one of the CPU, and not the device's."""
    whole, _ = filling[0]
    generator = torch.Generator().manual_seed(zlib.crc32(whole.name.encode()))
    mean = 0.0
    if "norm" in whole.name or whole.name.endswith("layer_scalar"):
        mean = 1.0
    numbers = torch.empty(whole.shape).normal_(mean, 0.15, generator=generator)
    for part, region in filling:
        region.copy_(numbers[part.source])


def answers(
    spec: str, device: str, params: SamplingParams, **settings: Any
) -> list[tuple[int, ...]]:
    sizes = {
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "kv_cache_memory": 32 << 20,
    }
    with LLM(spec, device=device, **{"dtype": "float32", "seed": 0, **sizes, **settings}) as llm:
        llm.built.prepare()
        prompts = [list(prompt) for prompt in random_prompts(LENGTHS, VOCAB_SIZE, seed=0)]
        return [one.token_ids for output in llm.generate(prompts, params) for one in output.outputs]


def compare_tokens(device: str) -> None:
    dummy._draw = draw_on_the_cpu
    with TemporaryDirectory() as folder:
        specs = {}
        for family, settings in FAMILIES.items():
            path = Path(folder) / family / "config.json"
            path.parent.mkdir()
            path.write_text(
                json.dumps({"model_type": family, **SHAPE, **settings}), encoding="utf-8"
            )
            specs[family] = f"{DUMMY_PREFIX}{path}"
        cases = [
            (family, GREEDY, {"eager": eager}) for family in FAMILIES for eager in (True, False)
        ]
        cases += [("qwen3", params, settings) for params, settings in VARIANTS.values()]
        for family, params, settings in cases:
            weights = {name: value for name, value in settings.items() if name == "quantization"}
            wanted = answers(specs[family], "cpu", params, eager=True, **weights)
            found = answers(specs[family], device, params, **settings)
            equal = sum(one == other for one, other in zip(wanted, found, strict=True))
            print(f"{family} {settings}: {equal} of {len(wanted)} equal", flush=True)


def step_settings(device: str, batch: int) -> dict[str, Any]:
    """Settings of an engine for so many sequences. Without a size, its KV cache is as large as that
    many of full length need, whatever the model."""
    return {
        "device": device,
        "dtype": "bfloat16",
        "seed": 0,
        "enable_prefix_caching": False,
        "max_model_len": 2048,
        "max_num_seqs": batch,
    }


class StageClock:
    """Prints after how many seconds each stage of opening began, and its parts if they are few."""

    def __init__(self) -> None:
        self._began, self._stage = time.monotonic(), ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage or total < 10:
            seconds = time.monotonic() - self._began
            print(f"{seconds:6.1f} s  {stage}, {done} of {total}", flush=True)
        self._stage = stage


def print_compiler_times() -> None:
    """Print what torch's compiler found in its caches, and its longest phases. Phases lie within
    others."""
    for part in ("aot_autograd", "inductor"):
        found = torch._dynamo.utils.counters[part]
        cached = {name: count for name, count in found.items() if "cache" in name}
        print(f"{part}: {cached}")
    names, seconds = torch._dynamo.utils.compile_times(repr="csv", aggregate=True)
    phases = sorted(zip(map(float, seconds), names, strict=True), reverse=True)
    for each, name in phases[:16]:
        print(f"{each:6.1f} s  in {name}")


def show_step(device: str, model: str, batch: int, context: int) -> None:
    clock = StageClock()
    with LLM(DUMMY_PREFIX + model, progress=clock, **step_settings(device, batch)) as llm:
        clock("opened", 1, 1)
        llm.built.prepare(clock)
        clock("prepared", 1, 1)
        print_compiler_times()
        engine, waiting = llm.engine, {str(place) for place in range(batch)}
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=batch + 100)
        for place, prompt in enumerate(
            random_prompts([context] * batch, llm.built.model.vocab_size, seed=0)
        ):
            engine.add(Request(str(place), prompt, params, seed=0, arrival_time=engine.now()))
        while waiting:
            waiting -= {update.request_id for update in engine.step()}
        steps = 16
        began = time.perf_counter()
        for _ in range(steps):
            engine.step()
        whole = (time.perf_counter() - began) / steps * 1e6
        kind = ProfilerActivity.CPU if device == "cpu" else ProfilerActivity.CUDA
        with profile(activities=[kind]) as profiler:
            for _ in range(steps):
                engine.step()
        times, calls = Counter[str](), Counter[str]()
        for event in profiler.events():
            if event.device_type.name == ("CPU" if device == "cpu" else "CUDA"):
                times[event.name] += (
                    event.self_cpu_time_total if device == "cpu" else event.device_time_total
                )
                calls[event.name] += 1
    # A program that is launched before the one before it has ended counts its waiting too.
    busy, launches = sum(times.values()) / steps, sum(calls.values()) / steps
    print(f"{whole:.0f} us a step; in the trace {busy:.0f} us in {launches:.0f} launches")
    for name, us in times.most_common(24):
        print(
            f"{us / steps:9.1f} us {calls[name] / steps:6.1f} x {us / calls[name]:8.2f}  "
            f"{name[:90]}"
        )


SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top-p": {"top_p": 0.95},
    "top-k": {"top_k": 50},
}
"""How each differs from sampling at a temperature alone."""
CPU_ROWS = 8
"""Rows of each batch that the CPU samples too: it takes many times as long as a GPU."""


@torch.inference_mode()
def compare_samplers(
    bench: GpuBench, row_counts: Sequence[int], vocab_size: int, temperature: float
) -> None:
    """Print for each sampler and number of rows how many tokens are equal, and both times."""
    for count in row_counts:
        logits = random_logits(count, vocab_size)
        moved = logits.to(bench.device)
        for name, settings in SAMPLERS.items():
            params = SamplingParams(**{"temperature": temperature, **settings})
            few = logits[:CPU_ROWS]
            on_cpu = sample(few, staged_rows(params, len(few), vocab_size, few.device)).tokens
            rows = staged_rows(params, count, vocab_size, bench.device)
            call = partial(sample, moved, rows)
            tokens = call().tokens
            own = bench.times({name: call})[name].us
            with reference_operators(bench.device.type.upper()):
                plain_tokens = call().tokens
                plain = bench.times({name: call})[name].us
            print(
                f"{count} x {vocab_size}, {name}: {num_equal(tokens, plain_tokens)} of {count} "
                f"tokens are those of plain torch, {num_equal(tokens[: len(few)], on_cpu)} of "
                f"{len(few)} the CPU's; "
                f"{own:.1f} us, plain torch {plain:.1f} us, {plain / own:.2f} times as long",
                flush=True,
            )


def staged_rows(
    params: SamplingParams, count: int, vocab_size: int, device: torch.device
) -> SamplingRows:
    """The settings of `count` requests of one token that differ in their seeds, on the device."""
    begins = [Begin(row, (0,), 1, 0, 7919 * row, params) for row in range(count)]
    states = [SamplingState(begin, vocab_size) for begin in begins]
    staging = Staging(device)
    rows = SamplingRows.stage(states, [1] * count, staging)
    staging.transfer()
    return rows


def num_equal(tokens: torch.Tensor, others: torch.Tensor) -> int:
    return int((tokens.cpu() == others.cpu()).sum())


def compare_presets(
    bench: GpuBench, model: str, preset: Preset, temperature: float, rounds: int
) -> None:
    """Print the output tokens per second of both, and their ratio within each round."""
    shapes = preset.draw(seed=0)
    limits = bench.limits  # measured before the engine takes the memory
    memory = None
    if bench.dry_run:
        memory = 64 << 20
    rates = {"greedy": list[float](), f"temperature {temperature:g}": list[float]()}
    with closing(EngineShelf(bench)) as shelf:
        engine = shelf.get(
            model,
            dtype=format_name(bench.dtype),
            max_model_len=max(shape.total_tokens for shape in shapes) + 16,
            max_num_seqs=len(shapes),
            max_num_batched_tokens=LONGEST_PROMPT,
            kv_cache_memory=memory,
        )
        temperatures = zip(rates, (0.0, temperature), strict=True)
        runs = {name: PresetRun(engine, shapes, one) for name, one in temperatures}
        for run in runs.values():
            run.warm_up()
        for number in range(rounds):
            for name in rotated(runs, number):
                rates[name].append(BatchRates.of(runs[name].run().timings).output)
        cost = ModelCost(engine.llm.built.model, bench.dtype.itemsize)
    floor = preset_floor_rate(cost, shapes, limits)
    print(f"floor: {floor:,.0f} tokens/s")
    for name, found in rates.items():
        share = statistics.median(found) / floor
        print(f"{name}: {spread_text(found, ',.0f')} tokens/s, {share:.0%} of the floor")
    ratios = [sampled / greedy for greedy, sampled in zip(*rates.values(), strict=True)]
    print(f"sampled over greedy: {spread_text(ratios, '.3f')}")


@torch.inference_mode()
def time_products(device: str) -> None:
    for outputs, columns in ((14336, 4096), (1024, 3072)):
        weight = torch.randn(outputs, columns, device=device)
        matrices: dict[str, tuple[torch.Tensor, Any]] = {
            "bfloat16": (weight.bfloat16(), torch.nn.functional.linear)
        }
        for bits in (4, 8):
            quantized = round_to_nearest(weight, bits, 128)
            product = partial(packed_linear, bias=None, columns=outputs, form=quantized.format)
            matrices[f"int{bits}"] = pack(quantized), product
        for name, (matrix, product) in matrices.items():
            copies = [matrix.clone() for _ in range(max(2, int(150e6 / matrix.nbytes)))]
            for num_rows in (1, 16, 32, 64, 2048):
                rows = torch.randn(num_rows, columns, device=device).bfloat16()
                us = graph_us([partial(product, rows, one) for one in copies])
                print(f"{name}, {num_rows} x {columns} x {outputs}: {us:.1f} us", flush=True)
    for name, (outputs, columns, surroundings) in LAYER_PRODUCTS.items():
        time_fused_product(name, outputs, columns, surroundings, device)


LAYER_PRODUCTS = {
    "qkv": (4096, 1024, "norm"),
    "output": (1024, 2048, "residual"),
    "gate_up": (6144, 1024, "norm silu"),
    "down": (1024, 3072, "residual"),
    "qkv of 8B": (6144, 4096, "norm"),
    "output of 8B": (4096, 4096, "residual"),
    "gate_up of 8B": (28672, 4096, "norm silu"),
    "down of 8B": (4096, 14336, "residual"),
}
"""Products of a layer of Qwen3-0.6B and of Llama-3.1-8B: outputs, columns, and what stands around
them."""


def time_fused_product(
    name: str, outputs: int, columns: int, surroundings: str, device: str
) -> None:
    """Print what one row takes through `fused_linear`, and through torch's product alone."""
    row, norm = (torch.randn(shape, device=device).bfloat16() for shape in ((1, columns), columns))
    weight = torch.randn(outputs, columns, device=device).bfloat16()
    activation = "silu" if "silu" in surroundings else ""
    residual = torch.randn(1, outputs, device=device).bfloat16()
    call = partial(
        fused_linear,
        row,
        bias=None,
        norm=norm if "norm" in surroundings else None,
        residual=residual if "residual" in surroundings else None,
        eps=1e-6,
        norm_adds_one=False,
        activation=activation,
    )
    copies = [weight.clone() for _ in range(max(2, int(200e6 / weight.nbytes)))]
    fused = graph_us([partial(call, weight=one) for one in copies])
    alone = graph_us([partial(torch.nn.functional.linear, row, one) for one in copies])
    print(
        f"{name}, {columns} x {outputs}: {fused:.2f} us with {surroundings}, "
        f"{weight.nbytes / 1e6 / fused:.2f} TB/s; {alone:.2f} us by torch, without",
        flush=True,
    )


@torch.inference_mode()
def time_layers(bench: GpuBench, model: str, row_counts: Sequence[int], context: int) -> None:
    """Print what all layers of a decode step take, captured, fused and compiled, for these numbers
    of rows; and how far their hidden states are apart, over their root mean square."""
    decoder, config = make_dummy_model(model, format_name(bench.dtype), bench.device)
    layers = LayerRunner.torch_compile(decoder, backend="eager" if bench.dry_run else "inductor")
    most, blocks = max(row_counts), -(-context // LAYER_BLOCK_SIZE)
    caches = make_caches(
        config,
        num_blocks=most * blocks,
        block_size=LAYER_BLOCK_SIZE,
        dtype=decoder.dtype,
        device=bench.device,
    )
    for cache in (*caches.keys, *caches.values):
        cache.normal_(std=0.1)
    forward = ForwardPass(decoder, caches, layers)
    for rows in row_counts:
        inputs = decode_inputs(rows, context, bench.device)
        found = {}
        for name in ("fused", "compiled"):
            with mock.patch.object(FusedLayer, "takes", return_value=name == "fused"):
                found[name] = forward(inputs).clone()
                us = 0.0 if bench.dry_run else graph_us([partial(forward, inputs)])
            print(f"{rows} rows, {name}: {us:.1f} us", flush=True)
        compiled = found["compiled"].float()
        apart = (found["fused"].float() - compiled).square().mean() / compiled.square().mean()
        print(f"{rows} rows: {apart.sqrt():.5f} apart", flush=True)


LAYER_BLOCK_SIZE = 16
LAYER_ROWS = (1, 2, 4, 8)


def decode_inputs(rows: int, context: int, device: torch.device) -> StepInputs:
    """One token for each of so many rows, behind context - 1 others; their blocks are shuffled."""
    blocks = -(-context // LAYER_BLOCK_SIZE)
    tables = torch.randperm(rows * blocks, device=device).int().view(rows, blocks)
    offset = (context - 1) % LAYER_BLOCK_SIZE
    batch = AttentionBatch(
        tables,
        torch.arange(rows + 1, dtype=torch.int32, device=device),
        torch.full((rows,), context, dtype=torch.int32, device=device),
        tables[:, -1].long() * LAYER_BLOCK_SIZE + offset,
    )
    positions = torch.full((rows,), context - 1, device=device)
    return StepInputs(torch.arange(rows, device=device), positions, batch, 1)


def graph_us(calls: list[Any]) -> float:
    """Microseconds of one of these calls, in a graph of all of them: the median of five replays."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(5):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) * 1000 / len(calls))
    return statistics.median(times)


def main(words: Sequence[str]) -> None:
    preset = PRESETS[PRESET]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "what", choices=("tokens", "step", "layers", "sampling", "preset", "products")
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default="qwen3-0.6b", help="of step, layers and preset")
    parser.add_argument("--batch", type=int, default=1, help="of step")
    parser.add_argument("--context", type=int, default=512, help="of step and layers")
    parser.add_argument("--temperature", type=float, default=TEMPERATURE)
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 64, 256), help="of sampling")
    parser.add_argument("--vocabulary", type=int, default=151_936, help="of sampling")
    parser.add_argument("--requests", type=int, default=preset.requests, help="of preset")
    parser.add_argument("--rounds", type=int, default=2, help="of preset")
    parser.add_argument(
        "--tokens",
        type=int,
        nargs=2,
        metavar=("LEAST", "MOST"),
        default=preset.input_range,
        help="in and out of each request of preset",
    )
    given = parser.parse_args(words)
    if given.temperature <= 0:
        parser.error("--temperature must be above 0: greedy sampling is measured in any case")
    numbers = [given.rounds, given.requests, given.vocabulary] + list(given.rows)
    if min(numbers) < 1:
        parser.error("--rounds, --requests, --vocabulary and --rows take numbers from 1")
    if not 1 <= given.tokens[0] <= given.tokens[1]:
        parser.error("--tokens takes the least and the most, both from 1")
    try:
        check(given)
    except NanoserveError as error:
        sys.exit(str(error))


def check(given: argparse.Namespace) -> None:
    """Do what was asked for."""
    bench = GpuBench.open(
        dry_run=given.device == "cpu", asked="gpu_checks", instead="try it with --device cpu"
    )
    if given.what == "tokens":
        compare_tokens(given.device)
    elif given.what == "step":
        show_step(given.device, given.model, given.batch, given.context)
    elif given.what == "layers":
        time_layers(bench, given.model, LAYER_ROWS, given.context)
    elif given.what == "sampling":
        compare_samplers(bench, given.rows, given.vocabulary, given.temperature)
    elif given.what == "preset":
        lengths = tuple(given.tokens)
        preset = Preset(given.requests, lengths, lengths)
        compare_presets(bench, given.model, preset, given.temperature, given.rounds)
    else:
        time_products(given.device)


if __name__ == "__main__":
    main(sys.argv[1:])
