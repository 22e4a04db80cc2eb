"""Separating a model's reasoning, between <think> and </think>, from its answer while the text arrives."""

from typing import Literal

OPEN = "<think>"
CLOSE = "</think>"

Part = Literal["thinking", "answer"]
Piece = tuple[Part, str]


class ReasoningSplitter:
    """Splits streamed text into ("thinking", text) and ("answer", text) pieces; the tags belong to neither.

    A model reasons before it answers, so only a tag at the very beginning opens a reasoning block. A later "<think>" is
    ordinary text. Blanks beside the tags are dropped.
    """

    def __init__(self, *, starts_inside: bool = False) -> None:
        """`starts_inside`: the prompt already ended with the opening tag; see `opens_reasoning`."""
        self._state: Literal["beginning", "thinking", "answer"] = "thinking" if starts_inside else "beginning"
        self._after_tag = starts_inside
        self._held = ""

    def push(self, text: str) -> list[Piece]:
        """The pieces that are certain now. Text that may be part of a tag, and blanks before it, are held back."""
        self._held += text
        if self._state == "beginning":
            self._leave_beginning()
        pieces: list[Piece] = []
        if self._state == "thinking":
            pieces.append(("thinking", self._take_thinking()))
        if self._state == "answer":
            pieces.append(("answer", self._take(len(self._held))))
        return [piece for piece in pieces if piece[1]]

    def flush(self) -> list[Piece]:
        """The rest, at the end of the output; an unfinished tag is text."""
        part: Part = "thinking" if self._state == "thinking" else "answer"
        rest = self._take(len(self._held))
        return [(part, rest)] if rest else []

    def _leave_beginning(self) -> None:
        """Decide as soon as the text shows whether it opens with the tag."""
        start = self._held.lstrip()
        if start.startswith(OPEN):
            self._state, self._held, self._after_tag = "thinking", start[len(OPEN) :], True
        elif not OPEN.startswith(start):
            self._state = "answer"

    def _take_thinking(self) -> str:
        end = self._held.find(CLOSE)
        if end < 0:
            undecided = length_of_partial_tag(self._held, CLOSE)
            return self._take(len(self._held[: len(self._held) - undecided].rstrip()))
        thinking = self._take(end).rstrip()
        self._state, self._held, self._after_tag = "answer", self._held[len(CLOSE) :], True
        return thinking

    def _take(self, length: int) -> str:
        """The first `length` characters of what is held, without blanks that follow a tag."""
        taken, self._held = self._held[:length], self._held[length:]
        if self._after_tag:
            taken = taken.lstrip()
            self._after_tag = not taken
        return taken


def length_of_partial_tag(text: str, tag: str) -> int:
    """Number of characters at the end of `text` that may begin a tag."""
    longest = min(len(text), len(tag) - 1)
    return next((length for length in range(longest, 0, -1) if tag.startswith(text[-length:])), 0)


def opens_reasoning(prompt: str) -> bool:
    """Whether a rendered prompt leaves a reasoning block open, so that the output begins inside it."""
    return prompt.rstrip().endswith(OPEN)
