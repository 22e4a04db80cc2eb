"""Commands under torchrun: the process of rank 0 runs them, and every other process keeps a worker
of its engines."""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import TypeVar

from nanoserve.commands.engine_options import WorkersOptions
from nanoserve.commands.terminal import remark
from nanoserve.errors import RuntimeFailure
from nanoserve.executor.start.rendezvous import SharedKeys, TorchrunProcess
from nanoserve.utils.threads import prepare_threads

W = TypeVar("W", bound=WorkersOptions)


def on_all_machines(command: Callable[[W], int | None]) -> Callable[[W], int | None]:
    """Make a command, whose engine may have several workers, one that torchrun can start on several
    machines."""

    @wraps(command)
    def run(options: W) -> int | None:
        process = TorchrunProcess.from_environment()
        if process is None:
            return command(options)
        layout = options.layouts()[0]
        workers = layout.devices // layout.data_parallel
        if options.parallel is not None:
            workers = options.devices or process.world_size
        process.check_num_workers(workers * layout.data_parallel)
        # Read when torch is imported. What fails here is told in our own words; torch adds pages of
        # addresses.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if process.rank > 0:
            _keep_worker(process, workers, options)
            return None
        code: int | None = RuntimeFailure.exit_code
        try:
            code = command(options)
        finally:
            with suppress(RuntimeFailure):  # torchrun is gone, and so are the other processes
                for engine in range(layout.data_parallel):
                    SharedKeys.of_torchrun(process.of_engine(engine, workers)).set_finished(
                        code or 0
                    )
        return code

    return run


def _keep_worker(process: TorchrunProcess, workers: int, options: WorkersOptions) -> None:
    """Keep a worker of one of the engines, each of which has this number of `workers`, until the
    command is done."""
    # imports NumPy, which rank 0 does not need
    from nanoserve.executor.workers.agent import WorkerAgent

    prepare_threads(options.threads)
    engine = process.rank // workers
    mine = process.of_engine(engine, workers)
    remark(f"worker {mine.rank} of engine {engine} on {process.master_address}")
    WorkerAgent(mine, SharedKeys.of_torchrun(mine), options.find_model).keep()
