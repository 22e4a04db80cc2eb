"""A program for torchrun: each process adds its rank to a tensor, and says the sum."""

import os

import torch
import torch.distributed as dist

from nanoserve.executor.start.rendezvous import TorchrunProcess

process = TorchrunProcess.from_environment()
assert process is not None
process.use_interface()
dist.init_process_group("gloo")
numbers = torch.full((1 << 18,), float(process.rank + 1))
dist.all_reduce(numbers)
if process.rank == 0:
    dist.send(numbers, 1)
else:
    dist.recv(numbers, 0)
print(
    f"rank {process.rank} over {os.environ['GLOO_SOCKET_IFNAME']}: {numbers.mean().item():g}",
    flush=True,
)
dist.destroy_process_group()
