"""The map from tensors of a Hugging Face checkpoint to rows of parameters, used to load and to save.

The decoder keeps query, key and value in one matrix, gate and up in another, and all experts of a layer in two. A
checkpoint holds them apart or, for some families, together. A `TensorPart` is one tensor of the checkpoint, or the part
of it that one shard of the model needs.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from nanoserve.checkpoint_names import CheckpointNames, LayerNames, checkpoint_names
from nanoserve.config import ModelConfig, MoeConfig
from nanoserve.models.shards import Shard, divided

_FANNING_IN = frozenset({"output", "down"})
"""Matrices divided by columns; the results of the ranks are summed."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A tensor of the checkpoint, or a part of it, and the rows of a parameter that it fills."""

    name: str
    """The tensor's name in the checkpoint."""
    parameter: str
    """Name of the parameter that it fills."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    first_row: int = 0
    expert: int | None = None
    """First row to fill in the parameter, or in the matrix of this expert."""
    rows: range | None = None
    columns: range | None = None
    """Rows and columns that are taken from the tensor; None takes all."""

    @property
    def source(self) -> tuple[slice, ...]:
        """The index into the tensor that selects the part."""
        taken = (self.rows, self.columns)[: len(self.shape)]
        return tuple(slice(None) if span is None else slice(span.start, span.stop) for span in taken)

    @property
    def size(self) -> int:
        """Number of values in the part."""
        taken = zip(self.shape, (self.rows, self.columns), strict=False)
        return math.prod(length if span is None else len(span) for length, span in taken)

    def region(self, parameter: Tensor) -> Tensor:
        """The view of the parameter that the part fills."""
        rows = parameter if self.expert is None else parameter[self.expert]
        filled = rows[self.first_row : self.first_row + (self.shape[0] if self.rows is None else len(self.rows))]
        return filled if self.columns is None else filled[:, : len(self.columns)]

    def pieces(self, most: int) -> Iterator["TensorPart"]:
        """The part in runs of rows with at most `most` numbers, or in single rows."""
        rows = self.rows or range(self.shape[0])
        run = max(16, most // math.prod(self.shape[1:]) // 16 * 16)
        for first in rows[::run]:
            taken = range(first, min(first + run, rows.stop))
            yield replace(self, rows=taken, first_row=self.first_row + first - rows.start)


def tensor_parts(config: ModelConfig) -> Iterator[TensorPart]:
    """Every tensor that the checkpoint must hold, once. A tied output matrix is the embedding and not listed."""
    names, (embedding, head) = checkpoint_names(config), tied_parts(config)
    yield embedding
    for index in range(config.num_layers):
        yield from _layer_parts(config, names, index)
    yield TensorPart(names.final_norm, "final_norm.weight", (config.hidden_size,))
    if not config.tie_word_embeddings:
        yield head


def tied_parts(config: ModelConfig) -> tuple[TensorPart, TensorPart]:
    """The embedding and the output matrix, which a config may tie."""
    names, vocabulary = checkpoint_names(config), (config.vocab_size, config.hidden_size)
    return (
        TensorPart(names.embedding, "embedding.weight", vocabulary),
        TensorPart(names.lm_head, "lm_head.weight", vocabulary),
    )


def shard_parts(parts: Iterable[TensorPart], config: ModelConfig, shard: Shard) -> Iterator[TensorPart]:
    """The parts of the whole model's `parts` that a shard needs, with the shard's own parameters."""
    for part in parts:
        for parameter in _parameters_in(shard, part.parameter, config):
            yield from _cut(replace(part, parameter=parameter), config, shard)


def unfilled_regions(parts: Iterable[TensorPart], parameters: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Views of the regions that a shard's `parts` do not fill: padding, and biases that another rank adds."""
    filled: dict[tuple[str, int | None], list[TensorPart]] = defaultdict(list)
    for part in parts:
        filled[part.parameter, part.expert].append(part)
    for name, parameter in parameters.items():
        experts = range(len(parameter)) if parameter.dim() == 3 else (None,)
        for expert in experts:
            rows = parameter if expert is None else parameter[expert]
            yield from _gaps(rows, sorted(filled[name, expert], key=lambda part: part.first_row))


def may_be_ignored(name: str, config: ModelConfig) -> bool:
    """Whether an extra tensor is redundant: rotary tables of old checkpoints, or a copy of a tied matrix."""
    if name.endswith(("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq")):
        return True
    return config.tie_word_embeddings and name == checkpoint_names(config).lm_head


def _layer_parts(config: ModelConfig, names: CheckpointNames, index: int) -> Iterator[TensorPart]:
    layer, prefix, target = names.layer, names.layer_prefix.format(index), f"layers.{index}."
    hidden, head_dim = config.hidden_size, config.head_dim
    query_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    norms = {"attention_norm": (layer.attention_norm, hidden), "feed_forward_norm": (layer.feed_forward_norm, hidden)}
    if config.norms_per_layer == 4:
        norms["attention_output_norm"] = (layer.attention_output_norm, hidden)
        norms["feed_forward_output_norm"] = (layer.feed_forward_output_norm, hidden)
    if config.qk_norm:
        norms["query_norm"] = (layer.query_norm, head_dim)
        norms["key_norm"] = (layer.key_norm, head_dim)
    for parameter, (name, size) in norms.items():
        yield TensorPart(f"{prefix}{name}.weight", f"{target}{parameter}.weight", (size,))
    qkv_names = tuple(prefix + name for name in layer.qkv)
    yield from _rows(qkv_names, target + "qkv", (query_size, kv_size, kv_size), hidden, bias=config.qkv_bias)
    yield from _rows((prefix + layer.output,), target + "output", (hidden,), query_size, bias=config.output_bias)
    if config.moe is not None and config.is_sparse(index):
        yield from _expert_parts(config.moe, layer, prefix, target + "feed_forward.", hidden)
        return
    inner = config.intermediate_size
    gate_up_names = tuple(prefix + name for name in layer.gate_up)
    yield from _rows(gate_up_names, target + "feed_forward.gate_up", (inner, inner), hidden, bias=config.mlp_bias)
    yield from _rows((prefix + layer.down,), target + "feed_forward.down", (hidden,), inner, bias=config.mlp_bias)


def _rows(
    names: tuple[str, ...], parameter: str, sizes: tuple[int, ...], columns: int, *, bias: bool
) -> Iterator[TensorPart]:
    """The parts of a matrix of row blocks; one name for several blocks means that they are stored fused."""
    blocks = sizes if len(names) == len(sizes) else (sum(sizes),)
    first_row = 0
    for name, rows in zip(names, blocks, strict=True):
        yield TensorPart(f"{name}.weight", f"{parameter}.weight", (rows, columns), first_row)
        if bias:
            yield TensorPart(f"{name}.bias", f"{parameter}.bias", (rows,), first_row)
        first_row += rows


def _expert_parts(moe: MoeConfig, layer: LayerNames, prefix: str, target: str, hidden: int) -> Iterator[TensorPart]:
    yield TensorPart(f"{prefix}{layer.router}.weight", f"{target}router.weight", (moe.num_experts, hidden))
    inner = moe.intermediate_size
    for expert in range(moe.num_experts):
        for block, matrix in enumerate(layer.expert_gate_up):
            name = f"{prefix}{matrix.format(expert)}.weight"
            yield TensorPart(name, f"{target}gate_up", (inner, hidden), block * inner, expert)
        name = f"{prefix}{layer.expert_down.format(expert)}.weight"
        yield TensorPart(name, f"{target}down", (hidden, inner), 0, expert)


def _parameters_in(shard: Shard, parameter: str, config: ModelConfig) -> list[str]:
    """Names in the shard of a parameter of the whole model: none, one or two."""
    if parameter == "embedding.weight":
        apart = config.tie_word_embeddings and shard.is_last and not shard.is_first
        return [parameter] * shard.is_first + ["lm_head.weight"] * apart
    if not parameter.startswith("layers."):
        return [parameter] * shard.is_last
    _, index, rest = parameter.split(".", 2)
    return [f"layers.{int(index) - shard.layers.start}.{rest}"] * (int(index) in shard.layers)


def _gaps(rows: Tensor, parts: Iterable[TensorPart]) -> Iterator[Tensor]:
    """Regions of a matrix or vector that the parts, in the order of rows, leave: rows between, columns beside them."""
    done = 0
    for part in parts:
        if done < part.first_row:
            yield rows[done : part.first_row]
        done = part.first_row + (part.shape[0] if part.rows is None else len(part.rows))
        if part.columns is not None and len(part.columns) < rows.shape[1]:
            yield rows[part.first_row : done, len(part.columns) :]
    if done < len(rows):
        yield rows[done:]


class _Block(NamedTuple):
    """Rows (or columns) of a whole parameter that are divided together."""

    size: int
    kept: range
    """Rows that the rank has."""
    width: int
    """Rows of the rank's own parameter for this block; the last ones may be padding."""


def _cut(part: TensorPart, config: ModelConfig, shard: Shard) -> Iterator[TensorPart]:
    """The rows or columns of a part that belong to this rank."""
    matrix = part.parameter.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    blocks = _blocks(matrix, part, config, shard) if shard.degree > 1 else ()
    if not blocks:
        yield part
    elif matrix in _FANNING_IN:
        (block,) = blocks
        if len(part.shape) == 1 and shard.rank == 0:
            yield part  # a bias: the results of the ranks are summed, so only one rank may add it
        elif len(part.shape) == 2 and block.kept:
            yield replace(part, columns=block.kept)
    else:
        yield from _cut_rows(part, blocks)


def _cut_rows(part: TensorPart, blocks: Iterable[_Block]) -> Iterator[TensorPart]:
    """The kept rows of each block that this part fills; only a fused tensor fills several blocks."""
    whole, own = 0, 0
    for block in blocks:
        first = max(whole + block.kept.start, part.first_row)
        after = min(whole + block.kept.stop, part.first_row + part.shape[0])
        if first < after:
            rows = range(first - part.first_row, after - part.first_row)
            yield replace(part, rows=rows, first_row=own + first - (whole + block.kept.start))
        whole, own = whole + block.size, own + block.width


def _blocks(matrix: str, part: TensorPart, config: ModelConfig, shard: Shard) -> tuple[_Block, ...]:
    """The blocks that divide a matrix of the decoder; empty if it is not divided."""

    def evenly(size: int) -> _Block:
        return _Block(size, shard.share(size), divided(size, shard.degree))

    if matrix in ("embedding", "lm_head"):
        return (evenly(config.vocab_size),)
    query = evenly(config.num_heads * config.head_dim)
    if matrix == "output":
        return (query,)
    if matrix == "qkv":
        heads, size = shard.kv_heads(config.num_kv_heads), config.head_dim
        kept = range(heads.start * size, heads.stop * size)
        return query, *[_Block(config.num_kv_heads * size, kept, len(kept))] * 2
    if matrix not in ("gate_up", "down"):
        return ()
    of_expert = config.moe if part.expert is not None else None
    inner = evenly((of_expert or config).intermediate_size)
    return (inner,) if matrix == "down" else (inner, inner)
