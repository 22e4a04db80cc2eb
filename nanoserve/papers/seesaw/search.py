"""The best static configuration against the best pair of layouts, found in the same three rounds for both.

First the cost model makes a short list; then what is on it is simulated once; then the two best with every seed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from nanoserve.papers.claims import Spread
from nanoserve.papers.framework import Outcomes, Run, Scale
from nanoserve.papers.seesaw.estimate import Shortlist
from nanoserve.papers.seesaw.runs import BatchOutcome, ClosedBatch
from nanoserve.papers.seesaw.settings import LayoutChoice, OfflineBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class BestOfBoth:
    """Two configurations of one setting, seed by seed."""

    setting: OfflineBatch
    """With the first seed."""
    static: LayoutChoice
    resharding: LayoutChoice
    """The configurations."""
    static_outcomes: Sequence[BatchOutcome]
    resharding_outcomes: Sequence[BatchOutcome]
    """In the order of the seeds."""

    def seconds(self, kind: str) -> list[float]:
        """Times of the "static" or the "resharding" configuration."""
        return [one.seconds for one in (self.static_outcomes if kind == "static" else self.resharding_outcomes)]

    @property
    def gains(self) -> list[float]:
        """Throughput of re-sharding over that of the static configuration, of each seed."""
        pairs = zip(self.seconds("static"), self.seconds("resharding"), strict=True)
        return [static / resharding for static, resharding in pairs]

    @property
    def gain(self) -> Spread:
        return Spread.of(self.gains)

    def row(self) -> dict[str, object]:
        """For a table."""
        return {
            "model": self.setting.model,
            "machine": self.setting.machine,
            "lengths": self.setting.lengths,
            "static": f"{self.static.label} ({self.static.token_budget})",
            "seesaw": f"{self.resharding.label} ({self.resharding.token_budget})",
            "static_requests_per_second": _rate(self.static_outcomes).mean,
            "seesaw_requests_per_second": _rate(self.resharding_outcomes).mean,
            "transitions": max(one.result.transitions for one in self.resharding_outcomes),
            "gain": self.gain.mean,
            "gain_text": self.gain.text("{:.2f}x"),
        }


def compare(settings: Sequence[OfflineBatch], scale: Scale, run: Run) -> list[BestOfBoth]:
    """The best of both kinds in every setting; settings on which nothing can be re-sharded are left out."""
    lists = [Shortlist(setting=setting, candidates=scale.pick(3, 8)) for setting in settings]
    outcomes = run(lists)
    found = {one.setting: outcomes[one] for one in lists if outcomes[one].resharding}
    outcomes = run(
        ClosedBatch(setting=setting, choice=choice)
        for setting, candidates in found.items()
        for choice in (*candidates.static, *candidates.resharding)
    )
    best = {
        setting: (fastest(setting, candidates.static, outcomes), fastest(setting, candidates.resharding, outcomes))
        for setting, candidates in found.items()
    }
    outcomes = run(
        batch
        for setting, choices in best.items()
        for choice in choices
        for batch in over_seeds(setting, choice, scale.seeds)
    )
    return [
        BestOfBoth(
            setting=setting,
            static=static,
            resharding=resharding,
            static_outcomes=[outcomes[batch] for batch in over_seeds(setting, static, scale.seeds)],
            resharding_outcomes=[outcomes[batch] for batch in over_seeds(setting, resharding, scale.seeds)],
        )
        for setting, (static, resharding) in best.items()
    ]


def fastest(setting: OfflineBatch, choices: Iterable[LayoutChoice], outcomes: Outcomes) -> LayoutChoice:
    """The fastest of the choices that were simulated."""
    return min(choices, key=lambda choice: outcomes[ClosedBatch(setting=setting, choice=choice)].seconds)


def over_seeds(setting: OfflineBatch, choice: LayoutChoice, seeds: Iterable[int]) -> list[ClosedBatch]:
    """The configuration on the setting's requests of each seed."""
    return [ClosedBatch(setting=msgspec.structs.replace(setting, seed=seed), choice=choice) for seed in seeds]


def _rate(outcomes: Iterable[BatchOutcome]) -> Spread:
    return Spread.of(one.result.requests_per_second for one in outcomes)
