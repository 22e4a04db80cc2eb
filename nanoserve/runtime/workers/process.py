"""A worker process, from its first line of input to its loop."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from nanoserve import __version__
from nanoserve.errors import NanoserveError, RuntimeFailure
from nanoserve.lifeline import Lifeline, own_pipes, read_line
from nanoserve.runtime.workers.messages import Allocate, Failed, Hello, Loaded, Loading, Ready, WorkerStart
from nanoserve.runtime.workers.station import Station


def main() -> None:
    """Entry point of a worker that the engine starts: stdin brings the WorkerStart and is the lifeline."""
    parent, pulse = own_pipes()
    start = msgspec.json.decode(read_line(parent), type=WorkerStart)
    assert start.directory is not None
    Lifeline(parent, pulse, Path(start.directory)).start()
    os.environ["TMPDIR"] = start.directory  # what a compiler leaves that is killed goes with the rest
    run_worker(start)


def run_worker(start: WorkerStart) -> None:
    """Work for the engine until this process is ended, or cannot go on."""
    import torch

    station = Station(start)
    station.introduce(Hello(start.rank, (__version__, torch.__version__)))
    try:
        _work(start, station)
    except NanoserveError as error:
        failed = Failed(start.rank, str(error), error.exit_code)
    except Exception as error:
        # Workers that wait for another's hidden states fail with it: the engine knows who was the first.
        reason = (str(error).strip().splitlines() or [""])[0]
        failed = Failed(start.rank, f"{type(error).__name__}: {reason}", RuntimeFailure.exit_code)
    station.report(failed)
    station.close()
    sys.exit(failed.exit_code)


def _work(start: WorkerStart, station: Station) -> None:
    """Load this worker's part of the model, and run plans."""
    from nanoserve.models.hub import ResolvedModel
    from nanoserve.runtime.shard_loading import load_shard
    from nanoserve.runtime.workers.activations import Activations
    from nanoserve.runtime.workers.ranks import Ranks, meet
    from nanoserve.runtime.workers.worker import Worker

    config = start.config
    ranks = Ranks(start.rank, config.pipeline_parallel, config.tensor_parallel)
    directory = None if start.model_directory is None else Path(start.model_directory)
    resolved = ResolvedModel(start.name, directory, Path(start.tokenizer_directory))
    ...
