"""Every word between the engine and its workers comes out as it went in."""

from pathlib import Path

import msgspec
import pytest

from nanoserve.costs.hardware import MachineSpeeds
from nanoserve.engine_config import EngineConfig
from nanoserve.executor.workers.messages import (
    Allocate,
    Answered,
    Follow,
    ForgetHost,
    FromWorker,
    Hello,
    HostLost,
    Loaded,
    Loading,
    Moved,
    Prepare,
    Prepared,
    Ready,
    Rejoin,
    RunPlan,
    StepObserved,
    ToWorker,
    WorkerFailed,
    WorkerStart,
    worker_decoder,
)
from nanoserve.models.hub import ResolvedModel
from nanoserve.record.times import ReshardTimes, StageTimes, SwapTimes
from nanoserve.request import SamplingParams, TokenLogprob
from nanoserve.scheduler.optional import HostPlan, Swap
from nanoserve.scheduler.plan import Answer, Begin, Copy, Row, StepPlan, StepResult

PARAMS = SamplingParams(
    n=2, logit_bias={7: -1.5}, stop=("end",), stop_token_ids=(3,), seed=5, json_schema="{}"
)
PLAN = StepPlan(
    3,
    begin=(Begin(8, (1, 2, 3), 2, 1, 2**63 - 1, PARAMS, (0, 1)),),
    rows=(Row(8, 0, (1, 2, 3), True, (4, 5)), Row(9, 12, (6,), False)),
    copies=(Copy(4, 5),),
    host=HostPlan(swaps=(Swap(2, 6, "in", (9, 3), (70, 2)),)),
    end=(7,),
)
LOGPROB = TokenLogprob(6, -0.5, 1, ((6, -0.5), (7, -1.0)))
RESULT = StepResult(3, (Answer(8, (6,), (LOGPROB,)), Answer(9, error="no")), seconds=0.25)
SPEEDS = MachineSpeeds(memory_bandwidth=1e10, flops=2e11, host_link_bandwidth=5e9)
START = WorkerStart(
    rank=1,
    local_rank=0,
    plans="ipc:///tmp/a\nb",
    reports="tcp://host:1",
    engine_key="k" * 40,
    init_method="env://",
    model=ResolvedModel("storyteller", None, Path("/models/ü")),
    config=EngineConfig(pipeline_parallel=2, pipeline_split=(3, 1), seed=4),
    coupled=True,
)
TO_WORKER = [Allocate((17, 12)), Rejoin(START), Prepare(), RunPlan(PLAN), Follow(), ForgetHost()]
FROM_WORKER = [
    Hello(1),
    Loading(1, "load", 3, 5),
    Loaded(
        1,
        "host cpu",
        (4096, 4096),
        2**40,
        MachineSpeeds(memory_bandwidth=1e10, flops=2e11, host_link_bandwidth=5e9),
    ),
    Ready(1),
    Prepared(1, compiled=True),
    WorkerFailed(1, "out of memory", 4),
    Answered(RESULT),
    StepObserved(StageTimes(3, 1, 4, *(0.5 * moment for moment in range(6)))),
    Moved(ReshardTimes(3, 1, 1, 2**34, 0.5, 2.5)),
    HostLost(1, "it hangs", 2),
]


@pytest.mark.parametrize("message", TO_WORKER, ids=lambda message: type(message).__name__)
def test_what_a_worker_is_told(message: ToWorker) -> None:
    line = msgspec.msgpack.encode(message, enc_hook=str)
    assert worker_decoder().decode(line) == message


@pytest.mark.parametrize("message", FROM_WORKER, ids=lambda message: type(message).__name__)
def test_what_a_worker_says(message: FromWorker) -> None:
    assert msgspec.msgpack.Decoder(FromWorker).decode(msgspec.msgpack.encode(message)) == message


def test_no_word_is_left_out_here() -> None:
    assert {type(message) for message in TO_WORKER} == set(ToWorker.__args__)
    assert {type(message) for message in FROM_WORKER} == set(FromWorker.__args__)


def test_what_moved_may_be_a_swap() -> None:
    moved = Moved(SwapTimes(17, 1, "out", 4096, 0.5, 0.75))
    assert msgspec.msgpack.Decoder(FromWorker).decode(msgspec.msgpack.encode(moved)) == moved


def test_the_first_line_is_one_line() -> None:
    line = START.line()
    assert b"\n" not in line
    assert WorkerStart.read(line) == START


def test_a_decode_costs_a_plan_few_bytes() -> None:
    """Every worker gets every row of every step, and answers it."""
    rows = tuple(Row(1000 + number, 600 + number, (100_000,), True) for number in range(24))
    assert len(msgspec.msgpack.encode(RunPlan(StepPlan(3, rows=rows, decodes=24)))) < 24 * 27 + 60
    answers = tuple(Answer(row.sequence, (100_000,)) for row in rows)
    assert len(msgspec.msgpack.encode(Answered(StepResult(3, answers)))) < 24 * 16 + 60
