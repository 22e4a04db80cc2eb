"""measure_profile: how long the parts of a step take here, over their sizes (the offline profiler of APEX)."""

import os
from collections.abc import Callable
from functools import partial

import torch

from nanoserve.benchmarks.cpu_load import ForeignLoad
from nanoserve.benchmarks.machine import describe_machine, describe_run
from nanoserve.benchmarks.profiling.attention import AttentionShape, AttentionTimer, Stopwatch
from nanoserve.benchmarks.profiling.engine import EngineTimer
from nanoserve.benchmarks.profiling.rounds import Point, curve_of, difference_of, grid_of, take_rounds
from nanoserve.benchmarks.profiling.steps import StepTimer, copy_probe
from nanoserve.benchmarks.roofline import BandwidthProbe, machine_limits
from nanoserve.benchmarks.settling import settle_operators
from nanoserve.costs.calibration import calibrate
from nanoserve.costs.profile import SCHEMA, KvMemory, Profile, Reached
from nanoserve.errors import UsageError
from nanoserve.llm import LLM
from nanoserve.models.decoder import DecoderLayer
from nanoserve.runtime.compiled_layers import CompiledLayers
from nanoserve.runtime.local import LocalExecutor
from nanoserve.runtime.model_runner import ModelRunner
from triton_ops.cpu import cpu_operators

TOKENS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
PROMPTS = (16, 32, 64, 128, 256, 512, 1024, 2048)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (16, 64, 256, 1024)
ROWS = (1, 4, 16, 64, 256)
COPIES = (2**16, 2**20, 2**24, 2**26)
"""Bytes."""
SECONDS = 25.0
"""Rounds begin until so much time has passed."""
_PRODUCT_SIZE = 8192

Sampling = dict[Point, Callable[[], float]]


def measure_profile(llm: LLM, announce: Callable[[str], None]) -> Profile:
    """Measure an open LLM that has nothing to do; no workload is predicted yet.

    Args:
        llm: on the device that is to be measured, with the settings that it will have.
        announce: is told, in a line, what is going on.

    Raises:
        TypeError: for an engine that is not one device in this process.
        UsageError: for limits of the engine so small that there are no two sizes to measure.
    """
    executor, config = llm.engine.executor, llm.engine_config
    if not isinstance(executor, LocalExecutor):
        raise TypeError(f"one device in this process can be profiled, not {type(executor).__name__}")
    operators = settle_operators(announce)
    llm.prepare(lambda stage, done, _: None if done else announce(f"{stage}, once on this machine ..."))
    announce("reading and multiplying, to know what the machine does at best ...")
    runner, pool = executor.runner, llm.engine.scheduler.pool
    dtype = runner.decoder.dtype
    host = _processor(dtype)
    device = host if runner.device.type == "cpu" else _accelerator(runner.device, dtype)
    probes, foreign = _probes(llm, runner), ForeignLoad()
    found = take_rounds(probes, announce, SECONDS)
    busy = foreign.read()
    profile = Profile(
        schema=SCHEMA,
        about=describe_run(),
        foreign_cores=busy,
        settings={
            "model": llm.model_name,
            "dtype": str(dtype).removeprefix("torch."),
            "operators": operators,
            "layers": "compiled" if llm.compiled else "eager",
            "threads": torch.get_num_threads(),
            "rounds": len(found["copy"][COPIES[:1]]),
            "policy": config.policy,
        },
        model=llm.config,
        bits=8 * dtype.itemsize,
        device=device,
        host=host,
        memory=KvMemory(kv_tokens=pool.num_blocks * config.block_size),
        linear=difference_of(found["layer"], found["its attention"]),
        decode_attention=grid_of(found["decode attention"]),
        host_attention=grid_of(found.get("host attention", found["decode attention"])),
        prefill_attention=curve_of(found["prefill attention"]),
        copy=curve_of(found["copy"]),
        inputs=curve_of(found["inputs"]),
        head=curve_of(found["head"]),
        engine=curve_of(found["engine"]),
    )
    return profile.with_factors(calibrate(profile))


def _probes(llm: LLM, runner: ModelRunner) -> dict[str, Sampling]:
    """What is timed, at which sizes: as large as the engine's steps and the model's context can be."""
    config, device = llm.engine_config, runner.device
    longest, largest = llm.max_model_len, config.max_num_batched_tokens
    tokens = _up_to(TOKENS, largest, "--max-num-batched-tokens")
    prompts = _up_to(PROMPTS, min(longest, largest), "--max-model-len")
    contexts = _up_to(CONTEXTS, longest, "--max-model-len")
    engine = EngineTimer(llm.engine)
    rows = _up_to(ROWS, min(config.max_num_seqs, largest, engine.most_rows), "--max-num-seqs")
    keys = max(tokens[-1] + config.block_size, BATCHES[-1] * contexts[-1], prompts[-1])
    timer = partial(
        AttentionTimer,
        llm.config,
        keys=keys,
        block_size=config.block_size,
        dtype=runner.decoder.dtype,
    )
    attention = timer(device=str(device))
    steps = StepTimer(
        runner.decoder,
        _layers(runner, config.block_size) if llm.compiled else DecoderLayer.__call__,
        block_size=config.block_size,
        device=device,
        max_tokens=tokens[-1],
        max_rows=rows[-1],
    )

    def over(sizes: list[int], sample: Callable[[int], float]) -> Sampling:
        return {(size,): partial(sample, size) for size in sizes}

    def cells(timer: AttentionTimer) -> Sampling:
        return {
            (batch, context): partial(timer.seconds, AttentionShape(batch, 1, context))
            for batch in BATCHES
            for context in contexts
        }

    probes: dict[str, Sampling] = {
        "layer": over(tokens, steps.layer_seconds),
        "its attention": over(tokens, lambda size: attention.seconds(steps.attention_shape(size))),
        "decode attention": cells(attention),
        "prefill attention": over(prompts, lambda size: attention.seconds(AttentionShape(1, size, size))),
        "inputs": over(rows, steps.inputs_seconds),
        "head": over(rows, steps.head_seconds),
        "engine": over(rows, engine.seconds),
        "copy": {(size,): copy_probe(size, device) for size in COPIES},
    }
    return probes if device.type == "cpu" else probes | {"host attention": cells(timer(device="cpu"))}


def _up_to(sizes: tuple[int, ...], limit: int, flag: str) -> list[int]:
    """Those within what the engine does; a line needs two of them."""
    found = [size for size in sizes if size <= limit]
    if len(found) < 2:
        raise UsageError(f"{flag} is too small to profile: it must allow {sizes[1]}, not {limit}")
    return found


def _layers(runner: ModelRunner, block_size: int) -> CompiledLayers:
    return CompiledLayers(runner.decoder, block_size=block_size, operators=cpu_operators())


def _processor(dtype: torch.dtype) -> Reached:
    limits = machine_limits(dtype, BandwidthProbe())
    return Reached(
        name=describe_machine()["processor"],
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        read_bytes_per_second=limits.bytes_per_second,
        operations_per_second=limits.operations_per_second,
    )


def _accelerator(device: torch.device, dtype: torch.dtype) -> Reached:
    """What a GPU reads and multiplies per second: the best of a few."""
    watch, facts = Stopwatch(device), torch.cuda.get_device_properties(device)
    numbers = torch.ones(2**28, device=device)
    factor = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE, dtype=dtype, device=device)

    def best(action: Callable[[], object]) -> float:
        seconds = []
        for _ in range(10):
            began = watch.now()
            action()
            seconds.append(watch.now() - began)
        return min(seconds)

    return Reached(
        name=facts.name,
        memory_bytes=facts.total_memory,
        read_bytes_per_second=numbers.nbytes / best(numbers.sum),
        operations_per_second=2 * _PRODUCT_SIZE**3 / best(lambda: factor @ factor),
    )
