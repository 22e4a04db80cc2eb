"""Draft tokens on the scheduler's floor: whatever is drafted, every request gets the tokens of
plain decoding."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.engine.engine import Engine
from nanoserve.request import Placeholders, Request, SamplingParams, Status
from nanoserve.request import Sequence as Sequence_
from nanoserve.scheduler import Decision, Load, Policy, make_policy
from nanoserve.scheduler.assembly import make_extensions
from nanoserve.scheduler.optional import DraftRow, draft_of
from nanoserve.scheduler.plan import Begin, Row
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.scheduler.speculation.draft_lengths import (
    COUNTS,
    Acceptance,
    choose_counts,
    expected_tokens,
)
from nanoserve.scheduler.speculation.draft_proposer import DraftProposer
from nanoserve.scheduler.speculation.ngram import NgramIndex
from nanoserve.scheduler.work import StepWork, work_of
from tests.fakes.dying_executor import DyingExecutor
from tests.fakes.integrity import host_pool
from tests.fakes.linear_predictor import LinearPredictor
from tests.fakes.memory_checking_executor import MemoryCheckingExecutor
from tests.scheduler.drafters import DRAFTERS, errs, knows
from tests.scheduler.lives import WINDOWS, check_outputs, live, lives


@pytest.mark.parametrize("policy", ["sarathi", "throttling", "adaptive"])
@pytest.mark.parametrize("name", DRAFTERS)
@settings(max_examples=40, deadline=None)
@given(
    life=lives(WINDOWS),
    predictors=st.sampled_from([(), (LinearPredictor(),)]),
    host_blocks=st.sampled_from([0, 0, 3, 9]),
    deaths=st.sampled_from([(), (), (9,), (5, 6, 30)]),
)
def test_draft_tokens_change_no_answer(
    policy: str, name: str, life: dict, predictors: tuple, host_blocks: int, deaths: tuple[int, ...]
) -> None:
    """Beside preemption by swaps, too, and where workers die."""
    drafter, depth = DRAFTERS[name], life["depth"]
    proposer = DraftProposer(
        looks_up=name == "ngram",
        token_budget=life["token_budget"] + 8,
        async_scheduling=life["async_scheduling"],
    )
    executor = DyingExecutor(
        life["num_blocks"],
        life["block_size"],
        depth=depth,
        async_scheduling=life["async_scheduling"],
        host_blocks=host_blocks,
        deaths=deaths,
        windows=life["windows"],
        drafter=drafter,
    )
    scheduler = Scheduler(
        make_policy(policy, life["token_budget"], swaps=host_blocks > 0),
        num_blocks=life["num_blocks"],
        block_size=life["block_size"],
        max_model_len=life["max_model_len"],
        max_num_seqs=life["max_num_seqs"],
        prefix_caching=life["prefix_caching"],
        pipeline_depth=depth,
        extensions=make_extensions(host_blocks=host_blocks, proposer=proposer),
        async_scheduling=life["async_scheduling"],
        predictors=predictors,
        windows=life["windows"],
    )
    engine = Engine(scheduler, executor, vocab_size=50)
    outputs, reasons = live(engine, life["arrivals"])

    check_outputs(life["arrivals"], life["max_model_len"], outputs, reasons)
    assert scheduler.pool.free_blocks == life["num_blocks"]
    assert host_pool(scheduler).free_blocks == host_blocks
    assert not proposer._records
    if name == "knows":
        assert sum(proposer.counts.accepted) == proposer.counts.draft_tokens
    if name == "errs":
        assert sum(proposer.counts.accepted) == 0


def test_a_row_with_draft_tokens_is_one_decode_that_samples_every_position() -> None:
    rows = [
        Row(1, 9, (4, 5, 6), True, draft=DraftRow(verify=2)),
        Row(2, 7, (4,), True),
        Row(3, 0, (1, 2), False),
    ]
    assert work_of(rows) == StepWork(
        decodes=2, decode_context=12 + 8, chunks=((0, 2),), sampled=4, draft_tokens=2
    )
    assert work_of(rows).tokens == 6


def test_a_match_of_three_tokens_is_continued_and_what_repeats_goes_on() -> None:
    index = NgramIndex()
    assert index.propose([1, 2, 3, 4, 5, 1, 2], 4) == ()
    assert index.propose([1, 2, 3, 4, 5, 1, 2, 3], 4) == (4, 5, 1, 2)
    assert index.propose([1, 2, 3, 4, 5, 1, 2, 3, 9], 4) == ()
    assert index.propose([1, 2, 3, 4, 5, 1, 2, 3, 9, 1, 2, 3], 2) == (9, 1)  # the latest one counts
    assert NgramIndex().propose([7, 7, 7, 7], 5) == (7, 7, 7, 7, 7)


def test_expected_tokens_are_those_of_the_lecture_and_of_the_paper() -> None:
    assert expected_tokens(0.8, 4) == pytest.approx(sum(0.8**count for count in range(5)))
    assert (expected_tokens(0.0, 7), expected_tokens(1.0, 7)) == (1.0, 8.0)


@settings(max_examples=60, deadline=None)
@given(
    rates=st.lists(st.sampled_from([0.0, 0.3, 0.6, 0.9]), min_size=1, max_size=3),
    most=st.sampled_from([0, 1, 3, 7]),
    slope=st.sampled_from([0.0, 0.05, 0.2, 1.0]),
    each=st.sampled_from([0.0, 0.1]),
    budget=st.sampled_from([1, 4, 100]),
    prompts=st.sampled_from([0, 0, 5, 50]),
)
def test_no_other_counts_are_predicted_faster(
    rates: list[float], most: int, slope: float, each: float, budget: int, prompts: int
) -> None:
    def seconds(draft_tokens: int, longest: int) -> float:
        return 1.0 + slope * draft_tokens + each * longest

    def tokens_per_second(counts: Sequence[int]) -> float:
        expected = sum(
            expected_tokens(rate, count) for rate, count in zip(rates, counts, strict=True)
        )
        return (expected + prompts) / seconds(sum(counts), max(counts))

    chosen = choose_counts(rates, [most] * len(rates), seconds, budget, prompts)
    assert sum(chosen) <= budget
    assert max(chosen) <= most
    # else the likeliest draft tokens first is a good way, and perhaps not the best
    if each == 0.0 and budget == 100:
        allowed = [count for count in COUNTS if count <= most]
        best = max(map(tokens_per_second, product(allowed, repeat=len(rates))))
        assert tokens_per_second(chosen) >= best / 1.02 - 1e-9


def test_what_follows_the_first_wrong_draft_token_tells_nothing() -> None:
    acceptance = Acceptance(0.0, 0.0)
    acceptance.learn(7, 0)
    assert (acceptance.accepted, acceptance.tried) == (0, 1)
    acceptance.learn(3, 3)
    assert (acceptance.accepted, acceptance.tried) == (3, 3.9)
    assert acceptance.rate(0.5) == pytest.approx(4 / 5.9)


def _alone(*, looks_up: bool, tokens: Sequence[int] = (1, 2)) -> tuple[DraftProposer, Sequence_]:
    request = Request("r", (1,), SamplingParams(max_tokens=5000), seed=0)
    sequence = Sequence_(1, request, 0, [*tokens], max_length=5001)
    sequence.status = Status.DECODE
    return DraftProposer(looks_up=looks_up, token_budget=64), sequence


def _plan(proposer: DraftProposer, sequence: Sequence_, row: float) -> tuple[tuple[int, ...], int]:
    if proposer.rests():
        return (), 0
    work = StepWork.of([len(sequence.tokens)])
    ((draft_tokens, draft),) = proposer.choose([sequence], lambda: work, LinearPredictor(row=row))
    return draft_tokens, draft


@pytest.mark.parametrize("draft", [(), (9,) * 7])
def test_a_drafter_that_is_never_right_is_asked_more_and_more_seldom(
    draft: tuple[int, ...],
) -> None:
    """Nor one that answers nothing."""
    proposer, sequence = _alone(looks_up=False)
    asked = []
    for step in range(2500):
        draft_tokens, count = _plan(proposer, sequence, row=0.1)
        asked += [step] if count else []
        sequence.tokens.append(2)
        proposer.learn(sequence, len(draft_tokens), 1, count, draft[:count])
    assert asked[-1] - asked[-2] > 250
    assert len(asked) < 50


def test_what_was_drafted_is_compared_with_what_follows_though_no_step_checks_it() -> None:
    """Words of four tokens come back: what is drafted is wrong at first and no longer checked, then
    right."""
    proposer, sequence = _alone(looks_up=True)
    random, checked = Random(0), []
    for step in range(400):
        draft_tokens, _ = _plan(proposer, sequence, row=0.5)
        checked += [step] if draft_tokens else []
        period = 10 if step > 200 else 0
        word = [3, 4, 5, random.randrange(6, 2**20)]
        sequence.tokens.append(sequence.tokens[-period] if period else word[step % 4])
        proposer.learn(sequence, len(draft_tokens), 1, 0, ())
    assert not [step for step in checked if 60 < step < 200]
    assert len([step for step in checked if step > 240]) > 150


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_now_and_then_a_plan_has_no_draft_tokens_so_that_it_is_timed(
    *, async_scheduling: bool
) -> None:
    """And the next one has some again: the sequence is not scheduled asynchronously meanwhile."""
    _, sequence = _alone(looks_up=True, tokens=[7, 8] * 20)
    sequence.placeholders = Placeholders(limit=1000, wait=True)  # as every sequence does at first
    proposer = DraftProposer(looks_up=True, token_budget=64, async_scheduling=async_scheduling)
    plain = []
    for step in range(200):
        draft_tokens, _ = _plan(proposer, sequence, row=0.01)
        plain += [] if draft_tokens else [step]
        assert sequence.placeholders.wait
        sequence.tokens.append(7 + step % 2)
        proposer.learn(sequence, len(draft_tokens), 1, 0, ())
    assert len(plain) == 6
    assert {later - step for step, later in pairwise(plain)} == {33}


def test_nothing_is_considered_for_plans_like_one_that_nothing_was_chosen_for() -> None:
    proposer, sequence = _alone(looks_up=True, tokens=range(50))
    considered = 0
    for _ in range(90):
        if not proposer.rests():
            considered += 1
            proposer.choose([sequence] * 16, lambda: StepWork.of([9] * 16), LinearPredictor())
        sequence.tokens.append(len(sequence.tokens))
    assert considered == 10


def _decoding(**settings: object) -> tuple[Scheduler, DraftProposer, MemoryCheckingExecutor]:
    """Blocks of 2 tokens; a drafter that is always wrong, unless the settings name another."""
    proposer = DraftProposer(looks_up=False, token_budget=64)
    executor = MemoryCheckingExecutor(16, 2, drafter=settings.pop("drafter", errs))
    scheduler = Scheduler(
        settings.pop("policy", make_policy("sarathi", 64)),
        num_blocks=16,
        block_size=2,
        max_model_len=30,
        extensions=make_extensions(proposer=proposer),
        **settings,
    )
    return scheduler, proposer, executor


def test_a_rejection_moves_nothing_but_the_count_of_computed_tokens() -> None:
    scheduler, proposer, executor = _decoding()
    engine = Engine(scheduler, executor, vocab_size=50)
    engine.add(
        Request(
            "r", (1, 2, 3), SamplingParams(temperature=0, max_tokens=25, ignore_eos=True), seed=0
        )
    )
    engine.step()
    (sequence,) = scheduler.running
    for _ in range(3):
        known, blocks, chain = (
            list(sequence.tokens),
            list(sequence.block_table),
            list(sequence.cached_columns),
        )
        engine.step()
        row = executor.plans[-1].rows[0]
        assert (draft_of(row).verify, row.start) == (7, len(known) - 1)
        assert sequence.tokens[:-1] == known  # one token more, as of a row without draft tokens
        assert sequence.computed == len(known)
        assert sequence.block_table[: len(blocks)] == blocks
        assert sequence.cached_columns[: len(chain)] == chain
        assert len(sequence.cached_columns) == len(known) // 2
    assert sum(proposer.counts.accepted) == 0


def test_a_draft_token_that_was_wrong_is_never_found_in_the_prefix_cache() -> None:
    scheduler, _, executor = _decoding(prefix_caching=True)
    engine = Engine(scheduler, executor, vocab_size=50)
    prompt, params = (1, 2, 3), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    engine.add(Request("r", prompt, params, seed=0))
    drafted = []
    while engine.has_work:
        engine.step()
        drafted += [row for row in executor.plans[-1].rows if draft_of(row).verify]
    wrong = max(drafted, key=lambda row: draft_of(row).verify)
    begin = Begin(0, prompt, 3, 0, 0, params)
    known = list(prompt) + knows(prompt, begin, wrong.start + 1 - len(prompt))
    engine.add(Request("s", (*known, *wrong.tokens[1:], 5), params, seed=0))
    engine.step()
    assert executor.plans[-1].begin[0].sequence != 0
    # the blocks of known tokens, and no other
    assert executor.plans[-1].rows[0].start == len(known) // 2 * 2


@dataclass
class Setting(Policy):
    """Wants as many draft tokens as it is told."""

    draft_tokens: int

    def decide(self, load: Load) -> Decision:
        return Decision(prefill_tokens=64, decodes=64, draft_tokens=self.draft_tokens)


@pytest.mark.parametrize(("wanted", "most"), [(0, 0), (1, 1), (4, 4), (50, 7), (-1, 0)])
def test_a_policy_may_set_how_many_draft_tokens_there_are(wanted: int, most: int) -> None:
    scheduler, proposer, executor = _decoding(
        policy=Setting(wanted), predictors=(LinearPredictor(row=9.0),)
    )
    engine = Engine(scheduler, executor, vocab_size=50)
    engine.add(
        Request("r", (1, 2), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), seed=0)
    )
    while engine.has_work:
        engine.step()
    draft_tokens = [
        draft_of(plan.rows[0]).verify
        for plan in executor.plans
        if plan.rows and plan.rows[0].start >= 2
    ]
    assert max(draft_tokens) == most
    assert all(each == most for each in draft_tokens[:5])
    assert proposer.counts.rows == sum(map(bool, draft_tokens))


def test_draft_tokens_are_drafted_beside_those_that_are_checked() -> None:
    """A row of 7 draft tokens asks for the next 7: one that checked its draft would have none
    behind it otherwise."""
    scheduler, _, executor = _decoding(drafter=knows)
    engine = Engine(scheduler, executor, vocab_size=50)
    engine.add(
        Request("r", (1, 2), SamplingParams(temperature=0, max_tokens=25, ignore_eos=True), seed=0)
    )
    while engine.has_work:
        engine.step()
    assert [draft_of(plan.rows[0]).verify for plan in executor.plans if plan.rows] == [0, 7, 7, 7]


def test_throttling_counts_sequences_however_many_draft_tokens_they_have() -> None:
    """D of Token Throttling, gLLM's equation 4: the running sequences over the stages."""
    rows = {}
    for name, drafter in (("plain", lambda prefix, begin, count: ()), ("speculative", knows)):
        proposer = DraftProposer(looks_up=False, token_budget=64)
        executor = MemoryCheckingExecutor(64, 2, depth=2, drafter=drafter)
        policy = make_policy("throttling", 64)
        scheduler = Scheduler(
            policy,
            num_blocks=64,
            block_size=2,
            max_model_len=30,
            pipeline_depth=2,
            extensions=make_extensions(proposer=proposer),
        )
        engine = Engine(scheduler, executor, vocab_size=50)
        for number in range(6):
            params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
            engine.add(Request(f"r{number}", (1, number), params, seed=0))
        while engine.has_work:
            engine.step()
        rows[name] = {
            plan.decodes for plan in executor.plans if plan.rows and not plan.prompt_tokens
        }
        assert bool(proposer.counts.draft_tokens) == (name == "speculative")
    assert max(rows["speculative"]) == max(rows["plain"])
