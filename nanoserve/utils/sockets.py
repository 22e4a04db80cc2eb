"""ZeroMQ sockets between the processes of one engine: their addresses and their encryption."""

import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

import zmq

from nanoserve.errors import RuntimeFailure


def local_address(directory: Path) -> str:
    """A new address to listen on for processes of this machine: on Linux an abstract socket,
    elsewhere a file.

    Raises RuntimeFailure if the file's path is longer than the system allows for sockets.
    """
    name = secrets.token_hex(8)
    if sys.platform == "linux":
        return f"ipc://@nanoserve-{name}"
    path = directory / name
    if len(str(path).encode()) > zmq.IPC_PATH_MAX_LEN:
        raise RuntimeFailure(
            f"the path of a socket would be longer than the system's {zmq.IPC_PATH_MAX_LEN} bytes: "
            f"set TMPDIR to a directory with a shorter name than {directory.parent}"
        )
    return f"ipc://{path}"


def listen(sockets: "Mapping[str, zmq.Socket[bytes]]") -> str:
    """Listen at each address with its socket; returns a new public key for ZeroMQ's CURVE, as Z85
    text.

    Messages from senders without that key are ignored; messages cannot be read or changed on the
    way. Raises RuntimeFailure if an address cannot be used.
    """
    public_key, secret_key = zmq.curve_keypair()
    for address, socket in sockets.items():
        socket.curve_server = True
        socket.curve_publickey = public_key
        socket.curve_secretkey = secret_key
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise RuntimeFailure(f"cannot listen on {address}: {error.strerror}") from None
    return public_key.decode()


def connect(socket: "zmq.Socket[bytes]", address: str, public_key: str) -> None:
    """Connect to the listener at an address, now or once it listens, if it has that key."""
    socket.curve_serverkey = public_key.encode()
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.connect(address)
