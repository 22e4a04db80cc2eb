"""The peak of host memory while a shard of a model is loaded, each in a process of its own. Linux.

``python scripts/loading_memory.py dummy:qwen3-0.6b`` prints a table for the whole model, two stages
and two ranks. The weights of a dummy model are written to the user's cache directory first.
"""

import subprocess
import sys
from pathlib import Path

LAYOUTS = ((1, 1), (2, 1), (1, 2))
"""Pipeline and tensor parallel degrees."""
_MEBI = 1 << 20


def main(name: str) -> None:
    from nanoserve.lab.benchmarks.peers.weights import checkpoint_directory
    from nanoserve.models.hub import resolve_model

    directory = checkpoint_directory(resolve_model(name), "bfloat16")
    print(
        "| --pp | --tp | rank | weights, MiB | peak growth while loading, MiB "
        "|\n|---|---|---|---|---|"
    )
    for stages, ranks in LAYOUTS:
        for rank in range(stages * ranks):
            subprocess.run(
                [sys.executable, __file__, str(directory), *map(str, (stages, ranks, rank))],
                check=True,
            )


def load_shard(directory: Path, pipeline_parallel: int, tensor_parallel: int, rank: int) -> None:
    """Load one shard into this process, and print its line of the table."""
    from nanoserve.config.model_config import ModelConfig
    from nanoserve.models.decoder import SingleRank
    from nanoserve.models.loading import load_model
    from nanoserve.models.shards import make_shards

    config = ModelConfig.from_directory(directory)
    shards = make_shards(
        config, pipeline_parallel=pipeline_parallel, tensor_parallel=tensor_parallel
    )
    before = _memory("VmRSS")  # what Python and torch take themselves
    # Loading asks nothing of the other ranks.
    decoder, _ = load_model(directory, "bfloat16", shard=shards[rank], group=SingleRank())
    weights = sum(parameter.nbytes for parameter in decoder.parameters())
    growth = _memory("VmHWM") - before
    print(
        f"| {pipeline_parallel} | {tensor_parallel} | {rank} | {weights / _MEBI:.0f} | "
        f"{growth / _MEBI:.0f} |"
    )


def _memory(field: str) -> int:
    """Bytes of this process's memory: VmRSS now, VmHWM at its peak."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


if __name__ == "__main__":
    name, *shard = sys.argv[1:]
    if shard:
        load_shard(Path(name), *map(int, shard))
    else:
        main(name)
