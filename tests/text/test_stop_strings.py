import sys
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from nanoserve.engine.outputs import StopStrings
from tests.text.building import PATIENT


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopStrings(stops)
    shown = ""
    for piece in pieces:
        text, found = matcher.push(piece)
        shown += text
        if found is not None:
            return shown, found
    return shown + matcher.flush(), None


def first_match(stops: list[str], text: str) -> tuple[str, str | None]:
    """The plain way: read until some stop string is complete; of several, the longest began
    first."""
    for end in range(len(text) + 1):
        found = max((stop for stop in stops if text[:end].endswith(stop)), key=len, default=None)
        if found is not None:
            return text[: end - len(found)], found
    return text, None


@PATIENT
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    pieces=st.lists(st.text("abc", max_size=6), max_size=8),
)
def test_the_first_complete_stop_string_ends_the_text(stops, pieces):
    assert run(stops, pieces) == first_match(stops, "".join(pieces))


@PATIENT
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    text=st.text("abc", max_size=20),
)
def test_only_what_may_be_a_beginning_is_held_back(stops, text):
    matcher = StopStrings(stops)
    shown, found = matcher.push(text)
    if found is None:
        held = text[len(shown) :]
        assert shown + held == text
        endings = [text[start:] for start in range(len(text))]
        longest = max(
            (len(e) for e in endings if any(stop.startswith(e) for stop in stops)), default=0
        )
        assert len(held) == longest
        assert matcher.flush() == held and matcher.flush() == ""


def test_a_stop_string_split_over_pieces_leaks_nothing():
    matcher = StopStrings(["</answer>"])
    assert [matcher.push(piece) for piece in ("42</", "ans", "wer", "> and more")] == [
        ("42", None),
        ("", None),
        ("", None),
        ("", "</answer>"),
    ]
    assert matcher.push("anything") == ("", "</answer>")
    assert matcher.flush() == ""


def test_a_false_alarm_is_shown_at_once():
    matcher = StopStrings(["\n\nUser:"])
    assert matcher.push("Hi\n") == ("Hi", None)
    assert matcher.push("\nYou") == ("\n\nYou", None)


def test_without_stop_strings_everything_passes():
    matcher = StopStrings([])
    assert matcher.push("abc") == ("abc", None)
    assert matcher.flush() == ""


def _calls(work: Callable[[], object]) -> int:
    """How many functions some work calls, of Python and of C."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_an_end_that_may_be_a_beginning_is_not_read_again():
    """A text always ends with a thousand characters of the first of several long stop strings."""
    matcher = StopStrings(
        ["a" * 1015 + "b", *(chr(99 + number) + "a" * 1015 for number in range(15))]
    )
    matcher.push("a" * 1000)
    # One call to push, and for each stop string one call that reads the character, with a handful
    # of others in it.
    assert _calls(lambda: [matcher.push("a") for _ in range(100)]) < 100 * 16 * 5
    shown, found = matcher.push("b")
    assert (shown, found) == ("", "a" * 1015 + "b")


def test_samples_share_stop_strings():
    assert StopStrings(["one", "two"])._stops == StopStrings(["one", "two"])._stops
