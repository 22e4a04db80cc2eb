"""Agents: torchrun's other processes. Each keeps one worker for the engine, from one rendezvous to
the next."""

import select
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import msgspec
import zmq

from nanoserve.errors import NanoserveError, RuntimeFailure
from nanoserve.executor.start.rendezvous import Presence, SharedKeys, TorchrunProcess
from nanoserve.executor.workers.endpoint import prepare_socket
from nanoserve.executor.workers.messages import WorkerFailed, WorkerStart
from nanoserve.executor.workers.process import start_worker
from nanoserve.models.hub import ResolvedModel
from nanoserve.utils.sockets import connect
from nanoserve.utils.temporary import choose_directory, make_directory
from nanoserve.utils.threads import threads_of_each
from nanoserve.utils.watchdog import TiedChild, end_children

_POLL_SECONDS = 0.1
_LAST_WORDS_MILLISECONDS = 1000


@dataclass(frozen=True, slots=True)
class WorkerAgent:
    """Keeps the worker of one rank."""

    process: TorchrunProcess
    keys: SharedKeys
    resolve: Callable[[], ResolvedModel]
    """Finds the model on this machine, and fetches it if need be."""

    def keep(self) -> None:
        """Until the command is done on the first machine. Raises NanoserveError if this process
        cannot take part, or the first machine is gone or failed."""
        self.process.use_interface()
        try:
            resolved = self.resolve()
        except NanoserveError as error:  # for the engine to hear, too, which would wait
            if (number := next(self._meetings(), None)) is not None:
                self._enter(number, Presence.here("", str(error)))
            raise
        mine = Presence.here(resolved.name)
        for number in self._meetings():
            self._attend(number, mine, resolved)

    def _meetings(self) -> Iterator[int]:
        """Each that is still held; an engine that died has left some that are not."""
        number = 0
        while True:
            if (code := self.keys.finished()) is not None:
                if code != 0:
                    raise RuntimeFailure("the command failed on the first machine, which says why")
                return
            if not self.keys.has(f"{number + 1}/engine"):
                time.sleep(_POLL_SECONDS)
                continue
            number += 1
            if not self._over(number):
                yield number

    def _over(self, number: int) -> bool:
        """Whether the workers of a meeting have nothing left to do."""
        return self.keys.finished() is not None or any(
            map(self.keys.has, (f"{number}/over", f"{number + 1}/engine"))
        )

    def _enter(self, number: int, mine: Presence) -> None:
        self.keys.set(f"{number}/present/{self.process.rank}", msgspec.msgpack.encode(mine))

    def _attend(self, number: int, mine: Presence, resolved: ResolvedModel) -> None:
        """Be there, and keep a worker until the meeting is over."""
        self._enter(number, mine)
        mine.check_fits(msgspec.msgpack.decode(self.keys.get(f"{number}/engine"), type=Presence))
        handed_out = f"{number}/start/{self.process.rank}"
        while not self.keys.has(handed_out):
            if self._over(number):
                return
            time.sleep(_POLL_SECONDS)
        start = WorkerStart.read(self.keys.get(handed_out))
        directory = choose_directory()
        child = start_worker(
            self.process.local_rank, threads_of_each(self.process.local_world_size), directory
        )
        try:
            make_directory(directory)
            # A model without a directory may have been given one: all workers share this machine's
            # memory then.
            model = replace(resolved, directory=resolved.directory or start.model.directory)
            here = msgspec.structs.replace(start, local_rank=self.process.local_rank, model=model)
            self._keep_worker(number, child, here)
        finally:
            end_children([child], directory)

    def _keep_worker(self, number: int, child: TiedChild, start: WorkerStart) -> None:
        """Have it work; if it dies, tell the engine, which then calls the next meeting."""
        child.tell(start.line())
        pulses = [child.pulse]
        while not self._over(number):
            readable, _, _ = select.select(pulses, [], [], _POLL_SECONDS)
            if readable and not child.beats():
                pulses.clear()
                _report(start, f"its process {child.ending()} on {socket.gethostname()}")


def _report(start: WorkerStart, ending: str) -> None:
    """Tell the engine how its worker ended; one that ended by itself has said more, and sooner."""
    with zmq.Context(io_threads=1) as context, context.socket(zmq.PUSH) as reports:
        prepare_socket(reports)
        reports.set(zmq.LINGER, _LAST_WORDS_MILLISECONDS)
        connect(reports, start.reports, start.engine_key)
        reports.send(
            msgspec.msgpack.encode(WorkerFailed(start.rank, ending, RuntimeFailure.exit_code))
        )
