"""The engine's side of the wire, in this process: commands in, reports out, rubbish dropped."""

import asyncio
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from nanoserve.engine.dispatcher import Dispatcher
from nanoserve.engine.engine import Engine
from nanoserve.record.counters import EngineStatus
from nanoserve.request import (
    FinishReason,
    Request,
    SamplingParams,
    Sequence,
    SequenceUpdate,
    TokenLogprob,
)
from nanoserve.scheduler.plan import Executor, StepResult
from nanoserve.scheduler.policies.baselines import ChunkedPrefill
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.server.engine_process import PROMPT_PIECE, EngineLoop
from nanoserve.server.messages import (
    Add,
    Command,
    EngineMessage,
    Failed,
    Mailbox,
    StepReport,
    Stop,
)
from nanoserve.server.streams import RequestStream
from nanoserve.utils.sockets import connect, listen, local_address
from tests.fakes.dying_executor import DyingExecutor
from tests.fakes.memory_checking_executor import MemoryCheckingExecutor
from tests.fakes.reference import expected_tokens
from tests.server.fake_engine import VOCAB_SIZE, WORKER_POISON_TOKEN, PacedExecutor

CONTEXT = 64
WAIT_MILLISECONDS = 120_000


class Wire:
    """A loop, and the front end's end of its socket."""

    def __init__(self, directory: Path) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.PAIR)
        address = local_address(directory)
        key = listen({address: self.socket})
        self.mailbox: Mailbox[Command] = Mailbox(zmq.Context(), Command)
        connect(self.mailbox.socket, address, key)
        self.run(MemoryCheckingExecutor(32, 4))

    def run(self, executor: Executor, vocab_size: int = 1000) -> None:
        """Serve with an engine of this executor."""
        self.engine = _engine(executor, vocab_size)
        self.loop = EngineLoop(self.engine, self.mailbox)

    def send(self, command: Command) -> None:
        self.socket.send(msgspec.msgpack.encode(command))

    def hear(self) -> EngineMessage:
        assert self.socket.poll(WAIT_MILLISECONDS), "the engine said nothing"
        return msgspec.msgpack.decode(self.socket.recv(), type=EngineMessage)

    def report(self) -> StepReport:
        message = self.hear()
        assert isinstance(message, StepReport)
        return message

    def finish(self) -> list[StepReport]:
        """Turn until there is nothing left to do."""
        self.loop.turn()
        reports = [self.report()]
        while self.engine.has_work:
            self.loop.turn()
            reports.append(self.report())
        return reports

    def close(self) -> None:
        self.mailbox.close()
        self._context.destroy(linger=0)


def _engine(executor: Executor, vocab_size: int = 1000) -> Engine:
    scheduler = Scheduler(ChunkedPrefill(64), num_blocks=32, block_size=4, max_model_len=CONTEXT)
    return Engine(scheduler, executor, vocab_size=vocab_size)


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    wire = Wire(tmp_path)
    yield wire
    wire.close()


def _request(**params: object) -> Request:
    return Request("r", (5, 6, 7), SamplingParams(temperature=1, **params), seed=3)  # type: ignore[arg-type]


def test_a_request_comes_back_token_by_token(wire: Wire) -> None:
    request = _request(max_tokens=5, n=2)
    wire.send(Add(request))
    reports = wire.finish()
    updates = [update for report in reports for update in report.updates]
    for index in range(2):
        mine = [update for update in updates if update.index == index]
        tokens = [token for update in mine for token in update.tokens]
        assert tokens == expected_tokens(request, index=index, max_model_len=CONTEXT)[0]
        assert [update.finish_reason is not None for update in mine] == [False] * 4 + [True]
        assert mine[-1].finish_reason is FinishReason.LENGTH
    status = reports[-1].status
    assert (reports[-1].added, status.running, status.waiting) == (1, 0, 0)
    assert status.free_blocks == status.total_blocks == 32


def test_a_stopped_request_gives_its_blocks_back_at_the_next_turn(wire: Wire) -> None:
    wire.send(Add(_request(max_tokens=50)))
    wire.loop.turn()
    assert wire.report().status.running == 1
    wire.send(Stop("r"))
    assert wire.mailbox.socket.poll(WAIT_MILLISECONDS), "it has arrived"
    while wire.engine.has_work:
        wire.loop.turn()
    last = wire.report()
    while wire.socket.poll(100):
        last = wire.report()
    assert last.updates[-1].finish_reason is FinishReason.ABORT
    assert last.status.free_blocks == 32


def test_a_request_that_can_never_run_is_refused_and_the_next_one_runs(wire: Wire) -> None:
    wire.send(Add(Request("bad", (2000,), SamplingParams(), seed=0)))
    wire.loop.turn()
    refused = wire.hear()
    assert (
        isinstance(refused, Failed)
        and refused.request_id == "bad"
        and "token id 2000" in refused.message
    )
    assert wire.report() == StepReport(
        status=EngineStatus(free_blocks=32, total_blocks=32), added=1
    )
    wire.send(Add(_request(max_tokens=2)))
    assert wire.finish()[-1].updates[-1].finish_reason is not None


def test_a_sample_that_ended_before_is_not_run_again(wire: Wire) -> None:
    request = _request(max_tokens=6, n=2)
    whole = [expected_tokens(request, index=index, max_model_len=CONTEXT)[0] for index in range(2)]
    again = replace(request, resumed=(tuple(whole[0]), tuple(whole[1][:2])))
    wire.send(Add(again, finished=(0,)))
    updates = [update for report in wire.finish() for update in report.updates]
    assert [token for update in updates for token in update.tokens] == whole[1][2:]


def test_several_engines_are_served_as_one_is(wire: Wire) -> None:
    dispatcher = Dispatcher(
        [_engine(MemoryCheckingExecutor(32, 4)) for _ in range(2)], wait=lambda until: None
    )
    wire.loop = EngineLoop(dispatcher, wire.mailbox)
    requests = [
        replace(_request(max_tokens=4), request_id=f"r{number}", seed=number) for number in range(3)
    ]
    for request in requests:
        wire.send(Add(request))
    got: dict[str, list[int]] = {request.request_id: [] for request in requests}
    report = StepReport()
    while report.added < 3 or dispatcher.has_work:
        wire.loop.turn()
        while wire.socket.poll(50):
            report = wire.report()
            for update in report.updates:
                got[update.request_id] += update.tokens
    for request in requests:
        assert (
            got[request.request_id] == expected_tokens(request, index=0, max_model_len=CONTEXT)[0]
        )
    assert min(engine.scheduler.steps for engine in dispatcher.engines) > 0
    assert report.status.free_blocks == report.status.total_blocks == 2 * 32


class _Silent(MemoryCheckingExecutor):
    """Nothing becomes known, as long as new workers are being started."""

    def collect(self, until: float | None) -> list[StepResult]:
        assert until is not None, "whoever waits for ever hears no command"
        return []


def test_commands_are_taken_while_no_step_ends(wire: Wire) -> None:
    wire.run(_Silent(32, 4))
    wire.send(Add(_request(max_tokens=50)))
    wire.loop.turn()
    assert wire.report().status.running == 1
    wire.send(Stop("r"))
    while True:
        wire.loop.turn()
        if wire.socket.poll(0):
            (update,) = wire.report().updates
            assert update.finish_reason is FinishReason.ABORT
            return


def test_the_last_word_is_why_the_engine_runs_nothing_any_more(wire: Wire) -> None:
    wire.run(PacedExecutor(32, 4), VOCAB_SIZE)
    wire.send(Add(Request("r", (WORKER_POISON_TOKEN, 3), SamplingParams(), seed=0)))
    wire.loop.run()
    messages = [wire.hear()]
    while not isinstance(messages[-1], Failed):
        messages.append(wire.hear())
    assert messages[-1].message.startswith("the workers died 3 times")
    reports = [message for message in messages if isinstance(message, StepReport)]
    assert not any(report.updates for report in reports), "what ends so is answered with that word"
    assert wire.engine.losses == 2


class _Reloading(MemoryCheckingExecutor):
    """Its workers are restarted until a test says otherwise."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.ready = False


def test_that_workers_are_gone_and_back_is_told_while_there_is_nothing_to_do(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanoserve.server.engine_process.WATCH_SECONDS", 0.0)
    wire.run(executor := _Reloading(32, 4))
    wire.loop.turn()
    assert wire.report().ready is False
    for _ in range(3):
        wire.loop.turn()
    executor.ready = True
    wire.loop.turn()
    assert wire.report().ready is True, "what has not changed is not told again"


def test_the_last_death_is_told_before_the_last_word(wire: Wire) -> None:
    wire.run(DyingExecutor(32, 4, deaths=[1, 3, 5], ran=0.0))
    wire.send(Add(_request(max_tokens=50)))
    wire.loop.run()
    messages = [wire.hear()]
    while not isinstance(messages[-1], Failed):
        messages.append(wire.hear())
    assert isinstance(messages[-2], StepReport) and messages[-2].status.losses == 3
    assert messages[-1].message.startswith("the workers died 3 times within ")


RUBBISH = [
    b"",
    b"\xc1",
    b"hello",
    pickle.dumps({"type": "Add"}),
    msgspec.msgpack.encode({"type": "Add"}),
    msgspec.msgpack.encode({"type": "Nothing"}),
    msgspec.msgpack.encode({"type": "Add", "request": {"request_id": 5}}),
    b"\x91" * 100_000,
    msgspec.msgpack.encode(
        {
            "type": "Add",
            "request": {"request_id": "x", "prompt": [1], "params": {"temperature": -1}, "seed": 0},
        }
    ),
    msgspec.msgpack.encode(
        {
            "type": "EngineFacts",
            "max_model_len": 9,
            "vocab_size": 9,
            "end_tokens": [],
            "default_params": {"n": 0},
            "max_num_seqs": 1,
        }
    ),
]


def test_rubbish_is_dropped_and_counted(wire: Wire) -> None:
    for rubbish in RUBBISH:
        wire.socket.send(rubbish)
    wire.send(Add(_request(max_tokens=2)))
    while not wire.engine.has_work:
        wire.loop.turn()
    last = wire.finish()[-1]
    assert (last.added, last.dropped) == (1, len(RUBBISH))


def test_log_probabilities_are_told_once(wire: Wire) -> None:
    wire.send(Add(_request(max_tokens=3, logprobs=1)))
    for report in wire.finish():
        for update in report.updates:
            assert len(update.logprobs) <= len(update.tokens)


def test_log_probabilities_of_a_prompt_are_told_in_pieces(wire: Wire) -> None:
    request = Request("r", tuple(range(2500)), SamplingParams(prompt_logprobs=1), seed=0)
    sequence = Sequence(0, request, 0, list(request.prompt))
    scored = [TokenLogprob(token, -1.0, 1, ((token, -1.0),)) for token in request.prompt[1:]]
    sequence.prompt_logprobs += scored
    sequence.tokens.append(5)
    for _ in range(2):
        wire.loop._report([SequenceUpdate("r", 0, (5,), sequence)], [])
    updates = [update for _ in range(5) for update in wire.report().updates]
    lengths = [len(update.prompt_logprobs) for update in updates]
    assert lengths == [PROMPT_PIECE, PROMPT_PIECE, 2499 % PROMPT_PIECE, 0, 0]
    decoder: Any = SimpleNamespace(
        special_ids=(), markers=(), vocab_size=9999, is_byte=lambda _token: True
    )
    decoder.decode = lambda ids, **_settings: "".join(map(chr, ids))
    stream = RequestStream(request, decoder, asyncio.Event())
    for update in (*updates[:2], *updates[:3]):  # an engine died, and another began again
        stream.take(update)
    assert stream.whole().prompt_logprobs == (None, *scored)
