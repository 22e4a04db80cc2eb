import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.text.answers.forms import AnswerParser, answer_form
from tests.text.building import PATIENT


def split(pieces: list[str], *, starts_inside: bool = False) -> tuple[str, str]:
    parser = AnswerParser(answer_form(""), {}, starts_inside=starts_inside)
    found = [part for piece in pieces for part in parser.push(piece)] + parser.push("", ended=True)
    assert all(text for _, text in found)
    return tuple(
        "".join(text for part, text in found if part == wanted) for wanted in ("thinking", "answer")
    )


CASES = [
    ("<think>\nhm\n</think>\n\nYes.", False, "hm", "Yes."),
    ("  \n<think>a < b </thi </think>Yes </think> no", False, "a < b </thi", "Yes </think> no"),
    ("hm</think> Yes.", True, "hm", "Yes."),
    ("<think></think>Yes.", False, "", "Yes."),
    ("Yes: <think> is a tag", False, "", "Yes: <think> is a tag"),
    ("<thin", False, "", "<thin"),
    ("  yes", False, "", "  yes"),
    ("<think>never ends </thin", False, "never ends </thin", ""),
    ("", False, "", ""),
]


@pytest.mark.parametrize(("text", "starts_inside", "thinking", "answer"), CASES)
def test_reasoning_and_answer_are_told_apart(text, starts_inside, thinking, answer):
    for size in (1, 2, 3, 5, 100):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert split(pieces, starts_inside=starts_inside) == (thinking, answer)


@PATIENT
@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "<", "/", "think", ">", " ", "\n", "a"]),
        max_size=12,
    ),
    st.booleans(),
)
def test_how_the_text_arrives_does_not_matter(pieces, starts_inside):
    assert split(pieces, starts_inside=starts_inside) == split(
        list("".join(pieces)), starts_inside=starts_inside
    )


def test_an_answer_is_shown_as_it_arrives():
    parser = AnswerParser(answer_form(""), {})
    assert parser.push("<think>one") == [("thinking", "one")]
    assert parser.push(" two </th") == [("thinking", " two")]
    assert parser.push("ink>\n\n") == []
    assert parser.push("Yes") == [("answer", "Yes")]
    assert parser.push(" </think>") == [("answer", " </think>")]


def test_a_prompt_may_open_the_reasoning():
    form = answer_form("")
    assert form.opens_reasoning("<|assistant|><think>\n")
    assert not form.opens_reasoning("<|assistant|><think>\n\n</think>\n\n")
