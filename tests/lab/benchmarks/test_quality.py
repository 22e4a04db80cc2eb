"""Questions, answers and perplexity, with a reader whose probabilities are known."""

import math
from pathlib import Path

import pytest

from nanoserve.errors import UsageError
from nanoserve.lab.commands.bench_quality import (
    Question,
    compare_answers,
    extract_answer,
    perplexity,
    prompt_text,
    read_questions,
    windows,
)


def even_odds(tokens: tuple[int, ...]) -> float:
    """Every token has probability one quarter."""
    return (len(tokens) - 1) * math.log(0.25)


def test_perplexity_of_even_odds_is_their_number() -> None:
    assert perplexity(even_odds, [(1, 2, 3), (4, 5)]) == pytest.approx(4.0)


def test_windows() -> None:
    # a single token predicts nothing
    assert windows(range(7), length=3, limit=9) == [(0, 1, 2), (3, 4, 5)]
    assert windows(range(8), length=3, limit=9)[-1] == (6, 7)
    assert windows(range(8), length=3, limit=1) == [(0, 1, 2)]
    with pytest.raises(UsageError, match="at least two tokens"):
        windows([1], 3, 1)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 16 - 3 = 13.\n#### 13", "13"),
        ("so $1,234.00 in all.", "1234"),
        ("#### -5 and 7", "-5"),
        ("first 3, then 4\nQuestion: what is 9?", "4"),
        ("2.50 dollars", "2.5"),
        ("no idea", None),
    ],
)
def test_the_number_in_an_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


def test_examples_come_with_answers_and_the_question_without() -> None:
    one, two = Question("a?", "b\n#### 1"), Question("c?", "d\n#### 2,000")
    assert prompt_text(two, [one]) == "Question: a?\nAnswer: b\n#### 1\n\nQuestion: c?\nAnswer:"
    assert two.gold == "2000"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "row 2: not JSON"),
        ("[]", "row 2: not an object"),
        ('{"question": "a", "answer": 1}', "row 2: not an object"),
        ('{"question": "a", "answer": "b"}', "does not end in"),
        ('{"question": "a", "answer": "#### b"}', "does not end in"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: str, message: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "a", "answer": "#### 1"}\n' + row + "\n")
    assert len(read_questions(path, 1)) == 1
    with pytest.raises(UsageError, match=message):
        read_questions(path, 2)


def test_agreement() -> None:
    ours = {"answers": ["1", None], "tokens": [(1,), (2,)]}
    theirs = {"answers": ["1", "2"], "tokens": [(1, 1), (2,)]}
    assert compare_answers(ours, theirs) == {"same_answer": 0.5, "same_tokens": 0.5}
