"""The weights of a worker that computes under several parallel layouts, one at a time: dynamic
model re-sharding (Seesaw, section 4.1).

The checkpoint stays mapped into memory, and the page cache holds it once for all workers of a
machine. A worker has one storage for its weights, as large as the largest of its shards. The
parameters of every layout's decoder are views of it. A transition copies the slices of the other
layout into it. Nothing is allocated and no parameter moves, so that compiled code and captured
graphs stay valid.

A mapped file may be deleted or replaced by another of the same name. It must not be truncated in
place: reading a mapping beyond the end of its file kills the process. Pages that a worker has read
count as shared in its resident size. With strict overcommit (vm.overcommit_memory 2), the kernel
charges every worker for the whole checkpoint.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from nanoserve.config.model_config import ModelConfig
from nanoserve.models.decoder import Decoder, TensorParallelGroup
from nanoserve.models.loading import (
    Checkpoint,
    Progress,
    check_finite,
    empty_decoder,
    open_checkpoint,
)
from nanoserve.models.packed import region_of
from nanoserve.models.shards import Shard
from nanoserve.models.weights import shard_parts, unfilled_regions

_ALIGNMENT = 256
"""Alignment of parameters in bytes, as in CUDA's own allocations; also a multiple of cache
lines."""

_PIECE_NUMBERS = 4 << 20
"""Most numbers to copy at once, unless a row is longer. It bounds page-locked buffers and steps of
progress."""


@dataclass(frozen=True, slots=True)
class _Move:
    """A piece of a tensor: how it is read from a mapped file, and the view of a parameter that it
    fills."""

    read: Callable[[], Tensor]
    region: Tensor
    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class _Filling:
    """The work that puts one layout in place: copies, their bytes, and regions to set to zero."""

    moves: list[_Move]
    num_bytes: int
    zeroed: list[Tensor]


class ReshardableWeights:
    """The shards of one worker under several layouts, one of which is in place at a time."""

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        shards: Sequence[Shard],
        groups: Sequence[TensorParallelGroup | None],
        progress: Progress | None = None,
    ) -> None:
        """Map the checkpoint, and put the first layout in place.

        `config` is the whole model's; `shards` and `groups` are this worker's for each layout, as
        in `Decoder`; `progress` is called with the bytes of the first layout that are in place, and
        their total. Raises ModelError, one line naming the file (and the tensor). Other workers
        check the values of the other layouts.
        """
        decoders = []
        for shard, group in zip(shards, groups, strict=True):
            # A decoder that was never written takes no memory on a CPU; below, its parameters
            # become views.
            decoders.append(
                empty_decoder(
                    config, dtype, torch.device("cpu"), shard=shard, group=group, zeroed=False
                )
            )
        # One decoder per layout, ready for inference while its layout is in place. They share their
        # memory.
        self.decoders = tuple(decoders)
        with open_checkpoint(directory, config) as opened:
            checkpoint = opened.rounded(config)
            for decoder in decoders:
                checkpoint.prepare(decoder)
            lengths = [_offsets(decoder)[1] for decoder in decoders]
            self._storage = torch.empty(max(lengths), dtype=torch.uint8, device=device)
            for decoder in decoders:
                _lay_out(decoder, self._storage)
            self._fillings = [_filling(decoder, checkpoint) for decoder in decoders]
        self.storage_bytes = self._storage.nbytes  # their shared memory on the device
        most_bytes = max(move.region.nbytes for filling in self._fillings for move in filling.moves)
        self._copies = _Copies(most_bytes, device)
        self._fill(self._fillings[0], progress, checked=True)

    def fill(self, layout: int, progress: Progress | None = None) -> int:
        """Put the slices of a layout in place, and zeros elsewhere in its parameters; on return,
        the device has them. Returns the bytes moved, in the format of the parameters and without
        zeros. `progress` is called with the bytes that were moved and their total."""
        filling = self._fillings[layout]
        self._fill(filling, progress, checked=False)
        return filling.num_bytes

    def _fill(self, filling: _Filling, progress: Progress | None, *, checked: bool) -> None:
        for gap in filling.zeroed:
            gap.zero_()
        moved = 0
        for move in filling.moves:
            copied = self._copies.copy(move.read(), move.region)
            if checked and copied.is_floating_point():
                check_finite(copied, move.name, move.path)
            moved += move.region.nbytes
            if progress is not None:
                progress(moved, filling.num_bytes)
        self._copies.finish()


class _Copies:
    """Copies from a mapped file to the device, into the parameters' number format.

    They reach a GPU through two page-locked buffers: one is sent while the processor fills the
    other.
    """

    def __init__(self, most_bytes: int, device: torch.device) -> None:
        """`most_bytes` is the size of the largest region."""
        self._device = device
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            self._buffers = [
                torch.empty(most_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)
            ]
            self._emptied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
            self._turn, self._used = 0, 0

    def copy(self, source: Tensor, region: Tensor) -> Tensor:
        """Start to copy; returns the converted numbers in host memory, valid until the next
        call."""
        if not self._on_gpu:
            return region.copy_(source)
        if self._used + region.nbytes > len(self._buffers[self._turn]):
            self._emptied[self._turn].record(torch.cuda.current_stream(self._device))
            self._turn = 1 - self._turn
            self._used = 0
            self._emptied[self._turn].synchronize()  # at once if it was never recorded
        place = self._buffers[self._turn][self._used : self._used + region.nbytes]
        self._used += _aligned(region.nbytes)
        staged = place.view(region.dtype).view(region.shape)
        staged.copy_(source)
        region.copy_(staged, non_blocking=True)
        return staged

    def finish(self) -> None:
        if self._on_gpu:
            torch.cuda.current_stream(self._device).synchronize()
            self._used = 0


def _weights(decoder: Decoder) -> dict[str, nn.Parameter]:
    """The parameters that share a storage. Orders of columns, which are small, stay where they
    are."""
    return {name: found for name, found in decoder.named_parameters() if found.dtype != torch.int64}


def _offsets(decoder: Decoder) -> tuple[list[int], int]:
    """The offset of each parameter in a storage that holds them all, and its length; in bytes."""
    offsets = []
    used = 0
    for parameter in _weights(decoder).values():
        offsets.append(used)
        used += _aligned(parameter.nbytes)
    return offsets, used


def _aligned(num_bytes: int) -> int:
    """A length up to the next place where a parameter may begin."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _lay_out(decoder: Decoder, storage: Tensor) -> None:
    """Make the parameters views of the storage, one after another. A tied matrix is one parameter
    and stays one."""
    offsets, _ = _offsets(decoder)
    for parameter, offset in zip(_weights(decoder).values(), offsets, strict=True):
        place = storage[offset : offset + parameter.nbytes]
        parameter.data = place.view(parameter.dtype).view(parameter.shape)
    for parameter in decoder.parameters():
        if parameter.dtype == torch.int64:
            parameter.data = parameter.data.to(storage.device)
    decoder.rotary.to(storage.device)


def _filling(decoder: Decoder, checkpoint: Checkpoint) -> _Filling:
    parts = list(shard_parts(checkpoint.parts, decoder.model_config, decoder.shard))
    moves = []
    for part in parts:
        for piece in part.pieces(_PIECE_NUMBERS):
            region = region_of(decoder, piece)
            read = checkpoint.reader(piece, packed=not region.is_floating_point())
            path = checkpoint.stored[piece.name].path
            moves.append(_Move(read, region, piece.name, path))
    num_bytes = sum(move.region.nbytes for move in moves)
    zeroed = list(unfilled_regions(parts, _weights(decoder)))
    return _Filling(moves, num_bytes, zeroed)
