"""The weights of a worker that computes under several parallel layouts, one at a time: dynamic model re-sharding
(Seesaw, section 4.1).

The checkpoint stays mapped into memory, and the page cache holds it once for all workers of a machine. What a worker
computes with is one storage, as large as the largest of its shards; the parameters of every layout's decoder are views
of it. A transition copies the slices of the other layout there: nothing is allocated, and no parameter moves, so that
compiled code and captured graphs stay right.

A mapped file may be deleted or replaced by another of its name. It must not be shortened in place: no process survives
reading a mapping beyond its file's end. Pages that a worker has read count as shared in its resident size. A kernel
that commits no more memory than there is (vm.overcommit_memory 2) charges every worker for the whole checkpoint.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from nanoserve.config import ModelConfig
from nanoserve.models.decoder import Decoder, TensorParallelGroup
from nanoserve.models.loading import Checkpoint, Progress, check_finite, open_checkpoint, unset_decoder
from nanoserve.models.shards import Shard
from nanoserve.models.weights import TensorPart, shard_parts, unfilled_regions

_ALIGNMENT = 256
"""Bytes that every parameter begins at a multiple of: what CUDA's own allocations are aligned to, and cache lines."""

_PIECE_NUMBERS = 4 << 20
"""So many numbers are copied at once, or a row: progress is told in between, and page-locked buffers are no larger."""


@dataclass(frozen=True, slots=True)
class _Move:
    """A piece of a tensor: where it lies in a mapped file, and the view of a parameter that it fills."""

    source: Tensor
    region: Tensor
    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class _Filling:
    """All that puts one layout in place: what is copied, how many bytes that are, and what is set to zero."""

    moves: list[_Move]
    num_bytes: int
    zeroed: list[Tensor]


class ReshardableWeights:
    """The shards of one worker under several layouts, of which one at a time is in place."""

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

        Args:
            config: of the whole model.
            shards, groups: of this worker, for each layout; as in `Decoder`.
            progress: is called with the bytes of the first layout that are in place, and that there are.

        Raises:
            ModelError: one line naming the file (and the tensor); the values that are read are checked, those of the
                other layouts are not, because other workers read them now.
        """
        # Decoders that no one has written to take no memory on a CPU; all of theirs is given back right below.
        unset = [
            unset_decoder(config, dtype, torch.device("cpu"), shard=shard, group=group)
            for shard, group in zip(shards, groups, strict=True)
        ]
        # One per layout, ready for inference while that layout is in place. They share their memory.
        self.decoders = tuple(unset)
        with open_checkpoint(directory, config) as checkpoint:
            self._storage = torch.empty(max(map(_laid_out_size, unset)), dtype=dtype, device=device)
            for decoder in unset:
                _lay_out(decoder, self._storage)
            self._fillings = [_filling(decoder, checkpoint) for decoder in unset]
        self.storage_bytes = self._storage.nbytes  # of the memory that they share, on the device
        self._copies: _Copies = _DirectCopies()
        if device.type == "cuda":
            largest = max(move.region.nbytes for filling in self._fillings for move in filling.moves)
            self._copies = _PinnedCopies(largest, device)
        self._fill(self._fillings[0], progress, checked=True)

    def fill(self, layout: int, progress: Progress | None = None) -> int:
        """Put the slices of a layout in place and everything else of its parameters to zero; returns bytes moved.

        Bytes count as they are in the parameters, and zeros do not. On return the device has them. `progress` is called
        with the bytes that were moved and that will be.
        """
        filling = self._fillings[layout]
        self._fill(filling, progress, checked=False)
        return filling.num_bytes

    def _fill(self, filling: _Filling, progress: Progress | None, *, checked: bool) -> None:
        for gap in filling.zeroed:
            gap.zero_()
        moved = 0
        for move in filling.moves:
            copied = self._copies.copy(move.source, move.region)
            if checked:
                check_finite(copied, move.name, move.path)
            moved += move.region.nbytes
            if progress is not None:
                progress(moved, filling.num_bytes)
        self._copies.finish()


class _Copies(Protocol):
    """How numbers come from a mapped file to the device, in the parameters' number format."""

    def copy(self, source: Tensor, region: Tensor) -> Tensor:
        """Begin to copy; returns the numbers as they are sent, in host memory, valid until the next call."""
        ...

    def finish(self) -> None:
        """Wait until everything is there."""
        ...


class _DirectCopies:
    """On a CPU."""

    def copy(self, source: Tensor, region: Tensor) -> Tensor:
        return region.copy_(source)

    def finish(self) -> None:
        """Nothing is under way."""


class _PinnedCopies:
    """To a GPU, through two page-locked buffers in turn: the link empties one while the processor fills the other."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """num_bytes: the largest region."""
        self._device = device
        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._emptied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._turn, self._used = 0, 0

    def copy(self, source: Tensor, region: Tensor) -> Tensor:
        if self._used + region.nbytes > len(self._buffers[self._turn]):
            self._take_the_other()
        place = self._buffers[self._turn][self._used : self._used + region.nbytes]
        self._used += -(-region.nbytes // _ALIGNMENT) * _ALIGNMENT
        staged = place.view(region.dtype).view(region.shape)
        staged.copy_(source)
        region.copy_(staged, non_blocking=True)
        return staged

    def finish(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()
        self._used = 0

    def _take_the_other(self) -> None:
        """What was sent from it a turn ago has arrived when this returns."""
        self._emptied[self._turn].record(torch.cuda.current_stream(self._device))
        self._turn, self._used = 1 - self._turn, 0
        self._emptied[self._turn].synchronize()  # at once if it was never recorded


def _offsets(decoder: Decoder) -> tuple[list[int], int]:
    """Where each parameter begins in a storage that holds them all, and how long that is; in numbers."""
    aligned = _ALIGNMENT // decoder.dtype.itemsize
    offsets, used = [], 0
    for parameter in decoder.parameters():
        offsets.append(used)
        used += -(-parameter.numel() // aligned) * aligned
    return offsets, used


def _laid_out_size(decoder: Decoder) -> int:
    return _offsets(decoder)[1]


def _lay_out(decoder: Decoder, storage: Tensor) -> None:
    """Make the parameters views of the storage, one after another. A tied matrix is one parameter and stays one."""
    offsets, _ = _offsets(decoder)
    for parameter, offset in zip(decoder.parameters(), offsets, strict=True):
        parameter.data = storage[offset : offset + parameter.numel()].view(parameter.shape)
    decoder.rotary.to(storage.device)


def _filling(decoder: Decoder, checkpoint: Checkpoint) -> _Filling:
    parameters = dict(decoder.named_parameters())
    parts = list(shard_parts(checkpoint.parts, decoder.model_config, decoder.shard))
    moves = [_move(piece, parameters, checkpoint) for part in parts for piece in part.pieces(_PIECE_NUMBERS)]
    num_bytes = sum(move.region.nbytes for move in moves)
    return _Filling(moves, num_bytes, list(unfilled_regions(parts, parameters)))


def _move(piece: TensorPart, parameters: Mapping[str, Tensor], checkpoint: Checkpoint) -> _Move:
    path = checkpoint.stored[piece.name].path
    return _Move(checkpoint.view(piece), piece.region(parameters[piece.parameter]), piece.name, path)
