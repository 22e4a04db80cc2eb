"""Single situations: admission, forks, prefix sharing within a plan, failures, several plans in
flight."""

import pytest

from nanoserve.engine.engine import Engine
from nanoserve.errors import RuntimeFailure, UsageError
from nanoserve.request import FinishReason, Request, SamplingParams, Sequence, SequenceUpdate
from nanoserve.scheduler.load import Policy
from nanoserve.scheduler.plan import StepPlan
from nanoserve.scheduler.policies.baselines import ChunkedPrefill, PrefillFirst
from nanoserve.scheduler.scheduler import Scheduler
from tests.fakes.integrity import check_integrity
from tests.fakes.memory_checking_executor import MemoryCheckingExecutor
from tests.fakes.reference import expected_tokens

BLOCK_SIZE = 4


def _engine(
    num_blocks: int = 16,
    *,
    depth: int = 1,
    budget: int = 64,
    max_num_seqs: int = 256,
    prefix_caching: bool = True,
) -> Engine:
    scheduler = Scheduler(
        ChunkedPrefill(budget),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=32,
        max_num_seqs=max_num_seqs,
        prefix_caching=prefix_caching,
        pipeline_depth=depth,
    )
    return Engine(
        scheduler, MemoryCheckingExecutor(num_blocks, BLOCK_SIZE, depth=depth), vocab_size=50
    )


def _request(name: str, length: int, **params: object) -> Request:
    return Request(
        name, tuple(range(1, length + 1)), SamplingParams(temperature=0, **params), seed=1
    )


def _finish(engine: Engine) -> list[SequenceUpdate]:
    updates = []
    while engine.has_work:
        updates += engine.step()
        check_integrity(engine.scheduler)
    return updates


def _plans(engine: Engine) -> list[StepPlan]:
    assert isinstance(engine.executor, MemoryCheckingExecutor)
    return engine.executor.plans


def _plans_until(engine: Engine, count: int) -> list[StepPlan]:
    while len(_plans(engine)) < count:
        engine.step()
    return _plans(engine)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Request("r", (), SamplingParams(), seed=0), "prompt is empty"),
        (Request("r", (1,) * 32, SamplingParams(), seed=0), "32 tokens, but the context holds 32"),
        (
            Request("r", (1,) * 30, SamplingParams(min_tokens=3), seed=0),
            "min_tokens 3 can never be reached: .* 30 tokens the context of 32 has room for 2",
        ),
        (
            Request("r", (1, 50), SamplingParams(), seed=0),
            "token id 50 is not in the vocabulary of 50",
        ),
        (Request("r", (1, -1), SamplingParams(), seed=0), "token id -1"),
        (Request("r", (1,), SamplingParams(logit_bias={50: 1}), seed=0), "logit_bias: token id 50"),
        (
            Request("r", (1,), SamplingParams(stop_token_ids=(50,)), seed=0),
            "stop_token_ids: token id 50",
        ),
    ],
)
def test_what_can_never_run_is_refused_at_admission(request_: Request, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        _engine().add(request_)


def test_a_request_that_outgrows_the_whole_cache_is_refused() -> None:
    engine = _engine(num_blocks=4)
    with pytest.raises(
        UsageError, match="may grow to 32 tokens, which take 8 KV blocks, but there are 4"
    ):
        engine.add(_request("r", 10))
    engine.add(_request("r", 10, max_tokens=7))  # 17 tokens, of which the last is never attended to
    assert len(_finish(engine)) == 7
    with pytest.raises(
        UsageError, match="may grow to 17 tokens, which take 5 KV blocks, but there are 4"
    ):
        # a prompt is computed to its end
        engine.add(_request("r", 17, max_tokens=0, prompt_logprobs=0))
    engine.add(_request("r", 16, max_tokens=0, prompt_logprobs=0))
    (update,) = _finish(engine)
    assert (update.new_tokens, update.sequence.finish_reason) == ((), FinishReason.LENGTH)


def test_a_prompt_as_long_as_the_context_allows_gives_one_token() -> None:
    engine = _engine()
    engine.add(_request("r", 31))
    (update,) = _finish(engine)
    assert update.sequence.finish_reason is FinishReason.LENGTH
    assert len(update.new_tokens) == 1


def test_as_many_min_tokens_as_the_context_allows() -> None:
    engine = _engine()
    engine.add(_request("r", 29, min_tokens=3))
    assert len(_finish(engine)) == 3


def test_an_id_in_use_is_refused() -> None:
    engine = _engine()
    engine.add(_request("r", 3))
    with pytest.raises(UsageError, match="'r' is in use"):
        engine.add(_request("r", 3))


def test_two_equal_prompts_that_arrive_together_share_their_blocks_in_one_plan() -> None:
    engine = _engine()
    engine.add(_request("a", 9, max_tokens=1))
    engine.add(_request("b", 9, max_tokens=1))
    _finish(engine)
    first, second = _plans(engine)[0].rows
    assert second.start == 2 * BLOCK_SIZE
    assert second.new_blocks[:2] == first.new_blocks[:2]


def test_a_full_hit_still_computes_one_token() -> None:
    engine = _engine()
    engine.add(_request("a", 8, max_tokens=1))
    _finish(engine)
    engine.add(_request("b", 8, max_tokens=1))
    (update,) = _finish(engine)
    assert update.sequence.cached_tokens == BLOCK_SIZE
    assert _plans(engine)[-1].rows[0].start == BLOCK_SIZE


def test_siblings_share_the_prompt_and_copy_the_block_it_ends_in() -> None:
    engine = _engine()
    request = _request("r", 10, n=3, max_tokens=5)
    engine.add(request)
    updates = _finish(engine)
    assert len(_plans(engine)[1].copies) == 2
    assert [row.start for row in _plans(engine)[1].rows if row.sequence > 0] == [9, 9]
    for index in range(3):
        tokens = [
            token for update in updates if update.index == index for token in update.new_tokens
        ]
        assert tokens == expected_tokens(request, index=index, max_model_len=32)[0]


def test_siblings_wait_for_the_last_chunk_of_the_prompt() -> None:
    engine = _engine(budget=4)
    engine.add(_request("r", 10, n=2, max_tokens=2))
    cached = {update.index: update.sequence.cached_tokens for update in _finish(engine)}
    assert cached == {0: 0, 1: 9}


def test_a_sibling_left_alone_takes_the_last_block_over() -> None:
    engine = _engine(num_blocks=3, max_num_seqs=2, budget=3)
    engine.add(_request("r", 11, n=2, max_tokens=1))
    assert len(_finish(engine)) == 2
    assert not any(plan.copies for plan in _plans(engine))


def test_a_block_taken_over_is_not_found_by_what_its_last_owner_wrote() -> None:
    engine = _engine(num_blocks=4)
    scheduler = engine.scheduler
    parent = Request("parent", (1, 2), SamplingParams(temperature=1, n=2, max_tokens=4), seed=3)
    engine.add(parent)
    engine.step()  # the prompt; now the sibling may start, and would copy block 0
    sibling = next(sequence for sequence in scheduler.running if sequence.index == 1)
    scheduler.running.remove(sibling)  # held back until the parent has filled the block and is gone
    while len(scheduler.running):
        engine.step()
    scheduler.running.add(sibling)
    _finish(engine)
    theirs = expected_tokens(parent, index=0, max_model_len=32)[0]
    assert theirs[:2] != sibling.output_tokens[:2]
    engine.add(Request("same as the parent", (1, 2, *theirs), SamplingParams(max_tokens=1), seed=0))
    _finish(engine)  # the executor notices if it is given the sibling's block


def test_a_parent_given_up_before_its_prompt_is_computed_leaves_its_siblings_to_compute_it() -> (
    None
):
    engine = _engine(budget=4)
    request = _request("r", 10, n=2, max_tokens=3)
    engine.add(request)
    plan = engine.scheduler.schedule(0.0)
    assert plan is not None
    engine.stop("r", index=0)
    engine.executor.submit(plan)
    tokens = [token for update in _finish(engine) for token in update.new_tokens]
    assert tokens == expected_tokens(request, index=1, max_model_len=32)[0]


def test_what_was_taken_from_the_newest_is_not_given_back_to_it_in_the_same_plan() -> None:
    engine = _engine(num_blocks=4, prefix_caching=False)
    engine.add(_request("old", 4, max_tokens=8))
    engine.add(Request("new", (9,) * 12, SamplingParams(temperature=0, max_tokens=2), seed=0))
    assert [len(plan.rows) for plan in _plans_until(engine, 1)] == [2]
    (second,) = _plans_until(engine, 2)[1:]
    assert [row.sequence for row in second.rows] == [0]
    assert second.end == (1,)
    _finish(engine)


def test_a_preemption_takes_no_row_from_those_before() -> None:
    """The first has room in its block, the second needs one and takes it from the third; all get
    their tokens."""
    engine = _engine(num_blocks=3, prefix_caching=False)
    for name, length in (("a", 1), ("b", 3), ("c", 2)):
        engine.add(_request(name, length, max_tokens=3, ignore_eos=True))
    sequences = list(engine.scheduler.table.sequences.values())
    _plans_until(engine, 3)
    prompts, decodes, taken = _plans(engine)
    assert (
        [row.sequence for row in prompts.rows]
        == [row.sequence for row in decodes.rows]
        == [0, 1, 2]
    )
    assert [row.sequence for row in taken.rows] == [0, 1]
    assert (taken.end, engine.scheduler.table.preemptions) == ((2,), 1)
    _finish(engine)
    assert [sequence.output_length for sequence in sequences] == [3, 3, 3]


def test_a_preempted_sequence_keeps_the_times_of_its_first_life() -> None:
    engine = _engine(num_blocks=4, prefix_caching=False)
    engine.add(_request("old", 4, max_tokens=9))
    engine.add(_request("new", 6, max_tokens=5))
    sequence = _finish(engine)[-1].sequence
    assert (sequence.request.request_id, sequence.preemptions) == ("new", 1)
    assert (sequence.first_scheduled_time, sequence.first_token_time) == (0.0, 1.0)


def test_a_victim_in_flight_gives_its_blocks_up_with_its_answer() -> None:
    engine = _engine(num_blocks=4, depth=2, budget=4)
    engine.add(
        Request(
            "old", (1,) * 4, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), seed=0
        )
    )
    engine.add(
        Request(
            "new", (2,) * 4, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), seed=0
        )
    )
    while engine.has_work:
        engine.step()
        check_integrity(engine.scheduler)
    assert engine.scheduler.table.preemptions > 0, "the trace was to run out of blocks"


def test_as_many_plans_as_the_pipeline_is_deep_are_in_flight() -> None:
    engine = _engine(depth=3, budget=4)
    for name in "abc":
        engine.add(
            Request(name, (int(name, 16),) * 4, SamplingParams(temperature=0, max_tokens=3), seed=0)
        )
    engine.step()
    assert [len(plan.rows) for plan in _plans(engine)] == [1, 1, 1]
    _finish(engine)


def test_an_abort_in_flight_keeps_its_blocks_until_the_answer() -> None:
    engine = _engine(depth=2)
    engine.add(_request("r", 8))
    plan = engine.scheduler.schedule(0.0)
    assert plan is not None
    (update,) = engine.stop("r")
    assert update.sequence.finish_reason is FinishReason.ABORT
    assert engine.scheduler.pool.free_blocks == 14
    engine.executor.submit(plan)
    assert _finish(engine) == []
    assert engine.scheduler.pool.free_blocks == 16


class _FailsOnce(MemoryCheckingExecutor):
    """Runs out of memory in its second plan."""

    def submit(self, plan: StepPlan) -> None:
        if plan.step == 1:
            self._begin_only(plan)
            raise RuntimeFailure("out of memory")
        super().submit(plan)

    def _begin_only(self, plan: StepPlan) -> None:
        self._run(StepPlan(plan.step, begin=plan.begin, end=plan.end))


def test_a_failed_step_ends_its_own_sequences_and_caches_nothing() -> None:
    engine = Engine(_engine(budget=8).scheduler, _FailsOnce(16, BLOCK_SIZE), vocab_size=50)
    for name in ("fails", "waits"):
        # two chunks each; the second of the first fails
        engine.add(_request(name, 16, max_tokens=2))
    updates = _finish(engine)
    assert [update.request_id for update in updates] == ["fails", "waits", "waits"]
    failed = updates[0].sequence
    assert (failed.finish_reason, failed.error) == (FinishReason.ERROR, "out of memory")
    assert updates[-1].sequence.cached_tokens == 0
    assert engine.scheduler.pool.free_blocks == 16


@pytest.mark.parametrize(("num_blocks", "begun"), [(6, 2), (7, 3)])
def test_a_new_prompt_is_admitted_when_it_leaves_each_decode_a_block_to_grow_into(
    num_blocks: int, begun: int
) -> None:
    engine = _engine(num_blocks, prefix_caching=False)
    for name, length in (("first", 4), ("second", 4)):
        engine.add(_request(name, length, max_tokens=4, ignore_eos=True))
    engine.step()
    # beside two decodes with two blocks each
    engine.add(_request("late", 4, max_tokens=4, ignore_eos=True))
    engine.step()
    assert len([entry for plan in _plans(engine) for entry in plan.begin]) == begun
    _finish(engine)
    assert engine.scheduler.table.preemptions == 0


def test_no_policy_is_told_of_a_prompt_that_may_not_begin_before_an_owed_decode() -> None:
    """Prefill-first waits for no decode while a prompt fits: if that prompt were refused, nothing
    would move."""
    scheduler = Scheduler(
        PrefillFirst(64),
        num_blocks=5,
        block_size=2,
        max_model_len=10,
        prefix_caching=False,
        pipeline_depth=2,
    )
    engine = Engine(scheduler, MemoryCheckingExecutor(5, 2, depth=2), vocab_size=50)
    prompts = [("a", 1, 5), ("b", 3, 4), ("c", 4, 1)]
    for number, (name, length, max_tokens) in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        engine.add(Request(name, (number,) * length, params, seed=0))
        if number == 0:
            engine.step()
    _finish(engine)
    assert scheduler.forced_steps == 0


@pytest.mark.parametrize("policy", [ChunkedPrefill, PrefillFirst])
def test_without_the_admission_reserve_a_prompt_takes_the_block_that_a_decode_grows_into(
    policy: type[Policy],
) -> None:
    def preemptions(*, admission_reserve: bool) -> int:
        scheduler = Scheduler(
            policy(64, admission_reserve=admission_reserve),  # type: ignore[call-arg]
            num_blocks=4,
            block_size=BLOCK_SIZE,
            max_model_len=32,
            prefix_caching=False,
        )
        engine = Engine(scheduler, MemoryCheckingExecutor(4, BLOCK_SIZE), vocab_size=50)
        for name in "ab":  # each has two blocks of prompt, and four at last
            engine.add(_request(name, 7, max_tokens=9, ignore_eos=True))
            engine.step()
        _finish(engine)
        return scheduler.table.preemptions

    assert preemptions(admission_reserve=True) == 0
    assert preemptions(admission_reserve=False) == 1


def _begins_by_plan(requests: list[Request]) -> list[int]:
    """How many sequences begin with each plan in which any does."""
    engine = _engine(1024, budget=512)
    for request in requests:
        engine.add(request)
    _finish(engine)
    return [len(plan.begin) for plan in _plans(engine) if plan.begin]


BIAS = dict.fromkeys(range(2, 8), 1.0)


@pytest.mark.parametrize(
    ("length", "params", "most"),
    [
        (4, {"logit_bias": BIAS, "stop_token_ids": (40, 41)}, 32 // 8),
        (8, {"frequency_penalty": 1.0}, 32 // 8),
        (8, {"logit_bias": BIAS, "repetition_penalty": 2.0}, 32 // 14),
        (20, {"logit_bias": BIAS, "presence_penalty": 1.0}, 1),
        # lists more than a plan may, but one always begins
        (31, {"logit_bias": BIAS, "presence_penalty": 1.0}, 1),
    ],
)
def test_the_tables_of_many_samples_are_made_some_a_plan(
    monkeypatch: pytest.MonkeyPatch, length: int, params: dict[str, object], most: int
) -> None:
    monkeypatch.setattr("nanoserve.scheduler.plan_builder.MOST_LISTED", 32)
    begun = _begins_by_plan(
        [_request(f"r{number}", length, n=8, max_tokens=1, **params) for number in range(5)]
    )
    assert sum(begun) == 40 and max(begun) == most


def test_samples_that_list_nothing_begin_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoserve.scheduler.plan_builder.MOST_LISTED", 32)
    assert _begins_by_plan(
        [_request(f"r{number}", 4, n=16, max_tokens=1) for number in range(8)]
    ) == [8, 120]


def test_only_an_answer_that_fills_a_block_costs_the_prefix_cache_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks of a prompt of 5 and an answer of 9: the chunk of the prompt fills one block of 4, and
    answers fill two more."""
    shared = list[int]()

    def share_full(sequence: Sequence, computed: int) -> None:
        shared.append(computed)
        plainly(sequence, computed)

    engine = _engine()
    plainly = engine.scheduler.table.blocks.share_full
    monkeypatch.setattr(engine.scheduler.table.blocks, "share_full", share_full)
    engine.add(_request("r", 5, max_tokens=9, ignore_eos=True))
    _finish(engine)
    assert shared == [5, 8, 12]
