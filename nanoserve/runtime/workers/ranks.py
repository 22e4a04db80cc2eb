"""The workers' ranks, and the process groups of torch.distributed by which they communicate."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nanoserve.runtime.launch.rendezvous import open_store


@dataclass(frozen=True, slots=True)
class Ranks:
    """One worker's place among all in a parallel layout. Ranks are stage-major: ``stage * degree + tensor_rank``."""

    rank: int
    """This worker's."""
    num_stages: int
    """N, of the pipeline."""
    degree: int
    """M, tensor-parallel ranks in each stage."""

    @property
    def world_size(self) -> int:
        return self.num_stages * self.degree

    @property
    def stage(self) -> int:
        return self.rank // self.degree

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.degree

    @property
    def before(self) -> int | None:
        """The rank that sends hidden states to this one; None in the first stage."""
        return self.rank - self.degree if self.stage > 0 else None

    @property
    def behind(self) -> int | None:
        """The rank that this one sends hidden states to; None in the last stage."""
        return self.rank + self.degree if self.stage < self.num_stages - 1 else None

    @property
    def answers(self) -> bool:
        """Whether it samples and answers: the first rank of the last stage does."""
        return self.behind is None and self.tensor_rank == 0


class RankGroup:
    """A TensorParallelGroup of processes: the ranks of one stage."""

    def __init__(self, ranks: Ranks) -> None:
        """To be made by all workers at the same time, once they have met."""
        self._ranks = ranks
        for stage in range(ranks.num_stages):  # every process takes part in making every group
            members = range(stage * ranks.degree, (stage + 1) * ranks.degree)
            group = dist.new_group(list(members))
            if stage == ranks.stage:
                self._group = group

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place of the argument."""
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def gather(self, tensor: Tensor) -> Tensor | None:
        """[N, columns] of every rank -> [N, degree * columns] on rank 0; None elsewhere."""
        ranks = self._ranks
        parts = None
        if ranks.tensor_rank == 0:
            parts = [torch.empty_like(tensor) for _ in range(ranks.degree)]
        dist.gather(tensor.contiguous(), parts, dst=ranks.stage * ranks.degree, group=self._group)
        return None if parts is None else torch.cat(parts, dim=1)


def meet(
    layouts: Sequence[Ranks], init_method: str, device: torch.device, *, headers: bool = False
) -> list[RankGroup | None]:
    """Join the other workers; returns by layout this worker's tensor-parallel group, None where it has one rank.

    All groups are made here: a change of layout makes none.

    Args:
        headers: tensors of the CPU are to be sent too, whatever the device is.

    Raises:
        RuntimeError: torch's, if they cannot be reached.
    """
    ranks = layouts[0]
    # Workers of one machine that meet in a file talk over its own interface: a host name may lead nowhere.
    if init_method.startswith("file:"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if os.uname().sysname == "Darwin" else "lo")
    backend = "gloo"
    if device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl" if headers else "nccl"
    store = open_store(init_method, ranks.world_size)
    dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world_size)
    return [RankGroup(one) if one.degree > 1 else None for one in layouts]
