"""Layouts over a slow link: what compares them runs, and pairs of layouts answer what one process
answers."""

import json
import sys
from pathlib import Path

import pytest

from scripts.two_hosts import Host, torchrun, wait

STORYTELLER = "nanoserve/assets/storyteller"

ENGINE = ["--dtype", "float32", "--kv-cache-memory", "16MiB", "--threads", "1", "--eager"]
SETTINGS = [*ENGINE, "-t", "0", "-n", "60"]


@pytest.mark.slow
def test_layouts_and_a_pair_of_them_are_compared_over_a_link(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    """Each layout runs alone and in turn with the other, on the same two workers."""
    for host in hosts:
        host.shape("300mbit")
    report = tmp_path / "report.json"
    command = [
        "-m",
        "nanoserve",
        "bench",
        "reshard",
        "--prefill-parallel",
        "p2",
        "--decode-parallel",
        "t2",
    ]
    work = [
        "--lengths",
        "16+4",
        "--requests",
        "3",
        "--rounds",
        "1",
        "--keep-all",
        "--json",
        str(report),
    ]
    both = torchrun(
        hosts, [*command, *work, "-m", STORYTELLER, "--host-kv-memory", "16MiB", *ENGINE]
    )
    wait(both, 240)
    assert [one.returncode for one in both] == [0, 0], both[0].messages + both[1].messages
    (row, *_) = json.loads(report.read_text())["rows"]
    found = row["round"]["variants"]
    assert {name: run["transitions"] > 0 for name, run in found.items()} == {
        **dict.fromkeys(["sarathi, P2", "throttling, P2", "adaptive, P2", "sarathi, T2"], False),
        "prefill-prioritizing, P2 -> T2": True,
        "decode-prioritizing, P2 -> T2": True,
        "transition-minimizing, P2 -> T2": True,
    }


@pytest.mark.slow
def test_two_layouts_on_two_hosts_answer_what_one_process_answers(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    """The hosts have the memory of one machine in common, which is what two layouts want."""
    command = ["-m", "nanoserve", "generate", "Once upon a time", *SETTINGS]
    alone = hosts[0].start([sys.executable, *command])
    wait([alone], 600)
    first, second = both = torchrun(
        hosts, [*command, "--prefill-parallel", "p2", "--decode-parallel", "t2"]
    )
    wait(both, 180)
    assert (alone.returncode, first.returncode, second.returncode) == (0, 0, 0), (
        first.messages + second.messages
    )
    assert first.output == alone.output


@pytest.mark.slow
def test_what_ranks_add_up_crosses_the_cable(hosts: tuple[Host, Host]) -> None:
    """The namespaces share a machine, and yet no sum of two ranks goes through its memory."""
    layers, hidden_size, tokens = 4, 256, 60

    def sent() -> list[int]:
        readers = [
            host.start(["cat", f"/sys/class/net/{host.interface}/statistics/tx_bytes"])
            for host in hosts
        ]
        wait(readers, 60)
        return [int(reader.output) for reader in readers]

    before = sent()
    both = torchrun(
        hosts, ["-m", "nanoserve", "generate", "Once upon a time", *SETTINGS, "--tp", "2"]
    )
    wait(both, 180)
    assert [one.returncode for one in both] == [0, 0], both[0].messages + both[1].messages
    sums = (2 * layers + 1) * hidden_size * 4 * tokens
    assert all(after - earlier > sums for earlier, after in zip(before, sent(), strict=True))
