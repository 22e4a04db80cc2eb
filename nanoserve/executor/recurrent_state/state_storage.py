"""StateStorage: the Mechanism that keeps the recurrent states of a stage's layers in slots, and
tells each step where its rows find and leave theirs."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanoserve.executor.mechanism import Mechanism
from nanoserve.models.mixer import RecurrentStates, make_states
from nanoserve.scheduler.optional import StateRow
from nanoserve.scheduler.plan import Row

if TYPE_CHECKING:
    from nanoserve.executor.step.model_runner import ModelRunner, PreparedStep

Segment = tuple[int, int, int, int, int]
"""A row of a table of segments; see `triton_ops.recurrent`."""


class StateStorage(Mechanism):
    """States of all recurrent layers of a stage, in `num_slots` slots each.

    A row without a StateRow goes on in the slot that the row before it has left its state in.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._slots: dict[int, int] = {}  # of sequences, as of the plans prepared so far
        self._segments: dict[int, Tensor] = {}  # of steps that are prepared and have not begun
        self._layers: list[RecurrentStates | None] = []

    def attach(self, runner: "ModelRunner") -> None:
        self._staging = runner.staging
        config = runner.config
        # as steps run: compiled code is made for tensors of one mode
        with torch.inference_mode(), runner.device:
            for layer in range(config.num_layers):
                states = None
                if config.is_recurrent(layer):
                    states = make_states(config, self._num_slots, runner.decoder.dtype)
                self._layers.append(states)

    def prepare(self, step: "PreparedStep") -> None:
        plan = step.plan
        for sequence in plan.end:
            self._slots.pop(sequence, None)
        if not step.rows:
            return
        segments = list[Segment]()
        moves = {row.sequence: row for row in plan.state.rows}
        first = 0
        for row in step.rows:
            segments += self._segments_of(row, first, moves)
            first += len(row.tokens)
        self._segments[plan.step] = self._staging.add(np.array(segments, np.int32))

    def _segments_of(self, row: Row, first: int, moves: Mapping[int, StateRow]) -> list[Segment]:
        """The segments of a row whose tokens begin there among those of the step. Raises
        RuntimeError if the row's state is nowhere."""
        move = moves.get(row.sequence)
        if move is None:
            slot = self._slots.get(row.sequence)
            if slot is None:
                raise RuntimeError(f"sequence {row.sequence}: its recurrent state is in no slot")
            move = StateRow(row.sequence, slot, slot)
        self._slots[row.sequence] = move.target
        ends = [position - row.start for position, _ in move.saves] + [len(row.tokens)]
        targets = [slot for _, slot in move.saves] + [move.target]
        segments = list[Segment]()
        begin, source = 0, move.source
        for end, target in zip(ends, targets, strict=True):
            segments.append((first + begin, first + end, source, target, row.start + begin))
            begin, source = end, target
        return segments

    def begin(self, step: "PreparedStep") -> None:
        segments = self._segments.pop(step.plan.step, None)
        if segments is None or step.inputs is None:
            return
        of_layers = list[RecurrentStates | None]()
        for states in self._layers:
            if states is not None:
                states = RecurrentStates(states.convolution, states.matrix, segments)
            of_layers.append(states)
        step.inputs.states = of_layers

    def abandon(self) -> None:
        self._slots.clear()
        self._segments.clear()
