"""A paper's number beside ours: how far ours spreads over seeds, and whether the relation that is claimed holds."""

import re
from collections.abc import Iterable
from typing import Literal, Self

import msgspec

Verdict = Literal["yes", "mostly", "no"]
"""yes: for every seed. mostly: for the mean, not for every seed. no: not for the mean."""
_NUMBER = r"([+]?)(\d+(?:\.\d+)?) ?(?:x|%)?"
_STATED = re.compile(rf"(?:up to |more than )?{_NUMBER}(?: to {_NUMBER})?(?: \(.*)?")
_FAR = 1.5
_ASKED = re.compile(r"(?:at (least|most) )?([+]?)(\d+(?:\.(\d+))?)(\D*?)(?: to [+]?(\d+(?:\.\d+)?)\D*)?")


class Spread(msgspec.Struct, frozen=True):
    """A metric over seeds; seeds differ in arrivals and lengths."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Mean, lowest and highest of one value or more.

        Raises:
            ValueError: without values.
        """
        found = list(values)
        if not found:
            raise ValueError("a spread takes one value at least")
        return cls(sum(found) / len(found), min(found), max(found))

    def text(self, form: str) -> str:
        """As "1.84x [1.79x..1.90x]", or the mean alone where all seeds agree on it; ``form`` is for str.format."""
        mean, low, high = (form.format(value) for value in (self.mean, self.low, self.high))
        return mean if low == high else f"{mean} [{low}..{high}]"


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What a paper says, and what came out here."""

    figure: str
    """The paper's figure or section where it stands."""
    says: str
    """The relation, in words."""
    paper: str
    """The paper's number."""
    ours: Spread
    """The same, simulated."""
    form: str = "{:.2f}"
    """How ours is written, for str.format: "{:.2f}x"."""
    at_least: float | None = None
    at_most: float | None = None
    """What ours must lie between for the relation to hold; None is no bound. The bounds are nanoserve's own, not the
    paper's, and are chosen for the relation that the paper draws."""
    assumption: str
    """What our number depends on most. Where the claim does not hold: what it would need."""

    @property
    def holds(self) -> Verdict:
        if self._within(self.ours.low) and self._within(self.ours.high):
            return "yes"
        return "mostly" if self._within(self.ours.mean) else "no"

    @property
    def off(self) -> float | None:
        """By what factor the mean is off the paper's number, or the nearer end of its range; None if it states none."""
        if not (stated := _STATED.fullmatch(self.paper)):
            return None
        plus, low, _, high = stated.groups()
        ends = [float(end) / 100 + 1 if plus else float(end) for end in (low, high or low)]
        if min(ends) <= 0 or self.ours.mean <= 0:
            return None
        return max(ends[0] / self.ours.mean, self.ours.mean / ends[1], 1.0)

    @property
    def verdict(self) -> str:
        """Whether it holds; and where it does, but ours is far from the paper's number, by how much."""
        off = self.off or 1.0
        return self.holds if self.holds == "no" or off <= _FAR else f"{self.holds}, {off:.1f}x off"

    @property
    def bounds(self) -> str:
        """What is asked for, in words."""
        low, high = (None if bound is None else self.form.format(bound) for bound in (self.at_least, self.at_most))
        if low and high:
            return f"{low} to {high}"
        return f"at least {low}" if low else f"at most {high}" if high else "-"

    def row(self) -> dict[str, object]:
        """For a report and a table."""
        return {
            **msgspec.to_builtins(self),
            "ours_text": self.ours.text(self.form),
            "bounds": self.bounds,
            "holds": self.holds,
            "verdict": self.verdict,
        }

    def _within(self, value: float) -> bool:
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)


Asked = str | tuple[str, float | None, float | None]
"""What must hold, as the table shows it ("at least 1.30x", "0.95x to 1.05x"); it tells the number's form, too. Computed
bounds are a tuple: form, lowest, highest."""
ClaimRow = tuple[str, str, Spread | float, Asked, str]
"""What is claimed, the paper's number, ours, what is asked, and what ours depends on most."""


def claims(figure: str | None, rows: Iterable[ClaimRow]) -> list[Claim]:
    """The claims of a figure; of several if it is None, and each claim then begins with its figure: "1.6: ..."."""
    found = []
    for says, paper, ours, asked, assumption in rows:
        place, words = (figure, says) if figure is not None else says.split(": ", 1)
        form, low, high = _bounds(asked) if isinstance(asked, str) else asked
        spread = ours if isinstance(ours, Spread) else Spread.of([ours])
        found.append(
            Claim(
                figure=place,
                says=words,
                paper=paper,
                ours=spread,
                form=form,
                at_least=low,
                at_most=high,
                assumption=assumption,
            )
        )
    return found


def _bounds(asked: str) -> tuple[str, float | None, float | None]:
    """Read the form of a number, the lowest and the highest value off what is asked."""
    match = _ASKED.fullmatch(asked)
    if match is None:
        raise ValueError(f"not a bound: {asked!r}")
    side, sign, number, decimals, unit, high = match.groups()
    form = f"{{:{sign}.{len(decimals or '')}f}}{unit}"
    return form, None if side == "most" else float(number), float(high or number) if side != "least" else None
