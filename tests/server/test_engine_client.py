"""What the front end makes of what its engines say, in this process."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nanoserve.config import EngineConfig
from nanoserve.request import SamplingParams
from nanoserve.server import plain_endpoints
from nanoserve.server.api_errors import ApiError
from nanoserve.server.engine_child import EngineChild
from nanoserve.server.engine_client import EngineClient, EngineState
from nanoserve.server.messages import Command, EngineStart, EngineStats, Ready, Report
from nanoserve.server.metrics import Metrics
from nanoserve.text.detokenizer import Decoder

FACTS = Ready(64, 1000, (), SamplingParams(), 8)


class FakeChild:
    """An engine process that hears everything and says nothing."""

    dropped = 0

    def __init__(self) -> None:
        self.ready = False
        self.sent: list[Command] = []

    def send(self, command: Command) -> None:
        self.sent.append(command)


class Front:
    """An engine client without a process."""

    def __init__(self) -> None:
        start = EngineStart("none", None, str(Path()), EngineConfig())
        self.client = EngineClient(start, cast(Decoder, None), max_queue=10)
        self.begin()

    def begin(self) -> None:
        """The next engine is there."""
        self.child = FakeChild()
        self.client._child = cast(EngineChild, self.child)
        self.client._hear(FACTS, self.client._child)

    def hear(self, **stats: Any) -> None:
        self.client._hear(Report((), EngineStats(**stats)), cast(EngineChild, self.child))

    def die(self) -> None:
        asyncio.run(self.client._after_death("was killed"))

    def ready(self) -> str:
        """What GET /ready says."""
        service = SimpleNamespace(engine=self.client, facts=lambda: FACTS)
        http: Any = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(service=service)))
        try:
            return str(asyncio.run(plain_endpoints.ready(http)).status_code)
        except ApiError as error:
            return f"{error.status}: {error}"


@pytest.fixture
def front() -> Iterator[Front]:
    yield Front()


def test_ready_says_no_while_workers_are_gone(front: Front) -> None:
    assert front.ready() == "200"
    front.hear(ready=False)
    assert front.ready() == "503: the engine's workers are stopped, or are being started anew"
    assert "engine_ready{model_name=\"m\"} 0.0" in Metrics("m", front.client).text().decode()
    front.hear()
    assert front.ready() == "200"
    front.hear(ready=False)
    front.die()
    front.begin()
    assert front.ready() == "200", "the next engine has workers of its own"


def test_counters_never_go_back(front: Front) -> None:
    front.hear(losses=2, preemptions=5, steps=7, host_losses=1)
    front.die()
    assert front.client.state is EngineState.RESTARTING
    for counted in ((2, 5, 7, 1), (3, 5, 9, 2)):
        text = Metrics("m", front.client).text().decode()
        names = ("nanoserve:worker_losses", "vllm:num_preemptions", "nanoserve:engine_steps", "nanoserve:host_losses")
        for name, count in zip(names, counted, strict=True):
            assert f'{name}_total{{model_name="m"}} {count}.0' in text
        if counted[0] == 2:
            front.begin()
            front.hear(losses=1, steps=2, host_losses=1)
    front.hear(losses=2)
    front.die()
    front.begin()
    assert front.client.total("losses") == 4
