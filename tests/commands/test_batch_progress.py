"""Counts between the steps of a batch under two layouts, and the words for them."""

from itertools import count

import pytest

from nanoserve.commands.batch import Phases
from nanoserve.layout import ParallelLayout
from nanoserve.record.counters import EngineStatus
from nanoserve.request import Request, SamplingParams, Sequence, SequenceUpdate

NAMES = count()
PAIR = (ParallelLayout(pipeline_parallel=4), ParallelLayout(tensor_parallel=4))


def engine(
    layout: int, used: int = 0, *, changing: bool = False, transitions: int = 0, blocks: int = 100
) -> EngineStatus:
    return EngineStatus(
        layouts=(layout,),
        changing=(changing,),
        free_host_blocks=blocks - used,
        total_host_blocks=blocks,
        transitions=transitions,
    )


class PromptRow:
    """A sequence as the scheduler has it, and what it gains."""

    def __init__(
        self, prompt: int, *, cached: int = 0, index: int = 0, name: str | None = None
    ) -> None:
        request = Request(name or f"row-{next(NAMES)}", tuple(range(prompt)), SamplingParams(), 0)
        self.sequence = Sequence(0, request, index, list(request.prompt), cached_tokens=cached)

    def gains(self, tokens: int) -> SequenceUpdate:
        new = tuple(range(tokens))
        self.sequence.tokens += new
        return SequenceUpdate(
            self.sequence.request.request_id, self.sequence.index, new, self.sequence
        )


def test_each_phase_has_its_own_tokens_and_seconds() -> None:
    phases, row, other = Phases(PAIR), PromptRow(100), PromptRow(60, cached=16)
    phases.observe(10.0, [], engine(0))
    phases.observe(12.0, [row.gains(1), other.gains(1)], engine(0, 40))
    assert phases.state == "prefill P4, host pool 40%, 0 transitions; P4 72 tokens/s, T4 -"
    phases.observe(12.5, [], engine(0, 90, changing=True))
    assert phases.state.startswith("moving, host pool 90%")
    phases.observe(15.5, [], engine(1, 80, transitions=1))
    phases.observe(16.5, [row.gains(4), other.gains(3)], engine(1, 5, transitions=1))

    assert dict(phases.seconds) == {0: 2.5, -1: 3.0, 1: 1.0}
    assert phases.state == "decode T4, host pool 5%, 1 transition; P4 58 tokens/s, T4 7 tokens/s"
    assert phases.summary == "P4 58 tokens/s, T4 7 tokens/s, host pool at most 90%, 1 transition"


def test_a_second_of_one_of_two_engines_is_half_a_second() -> None:
    phases = Phases(
        [ParallelLayout(data_parallel=2, pipeline_parallel=2), ParallelLayout(data_parallel=2)]
    )
    phases.observe(0.0, [], EngineStatus.together([engine(0), engine(1, 20, transitions=1)]))
    phases.observe(
        2.0,
        [PromptRow(100).gains(1)],
        EngineStatus.together([engine(0, 100), engine(1, changing=True, transitions=2)]),
    )

    assert dict(phases.seconds) == {0: 1.0, 1: 1.0}
    assert phases.state.startswith(
        "1 prefill D2P2, 1 moving, host pool 50%, 2 transitions; D2P2 100 tokens/s"
    )


def test_further_samples_and_prompts_computed_again_are_not_counted_as_prompts() -> None:
    phases, row, sibling = (
        Phases(PAIR),
        PromptRow(10, name="row"),
        PromptRow(10, name="row", index=1),
    )
    phases.observe(0.0, [row.gains(1), sibling.gains(1), row.gains(2)], engine(0))
    phases.observe(1.0, [row.gains(1)], engine(0))

    assert (phases.prompts, phases.prompt_tokens, phases.answer_tokens) == (1, 10, 3)


def test_the_time_left_is_that_of_prompts_and_of_answers() -> None:
    phases = Phases(PAIR)
    assert phases.seconds_left(40, 0, 0) is None
    rows = [PromptRow(100) for _ in range(10)]
    phases.observe(0.0, [], engine(0))
    phases.observe(5.0, [row.gains(1) for row in rows], engine(0, changing=True))
    phases.observe(6.0, [], engine(1))
    phases.observe(10.0, [row.gains(8) for row in rows], engine(1))

    # 30 prompts of half a second; 40 answers of 17 - 1 tokens, of which 80 are there and took 4 s;
    # a second of moving.
    expected = (30 * 0.5 + (40 * 16 - 80) * 4 / 80) * (1 + 1 / 9)
    assert phases.seconds_left(40, 2, 34) == pytest.approx(expected)


def test_answers_of_one_token_never_decode() -> None:
    phases = Phases(PAIR)
    phases.observe(0.0, [], engine(0))
    phases.observe(1.0, [PromptRow(100).gains(1)], engine(0))

    assert phases.seconds_left(4, 1, 1) == pytest.approx(3.0)
    assert phases.seconds_left(4, 1, 5) is None  # how fast the rest will come nobody has seen


def test_no_host_memory_is_never_full() -> None:
    phases = Phases(PAIR)
    phases.observe(0.0, [], engine(0, blocks=0))
    assert phases.pool_share == 0.0


def test_nothing_has_begun_but_will_with_prompts() -> None:
    assert Phases(PAIR).state == "prefill P4, host pool 0%, 0 transitions; P4 -, T4 -"
