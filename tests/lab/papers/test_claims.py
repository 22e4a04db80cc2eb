"""A claim's verdict is about seeds: all of them, their mean, or not even that."""

import pytest
from msgspec.structs import replace

from nanoserve.lab.papers.claims import Claim, claims, read_bounds, stated_claims
from nanoserve.lab.papers.framework import PAPERS
from nanoserve.record.metrics import Spread


def _claim(*values: float, at_least: float | None = None, at_most: float | None = None) -> Claim:
    return Claim(
        figure="1",
        says="it is more",
        paper="2x",
        ours=Spread.of(values),
        form="{:.1f}x",
        at_least=at_least,
        at_most=at_most,
        assumption="none",
    )


@pytest.mark.parametrize(
    ("values", "verdict"),
    [((1.3, 2.3), "yes"), ((1.2, 1.6), "mostly"), ((1.1, 1.2), "no"), ((2.0, 3.0), "no")],
)
def test_a_relation_holds_for_all_seeds_for_their_mean_or_not(
    values: tuple[float, ...], verdict: str
) -> None:
    assert _claim(*values, at_least=1.3, at_most=2.3).holds == verdict


def test_a_claim_says_what_was_asked_and_what_came() -> None:
    row = _claim(1.0, 2.0, at_least=1.3).row()
    assert (row["ours_text"], row["bounds"], row["holds"]) == (
        "1.5x [1.0x..2.0x]",
        "at least 1.3x",
        "mostly",
    )
    assert _claim(1.0, at_most=1.0).row()["ours_text"] == "1.0x"


@pytest.mark.parametrize(
    ("paper", "ours", "verdict"),
    [
        ("1.79x", 4.07, "yes, 2.3x off"),
        ("1.44x", 1.34, "yes"),
        ("up to 3.2x", 1.6, "yes, 2.0x off"),
        ("1.29x to 2.50x", 2.68, "yes"),
        ("1.29x to 2.50x", 5.0, "yes, 2.0x off"),
        ("+46 %", 1.57, "yes"),
        ("+46 %", 2.92, "yes, 2.0x off"),
        ("9.0x (abstract: 4x)", 0.9, "no"),
        ("below 2 %", 9.0, "yes"),
        ("more (bars)", 9.0, "yes"),
    ],
)
def test_what_holds_but_is_far_from_the_papers_number_says_so(
    paper: str, ours: float, verdict: str
) -> None:
    claim = replace(_claim(ours, at_least=1.0), paper=paper)
    assert claim.row()["verdict"] == verdict


def test_without_values_there_is_no_spread() -> None:
    with pytest.raises(ValueError, match="one value"):
        Spread.of([])


@pytest.mark.parametrize(
    ("asked", "form", "low", "high"),
    [
        ("at least 1.30x", "{:.2f}x", 1.3, None),
        ("at most 12.0 %", "{:.1f} %", None, 12.0),
        ("at most +0", "{:+.0f}", None, 0.0),
        ("at most 65,097", "{:,.0f}", None, 65097.0),
        ("1.90x to 2.20x", "{:.2f}x", 1.9, 2.2),
    ],
)
def test_what_is_asked_tells_the_bounds_and_the_form(
    asked: str, form: str, low: float | None, high: float | None
) -> None:
    assert read_bounds(asked) == (form, low, high)
    assert replace(_claim(1.0, at_least=low, at_most=high), form=form).bounds == asked


def test_what_is_no_bound_is_an_error() -> None:
    with pytest.raises(ValueError, match="not a bound"):
        read_bounds("about 2x")


def test_numbers_become_the_claims_of_the_table() -> None:
    few, over = claims("gllm", {"1 few bubbles": Spread(2.6, 2.5, 2.7), "11 input": 5.17})
    assert (few.figure, few.paper, few.bounds, few.holds) == (
        "1, 4",
        "few",
        "at most 12.0 %",
        "yes",
    )
    assert few.row()["ours_text"] == "2.6 % [2.5 %..2.7 %]"
    # The bounds may have more decimals than the number is shown with.
    assert (over.at_least, over.at_most, over.bounds) == (4.689, 5.731, "4.69x to 5.73x")


def test_words_in_braces_are_filled_in() -> None:
    (grows,) = claims("apex", {"7 grows": 1.2}, gain=1.0625)
    assert (grows.at_least, grows.bounds, grows.holds) == (1.0625, "at least 1.06x", "yes")
    (slow,) = claims("seesaw", {"14 slow": 4.0}, slow="d1t1p8")
    assert slow.assumption == "best was d1t1p8"


def test_every_row_of_the_table_is_whole() -> None:
    rows = stated_claims().values()
    assert {row["of"] for row in rows} == set(PAPERS)
    for row in rows:
        assert row["figure"] and row["says"] and row["paper"] and row["assumption"]
        assert "{" in row["asked"] or read_bounds(row["asked"])
