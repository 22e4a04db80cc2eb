"""Workers that are simulated, for the benchmark to measure: P2 for prompts, T2 for decodes."""

from nanoserve.engine_config import EngineConfig
from nanoserve.lab.benchmarks.policies.variants import OpenEngine, PolicyVariant
from nanoserve.lab.commands.bench_reshard import resharding_variants
from nanoserve.layout import ParallelLayout
from nanoserve.scheduler.optional import LayoutCapacity
from tests.fakes.moving_executor import MovingExecutor
from tests.lab.simulator.tier_times import TierTimes

BLOCK_SIZE, VOCAB_SIZE = 4, 50
P2, T2 = ParallelLayout(pipeline_parallel=2), ParallelLayout(tensor_parallel=2)
HOST_LINK = 2048.0


TIMES = (
    TierTimes(num_stages=2, num_layers=2, layer=2**-4, token=2**-8, swap_token=2**-9, reload=0.5),
    TierTimes(num_layers=2, layer=2**-5, token=2**-6, swap_token=2**-9, reload=0.5),
)
"""Prompts are dear in T2, decodes in P2; a transition takes as long as some steps."""
CAPACITIES = (LayoutCapacity(30, 2), LayoutCapacity(30))


def simulated_pair() -> OpenEngine:
    """With both layouts."""
    return OpenEngine(
        name="P2 -> T2",
        vocab_size=VOCAB_SIZE,
        executor=MovingExecutor(TIMES, block_size=BLOCK_SIZE),
        layouts=(P2, T2),
        capacities=CAPACITIES,
        host_blocks=40,
        host_link_bandwidth=HOST_LINK,
        workers=2,
        compiled=False,
    )


def simulated_alone(layout: int) -> OpenEngine:
    """With one of them."""
    return OpenEngine(
        name="own workers",
        vocab_size=VOCAB_SIZE,
        executor=MovingExecutor([TIMES[layout]], block_size=BLOCK_SIZE),
        layouts=((P2, T2)[layout],),
        capacities=(CAPACITIES[layout],),
        workers=2,
        compiled=False,
    )


def variants(*engines: OpenEngine) -> dict[str, PolicyVariant]:
    """By name."""
    config = EngineConfig(
        block_size=BLOCK_SIZE, max_model_len=100, max_num_seqs=64, max_num_batched_tokens=32
    )
    return {one.name: one for one in resharding_variants(engines, config)}
