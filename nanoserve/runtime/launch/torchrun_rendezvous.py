"""How the processes that torchrun started find each other and agree, before anything else is said between them.

They speak through the key-value store that torchrun's agent on the first machine holds, torch.distributed's TCPStore,
in typed msgpack. The network between the machines must be trusted: neither that store nor the hidden states that go
from worker to worker are protected.

An engine calls a meeting, and another one after a loss. Keys, below one prefix for each start of torchrun:

    meetings           how many have been called so far
    N/engine           meeting N: the Presence of the engine
    N/present/RANK     ... and of each other process, which keeps a worker
    N/start/RANK       what that worker is to start with, in JSON
    N/over             the workers of meeting N may go
    finished           the command is done, with this exit code
"""

import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, Self

import msgspec

from nanoserve import __version__
from nanoserve.errors import RuntimeFailure
from nanoserve.runtime.launch.torchrun import CONNECT_SECONDS, TorchrunProcess

PRESENT_SECONDS = 600.0
"""For the processes of all workers to be there: each may have to fetch the model first."""

_POLL_SECONDS = 0.1


class Presence(msgspec.Struct, frozen=True):
    """What a process brings to a meeting. Later versions may add fields, but must still be understood by this one."""

    nanoserve: str
    torch: str
    """Versions."""
    model: str
    """Its name."""
    host: str
    """Name of the machine."""
    problem: str | None = None
    """Why the process cannot take part, in one line."""

    @classmethod
    def here(cls, model: str, problem: str | None = None) -> Self:
        """This process's. Imports torch."""
        import torch

        return cls(__version__, str(torch.__version__), model, socket.gethostname(), problem)

    @property
    def versions(self) -> str:
        """Both, in words."""
        return f"nanoserve {self.nanoserve} with torch {self.torch}"

    def check_fits(self, other: "Presence") -> None:
        """That the two can work together.

        Raises:
            RuntimeFailure: if not; both sides say the same.
        """
        if other.problem is not None:
            raise RuntimeFailure(f"on {other.host}: {other.problem}")
        if self.versions != other.versions:
            raise RuntimeFailure(
                f"unequal versions: {self.versions} on {self.host}, {other.versions} on {other.host}; "
                "install the same on both"
            )
        if self.model != other.model:
            raise RuntimeFailure(
                f"unequal models: {self.model} on {self.host}, {other.model} on {other.host}; "
                "start the same command on both"
            )


class SharedKeys:
    """A part of torchrun's store, of torch.distributed's Store type.

    Every method raises RuntimeFailure if the store is gone.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    @classmethod
    def of_torchrun(cls, process: TorchrunProcess) -> Self:
        """Those of one start of torchrun.

        Raises:
            RuntimeFailure: if the store cannot be reached.
        """
        process.wait_for_store()  # of its own attempts torch would print every one
        try:
            store = _tcp_store(process.master_address, process.master_port)
        except RuntimeError as error:
            raise process.unreachable(str(error).splitlines()[0]) from None
        return cls(_below(_prefix(process), store))

    def set(self, key: str, value: bytes) -> None:
        self._ask(self._store.set, key, value)

    def get(self, key: str) -> bytes:
        """Of a key that is there."""
        return bytes(self._ask(self._store.get, key))

    def has(self, key: str) -> bool:
        return bool(self._ask(self._store.check, [key]))

    def count(self, key: str, more: int) -> int:
        """Add to a number; an unknown one is 0."""
        return int(self._ask(self._store.add, key, more))

    def set_finished(self, code: int) -> None:
        """Say that the command is done, with this exit code."""
        self.set("finished", str(code).encode())

    def finished(self) -> int | None:
        """The command's exit code, once it is done."""
        return int(self.get("finished")) if self.has("finished") else None

    def _ask(self, method: Any, *arguments: Any) -> Any:
        try:
            return method(*arguments)
        except RuntimeError:  # torch's DistError
            raise RuntimeFailure("torchrun's store is gone: the command has ended on the first machine") from None


class TorchrunRendezvous:
    """The engine's side of one meeting, as `call_rendezvous` made it."""

    def __init__(self, keys: SharedKeys, number: int, init_method: str) -> None:
        self._keys = keys
        self._number = number
        self.init_method = init_method  # where the workers meet each other, for `open_store`

    def hand_out(self, rank: int, start: bytes) -> None:
        """Tell a worker what to start with.

        Raises:
            RuntimeFailure: if the store is gone.
        """
        self._keys.set(f"{self._number}/start/{rank}", start)

    def end(self) -> None:
        """Let the workers go."""
        with suppress(RuntimeFailure):  # gone with torchrun
            self._keys.set(f"{self._number}/over", b"")


def call_rendezvous(process: TorchrunProcess, model: str) -> TorchrunRendezvous:
    """Call all other processes together, and wait for them.

    Raises:
        RuntimeFailure: if one does not come, cannot take part or does not fit.
    """
    mine, keys = Presence.here(model), SharedKeys.of_torchrun(process)
    number = keys.count("meetings", 1)
    keys.set(f"{number}/engine", msgspec.msgpack.encode(mine))
    until = time.monotonic() + PRESENT_SECONDS
    for rank in range(1, process.world_size):
        while not keys.has(f"{number}/present/{rank}"):
            if time.monotonic() > until:
                raise RuntimeFailure(
                    f"the process of worker {rank} did not come within {PRESENT_SECONDS:g} s: see what torchrun says "
                    "on its machine"
                )
            time.sleep(_POLL_SECONDS)
        mine.check_fits(msgspec.msgpack.decode(keys.get(f"{number}/present/{rank}"), type=Presence))
    place = f"{_prefix(process)}/{number}/group"
    return TorchrunRendezvous(keys, number, f"tcp://{process.master_address}:{process.master_port}/{place}")


def open_store(init_method: str, world_size: int) -> Any:
    """The torch.distributed Store in which workers meet: a file's, or a part of torchrun's.

    Raises:
        RuntimeError: torch's, if it cannot be reached.
    """
    if init_method.startswith("file://"):
        from torch.distributed import FileStore  # type: ignore[attr-defined]  # exported, but not by name

        return FileStore(init_method.removeprefix("file://"), world_size)
    address, _, place = init_method.removeprefix("tcp://").partition("/")
    host, _, port = address.rpartition(":")
    return _below(place, _tcp_store(host, int(port)))


def _prefix(process: TorchrunProcess) -> str:
    return f"nanoserve/{process.run}"


def _tcp_store(host: str, port: int) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, but not by name

    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=CONNECT_SECONDS))


def _below(place: str, store: Any) -> Any:
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # exported, but not by name

    return PrefixStore(place, store)
