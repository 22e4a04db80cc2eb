"""Watching what moves between the device and the host pool."""

from collections.abc import Sequence

import pytest

from nanoserve.executor.kv_transfer.swapping import BlockMover, LayerMarks, Swapper
from nanoserve.scheduler.optional import Swap


def watch_swaps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directions of all swaps that begin from now on, in this process."""
    moved: list[str] = []
    begin = Swapper.begin

    def beginning(swapper: Swapper, swaps: Sequence[Swap], mover: BlockMover) -> LayerMarks | None:
        moved.extend(swap.direction for swap in swaps)
        return begin(swapper, swaps, mover)

    monkeypatch.setattr(Swapper, "begin", beginning)
    return moved
