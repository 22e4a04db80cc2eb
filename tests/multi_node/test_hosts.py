"""That the two hosts are what they seem: if torch.distributed itself gets across, what fails
elsewhere is ours."""

import subprocess

import pytest

from scripts.two_hosts import Host, torchrun, two_hosts, wait

pytestmark = pytest.mark.slow


def test_torch_distributed_gets_from_one_host_to_the_other(hosts: tuple[Host, Host]) -> None:
    first, second = programs = torchrun(hosts, ["tests/multi_node/sum_of_ranks.py"])
    wait(programs, 600)

    assert (first.returncode, second.returncode) == (0, 0), first.messages + second.messages
    assert "rank 0 over cable-a: 3" in first.output
    assert "rank 1 over cable-b: 3" in second.output


def test_nothing_is_left_of_the_hosts(hosts: tuple[Host, Host]) -> None:
    with two_hosts() as (first, _):
        sleeper = first.start(["sleep", "600"])
        name = first.name

    assert sleeper.wait(240) != 0
    assert (
        name
        not in subprocess.run(
            ["ip", "netns", "list"], capture_output=True, text=True, check=True
        ).stdout
    )
