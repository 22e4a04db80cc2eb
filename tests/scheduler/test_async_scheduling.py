"""Decodes in two plans in flight: planned before their token is known, and taken back where it
ended them."""

import pytest

from nanoserve.engine.engine import Engine
from nanoserve.errors import RuntimeFailure
from nanoserve.request import FinishReason, Request, SamplingParams, SequenceUpdate
from nanoserve.scheduler.assembly import make_extensions
from nanoserve.scheduler.load import Decision
from nanoserve.scheduler.optional import HostDecision, LayoutCapacity
from nanoserve.scheduler.plan import Answer, Row, StepPlan, StepResult
from nanoserve.scheduler.policies.baselines import ChunkedPrefill
from nanoserve.scheduler.scheduler import Scheduler
from tests.fakes.integrity import check_integrity
from tests.fakes.memory_checking_executor import MemoryCheckingExecutor
from tests.scheduler.golden import Prompt, play
from tests.scheduler.tiered import Remote

BLOCK_SIZE = 2
END = 0


def make_engine(num_blocks: int = 16, *, budget: int = 64, end_at: int | None = None) -> Engine:
    """Answers ``100 + position``, and at position ``end_at`` the end token."""
    scheduler = Scheduler(
        ChunkedPrefill(budget),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=20,
        async_scheduling=True,
    )
    executor = MemoryCheckingExecutor(
        num_blocks,
        BLOCK_SIZE,
        async_scheduling=True,
        model=lambda prefix, begin: END if len(prefix) == end_at else 100 + len(prefix),
    )
    return Engine(scheduler, executor, vocab_size=200)


def request(name: str, *tokens: int, **params: object) -> Request:
    return Request(name, tokens, SamplingParams(temperature=0, **params), seed=0, end_tokens=(END,))


def plans_of(engine: Engine) -> list[StepPlan]:
    assert isinstance(engine.executor, MemoryCheckingExecutor)
    return engine.executor.plans


def rows_of(engine: Engine, sequence: int = 0) -> list[Row]:
    return [row for plan in plans_of(engine) for row in plan.rows if row.sequence == sequence]


def finish(engine: Engine) -> list[SequenceUpdate]:
    updates = []
    while engine.has_work:
        updates += engine.step()
        check_integrity(engine.scheduler)
    return updates


def step_until_two_are_in_flight(engine: Engine) -> None:
    """Sequence 0 has a row in each of two plans in flight, and one answer is still to come before
    either."""
    sequence = engine.scheduler.table.sequences[0]
    while len(sequence.in_flight) < 2:
        for plan in iter(lambda: engine.scheduler.schedule(0.0), None):
            engine.executor.submit(plan)
        if len(sequence.in_flight) < 2:
            for result in engine.executor.collect(None):
                engine.scheduler.apply(result, 0.0)


# ----------------------------------------------------------------------------------------------
# worked out by hand


def test_decodes_enter_the_next_plan_while_their_token_is_sampled() -> None:
    requests = [Prompt((1, 2, 3), 6), Prompt((4, 5), 3, at=1), Prompt((6,) * 9, 2, at=2)]
    assert play(ChunkedPrefill(8), requests, num_blocks=12, async_scheduling=True) == [
        "step 0: begin 0",
        "  0 at 0: 1 2 3 +[0, 1] *",
        "step 1: begin 1",
        "  0 at 3: 103 *",
        "  1 at 0: 4 5 +[2] *",
        "step 2:",  # step 1 is in flight: sequence 0 waits for 104, and 1 for its first token
        "  0 at 4: placeholder +[3] *",
        "step 3: begin 2",  # step 2 is in flight
        "  0 at 5: placeholder *",
        "  1 at 2: 102 +[4] *",
        "  2 at 0: 6 6 6 6 6 6 +[5, 6, 7]",
        "step 4:",  # step 3 is in flight, and with it the chunk before this one
        "  0 at 6: placeholder +[8] *",
        "  1 at 3: placeholder *",
        "  2 at 6: 6 6 6 +[9, 10] *",
        "step 5:",  # step 4 is in flight, with the last token of sequence 1 and the first of 2
        "  0 at 7: placeholder *",
        "step 6: end 1",  # step 5 is in flight, with the last token of sequence 0
        "  2 at 9: 109 *",
    ]


def test_a_victim_in_flight_is_not_planned_ahead_and_gives_way_with_its_answer() -> None:
    assert play(
        ChunkedPrefill(8),
        [Prompt((1, 2), 7), Prompt((3, 4), 6)],
        num_blocks=4,
        async_scheduling=True,
    ) == [
        "step 0: begin 0 begin 1",
        "  0 at 0: 1 2 +[0] *",
        "  1 at 0: 3 4 +[1] *",
        "step 1:",
        "  0 at 2: 102 +[2] *",
        "  1 at 2: 102 +[3] *",
        "step 2:",
        "  0 at 3: placeholder *",
        "  1 at 3: placeholder *",
        # planned when step 2 has ended: 0 needed a block, and 1 was in flight with it
        "step 3: end 1",
        "  0 at 4: 104 +[3] *",
        "step 4:",
        "  0 at 5: placeholder *",
        "step 5:",
        "  0 at 6: placeholder +[1] *",
        "step 6:",
        "  0 at 7: placeholder *",
        "step 7: end 0 begin 1",
        "  1 at 0: 3 4 102 103 104 +[1, 3, 2] *",
        "step 8:",
        "  1 at 5: 105 *",
        "step 9:",
        "  1 at 6: placeholder +[0] *",
    ]


def test_a_prompt_whose_chunk_is_in_flight_gives_way_before_its_next_one() -> None:
    prompts = [Prompt((1,), 6), Prompt((2,) * 4, 2, at=1)]
    plans = play(ChunkedPrefill(2), prompts, num_blocks=4, async_scheduling=True)
    assert plans[plans.index("step 3:") :][:5] == [
        "step 3:",
        "  0 at 3: placeholder *",
        "  1 at 2: 2 +[3]",
        # planned when step 3 has ended: 0 needed a block, and 1 had room for its last token
        "step 4: end 1",
        "  0 at 4: 104 +[3] *",
    ]


def test_a_long_prompt_has_a_chunk_in_every_plan_and_comes_before_a_later_one() -> None:
    engine = make_engine(budget=4)
    for name, token in (("first", 7), ("second", 8)):
        engine.add(request(name, *[token] * 12, max_tokens=2))
    finish(engine)
    rows = [
        [(row.sequence, row.start, len(row.tokens)) for row in plan.rows]
        for plan in plans_of(engine)
    ]
    assert rows[:4] == [[(0, 0, 4)], [(0, 4, 4)], [(0, 8, 4)], [(1, 0, 4)]]


def test_an_abort_with_two_chunks_in_flight_keeps_the_blocks_until_both_have_ended() -> None:
    engine = make_engine(budget=4)
    engine.add(request("r", *[7] * 16))
    engine.step()
    for plan in iter(lambda: engine.scheduler.schedule(0.0), None):
        engine.executor.submit(plan)
    (sequence,) = engine.scheduler.running
    assert len(sequence.in_flight) == 2
    engine.stop("r")
    for left in (1, 0):
        assert engine.scheduler.pool.free_blocks == 16 - 6
        assert engine.step() == []
        assert len(sequence.in_flight) == left
        check_integrity(engine.scheduler)
    assert engine.scheduler.pool.free_blocks == 16


def test_an_error_in_the_first_of_two_chunks_ends_the_prompt_once() -> None:
    engine = make_engine(budget=4)
    engine.add(request("r", *[7] * 16))
    engine.step()
    for plan in iter(lambda: engine.scheduler.schedule(0.0), None):
        engine.executor.submit(plan)
    first, second = plans_of(engine)[-2:]
    (update,) = engine.scheduler.apply(
        StepResult(first.step, (Answer(0, error="not numbers"),)), 1.0
    )
    assert update.sequence.finish_reason is FinishReason.ERROR
    check_integrity(engine.scheduler)
    assert engine.scheduler.apply(StepResult(second.step), 2.0) == []
    assert engine.scheduler.pool.free_blocks == 16
    assert not engine.has_work


def test_a_prompt_that_is_scored_has_one_chunk_in_flight() -> None:
    engine = make_engine(budget=4)
    engine.add(request("r", *[7] * 12, max_tokens=2, prompt_logprobs=0))
    plan = engine.scheduler.schedule(0.0)
    assert plan is not None and len(plan.rows[0].tokens) == 4
    assert engine.scheduler.schedule(0.0) is None


# --------------------------------------------------------------------------------------------------
# how it may end


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, None])
def test_nothing_is_planned_beyond_the_length_limit(max_tokens: int | None) -> None:
    engine = make_engine()
    engine.add(request("r", 1, 2, 3, max_tokens=max_tokens))
    tokens = [token for update in finish(engine) for token in update.new_tokens]
    assert len(rows_of(engine)) == len(tokens) == (max_tokens or 17)
    assert sum(row.placeholder for row in rows_of(engine)) == max(0, len(tokens) - 2)


def test_what_comes_behind_a_stop_token_is_never_seen_and_never_shared() -> None:
    engine = make_engine(end_at=7)
    engine.add(request("r", 1, 2, 3))
    updates = finish(engine)
    assert [token for update in updates for token in update.new_tokens] == [103, 104, 105, 106, END]
    assert updates[-1].sequence.finish_reason is FinishReason.STOP
    (*_, last) = rows_of(engine)
    assert (last.placeholder, last.start) == (True, 7), (
        "the row behind the end token was planned before it was known"
    )
    assert engine.scheduler.pool.free_blocks == 16
    # Positions 0 to 5 fill three blocks; 6 and 7 fill one with the end token, which nobody may
    # find.
    assert len(engine.scheduler.pool.match((1, 2, 3, 103, 104, 105, 106, END, 9), "")) == 3


def test_blocks_in_flight_come_back_with_the_last_answer() -> None:
    engine = make_engine()
    engine.add(request("r", 1, 2, 3))
    step_until_two_are_in_flight(engine)
    free, sequence = engine.scheduler.pool.free_blocks, engine.scheduler.running.first
    (update,) = engine.stop("r")
    assert update.sequence.finish_reason is FinishReason.ABORT
    for left in (1, 0):
        assert engine.scheduler.pool.free_blocks == free < 16
        assert engine.step() == []
        assert sequence is not None and len(sequence.in_flight) == left
        check_integrity(engine.scheduler)
    assert engine.scheduler.pool.free_blocks == 16
    assert not engine.has_work


@pytest.mark.parametrize("step", range(1, 8))
def test_a_stop_string_at_any_step_ends_a_sequence_and_harms_no_other(step: int) -> None:
    engine = make_engine()
    engine.add(request("stops", 1, 2, 3, max_tokens=12))
    engine.add(request("goes on", 1, 2, 4, max_tokens=12))
    updates = [update for _ in range(step) for update in engine.step()]
    updates += engine.stop("stops", reason=FinishReason.STOP)
    updates += finish(engine)
    by_name = {
        name: [
            token for update in updates if update.request_id == name for token in update.new_tokens
        ]
        for name in ("stops", "goes on")
    }
    assert by_name["goes on"] == list(range(103, 115))
    assert by_name["stops"] == list(range(103, 103 + len(by_name["stops"])))
    assert engine.scheduler.pool.free_blocks == 16


def test_an_error_ends_a_sequence_whatever_its_fed_row_says() -> None:
    engine = make_engine()
    engine.add(request("r", 1, 2, 3))
    step_until_two_are_in_flight(engine)
    first, second = plans_of(engine)[-2:]
    (update,) = engine.scheduler.apply(
        StepResult(first.step, (Answer(0, error="not numbers"),)), 1.0
    )
    assert (update.sequence.finish_reason, update.sequence.error) == (
        FinishReason.ERROR,
        "not numbers",
    )
    check_integrity(engine.scheduler)
    assert engine.scheduler.apply(StepResult(second.step, (Answer(0, (5,)),)), 2.0) == []
    assert engine.scheduler.pool.free_blocks == 16
    assert not engine.has_work


def test_a_failure_ends_everything_in_flight_once() -> None:
    engine = make_engine()
    engine.add(request("r", 1, 2, 3))
    step_until_two_are_in_flight(engine)

    def fail(until: float | None) -> list[StepResult]:
        raise RuntimeFailure("out of memory")

    engine.executor.collect = fail  # type: ignore[method-assign]
    (update,) = engine.step()
    assert (update.sequence.finish_reason, update.sequence.error) == (
        FinishReason.ERROR,
        "out of memory",
    )
    assert not engine.has_work
    assert engine.scheduler.pool.free_blocks == 16


# -------------------------------------------------------------------------------------------------
# without placeholders


@pytest.mark.parametrize(
    "params",
    [
        {"json_schema": "{}"},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"min_tokens": 1},
        {"logit_bias": {5: 1.0}},
        {"prompt_logprobs": 0},
    ],
    ids=str,
)
def test_what_the_host_must_see_first_is_never_fed(params: dict[str, object]) -> None:
    assert not SamplingParams(**params).allows_async_scheduling
    if "json_schema" in params or "prompt_logprobs" in params:
        return  # of which the fake executor knows nothing
    engine = make_engine()
    engine.add(request("r", 1, 2, 3, max_tokens=6, **params))
    finish(engine)
    assert len(rows_of(engine)) == 6
    assert not any(row.placeholder for row in rows_of(engine))


def test_samples_with_temperature_and_logprobs_are_fed() -> None:
    assert SamplingParams(
        temperature=1.0, top_k=5, top_p=0.5, min_p=0.1, logprobs=3, stop=("x",), n=4
    ).allows_async_scheduling


def test_decodes_that_cannot_be_fed_run_in_every_other_plan() -> None:
    engine = make_engine()
    engine.add(request("asynchronous", 1, 2, 3, max_tokens=9))
    engine.add(request("synchronous", 4, 5, 6, max_tokens=5, presence_penalty=1.0))
    finish(engine)
    assert [[row.sequence for row in plan.rows] for plan in plans_of(engine)[:6]] == [
        [0, 1],
        [0, 1],
        [0],
        [0, 1],
        [0],
        [0, 1],
    ]


# --------------------------------------------------------------------------------------------------
# with two tiers


def two_tiers(decision: Decision, num_blocks: int) -> tuple[Engine, Remote]:
    policy = Remote(decision)
    scheduler = Scheduler(
        policy,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=20,
        extensions=make_extensions(host_blocks=16),
        async_scheduling=True,
    )
    executor = MemoryCheckingExecutor(
        num_blocks,
        BLOCK_SIZE,
        host_blocks=16,
        async_scheduling=True,
        model=lambda prefix, begin: 100 + len(prefix),
    )
    return Engine(scheduler, executor, vocab_size=200), policy


def test_a_decode_that_is_to_move_to_the_host_is_not_fed_until_it_can() -> None:
    engine, policy = two_tiers(Decision(64, 64), num_blocks=16)
    for name in ("stays", "moves"):
        engine.add(request(name, 1, 2, 3, max_tokens=12))
    step_until_two_are_in_flight(engine)
    engine.step()  # one plan is in flight, with both
    policy.decision = Decision(64, 64, host=HostDecision(swap_out=1))
    before = len(plans_of(engine))
    engine.step()
    engine.step()
    policy.decision = Decision(64, 64, host=HostDecision(swap_in=1))
    assert [row.sequence for row in plans_of(engine)[before].rows] == [0]
    assert [
        swap.sequence for plan in plans_of(engine)[before : before + 2] for swap in plan.host.swaps
    ] == [1]
    finish(engine)


def test_a_victim_that_may_move_to_the_host_stays_out_of_the_plan_for_which_it_gives_way() -> None:
    engine, _ = two_tiers(
        Decision(64, 64, host=HostDecision(preempt=True, swap_in=1)), num_blocks=5
    )
    for name, tokens in (("old", (1, 2)), ("new", (3, 4, 5))):
        engine.add(request(name, *tokens, max_tokens=6))
    finish(engine)
    assert engine.scheduler.table.preemptions == 0
    moves = [
        plan.step
        for plan in plans_of(engine)
        for swap in plan.host.swaps
        if swap.direction == "out"
    ]
    before = [
        row.start
        for plan in plans_of(engine)
        if plan.step < moves[0]
        for row in plan.rows
        if row.sequence == 1
    ]
    assert before == [0, 3, 4]  # it had room for 5, but the old one had none for 4


# --------------------------------------------------------------------------------------------------
# agreement


def test_tokens_are_fed_within_one_stage() -> None:
    for depths in (
        {"pipeline_depth": 2},
        {"extensions": make_extensions(other_layouts=[LayoutCapacity(4, 2)])},
    ):
        with pytest.raises(ValueError, match="pipeline_depth must be 1"):
            Scheduler(
                ChunkedPrefill(8),
                num_blocks=4,
                block_size=2,
                max_model_len=8,
                async_scheduling=True,
                **depths,
            )


def test_an_executor_that_takes_no_fed_rows_gets_none() -> None:
    scheduler = Scheduler(
        ChunkedPrefill(8), num_blocks=4, block_size=2, max_model_len=8, async_scheduling=True
    )
    with pytest.raises(ValueError, match="the executor does not"):
        Engine(scheduler, MemoryCheckingExecutor(4, 2), vocab_size=50)


def test_a_policy_is_told_that_what_may_be_fed_is_ready() -> None:
    remote = Remote(Decision(64, 64))
    scheduler = Scheduler(
        remote, num_blocks=16, block_size=BLOCK_SIZE, max_model_len=20, async_scheduling=True
    )
    engine = Engine(
        scheduler, MemoryCheckingExecutor(16, BLOCK_SIZE, async_scheduling=True), vocab_size=50
    )
    for name, params in (("a", {}), ("b", {"min_tokens": 1})):
        engine.add(request(name, 1, 2, 3, max_tokens=9, ignore_eos=True, **params))
    step_until_two_are_in_flight(engine)
    load = remote.loads[-1]
    assert (
        load.running_decodes,
        load.ready_decodes,
        load.steps_in_flight,
        load.pipeline_depth,
    ) == (2, 1, 1, 1)
    assert load.context_tokens == 8
