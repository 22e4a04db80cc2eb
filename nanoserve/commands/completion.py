"""Completion of names with a colon in bash, which takes a colon for a word of its own."""

import io
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, redirect_stdout

_MODE, _WORDS, _PLACE = "_NANOSERVE_COMPLETE", "COMP_WORDS", "COMP_CWORD"


@contextmanager
def names_with_colons(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Within the block, the parser finds `smollm2 : 1` as the one word that was typed. Of what it
    prints to complete it, bash gets the part after the last colon: it replaces no more."""
    kept = _join(environment)
    if not kept:
        yield
        return
    found = io.StringIO()
    try:
        with redirect_stdout(found):
            yield
    finally:
        for line in found.getvalue().splitlines():
            print(line.removeprefix(kept))


def _join(environment: MutableMapping[str, str]) -> str:
    """Put the words around colons together, and return the last one up to its last colon. Empty if
    nothing is to be completed or no word was divided."""
    words = environment.get(_WORDS, "").split()
    if environment.get(_MODE) != "complete_bash" or ":" not in words:
        return ""
    joined: list[str] = []
    joins_next = False
    for word in words[: int(environment[_PLACE]) + 1]:
        if joined and (word == ":" or joins_next):
            joined[-1] += word
        else:
            joined.append(word)
        joins_next = word == ":"
    environment[_WORDS], environment[_PLACE] = " ".join(joined), str(len(joined) - 1)
    before, colon, _ = joined[-1].rpartition(":")
    return before + colon
