"""Layers whose matrices are packed integers, in place of a decoder's own."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from nanoserve.config.model_config import ModelConfig
from nanoserve.errors import UsageError
from nanoserve.models.decoder import (
    Decoder,
    MixtureOfExperts,
    SparseExperts,
    VocabParallelEmbedding,
    VocabularyShard,
)
from nanoserve.models.tensor_parts import TensorPart
from triton_ops import PackedFormat, packed_linear, packed_rows, sparse_packed_experts
from triton_ops.packed import ROWS, SIX_BITS

_UNROUNDED = (
    "router.weight",
    "shared.gate.weight",
    "rates.weight",
    "selection.weight",
    "time_step.weight",
    "log_decay",
    "kernel",
    "_bias",
)
"""Ends of the names of parameters of two dimensions that `--quantization` leaves as they are."""


class MatrixForm(NamedTuple):
    """How a stored matrix is packed."""

    format: PackedFormat
    order: Tensor | None
    """The order of its columns, as in `GroupQuantized`."""


class Segment(NamedTuple):
    """Rows of a matrix that are packed together."""

    first_row: int
    rows: int
    format: PackedFormat
    has_order: bool
    """Whether its columns are in an order of their own."""


@dataclass(frozen=True, slots=True)
class PackedShape:
    """A matrix of a module that is packed: by its path, "layers.0.qkv" or
    "layers.0.feed_forward.gate_up"."""

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
        packed, orders = [], []
        for segment in shape.segments:
            blocks = -(-segment.rows // ROWS)
            sizes = [blocks, segment.format.row_bytes(shape.columns)]
            if shape.experts:
                sizes.insert(0, shape.experts)
            packed.append(torch.zeros(sizes, dtype=torch.uint8))
            if segment.has_order:
                orders.append(torch.arange(shape.columns))
        self.packed = _frozen(packed)
        self.orders = _frozen(orders)
        """The order of columns of each segment that has one, int64 [K]."""

    def region(self, part: TensorPart) -> Tensor:
        """The view that the part fills: whole blocks of rows of one segment, and of them the first
        columns."""
        columns = self.shape.columns
        if part.columns is not None:
            columns = len(part.columns)
        for segment, packed in zip(self.shape.segments, self.packed, strict=True):
            first = part.first_row - segment.first_row
            if 0 <= first < segment.rows:
                blocks: Tensor = packed
                if part.expert is not None:
                    blocks = packed[part.expert]
                last_block = -(-(first + part.num_rows) // ROWS)
                return blocks[first // ROWS : last_block, : segment.format.row_bytes(columns)]
        raise ValueError(f"no segment has row {part.first_row}")

    def multiply(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """input [..., K] -> [..., N]"""
        parts = []
        orders = iter(self.orders)
        for segment, packed in zip(self.shape.segments, self.packed, strict=True):
            own_bias = None
            if bias is not None:
                own_bias = bias[segment.first_row : segment.first_row + segment.rows]
            ordered = input
            if segment.has_order:
                ordered = input[..., next(orders)]
            parts.append(packed_linear(ordered, packed, own_bias, segment.rows, segment.format))
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts, dim=-1)


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
        self.first_row = replaced.first_row
        self.num_embeddings = replaced.num_embeddings
        self.dtype = replaced.weight.dtype

    def forward(self, token_ids: Tensor) -> Tensor:
        (segment,) = self.weight.shape.segments
        return packed_rows(self.weight.packed[0], token_ids, segment.format).to(self.dtype)

    def rows(self, first: int, after: int) -> Tensor:
        numbers = torch.arange(first, after, device=self.weight.packed[0].device)
        return self.forward(numbers)


class PackedExperts(SparseExperts):
    """Experts whose matrices are packed."""

    def __init__(
        self, gate_up: PackedMatrix, down: PackedMatrix, replaced: MixtureOfExperts
    ) -> None:
        super().__init__()
        self.moe = replaced.moe
        self.router = replaced.router
        self.correction_bias = replaced.correction_bias
        self.gate_up = gate_up
        self.down = down
        if self.moe.shared_size:
            self.shared = replaced.shared
        if self.moe.norms_apart:
            self.router_scale, self.expert_scale = replaced.router_scale, replaced.expert_scale
            self.input_norm = replaced.input_norm
        if replaced.biases is not None:
            self.gate_up_bias, self.down_bias = replaced.gate_up_bias, replaced.down_bias

    def compute(self, hidden: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        gate_up, down = self.gate_up.shape, self.down.shape
        formats = gate_up.segments[0].format, down.segments[0].format
        return sparse_packed_experts(
            hidden,
            weights,
            experts,
            self.gate_up.packed[0],
            self.down.packed[0],
            down.columns,
            formats,
            self.biases,
            self.moe.style,
        )


def region_of(decoder: Decoder, part: TensorPart) -> Tensor:
    """The view of a parameter, or of a packed matrix, that the part fills."""
    found = _parameter(decoder, part.parameter)
    if isinstance(found, PackedMatrix):
        return found.region(part)
    return part.region(found)


def _parameter(decoder: Decoder, name: str) -> Tensor | PackedMatrix:
    module, _, attribute = name.rpartition(".")
    found: Tensor | PackedMatrix = getattr(decoder.get_submodule(module), attribute)
    return found


def pack_decoder(
    decoder: Decoder, parts: Iterable[TensorPart], forms: Mapping[str, MatrixForm]
) -> None:
    """Put packed layers, which are zero, in the place of those whose parts all have a form, by the
    name of the part. Raises UsageError if the ranks of a stage cannot divide a matrix into whole
    groups of columns."""
    matrices: dict[str, list[TensorPart]] = defaultdict(list)
    for part in parts:
        if len(part.shape) == 2:
            matrices[part.parameter].append(part)
    packed: dict[str, list[TensorPart]] = {}
    for name, filling in matrices.items():
        if all(part.name in forms for part in filling):
            packed[name] = sorted(filling, key=lambda part: part.first_row)
    shapes: list[PackedShape] = []
    for name, filling in packed.items():
        for part in filling:
            _check_columns(part, forms[part.name], decoder.shard.degree)
        shapes += _shape(name, filling, forms, decoder)
    pack_layers(decoder, shapes)
    for name, filling in packed.items():
        matrix = _parameter(decoder, name)
        if isinstance(matrix, PackedMatrix):
            orders = iter(matrix.orders)
            for part in filling:
                order = forms[part.name].order
                if order is not None:
                    next(orders).copy_(order)


def pack_layers(module: nn.Module, shapes: Sequence[PackedShape]) -> None:
    """Put packed layers in the place of those at the shapes' paths below the module."""
    experts: dict[str, dict[str, PackedMatrix]] = defaultdict(dict)
    for shape in shapes:
        weight = PackedMatrix(shape)
        parent, _, attribute = shape.path.rpartition(".")
        if shape.experts:
            experts[parent][attribute] = weight
            continue
        holder = module.get_submodule(parent)
        layer = module.get_submodule(shape.path)
        if isinstance(layer, VocabParallelEmbedding):
            if (
                isinstance(module, Decoder)
                and module.is_last
                and module.lm_head.weight is layer.weight
            ):
                setattr(module, "lm_head", PackedLinear(weight, None))  # noqa: B010  (its type is another)
            setattr(holder, attribute, PackedEmbedding(weight, layer))
        else:
            bias = cast(nn.Linear, layer).bias
            setattr(holder, attribute, PackedLinear(weight, bias))
    for path, matrices in experts.items():
        parent, _, attribute = path.rpartition(".")
        holder = module.get_submodule(parent)
        replaced = cast(MixtureOfExperts, module.get_submodule(path))
        if len(matrices) == 2:
            setattr(
                holder, attribute, PackedExperts(matrices["gate_up"], matrices["down"], replaced)
            )


def rounded_forms(parts: Iterable[TensorPart], config: ModelConfig) -> dict[str, PackedFormat]:
    """The format of each tensor that `--quantization` rounds, from the parts of the whole model:
    all matrices but routers and others of few rows. The vocabulary's have 8 bits, or with int4 6
    bits where 256 divides their columns. A matrix that no group divides is left alone. Raises
    UsageError if the user named the group. Ranks have slices of what is rounded so, and no format
    depends on how many there are."""
    rounding = config.quantization
    assert rounding is not None
    found: dict[str, PackedFormat] = {}
    for part in parts:
        if len(part.shape) != 2 or part.parameter.endswith(_UNROUNDED):
            continue
        columns = part.shape[1]
        group = rounding.group_of(columns, _head(part, config))
        if group is not None:
            is_vocabulary = part.parameter in ("embedding.weight", "lm_head.weight")
            found[part.name] = _rounded_form(
                rounding.bits, group, columns, is_vocabulary=is_vocabulary
            )
        elif not rounding.groups:
            raise UsageError(
                f"--quantization int{rounding.bits}:{rounding.group}: groups of {rounding.group} "
                "do not divide the "
                f"{columns} columns of {part.name}; choose a smaller group, or none"
            )
    return found


def _rounded_form(bits: int, group: int, columns: int, *, is_vocabulary: bool) -> PackedFormat:
    if is_vocabulary and bits == 4 and columns % SIX_BITS.span == 0:
        return SIX_BITS
    if is_vocabulary or bits == 8:
        return PackedFormat(8, group, scale=0, offset=0, zero=0)
    return PackedFormat(bits, group, scale=0, offset=0, zero=8)


def _head(part: TensorPart, config: ModelConfig) -> int:
    """The columns of a head, of which ranks have whole ones; 0 for matrices that are not divided by
    heads."""
    layer, _, matrix = part.parameter.removeprefix("layers.").partition(".")
    if matrix != "output.weight":
        return 0
    if config.recurrent is not None and config.is_recurrent(int(layer)):
        return config.recurrent.mixer.head_dim
    return config.of_layer(int(layer)).head_dim


def packed_shapes(module: nn.Module) -> tuple[PackedShape, ...]:
    """The packed matrices below a module, by their paths from it."""
    found = []
    for path, matrix in module.named_modules():
        if isinstance(matrix, PackedMatrix):
            found.append(replace(matrix.shape, path=path.removesuffix(".weight")))
    return tuple(found)


def num_weights(module: nn.Module) -> int:
    """Number of weights below a module, packed or not."""
    found = 0
    for shape in packed_shapes(module):
        rows = sum(segment.rows for segment in shape.segments)
        found += max(1, shape.experts) * rows * shape.columns
    for parameter in module.parameters():
        if parameter.is_floating_point():  # packed ones are bytes
            found += parameter.numel()
    return found


def _check_columns(part: TensorPart, form: MatrixForm, degree: int) -> None:
    if part.columns is None:
        return
    if form.order is not None:
        raise UsageError(
            f"--tp {degree} would cut {part.name}, whose columns have an order of their own; leave "
            "it out"
        )
    span = form.format.span
    if part.columns.start % span or part.columns.stop % span:
        raise UsageError(
            f"--tp {degree} would cut groups of {span} columns in {part.name}, which has "
            f"{part.shape[1]};"
            " choose a smaller degree"
        )


def _shape(
    name: str, parts: Sequence[TensorPart], forms: Mapping[str, MatrixForm], decoder: Decoder
) -> Iterator[PackedShape]:
    """The packed shape of a matrix that these parts fill, in the order of rows; none for experts of
    several formats. Rows that no part fills belong to the part before them."""
    shape = decoder.get_parameter(name).shape
    rows, columns = shape[-2:]
    if len(shape) == 3:
        if _fit_one_segment(parts, forms):
            segment = Segment(0, rows, forms[parts[0].name].format, has_order=False)
            yield PackedShape(name, (segment,), columns, experts=shape[0])
        return
    segments: list[Segment] = []
    ends = [part.first_row for part in parts[1:]] + [rows]
    for part, end in zip(parts, ends, strict=True):
        form = forms[part.name]
        segment = Segment(part.first_row, end - part.first_row, form.format, form.order is not None)
        if segments and _can_join(segments[-1], segment):
            segment = segments.pop()
            segment = segment._replace(rows=end - segment.first_row)
        segments.append(segment)
    yield PackedShape(name.removesuffix(".weight"), tuple(segments), columns)


def _fit_one_segment(parts: Sequence[TensorPart], forms: Mapping[str, MatrixForm]) -> bool:
    """Whether the matrices of all experts are in one format, in whole blocks of rows, and columns
    are in order."""
    first = forms[parts[0].name]
    for part in parts:
        form = forms[part.name]
        if form.format != first.format or form.order is not None or part.first_row % ROWS:
            return False
    return True


def _can_join(segment: Segment, following: Segment) -> bool:
    """Whether two neighbours can be packed as one: they are in one format and the first ends with a
    block of rows."""
    if segment.has_order or following.has_order:
        return False
    return segment.format == following.format and segment.rows % ROWS == 0
