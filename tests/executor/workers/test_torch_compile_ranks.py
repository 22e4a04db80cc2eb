"""Layers compiled by torch.compile, as on a GPU, whose ranks are processes: with the sums over the
group in them."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nanoserve.config.model_parts import LayerDifferences
from nanoserve.executor.compile.layer_runner import LayerRunner
from nanoserve.executor.step.forward_pass import ForwardPass
from nanoserve.executor.workers.distributed import RankGroup, join_workers
from nanoserve.models.decoder import Decoder
from nanoserve.models.shards import make_shards
from tests.executor.small_model import small_config
from tests.executor.test_torch_compile import caches, step_of

SIZES = [(1, 5), (1, 1), (2, 1), (16, 1)]  # rows and their lengths


def traced_and_eager(rank: int, meeting: Path) -> tuple[list[Tensor], list[Tensor], str | None]:
    """Hidden states of one of two ranks, and why its layers did not run compiled if they did
    not."""
    config = replace(small_config(), num_layers=1, layers=LayerDifferences(sliding_windows=(0,)))
    shards = make_shards(config, pipeline_parallel=1, tensor_parallel=2)
    join_workers(rank, 2, f"file://{meeting}", torch.device("cpu"))
    group = RankGroup(range(2), links=None)  # as on a GPU
    torch.manual_seed(rank)
    decoder = Decoder(config, shard=shards[rank], group=group).eval().requires_grad_(False)
    layers, generator = (
        LayerRunner.torch_compile(decoder, backend="inductor"),
        torch.Generator().manual_seed(1),
    )
    traced, eager = [], []
    with torch.inference_mode():
        for rows, length in SIZES:
            step = step_of(rows, length, generator)
            traced.append(ForwardPass(decoder, caches(decoder.config, 32), layers)(step))
            eager.append(ForwardPass(decoder, caches(decoder.config, 32))(step))
    dist.destroy_process_group()
    return traced, eager, layers.problem


@pytest.mark.slow
def test_compiled_layers_add_up_what_their_ranks_compute(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as processes:
        ranks = [
            processes.submit(traced_and_eager, rank, tmp_path / "meeting") for rank in range(2)
        ]
        (first, eager, problem), (second, *_, other) = (rank.result() for rank in ranks)
    assert problem is None and other is None
    for traced, others, expected in zip(first, second, eager, strict=True):
        assert torch.equal(traced, others)
        torch.testing.assert_close(traced, expected)
