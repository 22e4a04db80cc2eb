r"""Estimate the work that a regular expression may cause, from its text.

Oniguruma tries one way to match after the other, until one succeeds. `\s*[\r\n]+` has one way for
each blank that it gives back. `(a+)+$` has twice as many for each further `a`: after forty of them
and a `b`, none succeeds within an hour. A pattern is refused if it may be tried in too many ways.
The syntax is Oniguruma's, as far as patterns of tokenizers use it.
"""

import re
from dataclasses import dataclass

MAX_WAYS = 1000
# characters that a repeated one is taken to match, so that two of them before what can fail are too
# many
_LENGTH = 100
_MANY = 1e12  # ways that are not told apart
_MAX_DEPTH = 100

# Oniguruma knows `a++`, which gives nothing back, but `a{1,3}+` is `(?:a{1,3})+`.
_QUANTIFIER = re.compile(r"[*+?][?+]?|\{\d*,\d*\}\??|\{\d+\}\??")
_GROUP = re.compile(r"\(\?(?:[imsx-]*:|[=!>]|<[=!]|<\w+>)|\((?!\?)")
_OPTIONS = re.compile(r"\(\?[ims-]+\)")
_ESCAPE = re.compile(
    r"\\(?:[pP]\{[^}]*\}|x\{[^}]*\}|x[0-9A-Fa-f]{1,2}|u[0-9A-Fa-f]{4}|.)", re.DOTALL
)
_POSIX = re.compile(r"\[:\^?\w+:\]")
_PROPERTY = re.compile(r"\\p\{([A-Z][a-z]?)\}")


class PatternError(Exception):
    """A pattern may take too long, or cannot be read; the message goes on after the pattern."""


@dataclass(frozen=True, slots=True)
class Measure:
    """Properties of a part of a pattern, matched at one place of a text."""

    ways: float = 1.0  # ways in which it can match. All are tried if what follows fails
    tried: float = 1.0  # ways that are tried before it has matched once, or has failed
    fails: bool = False  # whether it can fail; what can match nothing never does
    shortest: int = 0  # fewest characters that match
    properties: tuple[str, ...] | None = None
    """Unicode general categories, if the part is a row of single characters by category, perhaps
    repeated."""
    begins: bool = False  # whether such a row begins with a character that must be there


_NOTHING = Measure(properties=())
_ASSERTION = Measure(fails=True)
_CHARACTER = Measure(fails=True, shortest=1)


def measure_pattern(pattern: str) -> Measure:
    """Measure a pattern. Raises PatternError if it may be tried in more than MAX_WAYS ways, or is
    not understood."""
    measure = _Reader(pattern).read()
    if measure.tried > MAX_WAYS:
        raise PatternError("may be tried in too many ways, and so take very long")
    return measure


class _Reader:
    """Reads a pattern from left to right."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0

    def read(self) -> Measure:
        measure = self._alternatives()
        if self._at < len(self._pattern):
            raise PatternError("has a parenthesis that closes nothing")
        return measure

    def _take(self, expression: re.Pattern[str]) -> re.Match[str] | None:
        match = expression.match(self._pattern, self._at)
        if match:
            self._at = match.end()
        return match

    def _alternatives(self) -> Measure:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise PatternError("is nested too deeply")
        branches = [self._row()]
        while self._pattern.startswith("|", self._at):
            self._at += 1
            branches.append(self._row())
        self._depth -= 1
        if len(branches) == 1:
            return branches[0]
        return Measure(
            ways=min(_MANY, sum(one.ways for one in branches)),
            tried=min(_MANY, sum(one.tried for one in branches)),
            fails=all(one.fails for one in branches),
            shortest=min(one.shortest for one in branches),
        )

    def _row(self) -> Measure:
        """Read the parts that follow one another, up to the end of a branch."""
        whole = _NOTHING
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            part = self._part()
            while quantifier := self._take(_QUANTIFIER):
                part = _repeated(part, quantifier.group())
            whole = _joined(whole, part)
        return whole

    def _part(self) -> Measure:
        if self._take(_OPTIONS):
            return Measure()
        if group := self._take(_GROUP):
            options = group.group().partition("-")[0]
            if group.group().endswith(":") and "x" in options:
                raise PatternError("ignores blanks (?x), which is not supported")
            inner = self._alternatives()
            if not self._pattern.startswith(")", self._at):
                raise PatternError("has a parenthesis that is not closed")
            self._at += 1
            # a look around is not repeated in other ways
            if group.group() in ("(?=", "(?!", "(?<=", "(?<!"):
                return Measure(tried=inner.tried, fails=True)
            return inner
        character = self._pattern[self._at]
        if character == "(":
            raise PatternError(
                f"has a group of a kind that is not supported: {self._pattern[self._at :][:4]}"
            )
        if character == "[":
            self._skip_class()
            return _CHARACTER
        if escape := self._take(_ESCAPE):
            return _measure_escape(escape.group())
        self._at += 1
        if character in "^$":
            return _ASSERTION
        return _CHARACTER

    def _skip_class(self) -> None:
        """Go to the end of a class of characters, which may hold other classes."""
        depth = 0
        first = True
        while self._at < len(self._pattern):
            if self._take(_POSIX) or self._take(_ESCAPE):
                first = False
                continue
            character = self._pattern[self._at]
            self._at += 1
            if character == "[":
                depth += 1
                first = True
                continue
            if character == "]" and not first:
                depth -= 1
                if depth == 0:
                    return
            first = first and character == "^"
        raise PatternError("has a class of characters that is not closed")


def _measure_escape(escape: str) -> Measure:
    kind = escape[1]
    if kind in "123456789gk":
        raise PatternError("refers to a group, which may take very long")
    if kind in "cCM":
        raise PatternError("has a control character of a form that is not supported")
    if kind in "bBAzZGKyY":
        return _ASSERTION
    category = _PROPERTY.fullmatch(escape)
    if category is None:
        return _CHARACTER
    return Measure(fails=True, shortest=1, properties=(category.group(1),), begins=True)


def _joined(whole: Measure, part: Measure) -> Measure:
    properties = None
    if whole.properties is not None and part.properties is not None:
        properties = whole.properties + part.properties
    before = 1.0
    if part.fails:  # then everything before it is tried in other ways
        before = max(whole.ways, whole.tried)
    begins = whole.begins
    if whole is _NOTHING:
        begins = part.begins
    return Measure(
        ways=min(_MANY, whole.ways * part.ways),
        tried=min(_MANY, max(whole.tried, before * part.tried)),
        fails=whole.fails or part.fails,
        shortest=whole.shortest + part.shortest,
        properties=properties,
        begins=begins,
    )


def _repeated(part: Measure, quantifier: str) -> Measure:
    """Measure the part when it is repeated by this quantifier."""
    least, most = _bounds(quantifier)
    ways = _ways_to_repeat(part, least, most)
    # If one of the repetitions that must be there fails, the ones before it are tried in other
    # ways.
    before = min(max(least - 1, 0), 16)
    tried = part.ways**before * part.tried
    properties = None
    if part.ways == 1:
        properties = part.properties
    return Measure(
        ways=min(_MANY, ways),
        tried=min(_MANY, tried),
        fails=part.fails and least > 0,
        shortest=least * part.shortest,
        properties=properties,
    )


def _ways_to_repeat(part: Measure, least: int, most: int | None) -> float:
    if most is not None:
        return part.ways ** min(most, 16) * (1.0 + most - least)
    # A repetition that begins with a character at which the one before could not go on begins at
    # one place only.
    if part.ways == 1 or (part.begins and _are_disjoint(part.properties or ())):
        return _LENGTH
    return _MANY


def _bounds(quantifier: str) -> tuple[int, int | None]:
    known: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
    if quantifier[0] in known:
        return known[quantifier[0]]
    least, comma, most = quantifier.strip("{?}").partition(",")
    if not comma:
        count = int(least)
        if quantifier.endswith("?"):  # `a{3}?` is `(?:a{3})?`
            return 0, count
        return count, count
    if not most:
        return int(least or 0), None
    return int(least or 0), int(most)


def _are_disjoint(categories: tuple[str, ...]) -> bool:
    """Whether no character is in two of these general categories, such as L, Mn and Mc."""
    pairs = ((one, other) for place, one in enumerate(categories) for other in categories[:place])
    return not any(one.startswith(other) or other.startswith(one) for one, other in pairs)
