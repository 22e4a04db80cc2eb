"""Where an engine and its workers meet: in a private directory of one machine, or, over several, by torchrun's store.

No torch here but under torchrun, whose store is torch.distributed's.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from nanoserve.errors import RuntimeFailure
from nanoserve.runtime.meetings import call_meeting
from nanoserve.runtime.torchrun import TorchrunProcess


@dataclass(frozen=True, slots=True)
class SocketKeys:
    """The engine's half of ZeroMQ's CURVE, as Z85 text; the public key is given only to workers."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def random(cls) -> "SocketKeys":
        """A new pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the workers of one engine find it and each other, until one of them is lost and all meet anew.

    Attributes:
        plans: ZeroMQ address that the engine binds as ROUTER.
        reports: ... as PULL.
        init_method: where the workers meet, for `open_store`.
        spawned: ranks that the engine starts as child processes; the others come by themselves.
        workers_here: workers on the engine's machine, which share its threads.
        keys: for `guard_engine`; None where only this user's processes can reach the addresses.
        hand_out: tells a worker that comes by itself, by its rank, what it starts with: a WorkerStart as JSON.
        release: lets the workers that came by themselves go.
    """

    plans: str
    reports: str
    init_method: str
    spawned: tuple[int, ...]
    workers_here: int
    keys: SocketKeys | None
    hand_out: Callable[[int, bytes], None]
    release: Callable[[], None]


def open_rendezvous(directory: Path, *, num_workers: int, model: str) -> Rendezvous:
    """The place for the workers of a new engine, or for new workers after a loss.

    Under torchrun this waits until all other workers' processes are there.

    Args:
        directory: private, new or of an earlier rendezvous of the same engine.
        model: its name, which must be the same everywhere.

    Raises:
        UsageError: if torchrun started another number of processes.
        RuntimeFailure: if others do not come, or are of another version.
    """
    process = TorchrunProcess.from_environment()
    if process is None:
        return _on_this_machine(directory, num_workers)
    process.check_num_workers(num_workers)
    return _under_torchrun(process, model)


def private_directory() -> Path:
    """A new directory that only this user may enter, with room for the names of sockets.

    Raises:
        RuntimeFailure: if there is no place for one.
    """
    try:
        return Path(tempfile.mkdtemp(prefix="nanoserve-"))  # mode 0700
    except OSError as error:
        raise RuntimeFailure(
            f"cannot make a temporary directory ({error.strerror}): set TMPDIR to a directory that can be written to"
        ) from None


def ipc_address(path: Path) -> str:
    """A socket file as ZeroMQ names it.

    Raises:
        RuntimeFailure: if the path is longer than the system allows for sockets.
    """
    if len(str(path).encode()) > zmq.IPC_PATH_MAX_LEN:
        raise RuntimeFailure(
            f"the path of a socket, {path}, is longer than the system's {zmq.IPC_PATH_MAX_LEN} bytes: "
            "set TMPDIR to a shorter one"
        )
    return f"ipc://{path}"


def bind(socket: "zmq.Socket[bytes]", address: str) -> None:
    """Listen there.

    Raises:
        RuntimeFailure: if the address is in use, or cannot be.
    """
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise RuntimeFailure(f"cannot listen on {address}: {error.strerror}") from None


def guard_engine(socket: "zmq.Socket[bytes]", keys: SocketKeys | None) -> None:
    """Before binding: only those are heard who were given the public key, and nobody else can read or change a word."""
    if keys is not None:
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()


def guard_worker(socket: "zmq.Socket[bytes]", engine_key: str | None) -> None:
    """Before connecting: the other end must be the engine with that public key; None for an ipc address."""
    if engine_key is not None:
        socket.curve_serverkey = engine_key.encode()
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()


def _on_this_machine(directory: Path, num_workers: int) -> Rendezvous:
    # A name of its own for each meeting: of an earlier one, the file and the sockets of dead workers may be left.
    place = Path(tempfile.mkdtemp(prefix="workers-", dir=directory))
    return Rendezvous(
        plans=ipc_address(place / "plans"),
        reports=ipc_address(place / "reports"),
        init_method=f"file://{place / 'group'}",
        spawned=tuple(range(num_workers)),
        workers_here=num_workers,
        keys=None,
        hand_out=_nobody_is_elsewhere,
        release=lambda: None,
    )


def _nobody_is_elsewhere(rank: int, start: bytes) -> None:
    raise AssertionError(f"worker {rank} is a child of the engine")


def _under_torchrun(process: TorchrunProcess, model: str) -> Rendezvous:
    process.use_interface()
    meeting = call_meeting(process, model)
    plans, reports = process.free_addresses(2)
    return Rendezvous(
        plans=plans,
        reports=reports,
        init_method=meeting.init_method,
        spawned=(process.rank,),
        workers_here=process.local_world_size,
        keys=SocketKeys.random(),
        hand_out=meeting.hand_out,
        release=meeting.end,
    )
