"""How an engine and its workers find each other: on one machine, or on several that torchrun
started.

torchrun's processes speak through the key-value store that torchrun's agent on the first machine
holds (torch.distributed's TCPStore), in typed msgpack. The network between the machines must be
trusted: neither that store nor the hidden states that go from worker to worker are protected.

An engine calls a rendezvous, and another one after a loss. Keys, below a prefix for each start of
torchrun and engine:

    meetings           how many rendezvous have been called so far
    N/engine           rendezvous N: the Presence of the engine
    N/present/RANK     ... and of each other process, which keeps a worker
    N/start/RANK       what that worker is to start with, in JSON
    N/over             the workers of rendezvous N may go
    finished           the command is done, with this exit code
"""

import fcntl
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import msgspec

from nanoserve import __version__
from nanoserve.errors import RuntimeFailure, UsageError, first_line

CONNECT_SECONDS = 60.0
"""How long reaching the first machine may take: torchrun's own processes have met before ours
start."""

_POLL_SECONDS = 0.1  # torch's own Store.wait ignores Ctrl-C, so keys are polled
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


@dataclass(frozen=True, slots=True)
class TorchrunProcess:
    """One of the processes that torchrun started: the same command once per device, on every
    machine.

    The process of rank 0 runs the command, and its first engine has worker 0 as a child. Each other
    process keeps one worker; those of an engine follow those of the one before.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    """Number of this process, and of processes, on all machines and on this one."""
    master_address: str
    master_port: int
    """Address of torchrun's key-value store, on the first machine."""
    run: str  # distinguishes this start of torchrun from others with the same store

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] | None = None
    ) -> "TorchrunProcess | None":
        """This process, by the variables that torchrun sets; None if it was started by something
        else. Raises UsageError if torchrun was told to keep its store to itself."""
        variables = os.environ if environment is None else environment
        if "TORCHELASTIC_RUN_ID" not in variables:  # other programs set RANK for their own purposes
            return None
        if variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            raise UsageError(
                "torchrun must share its store: unset TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
            )
        restarts = variables.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(
            rank=int(variables["RANK"]),
            world_size=int(variables["WORLD_SIZE"]),
            local_rank=int(variables["LOCAL_RANK"]),
            local_world_size=int(variables["LOCAL_WORLD_SIZE"]),
            master_address=variables["MASTER_ADDR"],
            master_port=int(variables["MASTER_PORT"]),
            run=f"{variables['TORCHELASTIC_RUN_ID']}/{restarts}",
        )

    def check_num_workers(self, num_workers: int) -> None:
        """Raise UsageError if torchrun started another number of processes than all engines have
        workers."""
        if self.world_size != num_workers:
            raise UsageError(
                f"torchrun started {self.world_size} processes, but there are {num_workers} "
                "workers "
                "(--dp times --pp times --tp, or the devices of a layout): each needs one"
            )

    def of_engine(self, engine: int, num_workers: int) -> "TorchrunProcess":
        """This process as seen by one of several engines, which meet their workers apart: its rank
        is that of a worker there, or below 0 or beyond where it keeps no worker of that engine."""
        rank = self.rank - engine * num_workers
        return replace(self, rank=rank, world_size=num_workers, run=f"{self.run}/{engine}")

    def wait_for_store(self) -> None:
        """Wait until the first machine's port listens; raises RuntimeFailure after
        `CONNECT_SECONDS`."""
        address, until = (self.master_address, self.master_port), time.monotonic() + CONNECT_SECONDS
        while True:
            try:
                socket.create_connection(
                    address, timeout=max(0.1, until - time.monotonic())
                ).close()
                return
            except OSError as error:
                if time.monotonic() > until:
                    raise self.unreachable(error.strerror or str(error)) from None
                time.sleep(_POLL_SECONDS)

    def unreachable(self, reason: str) -> RuntimeFailure:
        store = f"{self.master_address} port {self.master_port}"
        return RuntimeFailure(
            f"cannot reach torchrun's store at {store}: {reason}; check --master-addr"
        )

    def local_address(self) -> str:
        """This machine's IPv4 address on the route to the first one; raises RuntimeFailure if there
        is no route."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                # chooses a route and sends nothing
                probe.connect((self.master_address, self.master_port))
            except OSError as error:
                raise self.unreachable(error.strerror or str(error)) from None
            return str(probe.getsockname()[0])

    def free_addresses(self, number: int) -> list[str]:
        """ZeroMQ addresses with free ports, on the interface to the first machine; raises
        RuntimeFailure if none is."""
        host = self.local_address()
        with ExitStack() as opened:
            try:
                listeners = [opened.enter_context(socket.socket()) for _ in range(number)]
                for listener in listeners:
                    listener.bind((host, 0))
            except OSError as error:
                raise RuntimeFailure(f"no free port on {host}: {error.strerror}") from None
            return [f"tcp://{host}:{listener.getsockname()[1]}" for listener in listeners]

    def use_interface(self) -> None:
        """Have workers on this machine use the interface that leads to the first machine.

        By default gloo takes the address of the machine's name, which others often cannot reach.
        Variables that the user has set stay.
        """
        if (name := interface_of(self.local_address())) is not None:
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(variable, name)


def interface_of(address: str) -> str | None:
    """The network interface with this IPv4 address; None if it is not found."""
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == address), None)


def _address_of(interface: str) -> str | None:
    """Its IPv4 address; None for an interface without one, and on a system that is not Linux."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, suppress(OSError):
        answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None


def own_address(init_method: str) -> str:
    """The IPv4 address at which the other workers that meet there reach this one: the one that gloo
    takes. Raises OSError if no interface is named and the machine's name has no address."""
    if init_method.startswith("file://"):
        return "127.0.0.1"
    return _address_of(os.environ.get("GLOO_SOCKET_IFNAME", "")) or socket.gethostbyname(
        socket.gethostname()
    )


def on_one_machine(process: TorchrunProcess) -> bool:
    """Whether all processes that came to the last rendezvous run on this machine, as far as names
    tell."""
    keys = SharedKeys.of_torchrun(process.of_engine(0, process.world_size))
    number = keys.count("meetings", 0)
    there = [keys.get(f"{number}/present/{rank}") for rank in range(1, process.world_size)]
    return {msgspec.msgpack.decode(one, type=Presence).host for one in there} <= {
        socket.gethostname()
    }


PRESENT_SECONDS = 600.0
"""How long the processes of all workers may take to come: each may have to fetch the model
first."""


class Presence(msgspec.Struct, frozen=True):
    """A process's message about itself at a rendezvous. Later versions may add fields."""

    nanoserve: str
    torch: str
    """Versions."""
    model: str
    host: str
    """Names of the model and of the machine."""
    problem: str | None = None  # why the process cannot take part, in one line

    @classmethod
    def here(cls, model: str, problem: str | None = None) -> Self:
        """The presence of this process. Imports torch."""
        import torch

        return cls(__version__, str(torch.__version__), model, socket.gethostname(), problem)

    @property
    def versions(self) -> str:
        return f"nanoserve {self.nanoserve} with torch {self.torch}"

    def check_fits(self, other: "Presence") -> None:
        """Raise RuntimeFailure if the two cannot work together; both sides say the same."""
        if other.problem is not None:
            raise RuntimeFailure(f"on {other.host}: {other.problem}")
        if self.versions != other.versions:
            raise RuntimeFailure(
                f"unequal versions: {self.versions} on {self.host}, {other.versions} on "
                f"{other.host}; "
                "install the same on both"
            )
        if self.model != other.model:
            raise RuntimeFailure(
                f"unequal models: {self.model} on {self.host}, {other.model} on {other.host}; "
                "start the same command on both"
            )


class SharedKeys:
    """A part of torchrun's store. Every method raises RuntimeFailure if the store is gone."""

    def __init__(self, store: Any) -> None:
        self._store = store

    @classmethod
    def of_torchrun(cls, process: TorchrunProcess) -> Self:
        """The keys of one start of torchrun; raises RuntimeFailure if the store cannot be
        reached."""
        process.wait_for_store()  # torch's own attempts print a line each
        try:
            store = _tcp_store(process.master_address, process.master_port)
        except RuntimeError as error:
            raise process.unreachable(first_line(error)) from None
        return cls(_below(f"nanoserve/{process.run}", store))

    def set(self, key: str, value: bytes) -> None:
        self._ask(self._store.set, key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._ask(self._store.get, key))

    def has(self, key: str) -> bool:
        return bool(self._ask(self._store.check, [key]))

    def count(self, key: str, more: int) -> int:
        """Add to a number; an unknown one is 0."""
        return int(self._ask(self._store.add, key, more))

    def set_finished(self, code: int) -> None:
        self.set("finished", str(code).encode())

    def finished(self) -> int | None:
        """The command's exit code, once it is done."""
        return int(self.get("finished")) if self.has("finished") else None

    def _ask(self, method: Any, *arguments: Any) -> Any:
        try:
            return method(*arguments)
        except RuntimeError:  # torch's DistError
            raise RuntimeFailure(
                "torchrun's store is gone: the command has ended on the first machine"
            ) from None


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where workers find the engine and each other."""

    plans: str  # ZeroMQ address that the engine binds as ROUTER
    reports: str  # ZeroMQ address that the engine binds as PULL
    init_method: str  # where the workers meet each other, for `open_store`


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """How one life of an engine's workers finds together: all as its children, or under torchrun
    worker 0 alone, and the others as children of torchrun's other processes."""

    num_workers: int
    torchrun: TorchrunProcess | None = None
    """The engine's process; None if torchrun did not start it."""
    keys: SharedKeys | None = None
    number: int = 0
    """Under torchrun: the engine's keys, and which of its rendezvous in this start of torchrun it
    is."""
    engines: int = 1

    @classmethod
    def open(cls, num_workers: int, model: str, engine: int = 0, engines: int = 1) -> Self:
        """For the workers of a new engine, or for new workers after a loss. Under torchrun this
        waits until the processes of all other workers are there; the model's name must be the same
        on all machines. Raises UsageError if torchrun started another number of processes;
        RuntimeFailure if another process does not come, cannot take part or does not fit."""
        if (process := TorchrunProcess.from_environment()) is None:
            return cls(num_workers, engines=engines)
        process.check_num_workers(num_workers * engines)
        process.use_interface()
        return cls.call(process.of_engine(engine, num_workers), model)

    @classmethod
    def call(cls, process: TorchrunProcess, model: str) -> Self:
        """Call the other processes of the engine together, and wait for them; arguments and errors
        as for `open`."""
        mine, keys = Presence.here(model), SharedKeys.of_torchrun(process)
        number = keys.count("meetings", 1)
        keys.set(f"{number}/engine", msgspec.msgpack.encode(mine))
        until = time.monotonic() + PRESENT_SECONDS
        for rank in set(range(process.world_size)) - {process.rank}:
            while not keys.has(f"{number}/present/{rank}"):
                if time.monotonic() > until:
                    raise RuntimeFailure(
                        f"the process of worker {rank} did not come within {PRESENT_SECONDS:g} s: "
                        "see what torchrun"
                        " says on its machine"
                    )
                time.sleep(_POLL_SECONDS)
            mine.check_fits(
                msgspec.msgpack.decode(keys.get(f"{number}/present/{rank}"), type=Presence)
            )
        return cls(process.world_size, process, keys, number)

    @property
    def spawned(self) -> tuple[int, ...]:
        """Ranks of the workers that the engine starts."""
        return tuple(
            rank
            for rank in range(self.num_workers)
            if self.torchrun is None or rank == self.torchrun.rank
        )

    @property
    def workers_here(self) -> int:
        """How many share this machine's threads."""
        return (
            self.num_workers * self.engines
            if self.torchrun is None
            else self.torchrun.local_world_size
        )

    def addresses(self, directory: Path) -> Addresses:
        """New addresses: on one machine in a private directory, else on the interface to the other
        machines. Raises RuntimeFailure if the directory's name is too long for a socket, or no port
        is free."""
        process = self.torchrun
        if process is None:
            # and ZeroMQ, late: all commands import this module
            from nanoserve.utils.sockets import local_address

            meeting = directory / f"meeting-{secrets.token_hex(4)}"
            return Addresses(
                local_address(directory), local_address(directory), f"file://{meeting}"
            )
        plans, reports = process.free_addresses(2)
        place = f"nanoserve/{process.run}/{self.number}/group"
        return Addresses(
            plans, reports, f"tcp://{process.master_address}:{process.master_port}/{place}"
        )

    def hand_out(self, rank: int, start: bytes) -> None:
        """Tell a worker elsewhere what it starts with: a WorkerStart, in JSON."""
        assert self.keys is not None, "without torchrun all workers are children of the engine"
        self.keys.set(f"{self.number}/start/{rank}", start)

    def end(self) -> None:
        """Let the workers elsewhere go."""
        if self.keys is not None:
            with suppress(RuntimeFailure):  # the store is gone with torchrun
                self.keys.set(f"{self.number}/over", b"")


def open_store(init_method: str, world_size: int) -> Any:
    """The torch.distributed Store in which workers meet: a file's, or a part of torchrun's. Raises
    torch's RuntimeError if it cannot be reached."""
    if init_method.startswith("file://"):
        from torch.distributed import FileStore  # type: ignore[attr-defined]  # exported, but not by name

        return FileStore(init_method.removeprefix("file://"), world_size)
    address, _, place = init_method.removeprefix("tcp://").partition("/")
    host, _, port = address.rpartition(":")
    return _below(place, _tcp_store(host, int(port)))


def _tcp_store(host: str, port: int) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, but not by name

    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=CONNECT_SECONDS))


def _below(place: str, store: Any) -> Any:
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # exported, but not by name

    return PrefixStore(place, store)
