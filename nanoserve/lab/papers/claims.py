"""A paper's number beside ours: how far ours spreads over seeds, and whether the relation that is
claimed holds.

What the papers say is a table, claims.csv: a row for each claim, with the paper's number, the
bounds that are asked for and what our number depends on most. A figure computes our numbers only.
"""

import csv
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from nanoserve.record.metrics import Spread

Verdict = Literal["yes", "mostly", "no"]
"""yes: for every seed. mostly: for the mean, not for every seed. no: not for the mean."""
_TABLE = Path(__file__).with_name("claims.csv")
_NUMBER = r"([+]?)(\d+(?:\.\d+)?) ?(?:x|%)?"
_STATED = re.compile(rf"(?:up to |more than )?{_NUMBER}(?: to {_NUMBER})?(?: \(.*)?")
_FAR = 1.5
_ASKED = re.compile(
    r"(?:at (least|most) )?([+]?)([\d,]+(?:\.(\d+))?)(\D*?)(?: to [+]?([\d,]+(?:\.\d+)?)\D*)?"
)


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A relation that a paper states, with the paper's number and ours."""

    figure: str  # the paper's figure or section where it stands
    says: str  # the relation, in words
    paper: str  # the paper's number
    ours: Spread  # our simulated number, over the seeds
    form: str = "{:.2f}"  # how ours is written, for str.format: "{:.2f}x"
    at_least: float | None = None
    at_most: float | None = None
    """Bounds of our number for the relation to hold; None is no bound. The bounds are nanoserve's
    own, not the paper's, and are chosen for the relation that the paper draws."""
    # what our number depends on most. Where the claim does not hold: what it would need
    assumption: str

    @property
    def holds(self) -> Verdict:
        if self._within(self.ours.low) and self._within(self.ours.high):
            return "yes"
        if self._within(self.ours.mean):
            return "mostly"
        return "no"

    @property
    def off(self) -> float | None:
        """Factor between the mean and the paper's number, or the nearer end of its range; None if
        it states none."""
        if not (stated := _STATED.fullmatch(self.paper)):
            return None
        plus, low, _, high = stated.groups()
        ends = [float(low), float(high or low)]
        if plus:
            ends = [end / 100 + 1 for end in ends]
        if min(ends) <= 0 or self.ours.mean <= 0:
            return None
        return max(ends[0] / self.ours.mean, self.ours.mean / ends[1], 1.0)

    @property
    def verdict(self) -> str:
        """Whether it holds; and where it does, but ours is far from the paper's number, by how
        much."""
        off = self.off or 1.0
        if self.holds == "no" or off <= _FAR:
            return self.holds
        return f"{self.holds}, {off:.1f}x off"

    @property
    def bounds(self) -> str:
        if self.at_least is not None and self.at_most is not None:
            return f"{self.form.format(self.at_least)} to {self.form.format(self.at_most)}"
        if self.at_least is not None:
            return f"at least {self.form.format(self.at_least)}"
        if self.at_most is not None:
            return f"at most {self.form.format(self.at_most)}"
        return "-"

    def row(self) -> dict[str, object]:
        return {
            **msgspec.to_builtins(self),
            "ours_text": self.ours.text(self.form),
            "bounds": self.bounds,
            "holds": self.holds,
            "verdict": self.verdict,
        }

    def _within(self, value: float) -> bool:
        return (self.at_least is None or value >= self.at_least) and (
            self.at_most is None or value <= self.at_most
        )


Ours = dict[str, Spread | float]  # our numbers by the name of the claim


@cache
def stated_claims() -> Mapping[tuple[str, str], Mapping[str, str]]:
    """The rows of claims.csv, by the paper's name on the command line and the claim's own name."""
    with _TABLE.open(encoding="utf-8", newline="") as table:
        return {(row["of"], row["claim"]): row for row in csv.DictReader(table)}


def claims(of: str, ours: Mapping[str, Spread | float], **words: object) -> list[Claim]:
    """Our numbers, by the claim's name in the table, as claims of a paper; ``words`` stand in the
    texts' braces."""
    found = []
    for name, number in ours.items():
        stated = stated_claims()[of, name]
        form, low, high = read_bounds(stated["asked"].format(**words))
        texts = {
            field: stated[field].format(**words)
            for field in ("figure", "says", "paper", "assumption")
        }
        spread = number
        if not isinstance(spread, Spread):
            spread = Spread.of([spread])
        found.append(
            Claim(**texts, ours=spread, form=stated["form"] or form, at_least=low, at_most=high)
        )
    return found


def read_bounds(asked: str) -> tuple[str, float | None, float | None]:
    """How a number is written, the lowest and the highest value, from "0.95x to 1.05x"; ValueError
    if not bounds."""
    match = _ASKED.fullmatch(asked)
    if match is None:
        raise ValueError(f"not a bound: {asked!r}")
    side, sign, number, decimals, unit, high = match.groups()
    comma = ""
    if "," in number:
        comma = ","
    form = f"{{:{sign}{comma}.{len(decimals or '')}f}}{unit}"
    lowest, highest = (float(end.replace(",", "")) for end in (number, high or number))
    if side == "most":
        return form, None, highest
    if side == "least":
        return form, lowest, None
    return form, lowest, highest
