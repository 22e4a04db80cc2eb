"""Layouts: the parallel layouts there are, which one runs, and when it may be left for another.

A transition needs an idle, empty device: no plan in flight and no KV on it. Getting there is called draining. It ends
every sequence's stay on the device, so it costs recomputation or two swaps for each; a policy that wants another
layout every time it is asked must not be able to spend all time on that. Hence the rule: between two drains at least
one token is answered. Answers are finite, so everything finishes whatever the policy wants.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayoutCapacity:
    """What the scheduler must know of a parallel layout.

    Attributes:
        num_blocks: KV blocks on the device.
        pipeline_depth: plans in flight at most.
    """

    num_blocks: int
    pipeline_depth: int = 1


class Layouts:
    """The current one, and the way to another.

    Args:
        capacities: by number; 0 is the one to begin with.

    Attributes:
        current: the number of the one that runs.
        target: the one that a transition in flight leads to, or None.
        answered: whether a token was answered since the last drain began.
    """

    def __init__(self, capacities: Sequence[LayoutCapacity]) -> None:
        self.capacities = tuple(capacities)
        self.current = 0
        self.target: int | None = None
        self.answered = True
        self._draining = False

    @property
    def smallest(self) -> LayoutCapacity:
        """The one with the fewest blocks; what fits there fits everywhere."""
        return min(self.capacities, key=lambda capacity: capacity.num_blocks)

    @property
    def changing(self) -> bool:
        """Whether the device is being drained, or a transition is in flight."""
        return self._draining or self.target is not None

    def drains_for(self, wanted: int) -> bool:
        """Whether the device is to be drained, now that the policy wants this layout; one there is not is ignored."""
        if wanted == self.current or not 0 <= wanted < len(self.capacities):
            self._draining = False
        elif not self._draining and self.answered:
            self._draining, self.answered = True, False
        return self._draining

    def begin(self, target: int) -> None:
        """The transition is in flight."""
        self.target = target

    def end(self) -> LayoutCapacity:
        """The transition is done; returns what there is now."""
        assert self.target is not None, "a transition has begun"
        self.current, self.target, self._draining = self.target, None, False
        return self.capacities[self.current]

    def abandon(self) -> None:
        """The transition, if there is one, failed: the layout stays."""
        self.target, self._draining = None, False

    def begin_anew(self) -> None:
        """Nothing is left on the device: another drain costs nobody anything, so it need not wait for a token."""
        self.abandon()
        self.answered = True
