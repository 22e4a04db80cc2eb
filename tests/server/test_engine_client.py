"""The front end's reading of its engines' messages, in this process."""

import asyncio
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from nanoserve.engine_config import EngineConfig
from nanoserve.errors import ModelError, RuntimeFailure
from nanoserve.models.hub import ResolvedModel
from nanoserve.record.counters import EngineStatus, RecentStep
from nanoserve.request import FinishReason, Request, SamplingParams
from nanoserve.scheduler.work import DraftCounts
from nanoserve.server import endpoints, engine_client
from nanoserve.server.engine_client import (
    EngineChild,
    EngineClient,
    EngineState,
    EngineUnavailable,
    QueueFull,
)
from nanoserve.server.http_bodies import ApiError
from nanoserve.server.messages import (
    Add,
    Command,
    EngineFacts,
    EngineStart,
    LoadProgress,
    SampleUpdate,
    StepReport,
    Stop,
    TraceFailed,
)
from nanoserve.server.metrics import Metrics
from nanoserve.server.streams import RequestStream
from tests.server.test_streams import Letters

FACTS = EngineFacts(64, 1000, (), SamplingParams(), 8)


class FakeChild:
    """An engine process that hears everything and says nothing."""

    dropped = 0

    def __init__(self) -> None:
        self.ready = False
        self.mailbox = self
        self.sent: list[Command] = []

    def send(self, command: Command) -> None:
        self.sent.append(command)


class Front:
    """An engine client without a process."""

    hearing = ""  # the request of the update that it takes

    def __init__(self) -> None:
        start = EngineStart(ResolvedModel("none", None, Path()), EngineConfig())
        self.client = EngineClient(start, Letters(), max_queue=10)
        self.begin()

    def begin(self) -> None:
        """The next engine is there."""
        self.child = FakeChild()
        self.client._child = cast(EngineChild, self.child)
        self.client._take(FACTS, self.client._child)

    def hear(self, *steps: RecentStep, ready: bool = True, **status: Any) -> None:
        report = StepReport(status=EngineStatus(**status), steps=steps, ready=ready)
        self.client._take(report, cast(EngineChild, self.child))

    def die(self) -> None:
        asyncio.run(self.client._after_death("was killed"))

    def replace(self) -> None:
        self.die()
        self.begin()

    def add(self, name: str) -> RequestStream:
        (stream,) = self.client.add([Request(name, (1, 2), SamplingParams(max_tokens=9), seed=0)])
        return stream

    def answer(self, name: str, *, ends: bool = True) -> None:
        """The engine tells of a token, and perhaps of the end."""
        self.hearing = name
        reason = FinishReason.LENGTH if ends else None
        update = SampleUpdate(name, 0, (5,), started=0.0, finish_reason=reason)
        self.client._take(StepReport((update,)), cast(EngineChild, self.child))

    def got(self) -> list[str]:
        """The requests that the engine has been given."""
        return [
            command.request.request_id for command in self.child.sent if isinstance(command, Add)
        ]

    def ready(self) -> str:
        """Answer of GET /ready."""
        service = SimpleNamespace(engine=self.client, facts=lambda: FACTS)
        http: Any = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(service=service)))
        try:
            return str(asyncio.run(endpoints.ready(http)).status_code)
        except ApiError as error:
            return f"{error.status}: {error}"


@pytest.fixture
def front() -> Iterator[Front]:
    yield Front()


def test_tokens_with_which_the_tokenizer_fails_end_their_request_alone(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = Letters.decode

    def failing(letters: Letters, token_ids: Any, **settings: Any) -> str:
        if front.hearing == "broken":
            raise ModelError("the model's tokenizer fails with these tokens")
        return decode(letters, token_ids, **settings)

    broken, sound = front.add("broken"), front.add("sound")
    monkeypatch.setattr(Letters, "decode", failing)
    for name in ("broken", "sound", "broken"):
        front.answer(name, ends=name == "sound")
    with pytest.raises(ModelError, match="fails with these tokens"):
        broken.whole()
    assert sound.whole().outputs[0].text == "f" and front.client.state is EngineState.READY


def test_ready_says_how_far_a_start_is(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(engine_client, "time", SimpleNamespace(monotonic=lambda: clock.now))
    front.client.state = EngineState.LOADING  # as before the first engine
    front.client._starting_since = 98.5
    child = cast(EngineChild, front.child)
    assert front.ready() == "503: the model is being loaded: loading 1 s"
    front.client._take(LoadProgress("loading", 9, 20), child)
    clock.now = 102.5
    assert front.client.waiting == ("loading", "45%")
    assert front.ready() == "503: the model is being loaded: loading 45%, 4 s"
    front.client._take(LoadProgress("compiling layers", 0, 1), child)
    assert front.ready() == "503: the model is being loaded: compiling layers 4 s"
    front.client._take(FACTS, child)
    assert front.ready() == "200" and front.client.waiting is None


def test_ready_says_no_while_workers_are_gone(front: Front) -> None:
    assert front.ready() == "200"
    front.hear(ready=False)
    assert front.ready() == "503: the engine's workers are stopped, or are being restarted"
    assert 'engine_ready{model_name="m"} 0.0' in Metrics("m", front.client).text().decode()
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
        names = (
            "nanoserve:worker_losses",
            "vllm:num_preemptions",
            "nanoserve:engine_steps",
            "nanoserve:host_losses",
        )
        for name, count in zip(names, counted, strict=True):
            assert f'{name}_total{{model_name="m"}} {count}.0' in text
        if counted[0] == 2:
            front.begin()
            front.hear(losses=1, steps=2, host_losses=1)
    front.hear(losses=2)
    front.die()
    front.begin()
    assert front.client.total.losses == 4


def test_draft_tokens_are_counted_over_engines_under_vllms_names(front: Front) -> None:
    front.hear(drafts=DraftCounts(2, 6, [2, 1, 0, 0, 0, 0, 0]))
    front.replace()
    two = [
        EngineStatus(drafts=DraftCounts(1, 5, [1, 1, 1, 1, 0, 0, 0])),
        EngineStatus(drafts=DraftCounts(3, 3)),
    ]
    front.client.last = StepReport(status=EngineStatus.together(two))
    text = Metrics("m", front.client).text().decode()
    for name, count in {"drafts": 6, "draft_tokens": 14, "accepted_tokens": 7}.items():
        assert f'vllm:spec_decode_num_{name}_total{{model_name="m"}} {count}.0' in text
    for place, count in enumerate((3, 2, 1, 1, 0, 0, 0)):
        labels = f'model_name="m",position="{place}"'
        assert f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels}}} {count}.0" in text


def test_the_last_steps_of_a_dead_engine_are_logged_and_all_are_counted(
    front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics("m", front.client)
    front.hear(*(RecentStep(step, 2, 30, 3, 1, 0.25) for step in range(20)))
    front.die()
    (line,) = [
        record.getMessage() for record in caplog.records if "last steps" in record.getMessage()
    ]
    assert line.endswith("step 19: 2 decodes + 30 prompt tokens in 250 ms, 3 running, 1 waiting")
    assert line.count("decodes") < 20
    front.begin()
    front.hear(RecentStep(0, 1, 0, 1, 0, 0.5))
    text = metrics.text().decode()
    assert 'nanoserve:step_time_seconds_sum{model_name="m"} 5.5' in text
    assert 'vllm:iteration_tokens_total_count{model_name="m"} 21.0' in text
    caplog.clear()
    front.begin()
    front.die()
    assert caplog.text.count("last steps") == 1, "of the engine that died only"


# ----------------------------------------------------------------------------- requests that kill
# their engine


def test_requests_that_saw_two_engines_die_run_one_at_a_time(front: Front) -> None:
    a, killer, b = (front.add(name) for name in ("a", "killer", "b"))
    front.replace()
    assert front.got() == ["a", "killer", "b"], "once may be chance"
    front.answer("a", ends=False)
    front.replace()
    late = front.add("late")
    assert front.got() == ["a"]
    front.answer("a")
    assert a.finished and front.got() == ["a", "killer"]
    front.replace()
    with pytest.raises(RuntimeFailure, match="at last alone"):
        killer.whole()
    assert front.got() == ["b"], "which is suspected still"
    front.answer("b")
    assert front.got() == ["b", "late"]
    front.answer("late")
    assert b.whole().finished and late.whole().finished
    assert front.client.running == 0


def test_a_suspect_whose_client_goes_makes_room_for_the_next(front: Front) -> None:
    first = front.add("first")
    front.add("second")
    front.replace()
    front.replace()
    front.client.forget(first)
    commands = [
        (type(command), getattr(command, "request_id", None)) for command in front.child.sent[1:]
    ]
    assert commands == [(Stop, "first"), (Add, None)] and front.got() == ["first", "second"]


def test_who_is_held_back_counts_as_waiting(front: Front) -> None:
    front.add("a")
    front.add("b")
    front.replace()
    front.replace()
    with pytest.raises(QueueFull):
        for number in range(100):
            front.add(f"{number}")
    assert front.client.running == 10 + FACTS.max_num_seqs


def test_engines_that_die_without_a_culprit_are_given_up_for_a_while(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanoserve.server.engine_client.RETRY_SECONDS", 0.0)
    front.replace()
    front.replace()
    stream = front.add("a")
    front.die()
    assert front.client.state is EngineState.FAILED
    with pytest.raises(
        EngineUnavailable, match=r"engines died 3 times within 1 s; the last one was killed"
    ):
        stream.whole()
    front.begin()
    assert front.ready() == "200"


@pytest.mark.parametrize("turns", range(8))
def test_whoever_watches_an_engine_can_be_told_to_end_at_any_moment(turns: int) -> None:
    """Also in the few turns of the event loop that a heartbeat takes to come through: the server
    could not end."""
    beating, pulse = os.pipe()[::-1]
    child = EngineChild.__new__(EngineChild)
    child.ready, child._process = (
        True,
        cast(Any, SimpleNamespace(pulse=pulse, beats=lambda: bool(os.read(pulse, 64)))),
    )

    async def end() -> None:
        watcher = asyncio.create_task(child.death())
        await asyncio.sleep(0)
        os.write(beating, b".")
        for _ in range(turns):
            await asyncio.sleep(0)
        watcher.cancel()
        for _ in range(8):
            await asyncio.sleep(0)
        assert watcher.cancelled()

    try:
        asyncio.run(end())
    finally:
        os.close(beating)
        os.close(pulse)


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, os.strerror(errno.EMFILE)), zmq.ZMQError(errno.EMFILE)]
)
def test_an_engine_that_cannot_be_started_for_want_of_descriptors_is_tried_again(
    front: Front, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = 0

    def refuse(*_: Any, **__: Any) -> None:
        nonlocal starts
        starts += 1
        if starts == 3:
            raise asyncio.CancelledError
        raise error

    monkeypatch.setattr(engine_client, "TiedChild", refuse)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(front.client.run())
    assert starts == 3, "the front end goes on"


def test_a_heartbeat_that_came_during_a_long_turn_of_the_loop_counts() -> None:
    """Then the loop finds the heartbeat and the end of the time for it at once."""
    reader, writer = os.pipe()
    child = object.__new__(EngineChild)
    child._process = SimpleNamespace(pulse=reader, beats=lambda: bool(os.read(reader, 9)))  # type: ignore[assignment]

    async def listen() -> bool:
        asyncio.get_running_loop().call_soon(lambda: (time.sleep(0.05), os.write(writer, b".")))
        return await child._beats(0.01)

    assert asyncio.run(listen())
    os.close(reader)
    os.close(writer)


def test_a_trace_that_ends_is_told_once(front: Front, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):  # two engines of one file
        front.client._take(
            TraceFailed("cannot write t: No space left on device"), cast(EngineChild, front.child)
        )
    assert [record.getMessage() for record in caplog.records] == [
        "the trace ends here: cannot write t: No space left on device"
    ]
