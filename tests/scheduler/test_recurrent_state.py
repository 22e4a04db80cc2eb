"""Where the rows of plans find and leave recurrent states, one situation at a time."""

from typing import Any

import pytest

from nanoserve.request import Request, SamplingParams
from nanoserve.scheduler.assembly import make_extensions
from nanoserve.scheduler.optional import NO_STATE, LayoutCapacity, StateRow
from nanoserve.scheduler.plan import Answer, StepPlan, StepResult
from nanoserve.scheduler.policies.baselines import ChunkedPrefill
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.scheduler.speculation.draft_proposer import DraftProposer
from tests.fakes.integrity import check_integrity
from tests.fakes.reference import expected_tokens
from tests.scheduler.states import StatefulBench, prefix_of


def _tokens(length: int, first: int = 0) -> tuple[int, ...]:
    return tuple(range(first, first + length))


def _ends(bench: StatefulBench, name: str) -> list[int]:
    """The ends of a prompt's rows."""
    return [row.start + len(row.tokens) for row in bench.rows(name)]


def _placed(bench: StatefulBench) -> list[StateRow]:
    return [placed for plan in bench.plans for placed in plan.state.rows]


def _positions(bench: StatefulBench) -> list[int]:
    """The positions of all snapshots."""
    return sorted(len(prefix_of(column)) for column in bench.pool.snapshots)


@pytest.mark.parametrize(
    ("budget", "block_size", "ends"),
    [
        (100, 16, [64, 128, 192, 256, 300]),
        (200, 16, [192, 300]),
        (250, 24, [192, 300]),
        (300, 16, [300]),
        (40, 16, [40, 64, 104, 128, 168, 192, 232, 256, 296, 300]),
    ],
    ids=["a chunk", "chunks", "blocks of 24", "whole", "less than a chunk"],
)
def test_prompts_are_cut_at_whole_chunks(budget: int, block_size: int, ends: list[int]) -> None:
    bench = StatefulBench(budget=budget, block_size=block_size)
    bench.add("r", _tokens(300), max_tokens=1)
    bench.finish()
    assert _ends(bench, "r") == ends


def test_a_rest_of_the_budget_begins_no_chunk_that_it_cannot_end() -> None:
    bench = StatefulBench(budget=100)
    bench.add("first", _tokens(90), max_tokens=1)
    bench.add("long", _tokens(300, 100), max_tokens=1)
    bench.finish()
    assert [len(plan.rows) for plan in bench.plans] == [1] * 6
    assert _ends(bench, "long") == [64, 128, 192, 256, 300]
    bench.add("again", _tokens(90, 400), max_tokens=1)
    bench.add("short", _tokens(10, 500), max_tokens=1)
    bench.finish()
    assert len(bench.plans[-1].rows) == 2, "ten tokens are left for a prompt of ten"


def test_a_snapshot_in_an_answer_costs_two_words_and_no_copy() -> None:
    bench = StatefulBench()
    bench.add("r", _tokens(60), max_tokens=10)
    bench.finish()
    assert _ends(bench, "r") == list(range(60, 70))
    begun, saved, resumed = _placed(bench)
    assert (begun.source, begun.saves) == (NO_STATE, ())
    assert (saved.source, saved.target, saved.saves) == (begun.target, resumed.source, ())
    assert resumed.target == begun.target != resumed.source
    assert [plan.step for plan in bench.plans if plan.state.rows] == [0, 4, 5]
    assert _positions(bench) == [64]


def test_the_state_at_the_end_of_an_answer_is_kept() -> None:
    """The last token that is computed is the 64th, and the answer ends with the 65th."""
    bench = StatefulBench()
    bench.add("r", _tokens(60), max_tokens=5)
    answer = bench.finish()["r"]
    assert _positions(bench) == [64]
    bench.add("next turn", _tokens(60) + tuple(answer) + _tokens(9, 70), max_tokens=1)
    bench.finish()
    assert bench.rows("next turn")[0].start == 64


def _about_to_save(bench: StatefulBench) -> StepPlan:
    """Go on until the row that ends with the 64th token is planned, and return its plan."""
    bench.add("r", _tokens(60), max_tokens=20)
    while True:
        plan = bench.scheduler.schedule(0.0)
        if plan is None:
            for result in bench.executor.collect(None):
                bench.scheduler.apply(result, 0.0)
            continue
        if plan.rows[0].start == 63:
            return plan
        bench.executor.submit(plan)


def test_no_state_is_found_whose_tokens_are_not_known() -> None:
    """The request is given up while its 64th token is sampled, and fed to the next plan."""
    bench = StatefulBench(async_scheduling=True)
    plan = _about_to_save(bench)
    assert plan.rows[0].placeholder
    bench.executor.submit(plan)
    bench.scheduler.stop("r", 0.0)
    bench.finish()
    assert _positions(bench) == []


def test_no_state_is_found_of_a_row_that_failed() -> None:
    bench = StatefulBench()
    plan = _about_to_save(bench)
    bench.scheduler.apply(StepResult(plan.step, (Answer(0, error="NaN logits"),)), 0.0)
    check_integrity(bench.scheduler)
    assert _positions(bench) == [] and bench.pool.free_slots == bench.pool.num_slots


def test_a_newer_snapshot_of_a_sequence_replaces_its_older_one_and_no_others() -> None:
    """A prompt with 31 whole chunks does with four slots: another conversation keeps its own."""
    bench = StatefulBench(num_slots=4, budget=64)
    bench.add("talk", _tokens(100), max_tokens=1)
    bench.finish()
    assert _positions(bench) == [64]
    bench.add("long", _tokens(1000, 200) * 2, max_tokens=1)
    bench.finish()
    assert len(bench.rows("long")) == 32
    bench.add("talk again", _tokens(100), max_tokens=1)
    bench.finish()
    assert bench.rows("talk again")[0].start == 64


def test_the_end_of_a_prompt_outlasts_its_answer() -> None:
    """A text has no messages. Of three slots, one is the sequence's and one is for its answer."""
    bench = StatefulBench(num_slots=3)
    bench.add("text", _tokens(200), max_tokens=200)
    bench.finish()
    assert _positions(bench) == [192, 384]
    bench.add("again", _tokens(200), max_tokens=1)
    bench.finish()
    assert bench.rows("again")[0].start == 192


def test_no_more_sequences_run_than_there_are_slots() -> None:
    bench = StatefulBench(num_slots=3, budget=64)
    for number in range(6):
        bench.add(f"r{number}", _tokens(70, 100 * number), max_tokens=20)
    assert bench.scheduler.table.free_slots == 3
    most = 0
    while bench.engine.has_work:
        bench.step()
        most = max(most, len(bench.scheduler.running))
    assert most == 3


def test_samples_begin_with_a_copy_of_the_state_before_the_last_token() -> None:
    bench = StatefulBench()
    bench.add("r", _tokens(100), n=3, max_tokens=2)
    bench.finish()
    assert sum(len(row.tokens) for row in bench.rows("r")) == 100 + 2 + 3
    parent, *siblings = _placed(bench)
    assert [position for position, _ in parent.saves] == [64, 99]
    assert [sibling.source for sibling in siblings] == [parent.saves[-1][1]] * 2
    assert len({parent.target, *(sibling.target for sibling in siblings)}) == 3


@pytest.mark.parametrize("length", [1, 2, 64, 65, 66, 129])
@pytest.mark.parametrize("num_slots", [1, 2, 3, 8])
@pytest.mark.parametrize("budget", [1, 64, 512])
def test_samples_get_their_tokens_wherever_the_prompt_ends(
    length: int, num_slots: int, budget: int
) -> None:
    """With few slots they wait, or compute the prompt again."""
    bench = StatefulBench(num_slots=num_slots, budget=budget, checks_steps=length < 10)
    params: dict[str, Any] = {"n": 3, "temperature": 1.0, "max_tokens": 3}
    bench.add("r", _tokens(length), **params)
    request = Request("r", _tokens(length), SamplingParams(**params, ignore_eos=True), 0)
    answers: dict[int, tuple[int, ...]] = {}
    while bench.engine.has_work:
        for update in bench.step():
            answers[update.index] = answers.get(update.index, ()) + update.new_tokens
    for index in range(3):
        expected, _ = expected_tokens(request, index=index, max_model_len=10_000)
        assert list(answers[index]) == expected
    check_integrity(bench.scheduler)


def test_a_prompt_whose_log_probabilities_are_wanted_is_computed_whole() -> None:
    bench = StatefulBench()
    bench.add("r", _tokens(100), max_tokens=1)
    bench.finish()
    bench.add("again", _tokens(100), max_tokens=1, prompt_logprobs=0)
    bench.finish()
    assert bench.rows("again")[0].start == 0
    assert _placed(bench)[-1].source == NO_STATE


def test_two_tenants_share_no_state() -> None:
    bench = StatefulBench()
    for salt in ("one", "another"):
        params = SamplingParams(temperature=0, max_tokens=1)
        bench.engine.add(Request(salt, _tokens(200), params, 0, cache_salt=salt))
        bench.finish()
    assert [placed.source for placed in _placed(bench)] == [NO_STATE, NO_STATE]
    assert _positions(bench) == [192, 192]


def test_without_a_prefix_cache_there_are_no_snapshots() -> None:
    bench = StatefulBench(prefix_caching=False, budget=64)
    bench.add("r", _tokens(200), max_tokens=100)
    bench.finish()
    assert len(_placed(bench)) == 1 and bench.pool.snapshots == {}


def test_states_are_lost_with_the_workers() -> None:
    bench = StatefulBench(budget=64)
    bench.add("r", _tokens(200), max_tokens=4)
    for _ in range(4):
        bench.step()
    assert _positions(bench) == [64, 128, 192]
    bench.executor.die()
    while bench.executor.reported_losses == 0:
        bench.engine.step()
    assert _positions(bench) == []
    bench.finish()
    assert _ends(bench, "r")[-6:] == [64, 128, 192, 201, 202, 203], "it began again"


def test_the_snapshots_of_a_plan_that_failed_are_not_found() -> None:
    bench = StatefulBench()
    bench.add("failed", _tokens(200))
    plan = bench.scheduler.schedule(0.0)
    assert plan is not None and _positions(bench) == [192]
    bench.executor.submit(plan)
    bench.executor.forget_what_is_in_flight()
    bench.scheduler.fail_steps("out of memory", 0.0)
    check_integrity(bench.scheduler)
    assert _positions(bench) == []
    bench.add("again", _tokens(200))
    bench.finish()
    assert bench.rows("again")[0].start == 0


def test_a_snapshot_is_found_no_longer_than_its_blocks() -> None:
    """Other prompts take all blocks, and the slot is free for them too."""
    bench = StatefulBench(num_blocks=32, num_slots=3)
    bench.add("r", _tokens(200), max_tokens=1)
    bench.finish()
    assert _positions(bench) == [192]
    bench.add("other", _tokens(500, 300), max_tokens=1)
    bench.finish()
    assert _positions(bench) == [448]
    bench.add("again", _tokens(200), max_tokens=1)
    bench.finish()
    assert bench.rows("again")[0].start == 0


@pytest.mark.parametrize(
    ("others", "name"),
    [
        ({"host_blocks": 4}, "host memory"),
        ({"other_layouts": [LayoutCapacity(4)]}, "a change of layouts"),
        ({"proposer": DraftProposer(looks_up=True, token_budget=8)}, "draft tokens"),
    ],
    ids=["host", "layouts", "drafts"],
)
def test_what_cannot_be_together_is_named(others: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"^recurrent states together with {name}: choose one$"):
        make_extensions(state_slots=4, **others)


def test_windows_and_states_cannot_be_together() -> None:
    with pytest.raises(ValueError, match="recurrent states together with sliding windows"):
        Scheduler(
            ChunkedPrefill(8),
            num_blocks=8,
            block_size=16,
            max_model_len=64,
            windows=(0, 32),
            extensions=make_extensions(state_slots=4),
        )
