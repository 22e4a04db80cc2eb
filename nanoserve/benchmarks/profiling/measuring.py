"""measure_profile: how long the parts of a step take here, over their sizes (the offline profiler of APEX).

An engine's own work in a step is timed apart: scheduling, and taking answers in.
"""

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import count

import msgspec
import torch

from nanoserve.benchmarks.cpu_load import ForeignLoad
from nanoserve.benchmarks.machine import describe_machine, describe_run
from nanoserve.benchmarks.roofline import BandwidthProbe, machine_limits
from nanoserve.benchmarks.settling import settle
from nanoserve.costs.hardware import Device
from nanoserve.costs.profile import SCHEMA, KvMemory, Profile, calibrate
from nanoserve.engine import Engine
from nanoserve.errors import UsageError
from nanoserve.llm import LLM
from nanoserve.request import Request, SamplingParams
from nanoserve.runtime.host.host_processor import HostProcessor
from nanoserve.runtime.local import LocalExecutor
from nanoserve.runtime.profiling.parts import (
    Effort,
    ProfileSizes,
    cache_limits,
    curve_of,
    fields_of,
    open_probes,
    take_rounds,
)
from nanoserve.runtime.profiling.timers import Stopwatch

_PROMPT, _ANSWER = 4, 10


class EngineTimer:
    """Runs requests on an engine that has nothing else to do."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._names = engine, count()
        pool = engine.scheduler.pool
        # decodes at a time for which there are KV blocks.
        self.most_rows = pool.num_blocks // -(-(_PROMPT + _ANSWER) // pool.block_size)

    def seconds(self, rows: int) -> float:
        """Seconds that the engine adds to a step of ``rows`` decodes: the median over the steps of a short run."""
        engine, recorder = self._engine, self._engine.recorder
        for _ in range(rows):
            name = f"profile-{next(self._names)}"
            params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=_ANSWER)
            engine.add(Request(name, (1,) * _PROMPT, params, seed=0, arrival_time=engine.now(), cache_salt=name))
        outside = []
        while engine.has_work:
            began, before = time.perf_counter(), recorder.executor_seconds
            updates = engine.step()
            if len(updates) == rows:
                outside.append(time.perf_counter() - began - (recorder.executor_seconds - before))
        return statistics.median(outside)


SIZES = ProfileSizes(
    tokens=(1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096),
    prompts=(16, 32, 64, 128, 256, 512, 1024, 2048),
    batches=(1, 2, 4, 8, 16, 32, 64),
    contexts=(16, 64, 256, 1024),
    rows=(1, 4, 16, 64, 256),
    copies=(2**16, 2**20, 2**24, 2**26),
    kv_bytes=2**30,
)
EFFORT = Effort(seconds=25.0, fewest_rounds=3, most_rounds=15, longest_sample=1.0)
LEAST_LIMITS = {"--max-num-batched-tokens": 32, "--max-model-len": 32, "--max-num-seqs": 4}
"""Below that there is little to measure, and nothing to run for a proof."""
_READ_NUMBERS, _PRODUCT_SIZE = 2**26, 8192
"""Sizes that fit on a GPU whose memory is mostly taken by the KV cache."""


def measure_profile(llm: LLM, processor: HostProcessor, announce: Callable[[str], None]) -> Profile:
    """Measure an open LLM that has nothing to do; no workload is predicted yet.

    Args:
        llm: on the device that is to be measured, with the settings that it will have.
        processor: the part of the CPU that is to attend in host memory.
        announce: is told, in a line, what is going on.

    Raises:
        TypeError: for an engine that is not one device in this process.
        UsageError: for limits of the engine so small that there is nothing to measure.
    """
    executor, config = llm.engine.executor, llm.engine_config
    if not isinstance(executor, LocalExecutor):
        raise TypeError(f"one device in this process can be profiled, not {type(executor).__name__}")
    runner, pool = executor.runner, llm.engine.scheduler.pool
    engine = EngineTimer(llm.engine)
    sizes = _sizes(llm, engine)
    facts = settle(llm, announce)
    announce("reading and multiplying, to know what the machine does at best ...")
    dtype = runner.decoder.dtype
    host = _processor(dtype)
    device = host if runner.device.type == "cpu" else _accelerator(runner.device, dtype)
    with open_probes(runner, processor, sizes, block_size=config.block_size) as probes:
        probes["engine"] = {(rows,): partial(engine.seconds, rows) for rows in sizes.rows}
        foreign = ForeignLoad()
        found = take_rounds(probes, announce, EFFORT)
        busy = foreign.read()
    profile = Profile(
        schema=SCHEMA,
        about=describe_run(),
        foreign_cores=busy,
        settings={
            **facts,
            "host_threads": processor.threads,
            "rounds": len(found["copy"][sizes.copies[:1]]),
        },
        model=llm.config,
        bits=8 * dtype.itemsize,
        device=device,
        host=host,
        memory=KvMemory(kv_tokens=pool.num_blocks * config.block_size),
        engine=curve_of(found["engine"]),
        **fields_of(found, processor),
    )
    return msgspec.structs.replace(profile, efficiency=calibrate(profile))


def _sizes(llm: LLM, engine: EngineTimer) -> ProfileSizes:
    """Sizes up to the largest step of the engine and the model's context."""
    config, executor = llm.engine_config, llm.engine.executor
    limits = config.max_num_batched_tokens, llm.max_model_len, config.max_num_seqs
    for (flag, least), limit in zip(LEAST_LIMITS.items(), limits, strict=True):
        if limit < least:
            raise UsageError(f"{flag} is too small to profile: it must allow {least}, not {limit}")
    assert isinstance(executor, LocalExecutor)
    tokens, rows = cache_limits(executor.runner, config.block_size)
    shape = llm.config
    return SIZES.within(
        step_tokens=min(config.max_num_batched_tokens, tokens),
        step_rows=min(config.max_num_seqs, rows, engine.most_rows),
        context=llm.max_model_len,
        kv_token_bytes=2 * shape.num_kv_heads * shape.head_dim * executor.runner.decoder.dtype.itemsize,
    )


def _processor(dtype: torch.dtype) -> Device:
    limits = machine_limits(dtype, BandwidthProbe())
    return Device(
        name=describe_machine()["processor"],
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        memory_bandwidth=limits.bytes_per_second,
        flops=limits.operations_per_second,
    )


def _accelerator(device: torch.device, dtype: torch.dtype) -> Device:
    """What a GPU reads and multiplies per second: the best of a few."""
    watch, facts = Stopwatch(device), torch.cuda.get_device_properties(device)
    numbers = torch.ones(_READ_NUMBERS, device=device)
    factor = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE, dtype=dtype, device=device)

    def best(action: Callable[[], object]) -> float:
        seconds = []
        for _ in range(10):
            began = watch.now()
            action()
            seconds.append(watch.now() - began)
        return min(seconds)

    return Device(
        name=facts.name,
        memory_bytes=facts.total_memory,
        memory_bandwidth=numbers.nbytes / best(numbers.sum),
        flops=2 * _PRODUCT_SIZE**3 / best(lambda: factor @ factor),
    )
