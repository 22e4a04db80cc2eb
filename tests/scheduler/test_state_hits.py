"""Conversations whose model has recurrent states: of what was computed before, at most a chunk is
computed again."""

import pytest

from nanoserve.scheduler.recurrent_state.recurrent_state import lasting_positions
from tests.scheduler.states import StatefulBench

CHUNK = 64
START, SYSTEM, USER, ASSISTANT, LINE, END = 91, 92, 93, 94, 95, 96
"""Tokens of a chat format like that of Qwen; the fake's answers have none of them."""
GENERATION = (START, ASSISTANT, LINE)


def _message(role: int, length: int, first: int = 100) -> tuple[int, ...]:
    """A message of so many tokens, header and end included."""
    text = tuple(first + place % 700 for place in range(length - 5))
    return (START, role, LINE, *text, END, LINE)


def _common(one: tuple[int, ...], another: tuple[int, ...]) -> int:
    """How many of their first tokens are equal."""
    pairs = enumerate(zip(one, another, strict=False))
    shorter = min(len(one), len(another))
    return next((place for place, (token, other) in pairs if token != other), shorter)


@pytest.fixture(scope="module", params=[512, 8192], ids=["chunks of 512", "whole prompts"])
def talk(request: pytest.FixtureRequest) -> "Talk":
    return Talk(request.param)


class Talk:
    """A conversation whose prompt has about 4,000 tokens, answered with 100 more."""

    def __init__(self, budget: int) -> None:
        self.bench = StatefulBench(budget=budget, checks_steps=False)
        self.history = (
            _message(SYSTEM, 1007) + _message(USER, 1003, 300) + _message(ASSISTANT, 1001, 500)
        )
        self.question = _message(USER, 990, 50 + 600)
        self.prompt = self.history + self.question + GENERATION
        self.asked = 0
        self.answer = tuple(self.ask(self.prompt, 100))
        self.known = (self.prompt + self.answer)[:-1]  # its last token was never computed

    def ask(self, prompt: tuple[int, ...], max_tokens: int = 1) -> list[int]:
        self.asked += 1
        name = f"request {self.asked}"
        self.bench.add(name, prompt, (END,), max_tokens=max_tokens)
        return self.bench.finish()[name]

    def computed_again(self, prompt: tuple[int, ...]) -> int:
        """Old tokens that a prompt has computed again."""
        self.ask(prompt)
        old = min(_common(prompt, self.known), len(prompt) - 1)
        first = self.bench.rows(f"request {self.asked}")[0]
        return old - first.start

    @property
    def next_question(self) -> tuple[int, ...]:
        return (END, LINE, *_message(USER, 200, 200), *GENERATION)


def test_a_second_turn_with_all_of_the_answer(talk: Talk) -> None:
    assert 4000 < len(talk.prompt) < 4010 and len(talk.answer) == 100
    assert 0 <= talk.computed_again(talk.prompt + talk.answer + talk.next_question) <= CHUNK


def test_a_second_turn_without_the_reasoning(talk: Talk) -> None:
    """It parts from the first where the answer began."""
    spoken = talk.answer[60:]
    assert _common(spoken, talk.answer) == 0
    assert 0 <= talk.computed_again(talk.prompt + spoken + talk.next_question) <= CHUNK


def test_the_answer_given_again(talk: Talk) -> None:
    assert 0 <= talk.computed_again(talk.prompt) <= CHUNK


def test_the_last_message_edited(talk: Talk) -> None:
    edited = talk.history + _message(USER, 700, 111) + GENERATION
    assert _common(edited, talk.known) == len(talk.history) + 3, "the header is the same"
    assert 0 <= talk.computed_again(edited) <= CHUNK


def test_another_user_with_the_same_system_message(talk: Talk) -> None:
    another = talk.history[:1007] + _message(USER, 800, 222) + GENERATION
    assert _common(another, talk.known) == 1007 + 3
    assert 0 <= talk.computed_again(another) <= CHUNK


def test_a_restart_after_preemption() -> None:
    """The older of two requests takes the last free block, and the other gives way."""
    bench = StatefulBench(num_blocks=264, budget=8192, checks_steps=False)
    bench.add("older", tuple(range(100)), max_tokens=80)
    bench.add("preempted", tuple(range(200, 1200)) * 4, max_tokens=150)
    bench.finish()
    rows = bench.rows("preempted")
    restart = next(place for place, row in enumerate(rows) if place and len(row.tokens) > 1)
    assert bench.scheduler.table.preemptions == 1
    assert rows[restart - 1].start > 4032 + 16, "it was preempted in the middle of its answer"
    assert 0 <= rows[restart - 1].start + 1 - rows[restart].start <= CHUNK


@pytest.mark.parametrize("shift", range(CHUNK))
def test_wherever_messages_end(shift: int) -> None:
    """Some snapshot is at most a chunk before any place in the header of a message, in front of
    which or in which another prompt may part: by arithmetic, without an engine."""
    system, user = _message(SYSTEM, 201 + shift), _message(USER, 150)
    prompt = system + _message(USER, 77) + _message(ASSISTANT, 333) + user + GENERATION
    positions = lasting_positions(prompt, (END,), CHUNK)
    assert all(position % CHUNK == 0 for position in positions)
    ends = (len(system), len(prompt) - len(GENERATION) - len(user), len(prompt) - len(GENERATION))
    for end in ends:
        for parting in range(end, end + len(GENERATION) + 1):
            newest = max(position for position in positions if position <= parting)
            assert parting - newest <= CHUNK
    assert len(positions) <= 5
