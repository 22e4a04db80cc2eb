"""The map from tensors of a Hugging Face checkpoint to rows of parameters, used to load and to save.

The decoder keeps query, key and value in one matrix, gate and up in another, and all experts of a layer in two. A
checkpoint holds them apart or, for some families, together. A `TensorPart` is one tensor of the checkpoint, or the part
of it that one shard of the model needs.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from nanoserve.config.checkpoint_names import CheckpointNames, LayerNames, checkpoint_names
from nanoserve.config.model_config import MlaConfig, ModelConfig, MoeConfig
from nanoserve.models.shards import Shard, divided

_FANNING_IN = frozenset({"output", "down"})
"""Matrices divided by columns; the results of the ranks are summed."""
_BY_COLUMNS = _FANNING_IN | {"gate_up_bias"}


_CACHE_SCALES = re.compile(
    r"\.self_attn\.(?:(?:[qkv]|qkv)_proj\.|attn\.)?(?:[qkv]|kv|prob|prob_output|output)_(?:scale|zero_point|global_scale)$"
)
"""Scales of attention in 8 bits or fewer, as AutoFP8, compressed-tensors and ModelOpt call them. The cache has 16 or 32
bits, so they scale nothing."""


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
    if size := config.per_layer_input_size:
        width, (table, projection, norm) = config.num_layers * size, names.per_layer_embeddings
        yield TensorPart(table, "per_layer_embeddings.embedding.weight", (config.vocab_size, width))
        yield TensorPart(projection, "per_layer_embeddings.projection.weight", (width, config.hidden_size))
        yield TensorPart(norm, "per_layer_embeddings.norm.weight", (size,))
    for index in range(config.num_layers):
        yield from layer_parts(config, names, index)
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
    """Whether an extra tensor is redundant: rotary tables of old checkpoints, scales for a cache in 8 bits, a copy of a
    tied matrix, a layer for drafts, keys and values of a layer that shares others, or a part that reads images."""
    if name.endswith(("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq")) or _CACHE_SCALES.search(name):
        return True
    if config.mla is not None and name.startswith(checkpoint_names(config).layer_prefix.format(config.num_layers)):
        return True  # the layer that predicts a token more
    if config.tensor_names == "multimodal" and not name.startswith(("model.layers.", "lm_head.")):
        return True
    alone = (layer for layer, shape in enumerate(config.shapes) if not shape.has_kv)
    if name.startswith(tuple(f"model.layers.{layer}.self_attn.{part}_" for layer in alone for part in "kv")):
        return True
    return config.tie_word_embeddings and name == checkpoint_names(config).lm_head


def layer_parts(config: ModelConfig, names: CheckpointNames, index: int) -> Iterator[TensorPart]:
    """The tensors of a layer, under these names."""
    config = config.of_layer(index)
    layer, prefix, target = names.layer, names.layer_prefix.format(index), f"layers.{index}."
    hidden, head_dim = config.hidden_size, config.head_dim
    query_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    norms = {}
    if config.norms in ("before", "around"):
        norms["feed_forward_norm"] = (layer.feed_forward_norm, hidden)
    if config.attention_norm and config.norms != "after":
        norms["attention_norm"] = (layer.attention_norm, hidden)
    if config.norms in ("around", "after"):
        norms["attention_output_norm"] = (layer.attention_output_norm, hidden)
        norms["feed_forward_output_norm"] = (layer.feed_forward_output_norm, hidden)
    if config.qk_norm:
        norms["query_norm"] = (layer.query_norm, query_size if config.qk_norm_spans_heads else head_dim)
        if config.has_kv:
            norms["key_norm"] = (layer.key_norm, kv_size if config.qk_norm_spans_heads else head_dim)
    if config.per_layer_input_size:
        norms["input_norm"] = (layer.input_norm, hidden)
        sizes = (config.per_layer_input_size, hidden)
        yield TensorPart(f"{prefix}{layer.input_gate}.weight", target + "input_gate.weight", sizes)
        yield TensorPart(f"{prefix}{layer.input_up}.weight", target + "input_up.weight", sizes[::-1])
    for parameter, (name, size) in norms.items():
        yield TensorPart(f"{prefix}{name}.weight", f"{target}{parameter}.weight", (size,))
    if config.attention_sinks:
        yield TensorPart(prefix + layer.sinks, target + "sinks", (config.num_heads,))
    if config.layer_scale:
        yield TensorPart(prefix + layer.scale, target + "scale", (1,))
    if config.mla is not None:
        yield from _latent_parts(config, config.mla, layer, prefix, target)
    else:
        qkv_sizes = config.qkv_sizes
        qkv_names = tuple(prefix + name for name in layer.qkv[: len(qkv_sizes)])
        yield from _rows(qkv_names, target + "qkv", qkv_sizes, hidden, bias=config.qkv_bias)
    yield from _rows(
        (prefix + layer.output,), target + "output", (hidden,), config.output_size, bias=config.output_bias
    )
    if config.moe is not None and config.is_sparse(index):
        yield from _expert_parts(config.moe, layer, prefix, target + "feed_forward.", hidden)
        return
    inner = config.intermediate_size
    gate_up_names = tuple(prefix + name for name in layer.gate_up)
    yield from _rows(gate_up_names, target + "feed_forward.gate_up", (inner, inner), hidden, bias=config.mlp_bias)
    yield from _rows((prefix + layer.down,), target + "feed_forward.down", (hidden,), inner, bias=config.mlp_bias)


def _latent_parts(
    config: ModelConfig, mla: MlaConfig, layer: LayerNames, prefix: str, target: str
) -> Iterator[TensorPart]:
    parts: dict[str, tuple[str, tuple[int, ...]]] = {
        "latent_norm": (layer.latent_norm, (mla.kv_lora_rank,)),
        "latent_up": (layer.latent_up, (mla.expanded_size(config.num_heads), mla.kv_lora_rank)),
    }
    if mla.q_lora_rank:
        parts["query_norm"] = layer.latent_query_norm, (mla.q_lora_rank,)
        parts["query_up"] = layer.latent_query_up, (mla.query_size(config.num_heads), mla.q_lora_rank)
    for parameter, (name, shape) in parts.items():
        yield TensorPart(f"{prefix}{name}.weight", f"{target}latent.{parameter}.weight", shape)
    query, latent = (prefix + name for name in layer.qkv)
    rows, hidden = mla.q_lora_rank or mla.query_size(config.num_heads), config.hidden_size
    # Queries that are made of the hidden state itself have no bias, whatever attention_bias says; theirs stays zero.
    query_bias = config.qkv_bias and mla.q_lora_rank > 0
    yield from _rows((query,), target + "qkv", (rows,), hidden, bias=query_bias)
    yield from _rows((latent,), target + "qkv", (config.head_dim,), hidden, bias=config.qkv_bias, first_row=rows)


def _rows(
    names: tuple[str, ...], parameter: str, sizes: tuple[int, ...], columns: int, *, bias: bool, first_row: int = 0
) -> Iterator[TensorPart]:
    """The parts of a matrix of row blocks; one name for several blocks means that they are stored fused."""
    blocks = sizes if len(names) == len(sizes) else (sum(sizes),)
    for name, rows in zip(names, blocks, strict=True):
        yield TensorPart(f"{name}.weight", f"{parameter}.weight", (rows, columns), first_row)
        if bias:
            yield TensorPart(f"{name}.bias", f"{parameter}.bias", (rows,), first_row)
        first_row += rows


def _expert_parts(moe: MoeConfig, layer: LayerNames, prefix: str, target: str, hidden: int) -> Iterator[TensorPart]:
    yield TensorPart(f"{prefix}{layer.router}.weight", f"{target}router.weight", (moe.num_experts, hidden))
    inner, fused = moe.intermediate_size, len(layer.expert_gate_up) == 1
    if moe.style == "gpt_oss":
        gate_up_bias, down_bias = layer.expert_biases
        yield TensorPart(f"{prefix}{layer.router}.bias", f"{target}router.bias", (moe.num_experts,))
        yield TensorPart(prefix + gate_up_bias, f"{target}gate_up_bias", (moe.num_experts, 2 * inner))
        yield TensorPart(prefix + down_bias, f"{target}down_bias", (moe.num_experts, hidden))
    if moe.scores == "sigmoid":
        yield TensorPart(prefix + layer.correction_bias, f"{target}correction_bias", (moe.num_experts,))
    if moe.shared_size:
        names, sizes = tuple(prefix + name for name in layer.shared_gate_up), (moe.shared_size,) * 2
        yield from _rows(names, f"{target}shared.gate_up", sizes, hidden, bias=False)
        yield from _rows((prefix + layer.shared_down,), f"{target}shared.down", (hidden,), moe.shared_size, bias=False)
    for expert in range(moe.num_experts):
        for block, matrix in enumerate(layer.expert_gate_up):
            name, rows = f"{prefix}{matrix.format(expert)}.weight", 2 * inner if fused else inner
            yield TensorPart(name, f"{target}gate_up", (rows, hidden), block * inner, expert)
        name = f"{prefix}{layer.expert_down.format(expert)}.weight"
        yield TensorPart(name, f"{target}down", (hidden, inner), 0, expert)


def _parameters_in(shard: Shard, parameter: str, config: ModelConfig) -> list[str]:
    """Names in the shard of a parameter of the whole model: none or one."""
    if parameter == "embedding.weight":
        if shard.is_first:
            return [parameter]
        if config.tie_word_embeddings and shard.is_last:  # the head of a last stage has a copy of its own
            return ["lm_head.weight"]
        return []
    if not parameter.startswith("layers."):  # `per_layer_embeddings` are for models that are one stage
        return [parameter] if shard.is_last else []
    _, index, rest = parameter.split(".", 2)
    if int(index) not in shard.layers:
        return []
    return [f"layers.{int(index) - shard.layers.start}.{rest}"]


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
    if part.parameter.startswith("layers."):
        config = config.of_layer(shard.layers.start + int(part.parameter.split(".")[1]))
    matrix = part.parameter.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    blocks = _blocks(matrix, part, config, shard) if shard.degree > 1 else ()
    if not blocks:
        yield part
    elif matrix == "down_bias":
        if shard.rank == 0:
            yield part
    elif matrix in _BY_COLUMNS:
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

    def inner(size: int) -> _Block:
        width = config.inner_part(size, shard.degree)
        return _Block(size, shard.share(size, width), width)

    if matrix in ("embedding", "lm_head"):
        return (evenly(config.vocab_size),)
    if matrix == "output":
        return (evenly(config.output_size),)
    if config.mla is not None and matrix in ("qkv", "query_up", "latent_up"):
        return _latent_blocks(matrix, config, config.mla, evenly)
    query = evenly(config.num_heads * config.head_dim)
    heads, size = shard.kv_heads(config.num_kv_heads), config.head_dim
    kept = range(heads.start * size, heads.stop * size)
    key = _Block(config.num_kv_heads * size, kept, len(kept))
    if matrix == "qkv":
        return (query, key, key)[: len(config.qkv_sizes)]
    if matrix in ("query_norm", "key_norm") and config.qk_norm_spans_heads:
        return (query if matrix == "query_norm" else key,)
    if matrix == "sinks":
        return (evenly(config.num_heads),)
    if matrix not in ("gate_up", "down", "gate_up_bias", "down_bias"):
        return ()
    of_expert = config.moe if part.expert is not None or matrix.endswith("_bias") else None
    if config.moe is not None and ".shared." in part.parameter:
        found = inner(config.moe.shared_size)
    else:
        found = inner((of_expert or config).intermediate_size)
    if of_expert is not None and of_expert.style == "gpt_oss" and matrix.startswith("gate_up"):  # rows take turns
        return (_Block(2 * found.size, range(2 * found.kept.start, 2 * found.kept.stop), 2 * found.width),)
    return (found, found) if matrix == "gate_up" else (found,)


def _latent_blocks(
    matrix: str, config: ModelConfig, mla: MlaConfig, evenly: Callable[[int], _Block]
) -> tuple[_Block, ...]:
    """Heads are divided; latents, which all heads share, are whole on every rank."""
    if matrix == "latent_up":
        return (evenly(mla.expanded_size(config.num_heads)),)
    query = evenly(mla.query_size(config.num_heads))
    if matrix == "query_up":
        return (query,)
    if mla.q_lora_rank:
        return ()
    return query, _Block(config.head_dim, range(config.head_dim), config.head_dim)
