"""Work: the requests of a run, as lengths and perhaps times."""

from collections.abc import Sequence
from dataclasses import dataclass

from nanoserve.errors import UsageError
from nanoserve.measures.workloads import RequestShape


@dataclass(frozen=True, slots=True)
class Work:
    """What is asked in every run."""

    name: str
    shapes: Sequence[RequestShape]
    """The lengths of the requests."""
    times: Sequence[float] | None = None
    """When the requests of a trace came, one for each."""

    def fitting(self, context: int | None) -> "Work":
        """The requests that fit into a context of ``context`` tokens; all requests if it is None.

        Raises:
            UsageError: if none does.
        """
        if context is None:
            return self
        places = [place for place, shape in enumerate(self.shapes) if shape.total_tokens <= context]
        if not places:
            raise UsageError(f"every request of {self.name} is longer than the context of {context} tokens")
        times = None if self.times is None else [self.times[place] for place in places]
        return Work(self.name, [self.shapes[place] for place in places], times)
