"""Layers whose matrices are packed integers, in place of a decoder's own."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from nanoserve.config.model_config import ModelConfig
from nanoserve.errors import UsageError
from nanoserve.models.decoder import Decoder, MixtureOfExperts, VocabParallelEmbedding, VocabularyShard, route
from nanoserve.models.weights import TensorPart
from triton_ops import PackedFormat, packed_linear, packed_rows, sparse_packed_experts
from triton_ops.packed import ROWS, SIX_BITS


class MatrixForm(NamedTuple):
    """How a stored matrix is packed."""

    format: PackedFormat
    order: Tensor | None
    """As in `GroupQuantized`."""


class Segment(NamedTuple):
    """Rows of a matrix that are packed together."""

    first_row: int
    rows: int
    format: PackedFormat
    has_order: bool
    """Whether its columns are in an order of their own."""


@dataclass(frozen=True, slots=True)
class PackedShape:
    """A matrix of a module that is packed: by its path, "layers.0.qkv" or "layers.0.feed_forward.gate_up"."""

    path: str
    segments: tuple[Segment, ...]
    columns: int
    experts: int = 0
    """Number of matrices; 0 outside a mixture of experts."""


class PackedMatrix(nn.Module):
    """A matrix [N, K], or one for each expert, in segments of rows."""

    def __init__(self, shape: PackedShape) -> None:
        super().__init__()
        self.shape = shape
        experts = (shape.experts,) if shape.experts else ()
        sizes = [(-(-one.rows // ROWS), one.format.row_bytes(shape.columns)) for one in shape.segments]
        self.packed = _frozen(torch.zeros(*experts, *size, dtype=torch.uint8) for size in sizes)
        self.orders = _frozen(torch.arange(shape.columns) for one in shape.segments if one.has_order)
        """The order of columns of each segment that has one, int64 [K]."""

    def region(self, part: TensorPart) -> Tensor:
        """The view that the part fills: whole blocks of rows of one segment, and of them the first columns."""
        count = part.shape[0] if part.rows is None else len(part.rows)
        columns = self.shape.columns if part.columns is None else len(part.columns)
        for segment, packed in zip(self.shape.segments, self.packed, strict=True):
            first = part.first_row - segment.first_row
            if 0 <= first < segment.rows:
                rows: Tensor = packed if part.expert is None else packed[part.expert]
                return rows[first // ROWS : -(-(first + count) // ROWS), : segment.format.row_bytes(columns)]
        raise ValueError(f"no segment has row {part.first_row}")

    def multiply(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """input [..., K] -> [..., N]"""
        parts, orders = [], iter(self.orders)
        for segment, packed in zip(self.shape.segments, self.packed, strict=True):
            own_bias = None if bias is None else bias[segment.first_row : segment.first_row + segment.rows]
            ordered = input[..., next(orders)] if segment.has_order else input
            parts.append(packed_linear(ordered, packed, own_bias, segment.rows, segment.format))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _frozen(tensors: Iterable[Tensor]) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(tensor, requires_grad=False) for tensor in tensors)


class PackedLinear(nn.Module):
    """A linear layer whose weights are packed."""

    def __init__(self, weight: PackedMatrix, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias

    def forward(self, input: Tensor) -> Tensor:
        return self.weight.multiply(input, self.bias)


class PackedEmbedding(VocabularyShard):
    """An embedding whose rows are packed."""

    def __init__(self, weight: PackedMatrix, replaced: VocabParallelEmbedding) -> None:
        super().__init__()
        self.weight = weight
        self.first_row, self.num_embeddings = replaced.first_row, replaced.num_embeddings
        self.dtype = replaced.weight.dtype

    def forward(self, token_ids: Tensor) -> Tensor:
        (segment,) = self.weight.shape.segments
        return packed_rows(self.weight.packed[0], token_ids, segment.format).to(self.dtype)


class PackedExperts(nn.Module):
    """A mixture of experts whose matrices are packed."""

    def __init__(self, gate_up: PackedMatrix, down: PackedMatrix, replaced: MixtureOfExperts) -> None:
        super().__init__()
        self.moe, self.router = replaced.moe, replaced.router
        self.gate_up, self.down = gate_up, down
        if replaced.biases is not None:
            self.gate_up_bias, self.down_bias = replaced.gate_up_bias, replaced.down_bias

    @property
    def biases(self) -> tuple[Tensor, Tensor] | None:
        """Biases of gate_up and down of all experts; None where the family has none."""
        return (self.gate_up_bias, self.down_bias) if self.moe.style == "gpt_oss" else None

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden_size] -> [T, hidden_size]"""
        weights, experts = route(self.router(hidden), self.moe)
        forms = self.gate_up.shape.segments[0].format, self.down.shape.segments[0].format
        gate_up, down = self.gate_up.packed[0], self.down.packed[0]
        sizes_and_forms = self.down.shape.columns, forms
        return sparse_packed_experts(
            hidden, weights, experts, gate_up, down, *sizes_and_forms, self.biases, self.moe.style
        )


def region_of(decoder: Decoder, part: TensorPart) -> Tensor:
    """The view of a parameter, or of a packed matrix, that the part fills."""
    found = _parameter(decoder, part.parameter)
    return found.region(part) if isinstance(found, PackedMatrix) else part.region(found)


def _parameter(decoder: Decoder, name: str) -> Tensor | PackedMatrix:
    module, _, attribute = name.rpartition(".")
    found: Tensor | PackedMatrix = getattr(decoder.get_submodule(module), attribute)
    return found


def pack_decoder(decoder: Decoder, parts: Iterable[TensorPart], forms: Mapping[str, MatrixForm]) -> None:
    """Put packed layers, which are zero, in the place of those whose parts all have a form, by the name of the part.
    Raises UsageError if the ranks of a stage cannot divide a matrix into whole groups of columns."""
    matrices: dict[str, list[TensorPart]] = defaultdict(list)
    for part in parts:
        if len(part.shape) == 2:
            matrices[part.parameter].append(part)
    packed = {name: found for name, found in matrices.items() if all(part.name in forms for part in found)}
    shapes: list[PackedShape] = []
    for name, filling in packed.items():
        filling.sort(key=lambda part: part.first_row)
        for part in filling:
            _check_columns(part, forms[part.name], decoder.shard.degree)
        shapes += _shape(name, filling, forms, decoder)
    pack_layers(decoder, shapes)
    for name, filling in packed.items():
        matrix = _parameter(decoder, name)
        if isinstance(matrix, PackedMatrix):
            orders = (forms[part.name].order for part in filling)
            for own, order in zip(matrix.orders, (order for order in orders if order is not None), strict=True):
                own.copy_(order)


def pack_layers(module: nn.Module, shapes: Sequence[PackedShape]) -> None:
    """Put packed layers in the place of those at the shapes' paths below the module."""
    experts: dict[str, dict[str, PackedMatrix]] = defaultdict(dict)
    for shape in shapes:
        parent, _, attribute = shape.path.rpartition(".")
        if shape.experts:
            experts[parent][attribute] = PackedMatrix(shape)
            continue
        holder, layer, weight = module.get_submodule(parent), module.get_submodule(shape.path), PackedMatrix(shape)
        if isinstance(layer, VocabParallelEmbedding):
            if isinstance(module, Decoder) and module.is_last and module.lm_head.weight is layer.weight:
                setattr(module, "lm_head", PackedLinear(weight, None))  # noqa: B010  (its type is another)
            setattr(holder, attribute, PackedEmbedding(weight, layer))
        else:
            setattr(holder, attribute, PackedLinear(weight, cast(nn.Linear, layer).bias))
    for path, matrices in experts.items():
        parent, _, attribute = path.rpartition(".")
        replaced = cast(MixtureOfExperts, module.get_submodule(path))
        if len(matrices) == 2:
            setattr(module.get_submodule(parent), attribute, PackedExperts(**matrices, replaced=replaced))


def rounded_forms(parts: Iterable[TensorPart], config: ModelConfig) -> dict[str, PackedFormat]:
    """The format of each tensor that `--quantization` rounds, from the parts of the whole model: all matrices but
    routers. The vocabulary's have 8 bits, or with int4 6 bits where 256 divides their columns. A matrix that no group
    divides is left alone. Raises UsageError if the user named the group. Ranks have slices of what is rounded so, and
    no format depends on how many there are."""
    rounding, found = config.quantization, dict[str, PackedFormat]()
    assert rounding is not None
    for part in parts:
        if len(part.shape) != 2 or part.parameter.endswith(("router.weight", "_bias")):
            continue
        columns, bits = part.shape[1], rounding.bits
        is_vocabulary = part.parameter in ("embedding.weight", "lm_head.weight")
        group = rounding.group_of(columns, _head(part, config))
        if group is not None:
            bits = 8 if is_vocabulary else bits
            found[part.name] = PackedFormat(bits, group, scale=0, offset=0, zero=0 if bits == 8 else 8)
            if is_vocabulary and rounding.bits == 4 and columns % SIX_BITS.span == 0:
                found[part.name] = SIX_BITS
        elif not rounding.groups:
            raise UsageError(
                f"--quantization int{bits}:{rounding.group}: groups of {rounding.group} do not divide the {columns} "
                f"columns of {part.name}; choose a smaller group, or none"
            )
    return found


def _head(part: TensorPart, config: ModelConfig) -> int:
    """The columns of a head, of which ranks have whole ones; 0 for matrices that are not divided by heads."""
    layer, _, matrix = part.parameter.removeprefix("layers.").partition(".")
    return config.of_layer(int(layer)).head_dim if matrix == "output.weight" else 0


def packed_shapes(module: nn.Module) -> tuple[PackedShape, ...]:
    """The packed matrices below a module, by their paths from it."""
    found = {path: matrix.shape for path, matrix in module.named_modules() if isinstance(matrix, PackedMatrix)}
    return tuple(replace(shape, path=path.removesuffix(".weight")) for path, shape in found.items())


def _check_columns(part: TensorPart, form: MatrixForm, degree: int) -> None:
    if part.columns is None:
        return
    if form.order is not None:
        raise UsageError(f"--tp {degree} would cut {part.name}, whose columns have an order of their own; leave it out")
    span = form.format.span
    if part.columns.start % span or part.columns.stop % span:
        raise UsageError(
            f"--tp {degree} would cut groups of {span} columns in {part.name}, which has {part.shape[1]};"
            " choose a smaller degree"
        )


def _shape(
    name: str, parts: Sequence[TensorPart], forms: Mapping[str, MatrixForm], decoder: Decoder
) -> Iterator[PackedShape]:
    """The packed shape of a matrix that these parts fill, in the order of rows; none for experts of several formats.
    Rows that no part fills belong to the part before them."""
    *experts, rows, columns = decoder.get_parameter(name).shape
    kinds = [(forms[part.name].format, forms[part.name].order is not None) for part in parts]
    if experts:
        if {*kinds} == {(kinds[0][0], False)} and not any(part.first_row % ROWS for part in parts):
            yield PackedShape(name, (Segment(0, rows, *kinds[0]),), columns, *experts)
        return
    segments: list[Segment] = []
    ends = [part.first_row for part in parts[1:]] + [rows]
    for part, (form, has_order), end in zip(parts, kinds, ends, strict=True):
        last = segments[-1] if segments else None
        if last is not None and not has_order and last[2:] == (form, False) and last.rows % ROWS == 0:
            segments[-1] = last._replace(rows=end - last.first_row)
        else:
            segments.append(Segment(part.first_row, end - part.first_row, form, has_order))
    yield PackedShape(name.removesuffix(".weight"), tuple(segments), columns)
