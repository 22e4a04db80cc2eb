"""HostCohorts: host sequences whose token is under way, while plans come and go.

Under asynchronous overlap (APEX) the sequences that begin a token in one plan stay together: a cohort, which advances
by about one layer with each plan, so that a token takes layers + 1 plans.
"""

from collections.abc import Iterator, Mapping

from nanoserve.request import Sequence
from nanoserve.scheduler.load import Cohort
from nanoserve.scheduler.plan import StepPlan


class HostCohorts:
    """Who is under way since which plan, and how far."""

    def __init__(self) -> None:
        self._layers: dict[int, int] = {}
        self._members: dict[int, dict[int, Sequence]] = {}  # by plan, then by sequence
        self._plan_of: dict[int, int] = {}

    def __len__(self) -> int:
        """How many sequences are under way."""
        return len(self._plan_of)

    def follow(self, plan: StepPlan, sequences: Mapping[int, Sequence]) -> None:
        """Host sequences of an overlapped plan begin their token in it; any other plan finishes those that it names."""
        on_host = [row.sequence for row in plan.rows if row.tier == "host"]
        if plan.strategy == "overlap":
            self._layers[plan.step] = 0
            self._members[plan.step] = {sequence: sequences[sequence] for sequence in on_host}
            self._plan_of |= dict.fromkeys(on_host, plan.step)
        else:
            for sequence in on_host:
                self.leave(sequence)

    def advance(self, step: int, layers: int) -> None:
        """So many layers are behind the cohort that began in that plan; nothing if all of it has been answered."""
        if step in self._layers:
            self._layers[step] = layers

    def leave(self, sequence: int) -> None:
        """It is answered, or a plan was told to finish it; nothing if it was not under way."""
        step = self._plan_of.pop(sequence, None)
        if step is None:
            return
        del self._members[step][sequence]
        if not self._members[step]:
            del self._members[step], self._layers[step]

    def clear(self) -> None:
        """None is under way any more, and no progress will be told of those that were."""
        for of_all in (self._layers, self._members, self._plan_of):
            of_all.clear()

    def _by_progress(self) -> list[int]:
        return sorted(self._layers, key=lambda step: (-self._layers[step], step))

    def most_advanced(self) -> Iterator[Sequence]:
        """All that are under way, those nearest to their token first."""
        for step in self._by_progress():
            yield from self._members[step].values()

    def layers_behind(self, sequence: int) -> int:
        """How far one is whose token is under way.

        Raises:
            KeyError: if it is not.
        """
        return self._layers[self._plan_of[sequence]]

    @property
    def under_way(self) -> dict[int, Cohort]:
        """By the plan in which they began, the most advanced first."""
        return {step: self._cohort(step) for step in self._by_progress()}

    def snapshot(self) -> tuple[Cohort, ...]:
        """As the policy sees them, the most advanced first."""
        return tuple(self.under_way.values())

    def _cohort(self, step: int) -> Cohort:
        members = self._members[step].values()
        return Cohort(self._layers[step], len(members), sum(sequence.computed for sequence in members))
