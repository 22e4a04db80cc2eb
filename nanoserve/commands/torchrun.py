"""Commands under torchrun: the process of rank 0 runs them, every other one keeps a worker for its engine."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import TypeVar

from nanoserve.commands.engine_options import WorkersOptions
from nanoserve.commands.failures import EXIT_FAILURE, EXIT_OK
from nanoserve.commands.progress import show_progress
from nanoserve.commands.terminal import remark
from nanoserve.errors import RuntimeFailure, UsageError
from nanoserve.processes.threads import prepare_threads
from nanoserve.runtime.launch.torchrun import TorchrunProcess

W = TypeVar("W", bound=WorkersOptions)


def on_all_machines(command: Callable[[W], int]) -> Callable[[W], int]:
    """Make a command, whose engine may have several workers, one that torchrun can start on several machines."""

    @wraps(command)
    def run(options: W) -> int:
        process = TorchrunProcess.from_environment()
        if process is None:
            return command(options)
        layout = options.layouts()[0]
        if layout.data_parallel > 1:
            raise UsageError(f"torchrun starts the workers of one engine: leave the D out of {layout.name}")
        process.check_num_workers(layout.devices)
        # Read when torch is imported. What fails here is told in our own words; torch adds pages of addresses.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if process.rank > 0:
            return _keep_worker(process, options)
        with _told_when_done(process) as codes:
            codes.append(command(options))
        return codes[-1]

    return run


@contextmanager
def _told_when_done(process: TorchrunProcess) -> Iterator[list[int]]:
    """Say to the other processes how the command ended: with the last of the codes, or with an error."""
    codes = [EXIT_FAILURE]
    try:
        yield codes
    finally:
        from nanoserve.runtime.launch.rendezvous import SharedKeys

        with suppress(RuntimeFailure):  # torchrun is gone, and so are the others
            SharedKeys.of_torchrun(process).set_finished(codes[-1])


def _keep_worker(process: TorchrunProcess, engine: WorkersOptions) -> int:
    prepare_threads(engine.threads)
    from nanoserve.models.hub import ResolvedModel, resolve_model
    from nanoserve.runtime.launch.rendezvous import SharedKeys
    from nanoserve.runtime.workers.agent import WorkerAgent

    def resolve() -> ResolvedModel:
        with show_progress() as progress:
            return resolve_model(engine.model, offline=engine.offline, progress=progress)

    remark(f"worker {process.rank} of the engine on {process.master_address}")
    WorkerAgent(process, SharedKeys.of_torchrun(process), resolve).keep()
    return EXIT_OK
