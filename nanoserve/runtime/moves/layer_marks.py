"""How far a step is in its layers: told while it is computed, so that others begin with what a layer wrote at once."""

import threading
from collections.abc import Callable

import torch

LayerComputed = Callable[[int], None]
"""Told of each layer of a stage, in turn: its keys and values are written, or will be by what the device was told."""


class LayerMarks:
    """One thread computes a step and says which layers are `computed`; another waits for them, one by one.

    Args:
        issued: a mark behind all that the device has been told to do so far, in the computing thread; None on the CPU,
            which has done it.
    """

    def __init__(self, issued: Callable[[], "torch.cuda.Event | None"]) -> None:
        self._issued = issued
        self._changed = threading.Condition()
        self._marks: dict[int, torch.cuda.Event | None] = {}
        self._given_up = False

    def computed(self, layer: int) -> None:
        """A LayerComputed."""
        mark = self._issued()
        with self._changed:
            self._marks[layer] = mark
            self._changed.notify_all()

    def give_up(self) -> None:
        """No more layers of this step will be computed, if any are left: nobody is to wait for them."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def wait(self, layer: int) -> "torch.cuda.Event | None":
        """Until that layer is computed.

        Returns:
            what a GPU must have passed before its blocks are read.

        Raises:
            RuntimeError: if it never will be.
        """
        with self._changed:
            self._changed.wait_for(lambda: layer in self._marks or self._given_up)
            if layer not in self._marks:
                raise RuntimeError(f"the step was given up before layer {layer} was computed")
            return self._marks[layer]
