"""A claim's verdict is about seeds: all of them, their mean, or not even that."""

import pytest

from nanoserve.papers.claims import Claim, Spread


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


def test_without_values_there_is_no_spread() -> None:
    with pytest.raises(ValueError, match="one value"):
        Spread.of([])
