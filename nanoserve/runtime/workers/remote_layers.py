"""The compiled layers of all workers together, as the engine's process sees them."""

from collections.abc import Callable

from nanoserve.runtime.workers.messages import Prepared


class RemoteLayers:
    """One worker after the other loads or compiles its layers: the second finds what the first has made.

    Args:
        num_workers: that all prepare theirs.
        prepare: has the worker of that rank begin.
        wait: waits until something holds, as long as the workers live.
    """

    def __init__(
        self, num_workers: int, prepare: Callable[[int], None], wait: Callable[[Callable[[], bool]], None]
    ) -> None:
        self._num_workers = num_workers
        self._prepare = prepare
        self._wait = wait
        self._wanted = False
        self.waited = False  # whether the engine waits for what is being compiled
        self._prepared: dict[int, bool] = {}  # by rank: whether compiled

    @property
    def loaded(self) -> bool:
        """Whether all layers run compiled."""
        return len(self._prepared) == self._num_workers and all(self._prepared.values())

    @property
    def pending(self) -> bool:
        """Whether some are being compiled."""
        return self._wanted and len(self._prepared) < self._num_workers

    def start(self, *, waited: bool = False) -> None:
        """Begin to load them, or to compile what is missing; `waited` as for one library."""
        self.waited = waited
        if not self._wanted:
            self._wanted = True
            self.go_on()

    def wait(self) -> None:
        """Wait for what has been started, as long as the workers live; between two runs, when no plan is in flight."""
        self._wait(lambda: not self.pending)

    def go_on(self) -> None:
        """Have the next worker begin, if any is to."""
        if self.pending:
            self._prepare(len(self._prepared))

    def take(self, prepared: Prepared) -> None:
        """A worker is done."""
        self._prepared[prepared.rank] = prepared.compiled
        self.go_on()

    def forget(self) -> None:
        """The workers are gone; new ones begin again, once they run."""
        self._prepared.clear()
