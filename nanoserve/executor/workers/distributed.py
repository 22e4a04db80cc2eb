"""Communication between workers over torch.distributed: sums within a stage, hidden states from
stage to stage.

A plan whose rows are all on the device says how many hidden states come, so that a place for them
is ready before they are computed. With host sequences a header says so, and the receiver waits for
it first.
"""

import gc
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import cycle

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from nanoserve.executor.cpu_attention.headers import Header
from nanoserve.executor.start.rendezvous import open_store, own_address
from nanoserve.executor.workers.links import Links
from nanoserve.models.shards import Shard

_CPU = torch.device("cpu")
_UNSENT = 2
"""Sends that may be on their way: the one before need not have left when the next step is
computed."""
# what was sent together: its tensors must stay until they have left
_Sent = list[tuple[dist.Work, Tensor]]


@dataclass(frozen=True, slots=True)
class Expected:
    """Hidden states [T, hidden_size] that are being received."""

    work: dist.Work
    hidden: Tensor

    def wait(self) -> Tensor:
        """On a GPU, work that is issued from here on waits for them; on a CPU this returns when
        they are there."""
        self.work.wait()
        return self.hidden


class Activations:
    """A worker's links to the stages before and behind it. Two buffers take turns to hold what is
    received; most steps do not exceed `num_tokens`."""

    def __init__(
        self,
        shard: Shard,
        *,
        hidden_size: int,
        num_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._before, self._behind = shard.worker_before, shard.worker_behind
        self._like = torch.empty(0, dtype=dtype, device=device)
        rows = 0 if self._before is None else num_tokens
        with torch.inference_mode():  # as steps run
            self._buffers = [self._like.new_empty((rows, hidden_size)) for _ in range(2)]
        self._turn = cycle((0, 1))
        self._hidden_states: deque[_Sent] = deque()
        self._plans: deque[_Sent] = deque()

    def forget(self) -> None:
        """Drop what is on its way."""
        self._hidden_states.clear()
        self._plans.clear()

    def connect(self) -> None:
        """Exchange a number with the stages before and behind: NCCL makes its communicators with
        the first message."""
        number = self._like.new_zeros(1)
        if self._before is not None:
            dist.recv(number, self._before)
        if self._behind is not None:
            dist.send(number, self._behind)

    @torch.inference_mode()
    def expect(self, num_tokens: int) -> Expected | None:
        """Begin to receive the hidden states of `num_tokens` tokens; None where none come. The
        hidden states received last before these stay valid, earlier ones do not."""
        if self._before is None or num_tokens == 0:
            return None
        place = next(self._turn)
        if num_tokens > len(self._buffers[place]):
            self._buffers[place] = self._like.new_empty(
                (2 * num_tokens, self._buffers[place].shape[1])
            )
        hidden = self._buffers[place][:num_tokens]
        return Expected(_started(dist.irecv(hidden, self._before)), hidden)

    def send(self, hidden: Tensor) -> None:
        """Send hidden states to the stage behind; waits only if earlier ones have not left."""
        self._send(self._hidden_states, hidden.contiguous())

    def send_with_header(self, header: Header, hidden: Tensor | None) -> None:
        """Send a header that says how many hidden states come, then these; None for no hidden
        states."""
        text = _as_tensors(msgspec.msgpack.encode(header), _CPU)
        self._send(self._hidden_states, *text, *([] if hidden is None else [hidden.contiguous()]))

    def receive_header(self) -> Header | None:
        """Wait for a header, as long as the stage before computes; None in the first stage. Call it
        in the order of the plans, in the thread that expects hidden states, before the hidden
        states of the same plan."""
        if self._before is None:
            return None
        return msgspec.msgpack.decode(self._receive_text(_CPU), type=Header)

    def send_plan(self, encoded: bytes) -> None:
        """Send a plan ahead of its hidden states, as a coupled design does. Waits as `send` does:
        if it waited until the stage behind receives, no two stages would ever compute at the same
        time."""
        self._send(self._plans, *_as_tensors(encoded, self._like.device))

    def _send(self, sending: deque[_Sent], *tensors: Tensor) -> None:
        assert self._behind is not None
        if len(sending) == _UNSENT:
            for work, _ in sending.popleft():
                work.wait()
        sending.append([(_started(dist.isend(tensor, self._behind)), tensor) for tensor in tensors])

    def receive_plan(self) -> bytes:
        return self._receive_text(self._like.device)

    def _receive_text(self, device: torch.device) -> bytes:
        assert self._before is not None
        size = torch.zeros(1, dtype=torch.int64, device=device)
        dist.recv(size, self._before)
        data = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
        dist.recv(data, self._before)
        return bytes(data.cpu().numpy())


def _as_tensors(text: bytes, device: torch.device) -> tuple[Tensor, Tensor]:
    """The number of bytes, int64 [1], and the bytes, uint8."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    return torch.tensor([len(data)], device=device), data


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this worker is a member of the group of all"
    return work


_DIRECT_BYTES = 2**16
"""Larger tensors of more than two ranks go round a ring: each rank sends 2 (t - 1) / t of the bytes
there, and t - 1 times the bytes if it sends all to every other rank."""


class RankGroup:
    """A TensorParallelGroup of processes, by their workers' numbers, over links in the memory of
    CPUs. All workers make all groups, in the same order."""

    def __init__(self, workers: Sequence[int], links: Links | None) -> None:
        self._workers, self._links = workers, links
        self._group = dist.new_group(list(workers))
        self._others = [worker for worker in workers if worker != dist.get_rank()]
        self._is_first = dist.get_rank() == workers[0]

    def split(self, shard: Shard) -> "RankGroup | None":
        """Out of the group of all workers, the ranks of this worker's stage; None for a stage of
        one rank."""
        if shard.degree == 1:
            return None
        workers = range(shard.num_stages * shard.degree)
        stages = [
            RankGroup(workers[start : start + shard.degree], self._links)
            for start in workers[:: shard.degree]
        ]
        return stages[shard.stage]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, with the same bits on each. May reuse its argument."""
        if self._links is None or (len(self._others) > 1 and tensor.nbytes > _DIRECT_BYTES):
            dist.all_reduce(tensor, group=self._group)
            return tensor
        received = {worker: tensor.new_empty(tensor.shape) for worker in self._others}
        self._links.exchange(dict.fromkeys(self._others, tensor), received)
        return reduce(Tensor.add_, [received.get(worker, tensor) for worker in self._workers])

    def gather(self, tensor: Tensor) -> Tensor | None:
        """[N, columns] of every rank -> [N, degree * columns] on rank 0; None elsewhere."""
        first = self._workers[0]
        if not self._is_first:
            if self._links is None:
                dist.gather(tensor.contiguous(), None, dst=first, group=self._group)
            else:
                self._links.exchange({first: tensor}, {})
            return None
        parts = {worker: tensor.new_empty(tensor.shape) for worker in self._workers}
        if self._links is None:
            dist.gather(tensor.contiguous(), list(parts.values()), dst=first, group=self._group)
        else:
            self._links.exchange({}, {worker: parts[worker] for worker in self._others})
            parts[first] = tensor
        return torch.cat(list(parts.values()), dim=1)


def leave_workers() -> None:
    """Leave the other workers, once nothing holds a group or tensors on their way. Workers that
    wait for this one fail."""
    # an error that another thread raised is held by its own traceback, with all of that
    gc.collect()
    dist.destroy_process_group()


def join_workers(
    rank: int, world_size: int, init_method: str, device: torch.device, *, headers: bool = False
) -> RankGroup:
    """Join the other workers; returns the group of all. With headers, tensors of the CPU are sent
    too, whatever the device is. Raises torch's RuntimeError, or RuntimeFailure, if workers cannot
    be reached."""
    # Workers of one machine that meet in a file talk over its own interface: a host name may lead
    # nowhere.
    if init_method.startswith("file:"):
        os.environ.setdefault(
            "GLOO_SOCKET_IFNAME", "lo0" if os.uname().sysname == "Darwin" else "lo"
        )
    backend, store = "gloo", open_store(init_method, world_size)
    if device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl" if headers else "nccl"
        torch.cuda.set_device(device)  # before NCCL takes the one that is set
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    on_cpu = device.type == "cpu"
    links = Links.open(store, rank, world_size, own_address(init_method)) if on_cpu else None
    return RankGroup(range(world_size), links)
