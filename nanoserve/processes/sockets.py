"""ZeroMQ sockets between processes that belong together: where they listen, and who is heard there."""

import secrets
import sys
from pathlib import Path

import msgspec
import zmq

from nanoserve.errors import RuntimeFailure


class SocketKeys(msgspec.Struct, frozen=True):
    """The listening side's half of ZeroMQ's CURVE, as Z85 text; others are given the public key only.

    Whoever does not know it is not heard, and nobody can read or change a word on the way.
    """

    public: str
    secret: str

    @classmethod
    def random(cls) -> "SocketKeys":
        """A new pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    def __repr__(self) -> str:
        return f"SocketKeys({self.public!r})"


def local_address(directory: Path) -> str:
    """A new place to listen for processes of this machine.

    On Linux it is in no file system, so that nothing of it can be left; elsewhere a file in a private directory.

    Raises:
        RuntimeFailure: if the file's path is longer than the system allows for sockets.
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
    """Hear at that address those who know the public key.

    Raises:
        RuntimeFailure: if the address is in use, or cannot be used.
    """
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise RuntimeFailure(f"cannot listen on {address}: {error.strerror}") from None


def connect(socket: "zmq.Socket[bytes]", address: str, public_key: str) -> None:
    """Speak to who listens at that address, or will, and has that key."""
    socket.curve_serverkey = public_key.encode()
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.connect(address)
