"""Where engines and workers meet, on one machine and through torchrun's store (here: a store in a
file)."""

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from torch.distributed import TCPStore

from nanoserve.errors import NanoserveError, RuntimeFailure, UsageError
from nanoserve.executor.start import rendezvous as rendezvous_module
from nanoserve.executor.start.rendezvous import (
    Presence,
    Rendezvous,
    SharedKeys,
    TorchrunProcess,
    interface_of,
    open_store,
)
from nanoserve.utils.temporary import choose_directory, make_directory

VARIABLES = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
FIRST = TorchrunProcess(0, 2, 0, 1, "127.0.0.1", 29500, "none/0")


# -------------------------------------------------------------------------------------------------
# one machine


def test_on_one_machine_the_engine_starts_all_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")  # which others set, too
    rendezvous = Rendezvous.open(3, "storyteller")

    assert (rendezvous.spawned, rendezvous.workers_here) == ((0, 1, 2), 3)
    assert rendezvous.addresses(tmp_path).init_method.startswith(f"file://{tmp_path}/meeting")
    second = Rendezvous.open(3, "storyteller", engine=1, engines=2)
    assert (second.spawned, second.workers_here) == ((0, 1, 2), 6)


def test_no_place_for_a_directory_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))

    with pytest.raises(
        RuntimeFailure, match=r"no temporary directory can be made \(No such .*\): set TMPDIR"
    ):
        make_directory(choose_directory())


# --------------------------------------------------------------------------------------------------
# torchrun


def test_torchruns_variables_say_which_process_this_is() -> None:
    process = TorchrunProcess.from_environment(VARIABLES)

    assert process == TorchrunProcess(1, 4, 1, 2, "127.0.0.1", 29500, "none/0")
    assert TorchrunProcess.from_environment({"RANK": "0", "WORLD_SIZE": "2"}) is None


def test_another_number_of_processes_than_workers_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(UsageError, match="torchrun started 4 processes, but there are 2 workers"):
        Rendezvous.open(2, "storyteller")


def test_a_store_that_torchrun_does_not_share_is_refused() -> None:
    with pytest.raises(UsageError, match="unset TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        TorchrunProcess.from_environment(VARIABLES | {"TORCHELASTIC_USE_AGENT_STORE": "False"})


def test_a_master_that_cannot_be_reached_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_module, "CONNECT_SECONDS", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        process = replace(FIRST, master_port=silent.getsockname()[1])
        with pytest.raises(
            RuntimeFailure, match=r"cannot reach torchrun's store at .*refused; check --master-addr"
        ):
            process.wait_for_store()


def test_addresses_lie_on_the_way_to_the_first_machine() -> None:
    plans, reports = FIRST.free_addresses(2)

    assert plans != reports and plans.startswith("tcp://127.0.0.1:")
    with zmq.Context() as context, context.socket(zmq.PULL) as listener:
        listener.bind(plans)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the addresses of interfaces")
def test_the_interface_with_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None


def test_the_users_choice_of_an_interface_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "mine")
    FIRST.use_interface()

    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"


# --------------------------------------------------------------------------------------------------
# meetings


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SharedKeys:
    """Facts that all processes share."""
    shared = SharedKeys(open_store(f"file://{tmp_path}/store", -1))
    monkeypatch.setattr(SharedKeys, "of_torchrun", lambda process: shared)
    return shared


def called(keys: SharedKeys, others: Presence | None) -> tuple[Any, NanoserveError | None]:
    """Return the engine's part of a meeting to which the process of rank 1 comes with that
    presence."""
    if others is not None:
        keys.set("1/present/1", msgspec.msgpack.encode(others))
    try:
        return Rendezvous.call(FIRST, "storyteller"), None
    except NanoserveError as error:
        return None, error


def test_a_meeting_hands_out_what_workers_start_with(keys: SharedKeys) -> None:
    meeting, _ = called(keys, Presence.here("storyteller"))
    meeting.hand_out(1, b'{"rank": 1}')

    assert keys.get("1/start/1") == b'{"rank": 1}'
    assert meeting.addresses(Path()).init_method == "tcp://127.0.0.1:29500/nanoserve/none/0/1/group"
    assert not keys.has("1/over")
    meeting.end()
    assert keys.has("1/over")


def test_each_engine_meets_its_own_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts of 2 engines of 2 workers each: the first has worker 0 as a child, the second has both
    elsewhere."""
    parts: dict[str, SharedKeys] = {}

    def of_torchrun(process: TorchrunProcess) -> SharedKeys:
        place = f"{tmp_path}/{process.run.replace('/', '-')}"
        return parts.setdefault(process.run, SharedKeys(open_store(f"file://{place}", -1)))

    monkeypatch.setattr(SharedKeys, "of_torchrun", of_torchrun)
    monkeypatch.setattr(TorchrunProcess, "use_interface", lambda _: None)
    for name, value in (VARIABLES | {"RANK": "0", "LOCAL_RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    found = []
    for process_rank in (1, 2, 3):  # what each of the other processes does
        mine = replace(FIRST, rank=process_rank, world_size=4).of_engine(process_rank // 2, 2)
        found.append((mine.run, mine.rank))
        of_torchrun(mine).set(
            f"1/present/{mine.rank}", msgspec.msgpack.encode(Presence.here("storyteller"))
        )
    first, second = (Rendezvous.open(2, "storyteller", engine, engines=2) for engine in (0, 1))

    assert found == [("none/0/0", 1), ("none/0/1", 0), ("none/0/1", 1)]
    assert (first.spawned, second.spawned) == ((0,), ())
    # torchrun's processes on this machine
    assert (first.workers_here, second.workers_here) == (2, 2)
    assert first.addresses(Path()).init_method != second.addresses(Path()).init_method
    second.hand_out(0, b"start")
    assert not parts["none/0/0"].has("1/start/0") and parts["none/0/1"].get("1/start/0") == b"start"
    with pytest.raises(UsageError, match="torchrun started 4 processes, but there are 6 workers"):
        Rendezvous.open(2, "storyteller", 0, engines=3)


def test_a_second_meeting_is_another_one(keys: SharedKeys) -> None:
    first, _ = called(keys, Presence.here("storyteller"))
    keys.set("2/present/1", msgspec.msgpack.encode(Presence.here("storyteller")))
    second, _ = called(keys, None)

    assert second.addresses(Path()).init_method != first.addresses(Path()).init_method


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"nanoserve": "9.9.9"},
            r"unequal versions: nanoserve \S+ with torch \S+ on \S+, nanoserve 9\.9\.9 with",
        ),
        (
            {"torch": "9.9.9"},
            r"unequal versions: .* with torch 9\.9\.9 on there; install the same on both",
        ),
        (
            {"model": "qwen3-8b"},
            "unequal models: storyteller on .*, qwen3-8b on there; start the same command",
        ),
        ({"problem": "no model at ./models/x"}, "on there: no model at ./models/x"),
    ],
)
def test_processes_that_do_not_fit_are_refused_on_both_sides(
    keys: SharedKeys, change: dict[str, str], words: str
) -> None:
    other = msgspec.structs.replace(Presence.here("storyteller"), host="there", **change)
    _, error = called(keys, other)

    assert isinstance(error, RuntimeFailure)
    with pytest.raises(RuntimeFailure, match=words):
        raise error
    if other.problem is None:  # which its own side knows
        with pytest.raises(RuntimeFailure, match="unequal"):
            other.check_fits(Presence.here("storyteller"))


def test_a_presence_with_more_fields_is_understood() -> None:
    later = {
        "nanoserve": "2.0",
        "torch": "3.0",
        "model": "storyteller",
        "host": "there",
        "colour": "blue",
    }

    with pytest.raises(RuntimeFailure, match=r"unequal versions: .*nanoserve 2\.0 with torch 3\.0"):
        Presence.here("storyteller").check_fits(
            msgspec.msgpack.decode(msgspec.msgpack.encode(later), type=Presence)
        )


def test_a_process_that_does_not_come_is_one_clear_line(
    keys: SharedKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous_module, "PRESENT_SECONDS", 0.2)
    _, error = called(keys, None)

    assert "the process of worker 1 did not come within 0.2 s" in str(error)


def test_a_store_that_is_gone_is_one_clear_line() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    keys = SharedKeys(TCPStore("127.0.0.1", server.port, is_master=False))
    keys.set_finished(3)
    assert keys.finished() == 3
    del server
    expected = "^torchrun's store is gone: the command has ended on the first machine$"
    with pytest.raises(RuntimeFailure, match=expected) as caught:
        keys.has("finished")
    assert caught.value.__suppress_context__, "torch's own error has lines of its frames"
