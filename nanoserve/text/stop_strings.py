"""Finding stop strings in text that arrives in pieces."""

from collections.abc import Sequence
from functools import lru_cache

from nanoserve.errors import UsageError


class _Pattern:
    """One stop string, matched character by character (Knuth, Morris and Pratt), so time is linear in the text."""

    def __init__(self, text: str) -> None:
        self.text = text
        # fallback[n]: length of the longest proper prefix of text that also ends text[:n].
        self.fallback = [0, 0]
        for character in text[1:]:
            self.fallback.append(self.advance(self.fallback[-1], character))

    def advance(self, matched: int, character: str) -> int:
        """How much of the pattern is matched after `character`, when `matched` characters were before it."""
        while matched and self.text[matched] != character:
            matched = self.fallback[matched]
        return matched + (self.text[matched] == character)


@lru_cache(maxsize=32)
def _patterns(stops: tuple[str, ...]) -> tuple[_Pattern, ...]:
    """The patterns of a request. They do not change, so all its prompts and samples share them."""
    return tuple(_Pattern(stop) for stop in dict.fromkeys(stops))


class StopStrings:
    """Passes text on until a stop string appears; holds back an end that may be the beginning of one.

    The stop string itself is no part of the text. The one that is complete first wins; of several complete at once, the
    one that began first.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` may be empty. Raises UsageError for an empty stop string."""
        if any(not stop for stop in stops):
            raise UsageError("a stop string must not be empty")
        self._patterns = _patterns(tuple(stops))
        self._matched = [0] * len(self._patterns)
        self._held = ""
        self._stopped: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that is safe to show, the stop string that was met or None). After a match everything is swallowed."""
        if self._stopped is not None:
            return "", self._stopped
        if not self._patterns:
            return text, None
        for position, character in enumerate(text, start=len(self._held) + 1):
            found = self._advance(character)
            if found is not None:
                safe = (self._held + text)[: position - len(found)]
                self._held, self._stopped = "", found
                return safe, found
        known = self._held + text
        cut = len(known) - max(self._matched)
        self._held = known[cut:]
        return known[:cut], None

    def flush(self) -> str:
        """What was held back, at the end of the output: it was no stop string after all."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._patterns)
        return held

    def _advance(self, character: str) -> str | None:
        """Feed one character to every pattern; the longest that is complete, if any."""
        found: str | None = None
        for index, pattern in enumerate(self._patterns):
            matched = pattern.advance(self._matched[index], character)
            self._matched[index] = matched
            if matched == len(pattern.text) and (found is None or matched > len(found)):
                found = pattern.text
        return found
