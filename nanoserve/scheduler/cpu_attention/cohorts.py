"""Host sequences whose token is under way: Asynchronous Overlap (APEX) advances a cohort by at most
one layer a plan, so its token takes L + 1 plans at least."""

from collections.abc import Mapping

from nanoserve.request import Sequence
from nanoserve.scheduler.optional import Cohort
from nanoserve.scheduler.plan import StepPlan


class _HostCohort(dict[int, Sequence]):
    """Host sequences, by id, that began a token in the same overlapped plan, and the layers that
    are behind them."""

    layers = 0


class HostCohorts(dict[int, _HostCohort]):
    """The cohorts by the plan in which they began; none is empty."""

    def follow(self, plan: StepPlan, sequences: Mapping[int, Sequence]) -> None:
        """Follow a plan. Host sequences of an overlapped plan begin their token in it; any other
        plan finishes the sequences that it names."""
        on_host = [row.sequence for row in plan.rows if row.host is not None]
        if plan.host.strategy != "overlap":
            for sequence in on_host:
                self.leave(sequence)
        elif on_host:
            self[plan.step] = _HostCohort({sequence: sequences[sequence] for sequence in on_host})

    def advance(self, step: int, layers: int) -> None:
        """The cohort that began in that plan has passed this many layers; all of it may have been
        answered before."""
        if step in self:
            self[step].layers = layers

    def leave(self, sequence: int) -> None:
        """The sequence is answered, or a plan finishes it; it need not have been under way."""
        for step, cohort in self.items():
            if cohort.pop(sequence, None) is not None:
                if not cohort:
                    del self[step]
                return

    def _by_progress(self) -> list[tuple[int, _HostCohort]]:
        return sorted(self.items(), key=lambda item: (-item[1].layers, item[0]))

    @property
    def most_advanced(self) -> list[Sequence]:
        """All sequences under way, first the sequences that are nearest to their token."""
        return [sequence for _, cohort in self._by_progress() for sequence in cohort.values()]

    @property
    def under_way(self) -> dict[int, Cohort]:
        """A snapshot of the cohorts, the most advanced first."""
        return {
            step: Cohort(cohort.layers, len(cohort), sum(one.computed for one in cohort.values()))
            for step, cohort in self._by_progress()
        }

    def layers_behind(self, sequence: int) -> int:
        return next(cohort.layers for cohort in self.values() if sequence in cohort)
