"""Links between stages, over a network of one process."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nanoserve.executor.cpu_attention.headers import Header, Leaving
from nanoserve.executor.workers.distributed import Activations, Expected
from nanoserve.models.shards import Shard
from nanoserve.scheduler.optional import CohortProgress, HostWork

HIDDEN_SIZE = 3


@dataclass
class Work:
    """One that is done when somebody waits for it."""

    finish: Callable[[], None]
    done: bool = False

    def wait(self) -> None:
        if not self.done:
            self.finish()
            self.done = True


@dataclass
class Network:
    """Tensors on their way from one rank to the next, in order. A sent tensor is read when it is
    received."""

    way: deque[Tensor] = field(default_factory=deque)
    sends: list[Work] = field(default_factory=list)

    def isend(self, tensor: Tensor, to: int) -> Work:
        assert to == 1
        self.way.append(tensor)
        self.sends.append(Work(lambda: None))
        return self.sends[-1]

    def irecv(self, tensor: Tensor, of: int) -> Work:
        assert of == 0
        return Work(lambda: self.recv(tensor, of))

    @torch.inference_mode()
    def recv(self, tensor: Tensor, of: int) -> None:
        tensor.copy_(self.way.popleft())


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    network = Network()
    for name in ("isend", "irecv", "recv"):
        monkeypatch.setattr(dist, name, getattr(network, name))
    yield network


def link(rank: int, num_tokens: int = 4) -> Activations:
    """Activations of one rank of two stages."""
    shard, cpu = Shard(range(1), stage=rank, num_stages=2), torch.device("cpu")
    return Activations(
        shard, hidden_size=HIDDEN_SIZE, num_tokens=num_tokens, dtype=torch.float32, device=cpu
    )


def hidden(number: int, num_tokens: int = 2) -> Tensor:
    return torch.full((num_tokens, HIDDEN_SIZE), float(number))


def expected(activations: Activations, num_tokens: int = 2) -> Expected:
    coming = activations.expect(num_tokens)
    assert coming is not None
    return coming


def test_what_is_sent_arrives_and_stays_while_the_next_is_expected(network: Network) -> None:
    sender, receiver = link(0), link(1)
    for number, num_tokens in enumerate((2, 4, 1)):
        sender.send(hidden(number, num_tokens))
    first, second = expected(receiver), expected(receiver, 4)
    assert torch.equal(first.wait(), hidden(0))
    assert torch.equal(second.wait(), hidden(1, 4))
    assert torch.equal(first.hidden, hidden(0)), "overwritten while it is in use"
    assert torch.equal(expected(receiver, 1).wait(), hidden(2, 1))
    assert torch.equal(second.hidden, hidden(1, 4)), "overwritten while it is in use"


def test_buffers_are_used_again_and_grow_when_a_step_is_larger(network: Network) -> None:
    receiver = link(1, num_tokens=2)
    places = [expected(receiver).hidden.data_ptr() for _ in range(4)]
    assert places[0] == places[2] != places[1] == places[3]
    assert expected(receiver, 9).hidden.shape == (9, HIDDEN_SIZE)


def test_nothing_is_expected_where_nothing_comes(network: Network) -> None:
    assert link(0).expect(3) is None
    assert link(1).expect(0) is None


def test_a_sender_waits_when_two_are_on_their_way(network: Network) -> None:
    sender = link(0)
    for number in range(4):
        sender.send(hidden(number))
    assert [work.done for work in network.sends] == [True, True, False, False]


def test_hidden_states_with_gaps_arrive_without(network: Network) -> None:
    wide = torch.arange(2.0 * 2 * HIDDEN_SIZE).view(2, 2 * HIDDEN_SIZE)
    link(0).send(wide[:, ::2])
    assert network.way[0].is_contiguous()
    assert torch.equal(expected(link(1)).wait(), wide[:, ::2])


def test_a_sender_of_plans_does_not_wait_for_their_receiver(network: Network) -> None:
    """gloo sends when the other side receives: whoever waits for that computes nothing
    meanwhile."""
    sender = link(0)
    for number in range(2):
        sender.send_plan(b"plan")
        sender.send(hidden(number))
    assert not any(work.done for work in network.sends)
    sender.send_plan(b"plan")
    assert [work.done for work in network.sends[:3]] == [True, True, False], (
        "length and plan of the first"
    )


@pytest.mark.parametrize("plan", [b"\x00", bytes(range(256)) * 100])
def test_a_plan_comes_before_its_hidden_states(network: Network, plan: bytes) -> None:
    sender, receiver = link(0), link(1)
    sender.send_plan(plan)
    sender.send(hidden(7))
    assert receiver.receive_plan() == plan
    assert torch.equal(expected(receiver).wait(), hidden(7))


HEADERS = [
    Header(),
    Header(
        (Leaving(3, (8, 5)), Leaving(4, (9,))), (CohortProgress(5, 2),), (HostWork(2, 70, 0.25),)
    ),
    Header(cohorts=tuple(CohortProgress(step, 1) for step in range(1000))),
]


@pytest.mark.parametrize("header", HEADERS, ids=["empty", "two groups", "long"])
def test_a_header_says_how_many_hidden_states_follow_those_of_the_plan(
    network: Network, header: Header
) -> None:
    sender, receiver = link(0), link(1)
    sender.send_with_header(header, hidden(7, 2 + header.num_rows))
    sender.send(hidden(8))
    received = receiver.receive_header()
    assert received == header
    assert torch.equal(
        expected(receiver, 2 + received.num_rows).wait(), hidden(7, 2 + header.num_rows)
    )
    assert torch.equal(expected(receiver).wait(), hidden(8))


def test_a_header_may_come_alone(network: Network) -> None:
    """Nothing is on the device, and no group leaves its stage."""
    sender, receiver = link(0), link(1)
    for header in HEADERS:
        sender.send_with_header(header, None)
    assert [receiver.receive_header() for _ in HEADERS] == HEADERS
    assert not network.way


def test_no_header_comes_to_the_first_stage(network: Network) -> None:
    assert link(0).receive_header() is None


def test_headers_do_not_wait_for_their_receiver(network: Network) -> None:
    sender = link(0)
    for number in range(2):
        sender.send_with_header(Header(), hidden(number))
    assert not any(work.done for work in network.sends)
    sender.send(hidden(2))
    assert [work.done for work in network.sends[:4]] == [True, True, True, False], (
        "all of the first and no other"
    )
