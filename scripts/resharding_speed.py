"""How fast workers change their weights from one parallel layout to another, beside plain copies of as many bytes.

``OMP_NUM_THREADS=1 python scripts/resharding_speed.py dummy:smollm2-135m P2 T2 bf16`` prints a table: one worker alone,
and all of them at the same time, each in a process of its own. Every worker that takes part also copies one tensor of
as many bytes to another in each round, right after its weights: what the machine's memory gives in that moment. The
share is the median over rounds of one over the other. The checkpoint is a model's directory, or a dummy that is written
to shared memory and removed afterwards. The model is run on CPUs.
"""

import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from nanoserve.models.resharding import ReshardableWeights
    from nanoserve.models.shards import Shard

ROUNDS = 9
SHARED_MEMORY = Path("/dev/shm")


class Timing(NamedTuple):
    """One worker's part of a round."""

    together: bool
    round: int
    layout: int
    num_bytes: int
    filling: float
    """Seconds."""
    copying: float


def main(name: str, first: str, second: str, dtype: str) -> None:
    from nanoserve.config import ModelConfig
    from nanoserve.layout import ParallelLayout
    from nanoserve.models.shards import make_shards

    layouts = [ParallelLayout.parse(layout) for layout in (first, second)]
    num_workers = layouts[0].devices
    with checkpoint(name, dtype) as directory:
        config = ModelConfig.from_directory(directory)
        shards = [
            make_shards(config, pipeline_parallel=layout.pipeline_parallel, tensor_parallel=layout.tensor_parallel)
            for layout in layouts
        ]
        timings = measure(directory, dtype, list(zip(*shards, strict=True)))
    print(f"{name} {first} -> {second} {dtype}\n")
    print("| workers at once | to | MiB each | s | GB/s in all | copies, GB/s in all | share |")
    print("|---|---|---|---|---|---|---|")
    for together in (False, True):
        for layout in (1, 0):
            taken = [timing for timing in timings if (timing.together, timing.layout) == (together, layout)]
            print(table_row(taken, num_workers if together else 1, layouts[layout].name))


def measure(directory: Path, dtype: str, shards: "list[tuple[Shard, ...]]") -> list[Timing]:
    """Timings of all workers, each of which has a shard for either layout."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(shards))
    ends = []
    for rank, own in enumerate(shards):
        end, other_end = context.Pipe(duplex=False)
        context.Process(target=work, args=(rank, directory, dtype, own, barrier, other_end), daemon=True).start()
        other_end.close()
        ends.append(end)
    try:
        return [timing for end in ends for timing in end.recv()]
    except EOFError:
        sys.exit("a worker failed; what it said stands above")


def table_row(timings: list[Timing], num_workers: int, layout: str) -> str:
    """In a round the slowest worker counts, and all bytes."""
    rounds = [[timing for timing in timings if timing.round == number] for number in range(ROUNDS)]
    num_bytes = sum(timing.num_bytes for timing in rounds[0])
    filling = [max(timing.filling for timing in taken) for taken in rounds]
    copying = [max(timing.copying for timing in taken) for taken in rounds]
    share = statistics.median(copied / filled for copied, filled in zip(copying, filling, strict=True))
    seconds = statistics.median(filling)
    speeds = [num_bytes / median / 1e9 for median in (seconds, statistics.median(copying))]
    each = num_bytes / num_workers / 2**20
    return (
        f"| {num_workers} | {layout} | {each:.0f} | {seconds:.3f} | {speeds[0]:.1f} | {speeds[1]:.1f} | {share:.0%} |"
    )


@contextmanager
def checkpoint(name: str, dtype: str) -> Iterator[Path]:
    """A directory with the model's weights in this number format, if it is a dummy."""
    from nanoserve.models.dtypes import DTYPES
    from nanoserve.models.dummy import save_dummy_checkpoint
    from nanoserve.models.hub import resolve_model

    resolved = resolve_model(name)
    if resolved.directory is not None:
        yield resolved.directory
        return
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as directory:
        save_dummy_checkpoint(name, DTYPES[dtype], Path(directory))
        yield Path(directory)


def work(
    rank: int, directory: Path, dtype: str, shards: "tuple[Shard, ...]", barrier: Barrier, end: Connection
) -> None:
    """One worker: fills its weights alone, if it is the first, and then at the same time as all others."""
    import torch

    from nanoserve.config import ModelConfig
    from nanoserve.models.decoder import SingleRank
    from nanoserve.models.dtypes import DTYPES
    from nanoserve.models.resharding import ReshardableWeights

    try:
        weights = ReshardableWeights(
            directory,
            ModelConfig.from_directory(directory),
            dtype=DTYPES[dtype],
            device=torch.device("cpu"),
            shards=shards,
            groups=[SingleRank()] * len(shards),  # filling asks nothing of the other ranks
        )
        end.send(list(timed_rounds(rank, weights, barrier)))
    except BaseException:
        barrier.abort()  # nobody need wait for this one
        raise


def timed_rounds(rank: int, weights: "ReshardableWeights", barrier: Barrier) -> Iterator[Timing]:
    """To the second layout and back, `ROUNDS` times alone and as often together."""
    import torch

    copies = torch.ones(2, weights.storage_bytes, dtype=torch.uint8)
    for layout in (1, 0):
        weights.fill(layout)  # now every page has been seen
    for together in (False, True):
        for number in range(2 * ROUNDS):
            barrier.wait()
            if not together and rank > 0:
                continue
            layout = 1 - number % 2
            began = perf_counter()
            num_bytes = weights.fill(layout)
            filling = perf_counter() - began
            if together:
                barrier.wait()  # shards differ in size: nobody copies while another fills
            began = perf_counter()
            copies[0, :num_bytes].copy_(copies[1, :num_bytes])
            yield Timing(together, number // 2, layout, num_bytes, filling, perf_counter() - began)


if __name__ == "__main__":
    main(*sys.argv[1:])
