"""One life of all workers: met with each other, spoken to, watched. When one dies, the others may
be in the next."""

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
import torch
import zmq
from msgspec.structs import replace

from nanoserve.config.model_config import ModelConfig
from nanoserve.errors import NanoserveError, RuntimeFailure, error_of
from nanoserve.executor.kv_transfer.host_pool import HostPool
from nanoserve.executor.start.memory import available_memory
from nanoserve.executor.start.rendezvous import Rendezvous
from nanoserve.executor.workers.endpoint import identity, prepare_socket
from nanoserve.executor.workers.messages import (
    FromWorker,
    Hello,
    Rejoin,
    ToWorker,
    WorkerFailed,
    WorkerStart,
)
from nanoserve.executor.workers.process import start_worker
from nanoserve.models.dtypes import resolve_dtype
from nanoserve.models.dummy import save_dummy_checkpoint
from nanoserve.utils.sockets import listen
from nanoserve.utils.temporary import choose_directory, make_directory
from nanoserve.utils.threads import threads_of_each
from nanoserve.utils.watchdog import TiedChild, end_children


class SharedFiles:
    """Files in memory, named in a private directory of the engine; each exists while it is open or
    mapped anywhere.

    On Linux the name leads to a descriptor of this process, and the file is in no file system:
    however all processes end, and whenever, nothing of it is left. Elsewhere it is a file of that
    directory.
    """

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def make(self, path: Path) -> None:
        """Make an empty file under a new name. Raises OSError if that cannot be."""
        if not hasattr(os, "memfd_create"):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
            return
        self._descriptors[path] = descriptor = os.memfd_create(path.name)
        path.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")

    def close(self) -> None:
        """Remove the names, once all workers have opened the files."""
        while self._descriptors:
            path, descriptor = self._descriptors.popitem()
            path.unlink(missing_ok=True)
            os.close(descriptor)


SILENCE_SECONDS = 10.0  # twenty missed heartbeats: the worker is stopped
_QUIET_SECONDS = 2.0  # four missed heartbeats: perhaps it is stopped
_LOADING_SILENCE_SECONDS = 120.0  # importing torch can hold the interpreter for a while
WATCH_SECONDS = 1.0
_LINGER_MILLISECONDS = 1000
"""How long the last words to workers may take to leave."""
_REJOIN_SECONDS = 10.0
"""A worker that has not left a group by then computes, or waits, for too long: loading it anew is
the surer way."""
_FIRST_DEATH_SECONDS = 0.5  # a worker that fails because another has died may be heard of first


class WorkersDied(Exception):
    """A worker is dead or cannot go on; the message says which and why."""

    def __init__(self, reason: str, rank: int, error: NanoserveError | None = None) -> None:
        super().__init__(reason)
        self.rank = rank
        self.error = error  # what it said of it, if it said anything


class WorkerGroup:
    """Processes and sockets; ``end`` it in any case. Each worker gets the start with its ranks and
    addresses. Raises UsageError if torchrun started another number of processes; RuntimeFailure if
    no process can be started, there is no place for the sockets, or no memory for the host tier.
    Workers that outlived the group `before` go on in this one.
    """

    def __init__(
        self,
        start: WorkerStart,
        model: ModelConfig,
        host_blocks: int,
        before: "WorkerGroup | None" = None,
    ) -> None:
        self._config = start.config
        self._children: dict[int, TiedChild] = {}  # by rank
        self._directory: Path | None = None
        self._called: set[int] = set()  # workers of the group before that are still to come
        self._renewable = False
        self._shared = SharedFiles()
        self._rendezvous: Rendezvous | None = None
        self._context = zmq.Context(io_threads=1)
        self._plans = self._context.socket(zmq.ROUTER)
        self._reports = self._context.socket(zmq.PULL)
        self._poller = zmq.Poller()
        self._encoder = msgspec.msgpack.Encoder(enc_hook=str)
        self._decoder = msgspec.msgpack.Decoder(FromWorker)
        self._beat_at: dict[int, float] = {}
        self._began = self._looked_at = time.monotonic()
        self._loading = True
        # whether a worker gave no sign of life for a while, when `hear` looked last
        self.quiet = False
        try:
            self._start(start, model, host_blocks, before)
        except BaseException:
            self.end()
            raise

    def _start(
        self, start: WorkerStart, model: ModelConfig, host_blocks: int, before: "WorkerGroup | None"
    ) -> None:
        config = start.config
        engines = start.local_rank // config.num_workers, config.data_parallel
        rendezvous = self._rendezvous = Rendezvous.open(
            config.num_workers, start.model.name, *engines
        )
        threads = threads_of_each(rendezvous.workers_here)
        if before is not None:
            self._children, before._children = before._children, {}
            self._directory, before._directory = before._directory, None
            self._called = set(self._children)
        directory = self._directory = self._directory or choose_directory()
        try:
            for rank in sorted(set(rendezvous.spawned) - self._called):
                self._children[rank] = start_worker(start.local_rank + rank, threads, directory)
        except OSError as error:
            raise RuntimeFailure(
                f"the workers cannot be started: {error.strerror or error}"
            ) from error
        if before is None:
            make_directory(directory)
        # A new worker could not open what all share, NCCL does not tell of a lost one, and a keeper
        # keeps one worker.
        self._renewable = rendezvous.torchrun is None and not host_blocks and config.device == "cpu"
        start = self._share(start, model, host_blocks, directory)
        addresses = rendezvous.addresses(directory)
        for socket in (self._plans, self._reports):
            prepare_socket(socket)
            self._poller.register(socket, zmq.POLLIN)
        key = listen({addresses.plans: self._plans, addresses.reports: self._reports})
        # For a worker of this machine; another machine puts the places of its own files in.
        starts = [
            replace(
                start,
                rank=rank,
                local_rank=start.local_rank + rank,
                plans=addresses.plans,
                reports=addresses.reports,
                engine_key=key,
                init_method=addresses.init_method,
            )
            for rank in range(config.num_workers)
        ]
        for rank, child in self._children.items():
            self._poller.register(child.pulse, zmq.POLLIN)
            self._beat_at[rank] = time.monotonic()
            if before is not None and rank in self._called:
                before.send(Rejoin(starts[rank]), [rank])
            else:
                child.tell(starts[rank].line())
        if before is not None:
            before.end()
        for rank in set(range(config.num_workers)).difference(rendezvous.spawned):
            rendezvous.hand_out(rank, starts[rank].line())

    def _share(
        self, start: WorkerStart, model: ModelConfig, host_blocks: int, directory: Path
    ) -> WorkerStart:
        """Put into memory what all workers use: the blocks of the host tier, and weights that are
        in no files, where workers read them more than once. Returns the start with their places."""
        config = start.config
        dtype = resolve_dtype(config.dtype, torch.device(config.device), model.dtype)
        try:
            if host_blocks:
                path = directory / "blocks"
                self._shared.make(path)
                HostPool.open(
                    path,
                    model,
                    num_blocks=host_blocks,
                    block_size=config.block_size,
                    dtype=dtype,
                    create=True,
                )
                start = replace(start, host_pool=(str(path), host_blocks))
            if len(config.layouts) > 1 and start.model.directory is None:
                saved, free = directory / "model", available_memory("cpu")
                saved.mkdir()
                save_dummy_checkpoint(
                    start.model.name, dtype, saved, make_file=self._shared.make, free=free
                )
                start = replace(start, model=dataclasses.replace(start.model, directory=saved))
        except OSError as error:
            raise RuntimeFailure(
                f"workers cannot share memory: {error.strerror or error}"
            ) from error
        return start

    def end_of_loading(self) -> None:
        """All workers are ready: from now on silence is suspicious, and what they share needs no
        name any more."""
        self._loading = False
        self._shared.close()

    @property
    def sources(self) -> "list[zmq.Socket[bytes] | int]":
        """Where workers say something: sockets and descriptors, to be polled together with
        others'."""
        return [self._plans, self._reports, *(child.pulse for child in self._children.values())]

    def send(self, message: ToWorker, ranks: Iterable[int] | None = None) -> None:
        """Put a message on its way to these workers, or to all; each has been heard of. Never
        waits."""
        data = self._encoder.encode(message)
        for rank in range(self._config.num_workers) if ranks is None else ranks:
            with contextlib.suppress(zmq.ZMQError):  # its pulse says when a peer is gone
                self._plans.send_multipart((identity(rank), data), zmq.NOBLOCK, copy=False)

    def hear(self, seconds: float | None) -> list[FromWorker]:
        """Receive the workers' messages, in order; perhaps none. Waits `seconds`, and a second at
        most. Raises WorkersDied if a worker is dead or cannot go on; messages that came before are
        lost with it."""
        seconds = WATCH_SECONDS if seconds is None else min(seconds, WATCH_SECONDS)
        ready = dict(self._poller.poll(math.ceil(1000 * seconds)))
        heard = [*self._received(self._plans, ready), *self._received(self._reports, ready)]
        for message in heard:
            if isinstance(message, WorkerFailed):
                raise self._failure(message)
            if isinstance(message, Hello):
                self._called.discard(message.rank)
        self._watch(ready)
        return heard

    def _watch(self, ready: Mapping[object, int]) -> None:
        """See that all workers live. What they wrote since the last look counts as a sign of life
        now."""
        now = time.monotonic()
        # asleep, perhaps with the whole machine: give them time to wake
        if now - self._looked_at > 2 * WATCH_SECONDS:
            self._beat_at = dict.fromkeys(self._beat_at, now)
            self._began = now
        self._looked_at = now
        silence = _LOADING_SILENCE_SECONDS if self._loading else SILENCE_SECONDS
        for rank, child in self._children.items():
            if child.pulse in ready:
                if not child.beats():
                    raise WorkersDied(f"worker {rank} {child.ending()}", rank)
                self._beat_at[rank] = now
            elif now - self._beat_at[rank] > silence:
                raise WorkersDied(f"worker {rank} gave no sign of life for {silence:g} s", rank)
            elif rank in self._called and now - self._began > _REJOIN_SECONDS:
                raise WorkersDied(
                    f"worker {rank} did not leave its group within {_REJOIN_SECONDS:g} s", rank
                )
        self.quiet = any(now - beat > _QUIET_SECONDS for beat in self._beat_at.values())

    def _received(
        self, socket: "zmq.Socket[bytes]", ready: Mapping[object, int]
    ) -> Iterator[FromWorker]:
        if socket not in ready:
            return
        with contextlib.suppress(zmq.Again):
            while True:
                *_, data = socket.recv_multipart(zmq.NOBLOCK)
                yield self._decoder.decode(data)

    def _failure(self, failed: WorkerFailed) -> WorkersDied:
        """Make the error of a worker that cannot go on. If another worker was killed, which would
        explain it, name that worker instead."""
        until = time.monotonic() + _FIRST_DEATH_SECONDS
        while time.monotonic() < until:
            for rank, child in self._children.items():
                status = child.process.poll()
                if status is not None and status < 0:
                    return WorkersDied(f"worker {rank} {child.ending()}", rank)
            time.sleep(0.01)
        error = error_of(failed.exit_code, failed.message)
        return WorkersDied(f"worker {failed.rank} failed: {failed.message}", failed.rank, error)

    def bury(self, rank: int) -> bool:
        """End a worker that is lost. Returns whether the others can go on in another group; if not,
        ends them too."""
        renewable = self._renewable and not self._loading
        if renewable:
            self._children.pop(rank).end()
        else:
            self.end()
        return renewable

    def end(self) -> None:
        """End all processes, and leave nothing of them behind."""
        end_children(self._children.values(), self._directory)
        self._children = {}
        self._context.destroy(linger=_LINGER_MILLISECONDS)
        if self._rendezvous is not None:
            self._rendezvous.end()
        self._shared.close()
