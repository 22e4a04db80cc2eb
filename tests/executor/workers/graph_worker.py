"""A worker that does all that is done for a GPU, with the CPU in its place: its layers are compiled,
and its decode steps captured. Its group adds up by torch.distributed, as on a GPU."""

import os
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoserve.executor.start.device_start import DeviceStart
from nanoserve.executor.start.gpu_start import GpuStart
from nanoserve.executor.step.sampling_graphs import SamplingGraphs
from nanoserve.executor.workers import building, process
from nanoserve.executor.workers.distributed import Activations, RankGroup, join_workers
from nanoserve.executor.workers.worker import PrefetchedStep, Worker
from tests.executor.fake_graphs import CPU, answer_calls_of_cuda

PROGRAM = "from tests.executor.workers.graph_worker import main; main()"
NOTES = "NANOSERVE_TEST_NOTES"
"""The variable that names a folder. In a file of its rank a worker notes the rows of each step, the
tokens of the longest one, the rows of the graph that was replayed, 0 without one, 1 if its layers are
compiled, and 1 if it has graphs that sample. There is a file "overwritten" if hidden states changed after they were handed
over to be sent."""


class StartOnCpu(DeviceStart):
    """Gets the CPU ready as if it was a GPU."""

    def __init__(self, resolved: Any, config: Any, decoders: Any, device: Any, **options: Any):
        super().__init__(resolved, config, decoders, device, **options)
        self.gpus = [GpuStart(decoder, config, CPU) for decoder in decoders]


def join_without_links(*arguments: Any, **options: Any) -> RankGroup:
    """Join the other workers, with no sockets beside those of torch.distributed."""
    everyone = join_workers(*arguments, **options)
    everyone._links = None
    return everyone


def watch_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """See that what is still on its way stays as it is. gloo is too fast to show it otherwise."""
    send, unsent = Activations.send, deque[tuple[Tensor, Tensor]](maxlen=2)

    def send_and_look(activations: Activations, hidden: Tensor) -> None:
        if not all(torch.equal(sent, as_it_was) for sent, as_it_was in unsent):
            (Path(os.environ[NOTES]) / "overwritten").touch()
        unsent.append((hidden, hidden.clone()))
        send(activations, hidden)

    monkeypatch.setattr(Activations, "send", send_and_look)


def main() -> None:
    """Entry point of the process, in the place of a worker's own."""
    monkeypatch = pytest.MonkeyPatch()
    recorder = answer_calls_of_cuda(monkeypatch)
    monkeypatch.setattr(building, "DeviceStart", StartOnCpu)
    monkeypatch.setattr(building, "join_workers", join_without_links)
    watch_sends(monkeypatch)
    compute = Worker._compute

    def compute_and_note(worker: Worker, turn: PrefetchedStep, hidden: Tensor | None) -> Any:
        known, rows = len(recorder.replayed), turn.step.rows
        result = compute(worker, turn, hidden)
        if rows:
            longest = max(len(row.tokens) for row in rows)
            replayed = recorder.replayed[known:] or [0]
            stage = worker._current.stage
            stage_sampled = stage.runner.stage_sampled
            samples = isinstance(getattr(stage_sampled, "__self__", None), SamplingGraphs)
            note = (len(rows), longest, *replayed, int(stage.compiled), int(samples))
            with (Path(os.environ[NOTES]) / str(worker.rank)).open("a") as file:
                print(*note, file=file)
        return result

    monkeypatch.setattr(Worker, "_compute", compute_and_note)
    process.main()
