"""The buffer of an answer: text that has arrived and is not read yet, and the pieces that were read
from it.

Answer formats read with generators, which yield wherever they need text that has not arrived. So a
format is written as if the whole answer were there, and each piece is passed on as soon as it is
certain.
"""

import re
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Literal, TypeVar

Part = Literal["thinking", "answer", "call", "arguments"]
Piece = tuple[Part, str]
"""A part of an answer, and new text of this part. A call is its tool's name; its arguments follow
as JSON."""
Marks = Collection[tuple[int, int]]
"""Marker tokens in a text, in order: the position and the token id of each."""
T = TypeVar("T")
Steps = Generator[None, None, T]
Tools = Mapping[str, Mapping[str, object]]
"""The JSON schemas of the arguments of the tools that may be called, by name."""

_Name = tuple[str, str]

# A marker token is one lone surrogate in the text that is held: no decoded text contains one.
_FIRST_SIGN = 0xD800
_SIGN = re.compile("[\ud800-\udfff]")


def length_of_partial_tag(text: str, tag: str) -> int:
    """Number of characters at the end of `text` that may begin a tag."""
    place = text.find(tag[0], max(0, len(text) - len(tag) + 1))
    while place >= 0:
        if tag.startswith(text[place:]):
            return len(text) - place
        place = text.find(tag[0], place + 1)
    return 0


def ignore(_: str) -> None:
    """Drop text that belongs to no part of the answer."""


def untouched(text: str) -> str:
    """The text itself: nothing is dropped before a tag."""
    return text


class AnswerReader:
    """Holds text until its part of the answer is certain. A marker token differs from text that
    spells it. A marker token in a place where the format expects none is dropped."""

    def __init__(self, markers: Mapping[int, str]) -> None:
        """`markers`: the spellings of the marker tokens, by id. All other tags are searched for as
        text."""
        self._signs = {token: chr(_FIRST_SIGN + place) for place, token in enumerate(markers)}
        self._markers = markers
        self._pieces: list[Piece] = []
        self.held = ""
        self.ended = False

    def tag(self, spelling: str) -> str:
        """Spell a tag as in the held text, where each marker token is one character."""
        for token, sign in self._signs.items():
            spelling = spelling.replace(self._markers[token], sign)
        return spelling

    def is_token(self, spelling: str) -> bool:
        """Whether a tag begins with a marker token, so that no text can be taken for it."""
        return _SIGN.match(self.tag(spelling)) is not None

    def feed(self, text: str, marks: Marks, *, ended: bool) -> None:
        """Append text that has arrived; `ended` if nothing follows."""
        done = 0
        for place, token in marks:
            self.held += text[done:place] + self._signs[token]
            done = place
        self.held += text[done:]
        self.ended = ended

    def write(self, part: Part, text: str) -> None:
        """Add text to the pieces; a call is a piece of its own."""
        text = _SIGN.sub("", text)
        if not text:
            return
        if part != "call" and self._pieces and self._pieces[-1][0] == part:
            text = self._pieces.pop()[1] + text
        self._pieces.append((part, text))

    def take_pieces(self) -> list[Piece]:
        """Return the pieces since the last time, and forget them."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def take(self, length: int) -> str:
        """Remove the first characters of the held text and return them."""
        taken, self.held = self.held[:length], self.held[length:]
        return taken

    def skip_blanks(self) -> Steps[None]:
        """Drop blanks until something else arrives, or the end."""
        while not self._without_blanks() and not self.ended:
            yield

    def peek(self) -> Steps[str]:
        """Return the next character that is not blank, or an empty text at the end. Drops the
        blanks before it."""
        yield from self.skip_blanks()
        return self.held[:1]

    def _without_blanks(self) -> str:
        self.held = self.held.lstrip()
        return self.held

    def comes_next(self, *tags: str) -> Steps[str]:
        """Read the tag that comes next, with the blanks before it, and return it. If none of the
        tags comes next, return an empty text and read nothing."""
        while True:
            start = self.held.lstrip()
            for tag in tags:
                if start.startswith(tag):
                    self.held = start[len(tag) :]
                    return tag
            if self.ended or not any(tag.startswith(start) for tag in tags):
                return ""
            yield

    def copy_until(
        self,
        write: Callable[[str], object],
        *tags: str,
        trim: Callable[[str], str] = str.rstrip,
        keep_partial_tag: bool = True,
    ) -> Steps[str]:
        """Pass text on up to the first of the tags, and return this tag; an empty text at the end
        of the answer.

        `trim` cuts text that is not passed on before a tag, such as blanks. The cut text and the
        tag stay held: see `drop`. At the end of the answer, half a tag counts as text, unless
        `keep_partial_tag` is false.
        """
        while True:
            tag = self._first_tag(tags)
            if tag:
                text = self.held[: self.held.index(tag)]
                write(self.take(len(trim(text))))
                return tag
            if not tags or (self.ended and keep_partial_tag):
                write(self.take(len(self.held)))
            else:
                undecided = max(length_of_partial_tag(self.held, tag) for tag in tags)
                write(self.take(len(trim(self.held[: len(self.held) - undecided]))))
            if self.ended:
                self.held = ""
                return ""
            yield

    def _first_tag(self, tags: Sequence[str]) -> str:
        """Find the first tag in the held text, and the longest if several begin there. An empty
        text if there is none."""
        first = ""
        first_place = len(self.held)
        for tag in tags:
            place = self.held.find(tag)
            if place < 0 or place > first_place:
                continue
            if place < first_place or len(tag) > len(first):
                first = tag
                first_place = place
        return first

    def drop(self, tag: str) -> None:
        """Drop the tag that `copy_until` found, and the text that `trim` cut before it."""
        self.take(self.held.index(tag) + len(tag))

    def after(self, tag: str) -> str:
        """The text held after the tag that `copy_until` found."""
        return self.held[self.held.index(tag) + len(tag) :]

    def show(self, tag: str) -> None:
        """Pass on the tag that `copy_until` found as ordinary text, with the text that `trim` cut
        before it."""
        self.write("answer", self.take(self.held.index(tag) + len(tag)))

    def name_after(
        self, tag: str, names: Collection[str], *, ends: Sequence[str], before: str = ""
    ) -> Steps[_Name]:
        """Read the name after the tag that `copy_until` found, and the end that follows the name;
        return both. If anything else stands there, return two empty texts and read nothing."""
        while True:
            body = self.after(tag).lstrip()
            undecided = False
            for name in names:
                start = before + name
                if not body.startswith(start):
                    if start.startswith(body):
                        undecided = True
                    continue
                rest = body[len(start) :].lstrip()
                for end in ends:
                    if rest.startswith(end):
                        self.held = rest[len(end) :]
                        return name, end
                    if end.startswith(rest):
                        undecided = True
            if self.ended or not undecided:
                return "", ""
            yield
