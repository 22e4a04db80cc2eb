"""The compiled layers of all workers, of one engine or of several, as the engines' process sees them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanoserve.runtime.workers.executor import WorkersExecutor


class RemoteLayers:
    """One worker after the other loads or compiles its layers: the second finds what the first has made.

    Args:
        executors: of one model, in the order in which their workers prepare their layers.
    """

    def __init__(self, executors: "Sequence[WorkersExecutor]") -> None:
        self._executors = executors
        self._wanted = self._waited = False

    @property
    def loaded(self) -> bool:
        """Whether all layers run compiled."""
        return all(sum(executor.prepared.values()) == executor.num_workers for executor in self._executors)

    @property
    def pending(self) -> bool:
        """Whether some are being compiled, or are to be."""
        return self._wanted and self._current() is not None

    def start(self, *, waited: bool = False) -> None:
        """Begin to load them, or to compile what is missing; `waited` as in `BackgroundLibrary.start`."""
        self._wanted, self._waited = True, waited
        self.go_on()

    def go_on(self) -> None:
        """Have the next worker begin, if any is to. Call it when a worker is done, and when workers run again."""
        if self._wanted and (executor := self._current()) is not None:
            executor.prepare_next(waited=self._waited)

    def wait(self) -> None:
        """Wait for what has been started, as long as the workers live; between two runs, when no plan is in flight."""
        for executor in self._executors if self._wanted else ():
            if executor is self._current():
                executor.wait_for(lambda executor=executor: self._current() is not executor)  # type: ignore[misc]

    def _current(self) -> "WorkersExecutor | None":
        """The first whose workers have not all prepared their layers, and still can."""
        waiting = (one for one in self._executors if not one.failed and len(one.prepared) < one.num_workers)
        return next(waiting, None)
