"""The scheduler on a virtual clock: the same Scheduler, Engine and policies over simulated
hardware. No torch.

    workload = Workload(poisson_arrivals(4.0, seed=0), lognormal_lengths(222, 127, 1.2, 1.0,
    seed=0), limit=1000) result = simulate(make_policy("throttling", 2048), costs, workload,
    num_blocks=costs.memory.kv_blocks(16))

Read pipeline.py (what a micro-batch meets on its way), host_attention.py (the CPU's part),
executor.py (the Executor on both), fleet.py (the loops), then simulation.py, which puts them
together. docs/simulator.md says what is modelled and what is not.
"""

from nanoserve.lab.simulator.result import SimulationResult
from nanoserve.lab.simulator.simulation import simulate
from nanoserve.lab.simulator.workload import (
    Workload,
    burst,
    fixed_lengths,
    gamma_arrivals,
    lognormal_lengths,
    poisson_arrivals,
)

__all__ = [
    "SimulationResult",
    "Workload",
    "burst",
    "fixed_lengths",
    "gamma_arrivals",
    "lognormal_lengths",
    "poisson_arrivals",
    "simulate",
]
