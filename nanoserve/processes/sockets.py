"""ZeroMQ sockets between the processes of one engine: their addresses and their encryption."""

import secrets
import sys
from pathlib import Path

import msgspec
import zmq

from nanoserve.errors import RuntimeFailure


class SocketKeys(msgspec.Struct, frozen=True):
    """The listening side's key pair for ZeroMQ's CURVE, as Z85 text. Other processes get the public key only.

    Messages from senders without that key are ignored; messages cannot be read or changed on the way.
    """

    public: str
    secret: str

    @classmethod
    def random(cls) -> "SocketKeys":
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    def __repr__(self) -> str:
        return f"SocketKeys({self.public!r})"


def local_address(directory: Path) -> str:
    """A new address to listen on for processes of this machine: on Linux an abstract socket, elsewhere a file.

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


def listen(socket: "zmq.Socket[bytes]", address: str, keys: SocketKeys) -> None:
    """Listen at an address for senders that know the public key. Raises RuntimeFailure if it cannot be used."""
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise RuntimeFailure(f"cannot listen on {address}: {error.strerror}") from None


def connect(socket: "zmq.Socket[bytes]", address: str, public_key: str) -> None:
    """Connect to the listener at an address, now or once it listens, if it has that key."""
    socket.curve_serverkey = public_key.encode()
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.connect(address)
