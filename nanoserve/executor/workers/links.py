"""Links: a socket from each worker to every other one, for tensors in the memory of CPUs.

The calling thread sends and receives by itself. gloo hands a tensor to a thread of its own and
waits for it, which takes about a millisecond beside two busy cores: many times what a few KiB need
on their way.
"""

import secrets
import select
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Self

import torch
from torch import Tensor

from nanoserve.errors import RuntimeFailure
from nanoserve.executor.start.rendezvous import CONNECT_SECONDS

_KEY_BYTES, _RANK_BYTES = 16, 4
_STRANGER_SECONDS = 1.0
"""Time that a connecting process has to identify itself."""
# as long as torch.distributed waits: a machine that vanishes closes nothing
_SILENCE_SECONDS = 1800.0


class Links:
    """This worker's sockets, by the rank of the other end. One thread uses them, and all workers in
    the same order."""

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._sockets = sockets
        for one in sockets.values():
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one.setblocking(False)

    @classmethod
    def open(cls, store: Any, rank: int, world_size: int, host: str) -> Self:
        """Connect all workers of a torch.distributed Store; this one listens at an IPv4 address of
        its machine. Who connects without having read the store is not let in. Raises RuntimeFailure
        if a worker cannot be reached."""
        key, sockets = secrets.token_bytes(_KEY_BYTES), dict[int, socket.socket]()
        try:
            with socket.create_server((host, 0), backlog=world_size) as listener:
                listener.settimeout(CONNECT_SECONDS)
                store.set(f"link/{rank}", key + f"{host}:{listener.getsockname()[1]}".encode())
                for peer in range(rank):
                    told = bytes(store.get(f"link/{peer}"))
                    address, _, port = told[_KEY_BYTES:].decode().partition(":")
                    sockets[peer] = socket.create_connection((address, int(port)), CONNECT_SECONDS)
                    sockets[peer].sendall(told[:_KEY_BYTES] + rank.to_bytes(_RANK_BYTES))
                while len(sockets) < world_size - 1:
                    guest, _ = listener.accept()
                    if (named := _introduced(guest, key)) is None:
                        guest.close()
                    else:
                        sockets[named] = guest
        except OSError as error:
            raise RuntimeFailure(
                f"worker {rank} at {host} cannot be linked with the others: {error}"
            ) from None
        return cls(sockets)

    def exchange(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        """Send tensors to workers and fill others, which are contiguous, with what workers send.
        Both go on at once: no two workers wait for each other to receive. Raises RuntimeError if a
        worker is gone."""
        outgoing, incoming = _parts(sent), _parts(received)
        while outgoing or incoming:
            progress = [
                self._move(socket.socket.send, outgoing),
                self._move(socket.socket.recv_into, incoming),
            ]
            if not any(progress) and (outgoing or incoming):
                self._wait(outgoing, incoming)

    def _move(
        self, call: Callable[[socket.socket, memoryview], int], parts: dict[int, memoryview]
    ) -> bool:
        """Send or receive what can be at once; whether anything was. Takes it from the parts."""
        progress = False
        for peer, part in list(parts.items()):
            try:
                count = call(self._sockets[peer], part)
            except BlockingIOError:
                continue
            except OSError as error:
                raise RuntimeError(f"the link to worker {peer} broke: {error.strerror}") from None
            if count == 0:
                raise RuntimeError(f"the link to worker {peer} broke: it is gone")
            progress, parts[peer] = True, part[count:]
            if not parts[peer]:
                del parts[peer]
        return progress

    def _wait(self, outgoing: Mapping[int, memoryview], incoming: Mapping[int, memoryview]) -> None:
        waiting = select.poll()
        for peer in {*outgoing, *incoming}:
            events = 0
            if peer in outgoing:
                events |= select.POLLOUT
            if peer in incoming:
                events |= select.POLLIN
            waiting.register(self._sockets[peer], events)
        if not waiting.poll(1000 * _SILENCE_SECONDS):
            raise RuntimeError(
                f"no message from workers {sorted({*outgoing, *incoming})} for "
                f"{_SILENCE_SECONDS:g} s"
            )


def _introduced(guest: socket.socket, key: bytes) -> int | None:
    """The rank of a worker that knows the key; None for anybody else."""
    guest.settimeout(_STRANGER_SECONDS)
    said = b""
    with suppress(OSError):
        while len(said) < _KEY_BYTES + _RANK_BYTES and (
            more := guest.recv(_KEY_BYTES + _RANK_BYTES - len(said))
        ):
            said += more
    if len(said) < _KEY_BYTES + _RANK_BYTES or not secrets.compare_digest(said[:_KEY_BYTES], key):
        return None
    return int.from_bytes(said[_KEY_BYTES:])


def _parts(tensors: Mapping[int, Tensor]) -> dict[int, memoryview]:
    """The bytes of each tensor that has any."""
    found = {
        peer: tensor.contiguous().view(-1) for peer, tensor in tensors.items() if tensor.numel()
    }
    return {peer: tensor.view(torch.uint8).numpy().data for peer, tensor in found.items()}
