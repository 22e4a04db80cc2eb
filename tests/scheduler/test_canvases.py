"""Canvases in plans: what the rows of a sequence are, how many fit into a step, and what is
shared."""

from typing import Any

import pytest

from nanoserve.config.model_parts import CanvasConfig
from nanoserve.errors import UsageError
from nanoserve.executor.start.model_loading import longest_with_canvas
from nanoserve.request import Request, SamplingParams
from nanoserve.scheduler.assembly import make_extensions
from nanoserve.scheduler.canvas.aligned_canvases import AlignedCanvases
from nanoserve.scheduler.canvas.free_canvases import FreeCanvases
from nanoserve.scheduler.extension import Extensions
from nanoserve.scheduler.optional import CanvasRow, LayoutCapacity
from nanoserve.scheduler.plan import Answer, StepPlan, StepResult
from nanoserve.scheduler.policies.baselines import ChunkedPrefill
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.scheduler.speculation.draft_proposer import DraftProposer
from tests.scheduler.canvases import MASK, CanvasBench

LENGTH = 4
MASKS = (MASK,) * LENGTH


def canvases(budget: int = 64) -> AlignedCanvases:
    return AlignedCanvases(length=LENGTH, mask_token=MASK, token_budget=budget)


def make_scheduler(budget: int = 64, **settings: Any) -> Scheduler:
    sizes = {"num_blocks": 64, "block_size": 4, "max_model_len": 64} | settings
    extensions = Extensions(canvases=canvases(budget))
    return Scheduler(ChunkedPrefill(budget), extensions=extensions, **sizes)


def request(name: str, prompt: range, **params: Any) -> Request:
    settings = {"max_tokens": 8, "ignore_eos": True} | params
    return Request(name, tuple(prompt), SamplingParams(**settings), seed=0)


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule(0.0)
    assert plan is not None
    return plan


def answer(scheduler: Scheduler, plan: StepPlan, *answers: Answer) -> list[tuple[int, ...]]:
    """Answer a plan; returns the new tokens of each update."""
    updates = scheduler.apply(StepResult(plan.step, answers), 1.0 + plan.step)
    return [update.new_tokens for update in updates]


def test_a_canvas_is_rewritten_until_it_is_settled_and_then_computed_with_the_next() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", range(10)))
    plan = planned(scheduler)
    (row,) = plan.rows
    # the prompt's last two tokens are the fixed part of the first canvas
    assert (row.start, row.tokens) == (0, (*range(10), MASK, MASK))
    assert row.canvas == CanvasRow(length=4, fixed=2, step=0)
    assert len(row.new_blocks) == 3
    assert answer(scheduler, plan, Answer(0, canvas=(8, 9, MASK, 30))) == [()]

    plan = planned(scheduler)
    (row,) = plan.rows
    assert (row.start, row.tokens) == (8, (8, 9, MASK, 30))
    assert (row.canvas, row.new_blocks) == (CanvasRow(4, 2, 1), ())
    assert answer(scheduler, plan, Answer(0, (31, 30))) == [(31, 30)]

    plan = planned(scheduler)
    (row,) = plan.rows
    assert (row.start, row.tokens) == (8, (8, 9, 31, 30, *MASKS))
    assert (row.canvas, len(row.new_blocks)) == (CanvasRow(4, 0, 0), 1)
    assert (plan.decodes, plan.prompt_tokens) == (0, 8)


def test_the_first_token_comes_with_the_first_canvas() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", range(4)))
    plan = planned(scheduler)
    answer(scheduler, plan, Answer(0, canvas=(1, MASK, MASK, 2)))
    (sequence,) = scheduler.running
    assert (sequence.first_token_time, scheduler.prompt_tokens) == (None, 0)
    plan = planned(scheduler)
    answer(scheduler, plan, Answer(0, (1, 2, 3, 4)))
    assert (sequence.first_token_time, scheduler.prompt_tokens) == (1.0 + plan.step, 4)


def test_a_step_counts_all_tokens_of_a_canvas() -> None:
    """24 tokens hold three of four settled canvases, each with the next one: the oldest."""
    scheduler = make_scheduler(budget=24)
    for name in "abcd":
        scheduler.add(request(name, range(4)))
    widths = []
    for _ in range(3):
        plan = planned(scheduler)
        widths.append([len(row.tokens) for row in plan.rows])
        answer(scheduler, plan, *[Answer(row.sequence, canvas=MASKS) for row in plan.rows])
    assert widths == [[8, 8], [4, 4, 8], [4, 4, 4, 8]]
    plan = planned(scheduler)
    answer(scheduler, plan, *[Answer(row.sequence, (1, 2, 3, 4)) for row in plan.rows])
    assert [(row.sequence, len(row.tokens)) for row in planned(scheduler).rows] == [
        (0, 8),
        (1, 8),
        (2, 8),
    ]


def test_prompts_are_cut_at_spans() -> None:
    scheduler = make_scheduler(budget=17, block_size=3)
    scheduler.add(request("a", range(22)))
    spans = []
    for _ in range(3):
        plan = planned(scheduler)
        (row,) = plan.rows
        spans.append((row.start, row.start + len(row.tokens), row.canvas is not None))
        answer(scheduler, plan)
        if row.canvas is not None:
            break
    assert spans == [(0, 8, False), (8, 16, False), (16, 24, True)]


@pytest.mark.parametrize(("block_size", "hit"), [(4, 8), (2, 8), (8, 8), (3, 0)])
def test_cached_prefixes_end_at_spans(block_size: int, hit: int) -> None:
    """Ten tokens are shared; in blocks of 3, the first 9 would be a hit."""
    scheduler = make_scheduler(block_size=block_size)
    scheduler.add(request("a", range(10)))
    plan = planned(scheduler)
    answer(scheduler, plan, Answer(0, canvas=(8, 9, MASK, MASK)))
    scheduler.add(request("b", range(11)))
    (row,) = [row for row in planned(scheduler).rows if row.sequence == 1]
    assert row.start == hit


def test_nothing_of_a_canvas_enters_the_prefix_cache() -> None:
    """The first prompt leaves a block that was only ever part of a canvas. If that were cached, the
    third would read it."""
    bench = CanvasBench(
        policy=ChunkedPrefill(64),
        length=LENGTH,
        budget=64,
        num_blocks=32,
        block_size=2,
        max_model_len=64,
    )
    for name, length in [("a", 10), ("b", 14), ("c", 15)]:
        bench.engine.add(request(name, range(length), max_tokens=1))
        while bench.engine.has_work:
            bench.engine.step()  # the executor compares what is read with the tokens
    assert [plan.rows[0].start for plan in bench.executor.plans if plan.begin] == [0, 8, 12]


def test_samples_share_the_whole_spans_of_a_prompt() -> None:
    """They begin when the first canvas of the first sample is settled."""
    scheduler = make_scheduler(block_size=16, prefix_caching=False)
    scheduler.add(request("a", range(10), n=2))
    answer(scheduler, planned(scheduler), Answer(0, (30, 31)))
    plan = planned(scheduler)
    rows = {row.sequence: row for row in plan.rows}
    assert (rows[1].start, rows[1].tokens) == (8, (8, 9, MASK, MASK))
    assert len(plan.copies) == 1, "of the block in which the shared part of the prompt ends"


def test_a_preempted_canvas_begins_again() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", range(6)))
    answer(scheduler, planned(scheduler), Answer(0, canvas=(4, 5, 30, MASK)))
    scheduler.table.preempt(scheduler.running[0])
    (row,) = planned(scheduler).rows
    assert row.tokens[-4:] == (4, 5, MASK, MASK)
    assert row.canvas == CanvasRow(4, 2, 0)


def test_canvases_go_together_with_no_other_mechanism() -> None:
    proposer = DraftProposer(looks_up=True, token_budget=8)
    others: list[dict[str, Any]] = [
        {"host_blocks": 4},
        {"other_layouts": [LayoutCapacity(4)]},
        {"proposer": proposer},
        {"state_slots": 4},
    ]
    for other in others:
        with pytest.raises(ValueError, match="together with"):
            make_extensions(canvases=canvases(), **other)
    with pytest.raises(ValueError, match="asynchronous scheduling"):
        make_scheduler(async_scheduling=True)
    with pytest.raises(ValueError, match="sliding windows"):
        make_scheduler(windows=(0, 8))


# ---- free canvases -------------------------------------------------------------------------------

NOISE = (0,) * LENGTH
"""Stands for random tokens, which the executor draws."""


def make_free(budget: int = 64, **settings: Any) -> Scheduler:
    sizes = {"num_blocks": 64, "block_size": 4, "max_model_len": 64} | settings
    extensions = Extensions(canvases=FreeCanvases(length=LENGTH, token_budget=budget))
    return Scheduler(ChunkedPrefill(budget), extensions=extensions, **sizes)


def test_a_free_canvas_is_computed_alone_and_then_once_more_as_known_tokens() -> None:
    scheduler = make_free()
    scheduler.add(request("a", range(10)))
    plan = planned(scheduler)
    (row,) = plan.rows
    assert (row.start, row.tokens, row.canvas) == (0, tuple(range(10)), None)
    assert not row.sample, "nothing is sampled after known tokens"
    assert answer(scheduler, plan) == []

    plan = planned(scheduler)
    (row,) = plan.rows
    assert (row.start, row.tokens, row.canvas) == (10, NOISE, CanvasRow(LENGTH, 0, 0))
    assert (row.sample, len(row.new_blocks)) == (True, 1)
    assert answer(scheduler, plan, Answer(0, canvas=(5, 6, 7, 8))) == [()]

    plan = planned(scheduler)
    (row,) = plan.rows
    assert (row.start, row.tokens, row.canvas) == (10, (5, 6, 7, 8), CanvasRow(LENGTH, 0, 1))
    assert answer(scheduler, plan, Answer(0, (1, 2, 3, 4))) == [(1, 2, 3, 4)]

    plan = planned(scheduler)
    (row,) = plan.rows
    assert (row.start, row.tokens, row.canvas) == (10, (1, 2, 3, 4), None)
    assert (row.sample, row.new_blocks) == (False, ())
    answer(scheduler, plan)
    (row,) = planned(scheduler).rows
    assert (row.start, row.tokens, row.canvas) == (14, NOISE, CanvasRow(LENGTH, 0, 0))


def test_prompts_get_the_tokens_that_free_canvases_leave() -> None:
    """Of 10 tokens, two canvases take 8. Prompts are cut anywhere."""
    scheduler = make_free(budget=10)
    for name, prompt in [("a", range(5)), ("b", range(20, 25)), ("c", range(40, 49))]:
        scheduler.add(request(name, prompt))
    answer(scheduler, planned(scheduler))
    plan = planned(scheduler)
    assert [(row.sequence, len(row.tokens)) for row in plan.rows] == [(0, 4), (1, 4), (2, 2)]


def test_generated_tokens_are_shared_once_they_are_known() -> None:
    """A prompt that is the beginning of another's answer finds the blocks of its canvas, but not
    while that was not settled."""
    for is_settled, hit in [(False, 8), (True, 12)]:
        scheduler = make_free()
        scheduler.add(request("a", range(8)))
        answer(scheduler, planned(scheduler))
        plan = planned(scheduler)
        answer(scheduler, plan, Answer(0, canvas=(8, 9, 10, 11)))
        if is_settled:
            plan = planned(scheduler)
            answer(scheduler, plan, Answer(0, (8, 9, 10, 11)))
            answer(scheduler, planned(scheduler))
        scheduler.add(request("b", range(14)))
        (row,) = [row for row in planned(scheduler).rows if row.sequence == 1]
        assert row.start == hit


def test_the_last_canvas_of_the_longest_sequence_ends_within_the_memory() -> None:
    """16 slots hold 13 tokens: a canvas of 4 begins behind the first 12. With a window of 6, 5 keys
    are kept in its group beside the canvas."""
    free = CanvasConfig(LENGTH, None)
    assert longest_with_canvas(free, (0,), 4, 4, 100) == 13
    assert longest_with_canvas(free, (0,), 4, 4, 10) == 7
    assert longest_with_canvas(CanvasConfig(LENGTH, 9), (0,), 4, 4, 14) == 12
    assert longest_with_canvas(free, (0, 6), 14, 4, 100) == 10 * 4 - 3
    with pytest.raises(UsageError, match="1 blocks of 4 tokens does not hold a canvas of 4; raise"):
        longest_with_canvas(free, (0,), 1, 4, 100)
