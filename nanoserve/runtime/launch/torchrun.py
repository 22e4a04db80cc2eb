"""What torchrun tells the processes that it starts, and where in the network this machine stands. No torch here.

torchrun starts the same command once per device, on every machine. The process of rank 0 runs it, and its engine has
worker 0 as a child; every other process keeps one worker.
"""

import fcntl
import os
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from nanoserve.errors import RuntimeFailure, UsageError

CONNECT_SECONDS = 60.0
"""How long reaching the first machine may take: torchrun's own processes have met before ours start."""

_POLL_SECONDS = 0.2
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


@dataclass(frozen=True, slots=True)
class TorchrunProcess:
    """One of the processes that torchrun started."""

    rank: int
    """This process's number; 0 runs the command."""
    world_size: int
    """Number of processes on all machines."""
    local_rank: int
    local_world_size: int
    """This process's number, and the number of processes, on this machine."""
    master_address: str
    master_port: int
    """Address of torchrun's key-value store, on the first machine."""
    run: str
    """Distinguishes this start of torchrun from others with the same store."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "TorchrunProcess | None":
        """This process, by the variables that torchrun sets; None if it was started by something else.

        Raises:
            UsageError: if torchrun was told to keep its store to itself.
        """
        variables = os.environ if environment is None else environment
        if "TORCHELASTIC_RUN_ID" not in variables:  # other programs set RANK for their own purposes
            return None
        if variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            raise UsageError("torchrun must share its store: unset TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
        return cls(
            rank=int(variables["RANK"]),
            world_size=int(variables["WORLD_SIZE"]),
            local_rank=int(variables["LOCAL_RANK"]),
            local_world_size=int(variables["LOCAL_WORLD_SIZE"]),
            master_address=variables["MASTER_ADDR"],
            master_port=int(variables["MASTER_PORT"]),
            run=f"{variables['TORCHELASTIC_RUN_ID']}/{variables.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        )

    def check_num_workers(self, num_workers: int) -> None:
        """Raise UsageError if torchrun started another number of processes than there are workers."""
        if self.world_size != num_workers:
            raise UsageError(
                f"torchrun started {self.world_size} processes, but there are {num_workers} workers "
                "(--pp times --tp, or the devices of a layout): each needs one"
            )

    def wait_for_store(self) -> None:
        """Wait until the first machine's port listens; raises RuntimeFailure after `CONNECT_SECONDS`."""
        host, port = self.master_address, self.master_port
        until = time.monotonic() + CONNECT_SECONDS
        while True:
            try:
                socket.create_connection((host, port), timeout=max(0.1, until - time.monotonic())).close()
                return
            except OSError as error:
                if time.monotonic() > until:
                    raise self.unreachable(error.strerror or str(error)) from None
                time.sleep(_POLL_SECONDS)

    def unreachable(self, reason: str) -> RuntimeFailure:
        """What to say when the first machine cannot be spoken to."""
        host, port = self.master_address, self.master_port
        return RuntimeFailure(f"cannot reach torchrun's store at {host} port {port}: {reason}; check --master-addr")

    def local_address(self) -> str:
        """This machine's IPv4 address on the route to the first one; raises RuntimeFailure if there is no route."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((self.master_address, self.master_port))  # chooses a route and sends nothing
            except OSError as error:
                raise self.unreachable(error.strerror or str(error)) from None
            return str(probe.getsockname()[0])

    def free_addresses(self, number: int) -> list[str]:
        """ZeroMQ addresses with free ports, on the interface to the first machine; raises RuntimeFailure if none is."""
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

        By default gloo takes the address of the machine's name, which others often cannot reach. Variables that the
        user has set stay.
        """
        name = interface_of(self.local_address())
        if name is not None:
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(variable, name)


def interface_of(address: str) -> str | None:
    """The network interface with this IPv4 address; None if it is not found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address; a system that is not Linux
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
