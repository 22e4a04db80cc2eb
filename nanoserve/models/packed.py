"""Layers whose matrices are packed integers, in place of a decoder's own."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanoserve.models.decoder import Decoder
from nanoserve.models.weights import TensorPart
from triton_ops import PackedFormat, packed_linear, packed_rows
from triton_ops.packed import ROWS


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of a matrix that have one format."""

    first_row: int
    rows: int
    format: PackedFormat


class PackedMatrix(nn.Module):
    """A matrix [N, K] in segments of rows, each packed by itself."""

    def __init__(self, segments: Iterable[Segment], columns: int) -> None:
        super().__init__()
        self.segments = tuple(segments)
        self.packed = nn.ParameterList(
            nn.Parameter(
                torch.empty(-(-segment.rows // ROWS), segment.format.row_bytes(columns), dtype=torch.uint8),
                requires_grad=False,
            )
            for segment in self.segments
        )

    def region(self, part: TensorPart) -> Tensor:
        """The view that the part fills: whole blocks of rows of one segment."""
        count = part.shape[0] if part.rows is None else len(part.rows)
        for segment, packed in zip(self.segments, self.packed, strict=True):
            first = part.first_row - segment.first_row
            if 0 <= first < segment.rows:
                return packed[first // ROWS : -(-(first + count) // ROWS)]
        raise ValueError(f"no segment has row {part.first_row}")


class PackedLinear(nn.Module):
    """A linear layer whose weights are packed."""

    def __init__(self, weight: PackedMatrix, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias

    def forward(self, input: Tensor) -> Tensor:
        parts = []
        for segment, packed in zip(self.weight.segments, self.weight.packed, strict=True):
            bias = None if self.bias is None else self.bias[segment.first_row : segment.first_row + segment.rows]
            parts.append(packed_linear(input, packed, bias, segment.rows, segment.format))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class PackedEmbedding(nn.Module):
    """The embedding of a vocabulary, or of a part of it, whose rows are packed."""

    def __init__(self, weight: PackedMatrix, first_row: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = weight
        self.first_row = first_row
        self.dtype = dtype

    def forward(self, token_ids: Tensor) -> Tensor:
        (segment,) = self.weight.segments
        return packed_rows(self.weight.packed[0], token_ids, segment.format).to(self.dtype)


def pack_matrices(decoder: Decoder, parts: Iterable[TensorPart], formats: Mapping[str, PackedFormat]) -> None:
    """Put packed layers in the place of those whose parts have a format, by the name of the part. Their numbers are not
    set."""
    matrices: dict[str, list[TensorPart]] = defaultdict(list)
    for part in parts:
        if part.name in formats and part.expert is None:
            matrices[part.parameter].append(part)
    made: dict[int, PackedMatrix] = {}
    for name, filling in matrices.items():
        path = name.removesuffix(".weight")
        parent, _, attribute = path.rpartition(".")
        layer = decoder.get_submodule(path)
        weight = PackedMatrix(_segments(filling, formats), filling[0].shape[1])
        made[id(layer.weight)] = weight
        if name == "embedding.weight":
            tied = decoder.is_last and decoder.lm_head.weight is layer.weight
            decoder.embedding = PackedEmbedding(weight, layer.first_row, decoder.dtype)
            if tied:
                decoder.lm_head = PackedLinear(weight, None)
        else:
            setattr(decoder.get_submodule(parent), attribute, PackedLinear(weight, layer.bias))


def _segments(parts: Iterable[TensorPart], formats: Mapping[str, PackedFormat]) -> list[Segment]:
    segments: list[Segment] = []
    for part in sorted(parts, key=lambda part: part.first_row):
        rows = part.shape[0] if part.rows is None else len(part.rows)
        last = segments[-1] if segments else None
        if last is not None and last.format == formats[part.name] and last.rows % ROWS == 0:
            segments[-1] = Segment(last.first_row, last.rows + rows, last.format)
        else:
            segments.append(Segment(part.first_row, rows, formats[part.name]))
    return segments
