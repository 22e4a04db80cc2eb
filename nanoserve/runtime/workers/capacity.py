"""How many KV blocks all workers can have: each keeps its own part of every block."""

from collections import defaultdict
from collections.abc import Sequence

from nanoserve.engine_config import EngineConfig
from nanoserve.runtime.launch.memory import CPU_SHARE, CUDA_SHARE, blocks_that_fit
from nanoserve.runtime.workers.messages import Loaded


def common_num_blocks(workers: Sequence[Loaded], config: EngineConfig, longest: int, layout: int = 0) -> int:
    """Blocks of the KV cache in a parallel layout. Workers on the CPUs of one machine share its memory; GPUs have
    their own.

    Args:
        longest: the model's own limit, in tokens.
        layout: its number.

    Raises:
        UsageError: if a request of full length does not fit, or more is asked for than is free.
    """
    per_block: defaultdict[str, int] = defaultdict(int)
    free: dict[str, int] = {}
    for worker in workers:
        per_block[worker.memory] += worker.block_bytes[layout]
        free[worker.memory] = min(worker.free_bytes, free.get(worker.memory, worker.free_bytes))
    total = sum(per_block.values())
    # The memory that holds the fewest blocks is the measure: so much could be free of all together, and be used.
    together = min(free[memory] * total // per_block[memory] for memory in free)
    if config.device == "cpu":  # the engines beside this one load at the same time, and take as much
        together //= config.data_parallel
    return blocks_that_fit(
        total,
        together,
        share=CPU_SHARE if config.device == "cpu" else CUDA_SHARE,
        block_size=config.block_size,
        longest=longest,
        kv_cache_memory=config.kv_cache_memory,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
    )
