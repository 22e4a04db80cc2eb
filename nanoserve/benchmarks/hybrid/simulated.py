"""The same requests in the simulator, by what things were measured to take: is it as fast there? No torch."""

from collections.abc import Callable

import msgspec

from nanoserve.benchmarks.hybrid.steps import StepCounts
from nanoserve.benchmarks.pipeline.running import run_requests
from nanoserve.benchmarks.pipeline.simulated import answers
from nanoserve.record.run_record import RunRecord
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.simulator.pipeline import TieredTimes
from nanoserve.simulator.tiered_executor import TieredExecutor


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """A run in virtual time: seconds, and steps by strategy."""

    seconds: float
    steps: StepCounts


def simulate_run(
    record: RunRecord, times: TieredTimes, make_scheduler: Callable[[], Scheduler], *, block_size: int, vocab_size: int
) -> Simulation:
    """Simulate a run's requests in the times of a profile. Only their lengths matter, and when they came.

    Args:
        make_scheduler: makes one as the run had, whose predictor knows nothing but the profile.
    """
    executor = TieredExecutor([times], block_size=block_size, answer=answers)
    simulated = run_requests(executor, make_scheduler, record.rebased_requests, vocab_size=vocab_size)
    return Simulation(seconds=simulated.makespan, steps=StepCounts.of(simulated.plans))
