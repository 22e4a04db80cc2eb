"""The forward pass of a step in which the CPU attends for the sequences whose KV is in host memory.

Their linear layers run on the device, together with the rows whose KV is there. They wait for their
attention, which the CPU computes beside the steps (APEX, section 3.3) or in turn with the device
(NEO).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from nanoserve.executor.compile.layer_runner import LayerRunner
from nanoserve.executor.cpu_attention.host_attention import (
    HostAttentionLost,
    HostAttentionThread,
    HostTask,
)
from nanoserve.executor.step.forward_pass import LayerComputed
from nanoserve.models.attention import AttentionBatch, PagedAttention
from nanoserve.models.decoder import Angles, Decoder, DecoderLayer
from nanoserve.scheduler.optional import CohortProgress, HostWork
from nanoserve.scheduler.plan import Row


@dataclass(frozen=True, slots=True)
class _Pending:
    """A task of the CPU's attention, or some rows of it."""

    task: HostTask
    places: Tensor | None = None
    """int64 [n], which of the task's rows; None means all."""

    def of(self, places: Tensor) -> "_Pending":
        if self.places is not None:
            places = self.places[places]
        return _Pending(self.task, places)

    def result(self) -> Tensor:
        """[n, num_heads * head_dim], once the task is ready."""
        result = self.task.result()
        if self.places is None:
            return result
        return result[self.places.to(result.device)]


@dataclass(slots=True, eq=False)
class HostGroup:
    """Host sequences that began a token in the same plan and are at the same place: n rows."""

    step: int  # the plan in which they began
    rows: Sequence[Row]  # their rows in that plan, of one token each
    # where their keys and values are in host memory; its tensors are on the CPU
    batch: AttentionBatch
    # [n, hidden_size], what enters `layer`; while its attention is pending, that layer's residual
    hidden: Tensor
    angles: Sequence[Angles]
    """RoPE angles at the rows' positions, for each kind of RoPE."""
    layer: int = 0  # the next one of this stage, counted from 0
    pending: _Pending | None = None  # its attention, once it is asked for

    def pick(self, chosen: Sequence[int]) -> "HostGroup":
        """Some of its rows, by their places, as a group of their own."""
        places = torch.tensor(chosen, dtype=torch.int64)
        on_device = places.to(self.hidden.device)
        pending = None
        if self.pending is not None:
            pending = self.pending.of(places)
        return HostGroup(
            step=self.step,
            rows=[self.rows[place] for place in chosen],
            batch=self.batch.pick(places),
            hidden=self.hidden[on_device],
            angles=[(cos[on_device], sin[on_device]) for cos, sin in self.angles],
            layer=self.layer,
            pending=pending,
        )


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """The T tokens of a step whose KV is on the device."""

    hidden: Tensor  # [T, hidden_size], what enters the first layer of the stage
    angles: Sequence[Angles]
    """RoPE angles at the tokens' positions, for each kind of RoPE."""
    attention: PagedAttention
    computed: LayerComputed | None = None
    """Called after each layer in which they have written their keys and values; None if nothing
    waits for that."""


class HybridPass:
    """Walks over the layers of a stage with the rows of a step and with the host sequences that
    take part. `make_host` starts the CPU's part; again when it has failed."""

    def __init__(
        self, decoder: Decoder, layers: LayerRunner, make_host: Callable[[], HostAttentionThread]
    ) -> None:
        # groups whose attention the CPU was asked for, in this order
        self.pending: list[HostGroup] = []
        self._layers = list(cast(Iterable[DecoderLayer], decoder.layers))
        self._first_layer = decoder.shard.layers.start
        self._make_host = make_host
        self._host = make_host()
        self._run_layer = layers
        self._loss: str | None = None
        # An event in front of the newest attention: how far a GPU has come, which lags behind what
        # is issued.
        self._mark = torch.cuda.Event() if decoder.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    # ---- what is reported to the scheduler -------------------------------------------------------

    @property
    def progress(self) -> tuple[CohortProgress, ...]:
        """How many of the model's layers are behind the groups that are under way."""
        return tuple(
            CohortProgress(group.step, self._first_layer + group.layer) for group in self.pending
        )

    def take_work(self) -> tuple[HostWork, ...]:
        return self._host.take_work()

    def take_loss(self) -> str | None:
        """Why the CPU's part failed, if it did since the last call; then no group is under way any
        more. Call it in every step, to notice a CPU that hangs."""
        if self._loss is None and self.pending and self._host.problem is not None:
            self._lose(self._host.problem)
        loss, self._loss = self._loss, None
        return loss

    def forget(self) -> None:
        """Drop all groups under way; the CPU writes nothing more for one."""
        self._wait(self.pending)
        self.pending.clear()

    def close(self) -> None:
        self.pending.clear()
        self._host.close()

    def take(self, sequences: Sequence[int]) -> list[HostGroup]:
        """Take some sequences out of the pending groups, as new groups. Sequences of another stage
        are skipped."""
        wanted, taken, left = set(sequences), list[HostGroup](), list[HostGroup]()
        for group in self.pending:
            chosen, others = [], []
            for place, row in enumerate(group.rows):
                if row.sequence in wanted:
                    chosen.append(place)
                else:
                    others.append(place)
            if not chosen:
                left.append(group)
            elif not others:
                taken.append(group)
            else:
                taken.append(group.pick(chosen))
                left.append(group.pick(others))
        self.pending = left
        return taken

    # ---- asynchronous overlap --------------------------------------------------------------------

    def overlap(
        self, device: DeviceRows | None, new_groups: Sequence[HostGroup]
    ) -> tuple[Tensor | None, list[HostGroup]]:
        """A step of Asynchronous Overlap (APEX, section 3.3).

        A group whose attention in a layer is done when the step reaches that layer's second half
        joins it and the first half of the next layer, whose attention is then the CPU's next task.
        Other groups try again in the next step: the device waits only if it has nothing else to do.
        No group advances by more than a layer, so a token takes at least L + 1 steps in a model of
        L layers: it enters layer 0 in one step, and ends layer L - 1 in the L-th after.

        `new_groups` are at the first layer of this stage. Returns hidden states of the device's
        rows after the last layer, [T, hidden_size], and the groups that passed it.
        """
        hidden = None
        if device is not None:
            hidden = device.hidden
        elif self.pending and not new_groups:
            self._wait(self.pending[:1])
        groups = list(new_groups)
        for layer in self._layers:
            candidates = [group for group in self.pending if group.layer == layer.index]
            if not groups and not candidates:
                if device is not None:
                    assert hidden is not None
                    hidden = self._run_layer(
                        layer, hidden, *device.angles[layer.rope], device.attention
                    )
                    _mark(device, layer)
                continue
            attended = self._first_half(layer, device, hidden, groups)
            self.pending += groups
            groups = self._ready(candidates)
            self.pending = [group for group in self.pending if group not in groups]
            hidden = self._second_half(layer, attended, hidden, groups)
        return hidden, groups

    def _ready(self, groups: Sequence[HostGroup]) -> list[HostGroup]:
        """The groups whose attention is done when the device reaches this point; none if the CPU's
        part failed."""
        if self._mark is not None and groups:
            self._mark.synchronize()  # meanwhile the device attends
        try:
            return [
                group for group in groups if group.pending is not None and group.pending.task.ready
            ]
        except HostAttentionLost as error:
            self._lose(str(error))
            return []

    # ---- asymmetric pipelining -------------------------------------------------------------------

    def asymmetric(
        self, device: DeviceRows | None, first: Sequence[HostGroup], second: Sequence[HostGroup]
    ) -> tuple[Tensor | None, list[HostGroup]]:
        """A step of Asymmetric Pipelining (NEO, arXiv:2411.01142, as APEX, section 2.3, describes
        it).

        Two sub-batches alternate: while the CPU attends for one, the device computes the linear
        layers of the other. Both end the stage. If the CPU's part fails, the device's rows, which
        belong to the first, end it alone. The groups are at the first layer of the stage, or taken
        from those under way. Returns as `overlap`.
        """
        hidden = None
        if device is not None:
            hidden = device.hidden
        halves = [list(first), list(second)]
        for layer in self._layers:
            beginning = _groups_at(halves[0], layer.index)
            attended = self._first_half(layer, device, hidden, beginning)
            if layer.index:
                self._end_layer(self._layers[layer.index - 1], halves)
            beginning = _groups_at(halves[1], layer.index)
            self._first_half(layer, None, None, beginning)
            done = self._done(halves, 0, layer.index)
            hidden = self._second_half(layer, attended, hidden, done)
        self._end_layer(self._layers[-1], halves)
        return hidden, halves[0] + halves[1]

    def _end_layer(self, layer: DecoderLayer, halves: list[list[HostGroup]]) -> None:
        """The second half of a layer for the second sub-batch."""
        done = self._done(halves, 1, layer.index)
        self._second_half(layer, None, None, done)

    def _done(self, halves: list[list[HostGroup]], number: int, layer: int) -> list[HostGroup]:
        """Wait for the pending groups of a sub-batch in a layer; if that fails, both sub-batches
        lose all groups."""
        groups = [
            group for group in halves[number] if group.layer == layer and group.pending is not None
        ]
        if not self._wait(groups):
            halves[0], halves[1] = [], []
            return []
        return groups

    # ---- halves of a layer -----------------------------------------------------------------------

    def _first_half(
        self,
        layer: DecoderLayer,
        device: DeviceRows | None,
        hidden: Tensor | None,
        groups: Sequence[HostGroup],
    ) -> Tensor | None:
        """Queries, keys and values of all rows; the groups' attention is handed to the CPU, then
        the device attends. Returns the attention of the device's rows, [T, num_heads *
        head_dim]."""
        parts, own = _Joined(), slice(0, 0)
        if device is not None:
            assert hidden is not None
            own = parts.add(hidden, *device.angles[layer.rope])
        places = [parts.add(group.hidden, *group.angles[layer.rope]) for group in groups]
        if parts.is_empty:
            return None
        query, key, value = self._run_layer.pre_attention(layer, *parts.tensors())
        for group, rows in zip(groups, places, strict=True):
            task = self._host.attend(layer.index, query[rows], key[rows], value[rows], group.batch)
            group.pending = _Pending(task)
        if self._mark is not None:
            self._mark.record()
        if device is None:
            return None
        attended = layer.attend(device.attention, query[own], key[own], value[own])
        _mark(device, layer)
        return attended

    def _second_half(
        self,
        layer: DecoderLayer,
        attended: Tensor | None,
        hidden: Tensor | None,
        groups: Sequence[HostGroup],
    ) -> Tensor | None:
        """Output and feed-forward part of all rows; the groups advance to the next layer. Returns
        the hidden states of the device's rows."""
        parts, own = _Joined(), slice(0, 0)
        if attended is not None:
            assert hidden is not None
            own = parts.add(attended, hidden)
        places = []
        for group in groups:
            assert group.pending is not None
            places.append(parts.add(group.pending.result(), group.hidden))
        if parts.is_empty:
            return hidden
        output = self._run_layer.post_attention(layer, *parts.tensors())
        for group, rows in zip(groups, places, strict=True):
            group.hidden = output[rows]
            group.layer, group.pending = layer.index + 1, None
        if attended is not None:
            hidden = output[own]
        return hidden

    def _wait(self, groups: Sequence[HostGroup]) -> bool:
        """Wait until the groups' attention is done; False if it failed."""
        try:
            for group in groups:
                if group.pending is not None:
                    group.pending.task.wait()
        except HostAttentionLost as error:
            self._lose(str(error))
            return False
        return True

    def _lose(self, problem: str) -> None:
        """Drop all groups under way; a new thread takes later ones."""
        self._loss = problem
        self.pending.clear()
        self._host.close()
        self._host = self._make_host()


def _groups_at(groups: Sequence[HostGroup], layer: int) -> list[HostGroup]:
    """The groups at that layer's first half."""
    return [group for group in groups if group.layer == layer and group.pending is None]


def _mark(device: DeviceRows, layer: DecoderLayer) -> None:
    if device.computed is not None:
        device.computed(layer.index)


class _Joined:
    """Rows of several owners, one owner after another, for one run of a piece of a layer."""

    def __init__(self) -> None:
        # for each argument of the piece, its rows of each owner
        self._columns: list[list[Tensor]] = []
        self._end = 0

    @property
    def is_empty(self) -> bool:
        return not self._columns

    def add(self, *tensors: Tensor) -> slice:
        """Append an owner's rows, one tensor for each argument; returns their place among all
        rows."""
        if not self._columns:
            self._columns = [[] for _ in tensors]
        for column, tensor in zip(self._columns, tensors, strict=True):
            column.append(tensor)
        begin = self._end
        self._end += len(tensors[0])
        return slice(begin, self._end)

    def tensors(self) -> list[Tensor]:
        return [joined(column) for column in self._columns]


def joined(parts: Sequence[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts))
