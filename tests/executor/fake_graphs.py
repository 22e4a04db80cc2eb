"""Graphs without a GPU: like CUDA's, they read and write the very tensors that they were recorded
with. And engines on a GPU, with the CPU in its place."""

from collections.abc import Callable
from functools import partial
from typing import cast

import pytest
import torch
from torch import Tensor

from nanoserve.engine import assembly
from nanoserve.executor.compile.layer_runner import LayerRunner
from nanoserve.executor.sampling.sampler import Sampled
from nanoserve.executor.stage import Stage
from nanoserve.executor.start import gpu_start
from nanoserve.executor.start.gpu_start import GpuStart
from nanoserve.executor.step.decode_graphs import CudaRecorder, Recorded

CPU = torch.device("cpu")
STEP_MEMORY = 6000


class FakeRecorder(CudaRecorder):
    """Replays by computing the step again, from what its tensors hold then.

    Attributes:
        replayed: rows of the decode steps that ran, in order.
        recorded: rows of the decode steps, in the order of recording.
        sampled: rows of the graphs that sampled, in order.
    """

    def __init__(self) -> None:
        self.replayed: list[int] = []
        self.recorded: list[int] = []
        self.sampled: list[int] = []

    def record(self, step: Callable[[], Recorded]) -> tuple[Callable[[], None], Recorded]:
        result = step()
        if isinstance(result, Tensor):
            self.recorded.append(len(result))

        def replay() -> None:
            again = step()
            if isinstance(result, Tensor):
                result.copy_(cast(Tensor, again))
                self.replayed.append(len(result))
            else:
                sampled, again = cast(Sampled, result), cast(Sampled, again)
                sampled.tokens.copy_(again.tokens)
                sampled.valid.copy_(again.valid)
                self.sampled.append(len(sampled.tokens))

        return replay, result


def answer_calls_of_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeRecorder:
    """Answer calls of CUDA for the CPU; the compiler only traces."""
    recorder, free = FakeRecorder(), iter(range(10_000, 0, -300))
    monkeypatch.setattr(gpu_start, "keep_compiled_code", lambda environment: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 10_000))
    monkeypatch.setattr(gpu_start, "CudaRecorder", lambda device: recorder)
    monkeypatch.setattr(gpu_start, "measured_memory", lambda device, step: (step(), STEP_MEMORY)[1])
    monkeypatch.setattr(
        LayerRunner, "torch_compile", partial(LayerRunner.torch_compile, backend="eager")
    )
    return recorder


def put_cpu_in_place_of_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines with the device cuda do all that is done for a GPU, and compute on the CPU."""
    load, build_stage = assembly.load_decoder, Stage.build
    monkeypatch.setattr(assembly, "usable_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(
        assembly,
        "load_decoder",
        lambda resolved, config, device, progress: load(resolved, config, CPU, None),
    )
    monkeypatch.setattr(
        gpu_start, "GpuStart", lambda decoder, config, device: GpuStart(decoder, config, CPU)
    )
    monkeypatch.setattr(
        Stage,
        "build",
        lambda decoder, device, **options: build_stage(decoder, device=CPU, **options),
    )
