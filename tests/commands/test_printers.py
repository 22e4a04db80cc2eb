"""A streamed answer as a terminal shows it, on a small screen that is emulated."""

import io
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from nanoserve.commands.printers import AnswerPrinter, Block, BlockSplitter
from nanoserve.commands.terminal import visible
from tests.commands.screen import Screen

ANSWER = """\
# A list

Some *words* before it
on two lines:
- one
- two

  still two
- three

```python
def f():

    return "a"
```
After `code` a paragraph that is longer than the screen is wide.

1. first
2. 日本語日本語日本語日本語日本語日本語
"""
HEADING, PARAGRAPH, LIST, CODE_BLOCK = "heading_open", "paragraph_open", "bullet_list_open", "fence"


def blocks_of(text: str, cuts: list[int]) -> list[Block]:
    splitter, blocks, start = BlockSplitter(), [], 0
    for cut in [*sorted(cuts), len(text)]:
        blocks += splitter.push(text[start:cut])
        start = cut
    return blocks + splitter.cut(ended=True)


def test_blocks() -> None:
    blocks = blocks_of(ANSWER, [])
    kinds = [HEADING, PARAGRAPH, LIST, CODE_BLOCK, PARAGRAPH, "ordered_list_open"]
    assert [block.kind for block in blocks] == kinds
    assert blocks[1].source == "Some *words* before it\non two lines:"
    assert blocks[2].source == "- one\n- two\n\n  still two\n- three"
    assert blocks[3].source.endswith('return "a"\n```')


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("```\n# no heading\n\n- no list\n", [CODE_BLOCK]),
        ("~~~\n```\n~~~\nafter", [CODE_BLOCK, PARAGRAPH]),
        ("````\n```\n````\n", [CODE_BLOCK]),
        ("- a\n  ```\n\n  x\n  ```\n- b", [LIST]),
        ("- a\n  ```\n\nx\n  ```\n- b", [LIST, PARAGRAPH, CODE_BLOCK]),
        ("- a\nlazy\n\nnew", [LIST, PARAGRAPH]),
        ("text\n# head\ntext", [PARAGRAPH, HEADING, PARAGRAPH]),
        ("a ```b``` c\n```d``` e", [PARAGRAPH]),
        ("\n\n \n", []),
        ("[a]: b", ["text"]),
        ("2 * 3\n*emphasis* here", [PARAGRAPH]),
    ],
)
def test_where_blocks_end(text: str, kinds: list[str]) -> None:
    assert [block.kind for block in blocks_of(text, [])] == kinds


@given(st.lists(st.integers(0, len(ANSWER))))
def test_blocks_do_not_depend_on_the_pieces(cuts: list[int]) -> None:
    assert blocks_of(ANSWER, cuts) == blocks_of(ANSWER, [])


@given(st.text(alphabet="ab #-`~1.\n ", max_size=60))
def test_no_line_of_the_text_is_lost(text: str) -> None:
    kept = [
        line for block in blocks_of(text, []) for line in block.source.split("\n") if line.strip()
    ]
    assert [line.rstrip() for line in kept] == [
        line.rstrip() for line in text.split("\n") if line.strip()
    ]


def printer_on(
    width: int, height: int, *, markdown: bool = True
) -> tuple[AnswerPrinter, Console, Any]:
    """A printer, its console, and the screen that it writes to."""
    screen: Any = Screen(width, height)
    console = Console(
        file=screen, force_terminal=True, width=width, height=height, color_system=None
    )
    return AnswerPrinter(console, console, markdown=markdown), console, screen


def printed(pieces: list[str], width: int = 40, height: int = 100) -> Screen:
    printer, _, screen = printer_on(width, height)
    for piece in pieces:
        printer.answer(piece)
    printer.finish()
    shown: Screen = screen
    return shown


def test_finished_blocks_are_rendered_in_place() -> None:
    shown = printed(list(ANSWER)).text
    assert "**" not in shown
    assert "```" not in shown
    assert "A list\n\nSome words before it\non two lines:\n" in shown
    assert ' return "a"' in shown
    assert " 1 first\n 2 日本語" in shown


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, len(ANSWER))), st.integers(20, 60))
def test_the_screen_does_not_depend_on_the_pieces(cuts: list[int], width: int) -> None:
    edges = [0, *sorted(cuts), len(ANSWER)]
    pieces = [ANSWER[start:end] for start, end in pairwise(edges)]
    assert printed(pieces, width).text == printed([ANSWER], width).text


@settings(max_examples=30, deadline=None)
@given(st.text(alphabet="ab日\n-`# \t*", max_size=200), st.integers(3, 8))
def test_nothing_is_lost_on_a_screen_that_is_too_small(text: str, height: int) -> None:
    plain = text.replace("`", "'").replace("#", "x").replace("-", "y").replace("*", "z")
    shown = printed(list(plain), 20, height).text
    assert "".join(shown.split()) == "".join(plain.split())


CODE = "```\n" + "".join(f"line {number}\n" for number in range(30)) + "```\n\n"
TABLE = (
    "| name | twice |\n|--|--|\n"
    + "".join(f"| n{number} | {2 * number} |\n" for number in range(30))
    + "\n"
)


@pytest.mark.parametrize("block", [CODE, TABLE])
@pytest.mark.parametrize("whole", [True, False])
def test_a_block_taller_than_the_window_is_rendered_once(block: str, *, whole: bool) -> None:
    pieces = ["before **bold**\n\n", *([block] if whole else block), "after **bold**"]
    short = printed(pieces, 40, 10).text
    assert short == printed(pieces, 40, 100).text
    assert "```" not in short and "|" not in short
    assert short.startswith("before bold\n\n") and short.endswith("\n\nafter bold")


def test_a_preview_shows_the_end_of_a_tall_block() -> None:
    printer, _, screen = printer_on(40, 5)
    for piece in CODE[: CODE.index("line 25")]:
        printer.answer(piece)
    assert screen.window == ["line 21", "line 22", "line 23", "line 24", ""]
    assert len(screen.lines) == 5  # nothing has gone where it could not be erased


def test_a_tall_block_is_whole_after_the_window_was_resized() -> None:
    printer, console, screen = printer_on(40, 5)
    printer.answer(CODE[: CODE.index("line 20")])
    console.size = (39, 5)
    printer.answer(CODE[CODE.index("line 20") :])
    assert screen.text.split() == [word for number in range(30) for word in ("line", str(number))]


@pytest.mark.parametrize("plain", [True, False])
def test_a_word_that_does_not_fit_moves_to_the_next_line_while_it_streams(
    monkeypatch: pytest.MonkeyPatch, *, plain: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    text = (
        "a word at the right-hand edge is never extraordinarily torn apart, **not even** 日本 while "
        "it is written"
    )
    for width in range(16, 40):
        printer, _, screen = printer_on(width, 50, markdown=not plain)
        for end, piece in enumerate(text, 1):
            printer.answer(piece)
            assert words_of("\n".join(screen.lines)) == words_of(text[:end])


def words_of(text: str) -> list[str]:
    """A line may end behind every wide character."""
    return text.replace("日", " 日 ").split()


def test_a_word_longer_than_the_line_is_broken() -> None:
    assert printed(["ab ", "x" * 25 + " y"], 10).text == "ab\nxxxxxxxxxx\nxxxxxxxxxx\nxxxxx y"


def test_text_shows_before_its_block_is_finished() -> None:
    printer, _, screen = printer_on(20, 10)
    printer.answer("some **bo")
    assert screen.text == "some **bo"
    printer.answer("ld** words that go on")
    assert screen.text == "some **bold** words\nthat go on"
    printer.finish()
    assert screen.text == "some bold words that\ngo on"


def test_a_screen_that_was_resized_is_not_written_over() -> None:
    printer, console, screen = printer_on(40, 10)
    printer.answer("one **two**")
    console.size = (30, 10)
    printer.answer(" three\n\n")
    printer.answer("**four**\n\n")
    assert screen.text == "one **two**\nthree\n\nfour"


def test_what_others_wrote_is_not_written_over() -> None:
    printer, _, screen = printer_on(40, 10)
    printer.answer("one **two")
    screen.write("\nStopped\n")
    printer.lose_place()
    printer.answer("** three\n\n**four**\n\n")
    assert screen.text == "one **two\nStopped\n** three\n\nfour"


def test_reasoning_stands_apart() -> None:
    printer, _, screen = printer_on(40, 10)
    printer.thinking("hm **hm")
    printer.thinking("**")
    assert screen.text == "Thinking…\nhm **hm**"
    printer.answer("**yes**")
    printer.finish()
    assert screen.text == "Thought: 2 words\n\nyes"


def test_reasoning_longer_than_the_window_is_folded_to_one_line() -> None:
    printer, _, screen = printer_on(20, 6)
    for number in range(40):
        printer.thinking(
            f"line {number}\n" if number % 7 else "a line that is longer than the window is wide\n"
        )
    assert len(screen.lines) <= 6, "nothing has gone where it could not be erased"
    printer.finish()
    assert screen.text == f"Thought: {34 * 2 + 6 * 10} words"


DRAFT = "a draft with _ _ 日本 _ that is longer than a line of\nthe terminal,\n\nand in two blocks "


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (20, 6)], ids=str)
@pytest.mark.parametrize("markdown", [True, False])
def test_drafts_leave_nothing_behind(size: tuple[int, int], *, markdown: bool) -> None:
    """A draft before each piece: the text is that without drafts, also where it has scrolled
    away."""
    text = ANSWER * 4
    pieces = [text[start : start + 37] for start in range(0, len(text), 37)]
    drafted, _, screen = printer_on(*size, markdown=markdown)
    plain, _, expected = printer_on(*size, markdown=markdown)
    for number, piece in enumerate(pieces):
        shown = screen.text.split()[:-1]  # the last word may go on
        for masks in range(3):
            drafted.draft("", DRAFT[: 12 * number] + " _" * masks)
        if size[1] > 20:  # else the end of the draft fills the window
            assert screen.text.split()[: len(shown)] == shown
        drafted.answer(piece)
        plain.answer(piece)
        assert screen.text == expected.text
    drafted.draft("", DRAFT)
    for printer in (drafted, plain):
        printer.finish()
    assert screen.text == expected.text


def test_a_draft_stands_behind_the_text_in_its_place() -> None:
    printer, _, screen = printer_on(20, 10)
    printer.draft("", " _ upon")
    assert screen.text == " _ upon"
    printer.answer("Once upon")
    printer.draft("", " a time _ was _ _ little")
    assert screen.window == ["Once upon a time _ ", "was _ _ little"]
    printer.draft("", " a time _ was")
    assert screen.window == ["Once upon a time _ ", "was"]
    printer.answer(" a")
    assert screen.text == "Once upon a"


def test_a_draft_that_is_taller_than_the_window_stays_in_it() -> None:
    printer, _, screen = printer_on(20, 5)
    printer.answer("final")
    printer.draft("", " word" * 40)
    assert len(screen.lines) <= 5, "nothing has gone where it could not be erased"
    printer.answer(" text")
    printer.finish()
    assert screen.text == "final text"


def test_an_unchanged_draft_is_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    printer, _, screen = printer_on(40, 10)
    printer.draft("", "one _")
    monkeypatch.setattr(screen, "write", lambda text: pytest.fail(f"it flickers: {text!r}"))
    printer.draft("", "one _")


@pytest.mark.parametrize("no_color", [True, False])
def test_a_draft_is_faint_and_has_no_colour(
    monkeypatch: pytest.MonkeyPatch, *, no_color: bool
) -> None:
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=40, color_system="standard")
    stream.isatty = lambda: True  # type: ignore[method-assign]
    printer = AnswerPrinter(console, markdown=True)
    printer.answer("Once")
    printer.draft("", " _ a\x1b[31m time")
    written = stream.getvalue()
    assert written.endswith("Once\x1b[2m _ a[31m time\x1b[0m")
    printer.answer(" upon")
    assert stream.getvalue().removeprefix(written).endswith("Once upon")


@pytest.mark.parametrize("written", ["", "hm"])
def test_a_draft_of_reasoning_stands_with_it(written: str) -> None:
    printer, _, screen = printer_on(40, 10)
    if written:
        printer.thinking(written)
    printer.draft(" so _", "")
    assert screen.text == f"Thinking…\n{written} so _"
    printer.draft(" so.", "**Yes _")
    assert screen.text == f"Thinking…\n{written} so.\n\n**Yes _"
    printer.answer("**Yes**")
    printer.finish()
    folded = "Thought: 1 word\n\n" if written else ""
    assert screen.text == f"{folded}Yes"


def test_a_draft_gives_way_to_the_other_part() -> None:
    printer, _, screen = printer_on(40, 10)
    printer.draft("", "<think _ _")
    printer.draft("so _", "")
    assert screen.text == "Thinking…\nso _"
    printer.draft("", "no _")
    assert screen.text == "no _"
    printer.thinking("so")
    assert screen.text == "Thinking…\nso"


def test_hidden_reasoning_and_what_nobody_watches_have_no_draft() -> None:
    screen: Any = Screen(40, 10)
    console = Console(file=screen, force_terminal=True, width=40, height=10, color_system=None)
    hiding = AnswerPrinter(console, markdown=True)
    hiding.draft("secret _", "")
    assert screen.text == ""
    stream = io.StringIO()
    piped = AnswerPrinter(Console(file=stream))
    piped.draft("", "Once _")
    piped.answer("Once upon")
    piped.finish()
    assert stream.getvalue() == "Once upon\n"


def test_a_draft_is_left_where_the_window_was_resized_or_others_wrote() -> None:
    """Its place is unknown then."""
    printer, console, screen = printer_on(40, 10)
    printer.draft("", "draft _")
    console.size = (30, 10)
    printer.answer("one")
    assert screen.text == "draft _\none"
    printer.draft("", " draft")
    screen.write("\nStopped\n")
    printer.lose_place()
    printer.answer(" two")
    printer.finish()
    assert screen.text == "draft _\none draft\nStopped\ntwo"


def test_escape_sequences_do_not_reach_a_terminal() -> None:
    assert visible("a\x1b[2Jb\x07c\r\nd\x9b\te\u2028") == "a[2Jbc\nd    e"
    assert "\x1b]0;" not in printed(["x \x1b]0;title\x07 y"]).text


def test_plain_text_is_written_as_it_is() -> None:
    stream = io.StringIO()
    printer = AnswerPrinter(Console(file=stream))
    printer.thinking("nobody sees this")
    for piece in ("# a", "\x1b", "\n\n"):
        printer.answer(piece)
    printer.finish()
    assert stream.getvalue() == "# a\x1b\n\n"
    printer.answer("b")
    printer.finish()
    assert stream.getvalue() == "# a\x1b\n\nb\n"
