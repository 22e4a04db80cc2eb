"""The offline profiler behind ``nanoserve profile`` (APEX): how long the parts of a step take here,
over their sizes, and its proof: workloads that run on the real engine, and in the simulator over
what was measured."""

import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import msgspec
import torch

from nanoserve.costs.hardware import Device
from nanoserve.costs.profile import MeasuredTimes, Prediction, Profile, RunFigures, calibrate
from nanoserve.engine.engine import Engine
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import UsageError
from nanoserve.executor.cpu_attention.host_processor import HostProcessor
from nanoserve.executor.local import LocalExecutor
from nanoserve.executor.profiling.parts import (
    Effort,
    ProfileSizes,
    open_probes,
    profile_of,
    take_rounds,
)
from nanoserve.executor.profiling.timers import Stopwatch
from nanoserve.executor.start.model_loading import refuse_canvases, refuse_states
from nanoserve.lab.benchmarks.machine import ForeignLoad, describe_machine, describe_run
from nanoserve.lab.benchmarks.roofline import STAGE, BandwidthProbe, machine_limits
from nanoserve.lab.benchmarks.settling import settle
from nanoserve.lab.simulator import Workload, burst, poisson_arrivals, simulate
from nanoserve.lab.simulator.fleet import drive
from nanoserve.lab.simulator.pipeline import StepTimes
from nanoserve.llm import LLM
from nanoserve.record.metrics import Distribution
from nanoserve.record.metrics_observer import LatencyMetrics
from nanoserve.record.recorder import recorded
from nanoserve.request import Request, RequestShape, SamplingParams
from nanoserve.scheduler.policies import make_policy

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
"""Below that there is nothing to run for a proof."""
# sizes that fit on a GPU whose memory is mostly taken by the KV cache
_READ_NUMBERS, _PRODUCT_SIZE = 2**26, 8192


def measure_profile(llm: LLM, processor: HostProcessor, announce: Callable[[str], None]) -> Profile:
    """Measure an idle open LLM, and run two small workloads beside their predictions. ``processor``
    is the part of the CPU that is to attend in host memory. Raises TypeError for an engine that is
    not one device in this process, UsageError for a model with recurrent states or canvases, and
    for limits of the engine so small that there is nothing to measure."""
    executor, config = llm.engine.executor, llm.built.config
    if not isinstance(executor, LocalExecutor):
        raise TypeError(
            f"one device in this process can be profiled, not {type(executor).__name__}"
        )
    for refuse in (refuse_states, refuse_canvases):
        refuse(llm.built.model, "nanoserve profile", "choose another model")
    limits = config.max_num_batched_tokens, llm.built.max_model_len, config.max_num_seqs
    for (flag, least), limit in zip(LEAST_LIMITS.items(), limits, strict=True):
        if limit < least:
            raise UsageError(f"{flag} is too small to profile: it must allow {least}, not {limit}")
    runner = executor.runner
    sizes = SIZES.within(runner, config, context=llm.built.max_model_len)
    facts = settle(llm, announce)
    announce(f"{STAGE} ...")
    dtype = runner.decoder.dtype
    best = machine_limits(dtype, BandwidthProbe())
    host = Device(
        name=describe_machine()["processor"],
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        memory_bandwidth=best.bytes_per_second,
        flops=best.operations_per_second,
    )
    device = host
    if runner.device.type != "cpu":
        device = _accelerator(runner.device, dtype)
    with open_probes(runner, processor, sizes, block_size=config.block_size) as probes:
        foreign = ForeignLoad()
        found, busy = take_rounds(probes, announce, EFFORT), foreign.read()
    reached: dict[str, Any] = {"device": device, "host": host, "foreign_cores": busy}
    profile = profile_of(
        found,
        runner,
        processor,
        block_size=config.block_size,
        settings=facts,
        about=describe_run(),
        **reached,
    )
    profile = msgspec.structs.replace(profile, efficiency=calibrate(profile))
    predictions = predict_and_run(llm.engine, config, profile, announce)
    return msgspec.structs.replace(profile, predictions=tuple(predictions))


def _accelerator(device: torch.device, dtype: torch.dtype) -> Device:
    """Measure how much a GPU reads and multiplies per second: the best of a few tries."""
    watch, facts = Stopwatch(device), torch.cuda.get_device_properties(device)
    numbers = torch.ones(_READ_NUMBERS, device=device)
    factor = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE, dtype=dtype, device=device)

    def best(action: Callable[[], object]) -> float:
        return min(watch.seconds(action) for _ in range(10))

    return Device(
        name=facts.name,
        memory_bytes=facts.total_memory,
        memory_bandwidth=numbers.nbytes / best(numbers.sum),
        flops=2 * _PRODUCT_SIZE**3 / best(lambda: factor @ factor),
    )


# in turn
LENGTHS = (RequestShape(64, 32), RequestShape(160, 64), RequestShape(320, 48), RequestShape(32, 96))
LOAD = 0.5  # arrivals, as a share of the throughput of the closed batch
MOST_REQUESTS, FEWEST_REQUESTS = 64, 4
_SECONDS = 2.5
# where a few requests take much longer than that, all of them are shorter by this factor
_SHORTER = 4
_SEED, _REPEATS = 0, 3


@dataclass(frozen=True, slots=True)
class _Work:
    """Requests that are the same however often they are asked for; a rate of None means all at
    once."""

    requests: int
    rate: float | None
    lengths: tuple[RequestShape, ...]

    @property
    def name(self) -> str:
        inputs = statistics.mean(shape.input_tokens for shape in self.lengths)
        outputs = statistics.mean(shape.output_tokens for shape in self.lengths)
        coming = "at once"
        if self.rate is not None:
            coming = f"{self.rate:.3g} a second"
        return f"{self.requests} requests of {inputs:.0f}+{outputs:.0f}, {coming}"

    def draw(self, *, after: float = 0.0, name: str = "simulated") -> Iterator[Request]:
        """Each answer has its full length, which the scheduler does not know better than that of
        any other request."""
        arrivals = burst()
        if self.rate is not None:
            arrivals = poisson_arrivals(self.rate, _SEED)
        for request in Workload(arrivals, cycle(self.lengths), self.requests):
            params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=request.seed)
            salt = f"{name}-{request.request_id}"
            yield replace(
                request,
                request_id=salt,
                params=params,
                cache_salt=salt,
                arrival_time=request.arrival_time + after,
            )


def predict_and_run(
    engine: Engine, config: EngineConfig, profile: Profile, announce: Callable[[str], None]
) -> Iterator[Prediction]:
    """A closed batch and Poisson arrivals, each simulated and then run a few times on the idle
    engine."""
    times, longest = MeasuredTimes(profile), engine.scheduler.table.max_model_len

    def predict(work: _Work, costs: StepTimes = times) -> RunFigures:
        """The run in virtual time, with the engine's settings."""
        found = simulate(
            make_policy(config.policy_name, config.max_num_batched_tokens),
            costs,
            work.draw(),
            num_blocks=profile.memory.kv_blocks(config.block_size),
            block_size=config.block_size,
            windows=profile.model.cache_groups.windows,
            max_num_seqs=config.max_num_seqs,
        )
        return _figures(found.seconds, found.ttft_ms, found.tpot_ms)

    closed = _Work(FEWEST_REQUESTS, None, _fitting(longest, 1))
    if predict(closed).seconds > 2 * _SECONDS:
        closed = replace(closed, lengths=_fitting(longest, _SHORTER))
    while closed.requests < MOST_REQUESTS:
        larger = replace(closed, requests=2 * closed.requests)
        if predict(larger).seconds > _SECONDS:
            break
        closed = larger
    rate = LOAD * closed.requests / predict(closed).seconds
    for number, work in enumerate((closed, replace(closed, rate=rate))):
        announce(f"running {work.name}, {_REPEATS} times ...")
        real = tuple(
            run_for_real(engine, work.draw, f"run-{number}-{repeat}") for repeat in range(_REPEATS)
        )
        by_factors = predict(work, profile.step_costs())
        yield Prediction(
            workload=work.name, real=real, by_profile=predict(work), by_factors=by_factors
        )


def _fitting(longest: int, divisor: int) -> tuple[RequestShape, ...]:
    """The lengths, divided by that, which fit the context; or lengths that fit any context."""
    shapes = [
        RequestShape(shape.input_tokens // divisor, shape.output_tokens // divisor)
        for shape in LENGTHS
    ]
    return tuple(shape for shape in shapes if shape.total_tokens <= longest) or (
        RequestShape(4, 4),
    )


def run_for_real(engine: Engine, draw: Callable[..., Iterator[Request]], name: str) -> RunFigures:
    """Run the requests on the engine's own clock, and return their metrics."""
    lives, began = LatencyMetrics(), engine.now()
    with recorded(engine, lives):
        drive(engine, draw(after=began, name=name))
    return _figures(engine.now() - began, lives.ttft.distribution(), lives.tpot.distribution())


def _figures(
    seconds: float, ttft_ms: Distribution | None, tpot_ms: Distribution | None
) -> RunFigures:
    assert ttft_ms is not None and tpot_ms is not None, "requests ran, and had several tokens"
    return RunFigures(seconds=seconds, ttft_ms=ttft_ms.mean, tpot_ms=tpot_ms.mean)
