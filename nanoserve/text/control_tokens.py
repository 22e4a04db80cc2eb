"""Telling the control tokens a chat template writes from the same spellings typed by a user.

A template turns a conversation into one string, and in that string `<|im_end|>` written by the template looks exactly
like `<|im_end|>` pasted by a user. So the spellings in the conversation get a *mark*, a private-use character that
occurs nowhere else, before the template runs. A marked spelling is no longer a spelling; everything that still matches
afterwards was written by the template. Then the marks are taken out again. A conversation without such spellings is
not touched.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from nanoserve.errors import UsageError

# A piece of a prompt: text that is only text, or the id of a control token.
Piece = str | int

_PRIVATE_USE = range(0xE000, 0xF900)


class ControlTokens:
    """The control tokens of a tokenizer: their spellings and ids."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = {spelling: token_id for spelling, token_id in ids.items() if spelling}
        # Longest first: where one spelling begins another, the longer one is meant.
        spellings = sorted(self.ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, spellings))) if spellings else None
        self._beginnings = tuple({s[:end] for s in spellings for end in range(1, len(s))})
        self._endings = tuple({s[start:] for s in spellings for start in range(1, len(s))})

    def split(self, text: str) -> list[Piece]:
        """Cut `text` at its control tokens: ["hello", 2, "there"]; empty texts are left out."""
        if self._pattern is None:
            return [text] if text else []
        pieces: list[Piece] = []
        position = 0
        for match in self._pattern.finditer(text):
            pieces += [text[position : match.start()], self.ids[match.group()]]
            position = match.end()
        pieces.append(text[position:])
        return [piece for piece in pieces if piece != ""]

    def mark(self, text: str, mark: str) -> str:
        """Put `mark` into every spelling in `text`, and at an edge that could be one half of a spelling."""
        if self._pattern is None or not text:
            return text
        # After every character: one spelling may hold another, or overlap with the next.
        marked = self._pattern.sub(lambda match: "".join(character + mark for character in match.group()), text)
        if text.startswith(self._endings):
            marked = mark + marked
        if text.endswith(self._beginnings):
            marked = marked + mark
        return marked

    def mark_all(self, value: Any, mark: str) -> Any:
        """`mark` applied to every string in a JSON value, names of fields included."""
        if isinstance(value, str):
            return self.mark(value, mark)
        if isinstance(value, Mapping):
            return {self._mark_name(name, mark): self.mark_all(item, mark) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark_all(item, mark) for item in value]
        return value

    def _mark_name(self, name: str, mark: str) -> str:
        # Only whole spellings: a mark at the edge of an ordinary name would hide the field from the template.
        return self.mark(name, mark) if self._pattern and self._pattern.search(name) else name


def choose_mark(texts: Iterable[str]) -> str:
    """A private-use character that occurs in none of `texts`."""
    used = set().union(*texts)
    for code in _PRIVATE_USE:
        if chr(code) not in used:
            return chr(code)
    raise UsageError("the conversation uses every private-use character of Unicode; remove some of them")
