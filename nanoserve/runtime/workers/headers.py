"""What goes ahead of hidden states where the plan alone does not say how many come: in plans of host sequences."""

import msgspec

from nanoserve.scheduler.plan import CohortProgress, HostWork


class Leaving(msgspec.Struct, frozen=True, array_like=True):
    """A group of host sequences that goes on to the next stage."""

    step: int
    """The plan in which they began their token."""
    sequences: tuple[int, ...]
    """In the order of their hidden states."""


class Header(msgspec.Struct, frozen=True, array_like=True):
    """Which groups have left a stage with a plan, and what the last stage shall tell of those that are under way.

    Which of them leave is known only where they are under way, for it depends on how far the CPU has come.
    """

    leaving: tuple[Leaving, ...] = ()
    """Their hidden states follow those of the plan's rows on the device, one group after the other."""
    cohorts: tuple[CohortProgress, ...] = ()
    """Progress of the host sequences that are under way in this stage and in those before it."""
    host_work: tuple[HostWork, ...] = ()
    """What the CPU did there since the last such plan."""

    @property
    def num_rows(self) -> int:
        """Hidden states that follow those of the rows on the device."""
        return sum(len(group.sequences) for group in self.leaving)
