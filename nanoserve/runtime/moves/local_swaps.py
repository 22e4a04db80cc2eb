"""The swaps of one process: begun with the plan that holds them, taken when they are done."""

import time
from queue import Empty, SimpleQueue

from nanoserve.runtime.moves.host_pool import HostPart
from nanoserve.runtime.moves.layer_marks import LayerComputed, LayerMarks
from nanoserve.runtime.moves.swapping import BlockMover, Swapper
from nanoserve.runtime.step.model_runner import ModelRunner
from nanoserve.scheduler.plan import Swap


class LocalSwaps:
    """Moves blocks of a runner's caches to and from its part of the host pool, in threads."""

    def __init__(self, runner: ModelRunner, part: HostPart) -> None:
        self._mover = BlockMover(runner.caches.keys, runner.caches.values, part, runner.device)
        self._ended: SimpleQueue[int | BaseException] = SimpleQueue()
        self._under_way = 0
        self._marks: LayerMarks | None = None  # of the newest step whose layers are waited for
        self._swapper = Swapper(lambda swap, *_: self._ended.put(swap.swap), self._ended.put)

    def begin(self, swaps: tuple[Swap, ...]) -> LayerComputed | None:
        """Have them carried out, behind what the device has been told to do so far.

        Returns:
            what is to be told of each layer of the step with these swaps; None if none of them follows a row.
        """
        self._under_way += len(swaps)
        marks = self._swapper.begin(swaps, self._mover)
        if marks is None:
            return None
        self._marks = marks
        return marks.computed

    def take_done(self, until: float | None) -> tuple[int, ...]:
        """Ids of swaps that are done since the last call. Waits for the first at most to that monotonic time, or as
        long as it takes; with none under way, not at all.

        Raises:
            BaseException: what one of them failed with.
        """
        done: list[int] = []
        while self._under_way:
            timeout = 0.0 if done else None if until is None else max(0.0, until - time.monotonic())
            try:
                ended = self._ended.get(timeout=timeout)
            except Empty:
                break
            self._under_way -= 1
            if isinstance(ended, BaseException):
                raise ended
            done.append(ended)
        return tuple(done)

    def abandon(self) -> None:
        """Nobody will ask for those under way: they end before their blocks are used for anything else. A step whose
        layers are waited for is given up too."""
        self._give_up_step()
        while self._under_way:
            self._ended.get()
            self._under_way -= 1

    def close(self) -> None:
        """End the threads, and what is under way first."""
        self._give_up_step()
        self._swapper.close()

    def _give_up_step(self) -> None:
        if self._marks is not None:
            self._marks.give_up()
