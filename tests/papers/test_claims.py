"""A claim's verdict is about seeds: all of them, their mean, or not even that."""

import msgspec
import pytest

from nanoserve.papers.claims import Asked, Claim, Spread, claims


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
    ("values", "verdict"), [((1.3, 2.3), "yes"), ((1.2, 1.6), "mostly"), ((1.1, 1.2), "no"), ((2.0, 3.0), "no")]
)
def test_a_relation_holds_for_all_seeds_for_their_mean_or_not(values: tuple[float, ...], verdict: str) -> None:
    assert _claim(*values, at_least=1.3, at_most=2.3).holds == verdict


def test_a_claim_says_what_was_asked_and_what_came() -> None:
    row = _claim(1.0, 2.0, at_least=1.3).row()
    assert (row["ours_text"], row["bounds"], row["holds"]) == ("1.5x [1.0x..2.0x]", "at least 1.3x", "mostly")
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
def test_what_holds_but_is_far_from_the_papers_number_says_so(paper: str, ours: float, verdict: str) -> None:
    claim = msgspec.structs.replace(_claim(ours, at_least=1.0), paper=paper)
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
        ("1.90x to 2.20x", "{:.2f}x", 1.9, 2.2),
        (("{:.2f}x", 1.055, None), "{:.2f}x", 1.055, None),
    ],
)
def test_what_is_asked_tells_the_bounds_and_the_form(
    asked: Asked, form: str, low: float | None, high: float | None
) -> None:
    (claim,) = claims("1", [("it is more", "2x", 1.5, asked, "none")])
    assert (claim.form, claim.at_least, claim.at_most) == (form, low, high)
    assert claim.bounds == asked or isinstance(asked, tuple)


def test_a_claim_may_name_its_figure_itself() -> None:
    (claim,) = claims(None, [("1, 4: bubbles: few", "few", 1.0, "at most 2", "none")])
    assert (claim.figure, claim.says) == ("1, 4", "bubbles: few")


def test_what_is_no_bound_is_an_error() -> None:
    with pytest.raises(ValueError, match="not a bound"):
        claims("1", [("it is more", "2x", 1.0, "about 2x", "none")])
