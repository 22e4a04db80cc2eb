"""Layers whose matrices are packed integers, in place of a decoder's own."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from nanoserve.errors import UsageError
from nanoserve.models.decoder import Decoder, DecoderLayer, SparseExperts, VocabularyEmbedding, VocabularyPart, route
from nanoserve.models.weights import TensorPart
from triton_ops import PackedFormat, packed_linear, packed_rows, sparse_packed_experts
from triton_ops.packed import ROWS


class MatrixForm(NamedTuple):
    """How a stored matrix is packed."""

    format: PackedFormat
    order: Tensor | None
    """As in `GroupQuantized`."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of a matrix that have one form."""

    first_row: int
    rows: int
    form: MatrixForm


class PackedMatrix(nn.Module):
    """A matrix [N, K] in segments of rows, each packed by itself."""

    def __init__(self, segments: Iterable[Segment], columns: int) -> None:
        super().__init__()
        self.segments = tuple(segments)
        self.packed = nn.ParameterList(
            nn.Parameter(
                torch.zeros(-(-segment.rows // ROWS), segment.form.format.row_bytes(columns), dtype=torch.uint8),
                requires_grad=False,
            )
            for segment in self.segments
        )
        for number, segment in enumerate(self.segments):
            self.register_buffer(f"order_{number}", segment.form.order, persistent=False)

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
        for number, (segment, packed) in enumerate(zip(self.weight.segments, self.weight.packed, strict=True)):
            bias = None if self.bias is None else self.bias[segment.first_row : segment.first_row + segment.rows]
            order = getattr(self.weight, f"order_{number}")
            ordered = input if order is None else input[..., order]
            parts.append(packed_linear(ordered, packed, bias, segment.rows, segment.form.format))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class PackedEmbedding(VocabularyPart):
    """An embedding whose rows are packed."""

    def __init__(self, weight: PackedMatrix, replaced: VocabularyEmbedding) -> None:
        super().__init__()
        self.weight = weight
        self.first_row, self.num_embeddings = replaced.first_row, replaced.num_embeddings
        self.dtype = replaced.weight.dtype

    def forward(self, token_ids: Tensor) -> Tensor:
        (segment,) = self.weight.segments
        return packed_rows(self.weight.packed[0], token_ids, segment.form.format).to(self.dtype)


class PackedExpertMatrices(nn.Module):
    """A matrix [N, K] of each expert, all of one format."""

    def __init__(self, experts: int, rows: int, columns: int, format: PackedFormat) -> None:
        super().__init__()
        self.format = format
        shape = (experts, -(-rows // ROWS), format.row_bytes(columns))
        self.packed = nn.Parameter(torch.zeros(shape, dtype=torch.uint8), requires_grad=False)

    def region(self, part: TensorPart) -> Tensor:
        """The view that the part fills: whole blocks of rows of one expert."""
        assert part.expert is not None
        count = part.shape[0] if part.rows is None else len(part.rows)
        return self.packed[part.expert, part.first_row // ROWS : -(-(part.first_row + count) // ROWS)]


class PackedExperts(nn.Module):
    """A mixture of experts whose matrices are packed."""

    def __init__(self, replaced: SparseExperts, gate_up: PackedExpertMatrices, down: PackedExpertMatrices) -> None:
        super().__init__()
        self.moe, self.router = replaced.moe, replaced.router
        self.inner = replaced.down.shape[2]
        self.gate_up, self.down = gate_up, down

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden_size] -> [T, hidden_size]"""
        weights, experts = route(self.router(hidden), self.moe)
        forms = self.gate_up.format, self.down.format
        return sparse_packed_experts(hidden, weights, experts, self.gate_up.packed, self.down.packed, self.inner, forms)


def region_of(decoder: Decoder, part: TensorPart) -> Tensor:
    """The view of a parameter, or of a packed matrix, that the part fills."""
    place, _, name = part.parameter.rpartition(".")
    found = getattr(decoder.get_submodule(place), name)
    return part.region(found) if isinstance(found, nn.Parameter) else found.region(part)


def pack_matrices(decoder: Decoder, parts: Iterable[TensorPart], forms: Mapping[str, MatrixForm]) -> None:
    """Put packed layers, which are zero, in the place of those whose parts all have a form, by the name of the part.
    Raises UsageError if the ranks of a stage cannot divide a matrix into whole groups of columns."""
    matrices: dict[str, list[TensorPart]] = defaultdict(list)
    for part in parts:
        if len(part.shape) == 2:
            matrices[part.parameter].append(part)
    for name, filling in matrices.items():
        if not all(part.name in forms for part in filling):
            continue
        for part in filling:
            _check_columns(part, forms[part.name], decoder.shard.degree)
        if filling[0].expert is not None:
            continue
        path = name.removesuffix(".weight")
        parent, _, attribute = path.rpartition(".")
        layer = decoder.get_submodule(path)
        columns = filling[0].shape[1] if filling[0].columns is None else len(filling[0].columns)
        weight = PackedMatrix(_segments(filling, forms, layer.weight.shape[0]), columns)
        if name == "embedding.weight":
            tied = decoder.is_last and decoder.lm_head.weight is layer.weight
            decoder.embedding = PackedEmbedding(weight, layer)
            if tied:
                decoder.lm_head = PackedLinear(weight, None)
        else:
            setattr(decoder.get_submodule(parent), attribute, PackedLinear(weight, layer.bias))
    for layer in decoder.layers:
        if isinstance(layer.feed_forward, SparseExperts):
            _pack_experts(layer, matrices, forms)


def _pack_experts(
    layer: DecoderLayer, matrices: Mapping[str, Sequence[TensorPart]], forms: Mapping[str, MatrixForm]
) -> None:
    """Pack the experts of a layer if their matrices have one format each, and each one's rows fill whole blocks."""
    replaced = cast(SparseExperts, layer.feed_forward)
    packed = []
    for name, parameter in (("gate_up", replaced.gate_up), ("down", replaced.down)):
        parts = matrices[f"layers.{layer.index}.feed_forward.{name}"]
        found = {forms[part.name].format for part in parts if part.name in forms and forms[part.name].order is None}
        if len(found) != 1 or any(part.name not in forms or part.first_row % ROWS for part in parts):
            return
        packed.append(PackedExpertMatrices(*parameter.shape, found.pop()))
    layer.feed_forward = PackedExperts(replaced, *packed)


def _check_columns(part: TensorPart, form: MatrixForm, degree: int) -> None:
    if part.columns is None:
        return
    if form.order is not None:
        raise UsageError(
            f"--tp {degree} would cut {part.name}, whose columns are in an order of their own; leave it out"
        )
    span = form.format.span
    if part.columns.start % span or part.columns.stop % span:
        raise UsageError(
            f"--tp {degree} would cut groups of {span} columns in {part.name}, which has {part.shape[1]};"
            " choose a smaller degree"
        )


def _segments(parts: Iterable[TensorPart], forms: Mapping[str, MatrixForm], rows: int) -> list[Segment]:
    """The segments of a matrix with that many rows; rows that no part fills belong to the part before them."""
    ordered = sorted(parts, key=lambda part: part.first_row)
    ends = [part.first_row for part in ordered[1:]] + [rows]
    segments: list[Segment] = []
    for part, end in zip(ordered, ends, strict=True):
        last, form = segments[-1] if segments else None, forms[part.name]
        plain = form.order is None and last is not None and last.form.order is None
        if last is not None and plain and last.form.format == form.format and last.rows % ROWS == 0:
            segments[-1] = Segment(last.first_row, end - last.first_row, last.form)
        else:
            segments.append(Segment(part.first_row, end - part.first_row, form))
    return segments
