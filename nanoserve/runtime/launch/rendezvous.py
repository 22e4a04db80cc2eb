"""Where an engine and its workers meet: on one machine, or over several by torchrun's store."""

from dataclasses import dataclass
from pathlib import Path

from nanoserve.processes.sockets import SocketKeys, local_address
from nanoserve.runtime.launch.torchrun import TorchrunProcess
from nanoserve.runtime.launch.torchrun_rendezvous import TorchrunRendezvous, call_rendezvous


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where workers find the engine and each other."""

    plans: str
    """ZeroMQ address that the engine binds as ROUTER."""
    reports: str
    """... as PULL."""
    init_method: str
    """Where the workers meet each other, for `open_store`."""
    keys: SocketKeys
    """Of the engine."""


@dataclass(frozen=True, slots=True)
class OneMachine:
    """All workers are children of the engine."""

    num_workers: int

    @property
    def spawned(self) -> tuple[int, ...]:
        """Ranks of the workers that the engine starts."""
        return tuple(range(self.num_workers))

    @property
    def workers_here(self) -> int:
        """How many share this machine's threads."""
        return self.num_workers

    def addresses(self, directory: Path) -> Addresses:
        """With whatever needs a file in a private directory, which is new.

        Raises:
            RuntimeFailure: if its name is too long.
        """
        plans, reports = local_address(directory), local_address(directory)
        return Addresses(plans, reports, f"file://{directory / 'meeting'}", SocketKeys.random())

    def hand_out(self, rank: int, start: bytes) -> None:
        """There is nobody else to tell anything."""
        raise AssertionError(f"worker {rank} is a child of the engine")

    def end(self) -> None:
        """The engine ends its children itself."""


@dataclass(frozen=True, slots=True)
class SeveralMachines:
    """torchrun started a process for each worker; worker 0 is a child of the engine, the others come by themselves."""

    process: TorchrunProcess
    meeting: TorchrunRendezvous

    @property
    def spawned(self) -> tuple[int, ...]:
        """Ranks of the workers that the engine starts."""
        return (self.process.rank,)

    @property
    def workers_here(self) -> int:
        """How many share this machine's threads."""
        return self.process.local_world_size

    def addresses(self, directory: Path) -> Addresses:
        """On the interface that leads to the other machines; nothing is in the directory.

        Raises:
            RuntimeFailure: if there is no port to be had.
        """
        plans, reports = self.process.free_addresses(2)
        return Addresses(plans, reports, self.meeting.init_method, SocketKeys.random())

    def hand_out(self, rank: int, start: bytes) -> None:
        """Tell a worker elsewhere what it starts with: a WorkerStart, in JSON.

        Raises:
            RuntimeFailure: if torchrun's store is gone.
        """
        self.meeting.hand_out(rank, start)

    def end(self) -> None:
        """Let the workers elsewhere go."""
        self.meeting.end()


Rendezvous = OneMachine | SeveralMachines


def open_rendezvous(num_workers: int, model: str) -> Rendezvous:
    """For the workers of a new engine, or for new workers after a loss.

    Under torchrun this waits until the processes of all other workers are there.

    Args:
        model: its name, which must be the same on all machines.

    Raises:
        UsageError: if torchrun started another number of processes.
        RuntimeFailure: if others do not come, or do not fit.
    """
    process = TorchrunProcess.from_environment()
    if process is None:
        return OneMachine(num_workers)
    process.check_num_workers(num_workers)
    process.use_interface()
    return SeveralMachines(process, call_rendezvous(process, model))
