"""The same requests in the simulator, by what things were measured to take: is it as fast there? No torch."""

from collections.abc import Callable
from dataclasses import replace

import msgspec

from nanoserve.benchmarks.hybrid.running import HybridRun, run_requests
from nanoserve.benchmarks.hybrid.steps import StepCounts
from nanoserve.benchmarks.pipeline.simulated import answers
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.simulator.pipeline import TieredTimes
from nanoserve.simulator.tiered_executor import TieredExecutor


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """A run in virtual time: seconds, and steps by strategy."""

    seconds: float
    steps: StepCounts


def simulate_run(
    run: HybridRun, times: TieredTimes, make_scheduler: Callable[[], Scheduler], *, block_size: int, vocab_size: int
) -> Simulation:
    """Simulate a run's requests in the times of a profile. Only their lengths matter, and when they came.

    Args:
        make_scheduler: makes one as the run had, whose predictor knows nothing but the profile.
    """
    requests = [
        replace(request, arrival_time=arrival)
        for request, arrival in zip(run.record.arrivals, run.outcome.arrivals, strict=True)
    ]
    executor = TieredExecutor([times], block_size=block_size, answer=answers)
    simulated = run_requests(executor, make_scheduler, requests, vocab_size=vocab_size)
    return Simulation(seconds=simulated.outcome.makespan, steps=StepCounts.of(simulated.record.plans))
