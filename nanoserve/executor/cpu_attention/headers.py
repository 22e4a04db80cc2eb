"""Header: goes from stage to stage ahead of hidden states, because a plan alone does not say how
many come.

In a pipeline, a group of host sequences is under way in a stage while plans pass through it, and
leaves its last layer with one of them: with that plan its hidden states travel to the next stage.
Which groups leave depends on how far the CPU is.
"""

import msgspec

from nanoserve.scheduler.optional import CohortProgress, HostWork


class Leaving(msgspec.Struct, frozen=True, array_like=True):
    """A group of host sequences that goes on to the next stage."""

    step: int  # the plan in which they began their token
    sequences: tuple[int, ...]  # in the order of their hidden states


class Header(msgspec.Struct, frozen=True, array_like=True):
    """Groups that have left a stage with a plan, and the progress of groups that are under way."""

    leaving: tuple[Leaving, ...] = ()
    """Their hidden states follow those of the plan's rows on the device, one group after the
    other."""
    cohorts: tuple[CohortProgress, ...] = ()
    """Progress of the host sequences that are under way in this stage and in those before it."""
    # work that the CPU finished there since the last such plan
    host_work: tuple[HostWork, ...] = ()

    @property
    def num_rows(self) -> int:
        return sum(len(group.sequences) for group in self.leaving)
