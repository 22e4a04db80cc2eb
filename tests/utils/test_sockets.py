"""Where processes that belong together listen: nothing of it can be left, and nobody else is
heard."""

import pickle
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from nanoserve.errors import RuntimeFailure
from nanoserve.utils import sockets
from nanoserve.utils.sockets import connect, listen, local_address

ADDRESSES: dict[str, Callable[[Path], str]] = {
    "here": local_address,
    "network": lambda _: "tcp://127.0.0.1:*",
}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere sockets are files")
def test_a_local_socket_is_in_no_file_system_and_its_name_is_not_to_be_guessed(
    tmp_path: Path,
) -> None:
    addresses = {local_address(tmp_path) for _ in range(2)}
    assert len(addresses) == 2
    with zmq.Context() as context, context.socket(zmq.PULL) as listener:
        listen(dict.fromkeys(addresses, listener))
        for address in addresses:
            assert address.removeprefix("ipc://") in Path("/proc/net/unix").read_text()
        assert list(tmp_path.iterdir()) == []


def test_elsewhere_it_is_a_file_of_the_private_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets.sys, "platform", "darwin")
    with zmq.Context() as context, context.socket(zmq.PULL) as listener:
        listen({local_address(tmp_path): listener})
        assert [path.is_socket() for path in tmp_path.iterdir()] == [True]
    with pytest.raises(RuntimeFailure, match=r"longer than the system's \d+ bytes: set TMPDIR to"):
        local_address(tmp_path / ("x" * zmq.IPC_PATH_MAX_LEN))


def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.socket() as other, zmq.Context() as context, context.socket(zmq.PULL) as listener:
        other.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(
            RuntimeFailure, match=f"cannot listen on {address}: Address already in use"
        ):
            listen({address: listener})


@pytest.mark.parametrize("place", ADDRESSES)
def test_only_who_knows_the_key_is_heard(place: str, tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as listener:
        key = listen({ADDRESSES[place](tmp_path): listener})
        address = listener.get(zmq.LAST_ENDPOINT).decode()
        with (
            context.socket(zmq.PUSH) as stranger,
            context.socket(zmq.PUSH) as guessing,
            context.socket(zmq.PUSH) as ours,
        ):
            for each in (stranger, guessing):
                each.set(zmq.LINGER, 0)
            stranger.connect(address)
            stranger.send(b"a stranger's word")
            connect(guessing, address, zmq.curve_keypair()[0].decode())
            guessing.send(b"a guess")
            _say_raw(address, pickle.dumps({"not": "even ZeroMQ"}) * 1000)
            connect(ours, address, key)
            ours.send(b"a word")
            assert listener.recv() == b"a word" and not listener.poll(300)


def _say_raw(address: str, data: bytes) -> None:
    if address.startswith("tcp"):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        kind, place = socket.AF_INET, (host, int(port))
    else:
        kind, place = socket.AF_UNIX, address.removeprefix("ipc://").replace("@", "\0")
    with socket.socket(kind) as raw:
        raw.connect(place)
        raw.sendall(data)
