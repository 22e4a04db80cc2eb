"""Where an engine and its workers meet: in a private directory of one machine, or over several by torchrun's store."""

from dataclasses import dataclass, field
from pathlib import Path

import zmq

from nanoserve.errors import RuntimeFailure
from nanoserve.runtime.meetings import Meeting, call_meeting
from nanoserve.runtime.torchrun import TorchrunProcess


@dataclass(frozen=True, slots=True)
class SocketKeys:
    """The engine's half of ZeroMQ's CURVE, as Z85 text; the public key is given to workers only."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def random(cls) -> "SocketKeys":
        """A new pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where workers find the engine and each other.

    Attributes:
        plans: ZeroMQ address that the engine binds as ROUTER.
        reports: ... as PULL.
        init_method: where the workers meet each other, for `open_store`.
        keys: for `guard_engine`; None where only processes of this user can reach the addresses.
    """

    plans: str
    reports: str
    init_method: str
    keys: SocketKeys | None


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
        """In a private directory, which is new.

        Raises:
            RuntimeFailure: if its name is too long.
        """
        plans, reports = ipc_address(directory / "plans"), ipc_address(directory / "reports")
        return Addresses(plans, reports, f"file://{directory / 'meeting'}", None)

    def hand_out(self, rank: int, start: bytes) -> None:
        """There is nobody else to tell anything."""
        raise AssertionError(f"worker {rank} is a child of the engine")

    def end(self) -> None:
        """The engine ends its children itself."""


@dataclass(frozen=True, slots=True)
class SeveralMachines:
    """torchrun started a process for each worker; worker 0 is a child of the engine, the others come by themselves."""

    process: TorchrunProcess
    meeting: Meeting

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
    return SeveralMachines(process, call_meeting(process, model))


def ipc_address(path: Path) -> str:
    """A socket file as ZeroMQ names it.

    Raises:
        RuntimeFailure: if the path is longer than the system allows for sockets.
    """
    if len(str(path).encode()) > zmq.IPC_PATH_MAX_LEN:
        raise RuntimeFailure(
            f"the path of a socket would be longer than the system's {zmq.IPC_PATH_MAX_LEN} bytes: "
            f"set TMPDIR to a directory with a shorter name than {path.parent.parent}"
        )
    return f"ipc://{path}"


def bind(socket: "zmq.Socket[bytes]", address: str) -> None:
    """Listen there.

    Raises:
        RuntimeFailure: if the address is in use, or cannot be used.
    """
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise RuntimeFailure(f"cannot listen on {address}: {error.strerror}") from None


def guard_engine(socket: "zmq.Socket[bytes]", keys: SocketKeys | None) -> None:
    """Before binding: only those are heard who know the public key, and nobody else can read or change a word."""
    if keys is not None:
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()


def guard_worker(socket: "zmq.Socket[bytes]", engine_key: str | None) -> None:
    """Before connecting: the other end must be the engine with that public key; None for an ipc address."""
    if engine_key is not None:
        socket.curve_serverkey = engine_key.encode()
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
