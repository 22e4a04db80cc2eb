"""The map from tensors of a Hugging Face checkpoint to rows of parameters, used to load and to
save.

The decoder keeps query, key and value in one matrix, gate and up in another, and all experts of a
layer in two. A checkpoint holds them apart or, for some families, together.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from nanoserve.config.checkpoint_names import CheckpointNames, LayerNames, checkpoint_names
from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import MlaConfig, MoeConfig
from nanoserve.models.mixer_weights import mixer_blocks, mixer_parts
from nanoserve.models.shards import Shard
from nanoserve.models.tensor_parts import (
    DividedRows,
    TensorPart,
    divide_evenly,
    interleaved_parts,
    row_parts,
)

_FANNING_IN = frozenset({"output", "down", "selection"})
"""Matrices divided by columns; the results of the ranks are summed."""
_FEED_FORWARD = frozenset({"gate_up", "down", "gate_up_bias", "down_bias"})

_CACHE_SCALES = re.compile(
    r"\.self_attn\.(?:(?:[qkv]|qkv)_proj\.|attn\.)?(?:[qkv]|kv|prob|prob_output|output)_(?:scale|zero_point|global_scale)$"
)
"""Scales of attention in 8 bits or fewer, as AutoFP8, compressed-tensors and ModelOpt call them.
The cache has 16 or 32 bits, so they scale nothing."""


def tensor_parts(config: ModelConfig) -> Iterator[TensorPart]:
    """Every tensor that the checkpoint must hold, once, or in parts one after another. A tied
    output matrix is the embedding and not listed."""
    names = checkpoint_names(config)
    embedding, head = tied_parts(config)
    hidden = config.hidden_size
    yield embedding
    size = config.embedding.per_layer_size
    if size:
        width = config.num_layers * size
        table, projection, norm = names.per_layer_embeddings
        yield TensorPart(table, "per_layer_embeddings.embedding.weight", (config.vocab_size, width))
        yield TensorPart(projection, "per_layer_embeddings.projection.weight", (width, hidden))
        yield TensorPart(norm, "per_layer_embeddings.norm.weight", (size,))
    if config.writes_free_canvases:
        yield from _self_conditioning_parts(config, names.self_conditioning)
    for index in range(config.num_layers):
        yield from layer_parts(config, names, index)
    yield TensorPart(names.final_norm, "final_norm.weight", (hidden,))
    if not config.tie_word_embeddings:
        yield head


def _self_conditioning_parts(config: ModelConfig, prefix: str) -> Iterator[TensorPart]:
    hidden, inner = config.hidden_size, config.intermediate_size
    yield TensorPart(f"{prefix}pre_norm.weight", "self_conditioning.norm.weight", (hidden,))
    target = "self_conditioning.feed_forward."
    gate_up, down = [f"{prefix}gate_proj", f"{prefix}up_proj"], [f"{prefix}down_proj"]
    yield from row_parts(gate_up, target + "gate_up", (inner, inner), hidden, bias=False)
    yield from row_parts(down, target + "down", (hidden,), inner, bias=False)


def tied_parts(config: ModelConfig) -> tuple[TensorPart, TensorPart]:
    """The embedding and the output matrix, which a config may tie."""
    names = checkpoint_names(config)
    shape = (config.vocab_size, config.hidden_size)
    embedding = TensorPart(names.embedding, "embedding.weight", shape)
    head = TensorPart(names.lm_head, "lm_head.weight", shape)
    return embedding, head


def shard_parts(
    parts: Iterable[TensorPart], config: ModelConfig, shard: Shard
) -> Iterator[TensorPart]:
    """The parts of the whole model's `parts` that a shard needs, with the shard's own
    parameters."""
    for part in parts:
        for parameter in _parameters_in(shard, part.parameter, config):
            yield from _cut(replace(part, parameter=parameter), config, shard)


def unfilled_regions(
    parts: Iterable[TensorPart], parameters: Mapping[str, Tensor]
) -> Iterator[Tensor]:
    """Views of the regions that a shard's `parts` do not fill: padding, and biases that another
    rank adds."""
    filled: dict[tuple[str, int | None], list[TensorPart]] = defaultdict(list)
    for part in parts:
        filled[part.parameter, part.expert].append(part)
    for filling in filled.values():
        filling.sort(key=lambda part: part.first_row)
    for name, parameter in parameters.items():
        if parameter.dim() < 3:
            yield from _gaps(parameter, filled[name, None])
            continue
        for expert, matrix in enumerate(parameter):
            yield from _gaps(matrix, filled[name, expert])


def may_be_ignored(name: str, config: ModelConfig) -> bool:
    """Whether an extra tensor is redundant: rotary tables of old checkpoints, scales for a cache in
    8 bits, a copy of a tied matrix, layers for drafts (multi-token prediction), keys and values of
    a layer that shares others, a part that reads images, or an encoder's copy of the decoder's
    weights."""
    names = checkpoint_names(config)
    if name.endswith(("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq")):
        return True
    if _CACHE_SCALES.search(name) or name.startswith(("mtp.", "model.visual.")):
        return True
    drafting_layer = names.layer_prefix.format(config.num_layers)
    if config.attention.mla is not None and name.startswith(drafting_layer):
        return True
    of_layers, _, _ = names.layer_prefix.partition("{}")
    if config.tensor_names == "multimodal" and not name.startswith((of_layers, "lm_head.")):
        return True
    for layer, shape in enumerate(config.layers.shapes):
        shared = [f"{names.layer_prefix.format(layer)}{part}." for part in names.layer.shared_parts]
        if not shape.has_kv and name.startswith(tuple(shared)):
            return True
    return config.tie_word_embeddings and name == names.lm_head


def layer_parts(config: ModelConfig, names: CheckpointNames, index: int) -> Iterator[TensorPart]:
    """The tensors of a layer, under these names."""
    config = config.of_layer(index)
    layer = names.layer
    prefix, feed_forward_prefix = names.layer_prefixes(config, index)
    target = f"layers.{index}."
    hidden = config.hidden_size
    yield from _norm_parts(config, layer, prefix, feed_forward_prefix, target, index)
    if config.attention.sinks:
        yield TensorPart(prefix + layer.sinks, target + "sinks", (config.num_heads,))
    if config.writes_free_canvases:
        yield TensorPart(names.encoder_scale.format(index), target + "scale", (1,))
        yield TensorPart(prefix + layer.scale, target + "canvas_scale", (1,))
    elif config.norms.layer_scale:
        yield TensorPart(prefix + layer.scale, target + "scale", (1,))
    if config.embedding.per_layer_size:
        size = config.embedding.per_layer_size
        yield TensorPart(
            f"{prefix}{layer.input_gate}.weight", target + "input_gate.weight", (size, hidden)
        )
        yield TensorPart(
            f"{prefix}{layer.input_up}.weight", target + "input_up.weight", (hidden, size)
        )
    if config.recurrent is not None and config.is_recurrent(index):
        yield from mixer_parts(config, config.recurrent, layer, prefix, target)
    else:
        yield from _attention_parts(config, layer, prefix, target)
    if config.has_feed_forward(index):
        yield from _feed_forward_parts(config, layer, feed_forward_prefix, target, index)


def _feed_forward_parts(
    config: ModelConfig, layer: LayerNames, prefix: str, target: str, index: int
) -> Iterator[TensorPart]:
    """The matrices of the feed-forward part."""
    target += "feed_forward."
    hidden, inner = config.hidden_size, config.intermediate_size
    if config.moe is not None and config.is_sparse(index):
        yield from _expert_parts(config, config.moe, layer, prefix, target)
        return
    sizes: tuple[int, ...] = (inner,)
    if config.feed_forward.is_gated:
        sizes = (inner, inner)
    bias = config.feed_forward.bias
    gate_up_names = [prefix + name for name in layer.gate_up]
    yield from row_parts(gate_up_names, target + "gate_up", sizes, hidden, bias=bias)
    yield from row_parts([prefix + layer.down], target + "down", (hidden,), inner, bias=bias)


def _attention_parts(
    config: ModelConfig, layer: LayerNames, prefix: str, target: str
) -> Iterator[TensorPart]:
    """The matrices of attention."""
    hidden = config.hidden_size
    bias = config.attention.qkv_bias
    if config.attention.mla is not None:
        yield from _latent_parts(config, config.attention.mla, layer, prefix, target)
    elif config.attention.output_gate:
        query, key, value = (prefix + name for name in layer.qkv)
        size = config.head_dim
        yield from interleaved_parts(
            query,
            [target + "qkv", target + "output_gate"],
            [size, size],
            config.num_heads,
            hidden,
            bias=bias,
        )
        query_size, *key_and_value = config.qkv_sizes
        yield from row_parts(
            [key, value],
            target + "qkv",
            tuple(key_and_value),
            hidden,
            bias=bias,
            first_row=query_size,
        )
    else:
        sizes = config.qkv_sizes
        qkv_names = [prefix + name for name in layer.qkv[: len(sizes)]]
        yield from row_parts(qkv_names, target + "qkv", sizes, hidden, bias=bias)
    yield from row_parts(
        [prefix + layer.output],
        target + "output",
        (hidden,),
        config.output_size,
        bias=config.attention.output_bias,
    )


def _norm_parts(
    config: ModelConfig,
    layer: LayerNames,
    prefix: str,
    feed_forward_prefix: str,
    target: str,
    index: int,
) -> Iterator[TensorPart]:
    """The weights of a layer's norms; those of queries and keys are for layers that attend."""
    hidden = config.hidden_size
    norms: dict[str, tuple[str, int]] = {}
    if config.norms.places in ("before", "around") and config.has_feed_forward(index):
        norms["feed_forward_norm"] = (layer.feed_forward_norm, hidden)
    if config.norms.before_attention and config.norms.places != "after":
        norms["attention_norm"] = (layer.attention_norm, hidden)
    if config.norms.places in ("around", "after"):
        norms["attention_output_norm"] = (layer.attention_output_norm, hidden)
        norms["feed_forward_output_norm"] = (layer.feed_forward_output_norm, hidden)
    if config.moe is not None and config.moe.norms_apart and config.is_sparse(index):
        norms["shared_output_norm"] = (layer.shared_output_norm, hidden)
        norms["expert_output_norm"] = (layer.expert_output_norm, hidden)
    if config.attention.qk_norm and not config.is_recurrent(index):
        query_size = key_size = config.head_dim
        if config.attention.qk_norm_spans_heads:
            query_size = config.num_heads * config.head_dim
            key_size = config.num_kv_heads * config.head_dim
        norms["query_norm"] = (layer.query_norm, query_size)
        if config.attention.has_kv:
            norms["key_norm"] = (layer.key_norm, key_size)
    if config.embedding.per_layer_size:
        norms["input_norm"] = (layer.input_norm, hidden)
    for parameter, (name, size) in norms.items():
        of_block = feed_forward_prefix if parameter == "feed_forward_norm" else prefix
        yield TensorPart(f"{of_block}{name}.weight", f"{target}{parameter}.weight", (size,))


def _latent_parts(
    config: ModelConfig, mla: MlaConfig, layer: LayerNames, prefix: str, target: str
) -> Iterator[TensorPart]:
    query_size = mla.query_size(config.num_heads)
    parts: dict[str, tuple[str, tuple[int, ...]]] = {
        "latent_norm": (layer.latent_norm, (mla.kv_lora_rank,)),
        "latent_up": (layer.latent_up, (mla.expanded_size(config.num_heads), mla.kv_lora_rank)),
    }
    first_rows = query_size
    if mla.q_lora_rank:
        first_rows = mla.q_lora_rank
        parts["query_norm"] = (layer.latent_query_norm, (mla.q_lora_rank,))
        parts["query_up"] = (layer.latent_query_up, (query_size, mla.q_lora_rank))
    for parameter, (name, shape) in parts.items():
        yield TensorPart(f"{prefix}{name}.weight", f"{target}latent.{parameter}.weight", shape)
    query_name, latent_name = layer.qkv
    hidden = config.hidden_size
    # Queries that are made of the hidden state itself have no bias, whatever attention_bias says;
    # theirs stays zero.
    query_bias = config.attention.qkv_bias and mla.q_lora_rank > 0
    target += "qkv"
    yield from row_parts([prefix + query_name], target, (first_rows,), hidden, bias=query_bias)
    yield from row_parts(
        [prefix + latent_name],
        target,
        (config.head_dim,),
        hidden,
        bias=config.attention.qkv_bias,
        first_row=first_rows,
    )


def _expert_parts(
    config: ModelConfig, moe: MoeConfig, layer: LayerNames, prefix: str, target: str
) -> Iterator[TensorPart]:
    count, hidden, bias = moe.num_experts, config.hidden_size, config.feed_forward.bias
    inner = moe.intermediate_size
    router = prefix + layer.router
    yield TensorPart(f"{router}.weight", target + "router.weight", (count, hidden))
    if moe.style == "gpt_oss":
        gate_up_bias, down_bias = layer.expert_biases
        yield TensorPart(f"{router}.bias", target + "router.bias", (count,))
        yield TensorPart(prefix + gate_up_bias, target + "gate_up_bias", (count, 2 * inner))
        yield TensorPart(prefix + down_bias, target + "down_bias", (count, hidden))
    if moe.corrects_choice:
        yield TensorPart(prefix + layer.correction_bias, target + "correction_bias", (count,))
    if moe.norms_apart:
        vectors = {
            "router_scale": (prefix + layer.router_scale, hidden),
            "expert_scale": (prefix + layer.expert_scale, count),
            "input_norm.weight": (f"{prefix}{layer.expert_input_norm}.weight", hidden),
        }
        for parameter, (name, size) in vectors.items():
            yield TensorPart(name, target + parameter, (size,))
    if moe.gates_shared:
        name = f"{prefix}{layer.shared_gate}.weight"
        yield TensorPart(name, target + "shared.gate.weight", (1, hidden))
    shared = moe.shared_size
    if shared:
        names = [prefix + name for name in layer.shared_gate_up]
        sizes: tuple[int, ...] = (shared, shared) if moe.is_gated else (shared,)
        down = [prefix + layer.shared_down]
        yield from row_parts(names, target + "shared.gate_up", sizes, hidden, bias=bias)
        yield from row_parts(down, target + "shared.down", (hidden,), shared, bias=bias)
    rows = inner
    if moe.is_gated and len(layer.expert_gate_up) == 1:  # gate and up are stored fused
        rows = 2 * inner
    for expert in range(count):
        for block, matrix in enumerate(layer.expert_gate_up):
            name = f"{prefix}{matrix.format(expert)}.weight"
            yield TensorPart(name, target + "gate_up", (rows, hidden), block * inner, expert)
        name = f"{prefix}{layer.expert_down.format(expert)}.weight"
        yield TensorPart(name, target + "down", (hidden, inner), 0, expert)


def _parameters_in(shard: Shard, parameter: str, config: ModelConfig) -> list[str]:
    """Names in the shard of a parameter of the whole model: none or one."""
    if parameter == "embedding.weight":
        if shard.is_first:
            return [parameter]
        # the head of a last stage has a copy of its own
        if config.tie_word_embeddings and shard.is_last:
            return ["lm_head.weight"]
        return []
    if parameter.startswith("layers."):
        _, index, rest = parameter.split(".", 2)
        if int(index) not in shard.layers:
            return []
        own_index = int(index) - shard.layers.start
        return [f"layers.{own_index}.{rest}"]
    # `per_layer_embeddings` and `self_conditioning` are for models that are one stage
    if shard.is_last:
        return [parameter]
    return []


def _gaps(rows: Tensor, parts: Iterable[TensorPart]) -> Iterator[Tensor]:
    """Regions of a matrix or vector that the parts, in the order of rows, leave: rows between,
    columns beside them."""
    done = 0
    for part in parts:
        if done < part.first_row:
            yield rows[done : part.first_row]
        done = part.first_row + part.num_rows
        if part.columns is None:
            continue
        width = len(part.columns)
        if width < rows.shape[1]:
            yield rows[part.first_row : done, width:]
    if done < len(rows):
        yield rows[done:]


def _cut(part: TensorPart, config: ModelConfig, shard: Shard) -> Iterator[TensorPart]:
    """The rows or columns of a part that belong to this rank."""
    blocks = _blocks(part, config, shard)
    matrix = _matrix_name(part)
    is_vector = len(part.shape) == 1
    if not blocks:
        yield part
    elif matrix == "down_bias" or (is_vector and matrix in _FANNING_IN):
        if shard.rank == 0:  # the results of the ranks are summed, so only one rank may add a bias
            yield part
    elif matrix in _FANNING_IN or matrix == "gate_up_bias":
        (block,) = blocks
        if block.kept:
            yield replace(part, columns=block.kept)
    else:
        yield from _cut_rows(part, blocks)


def _cut_rows(part: TensorPart, blocks: Iterable[DividedRows]) -> Iterator[TensorPart]:
    """The kept rows of each block that this part fills; only a fused tensor fills several
    blocks. A part may be some rows of a tensor already."""
    part_end = part.first_row + part.num_rows
    first_stored = part.rows.start if part.rows is not None else 0
    whole, own = 0, 0
    for block in blocks:
        kept_start = whole + block.kept.start
        kept_end = whole + block.kept.stop
        first = max(kept_start, part.first_row)
        after = min(kept_end, part_end)
        if first < after:
            shift = first_stored - part.first_row
            rows = range(first + shift, after + shift)
            yield replace(part, rows=rows, first_row=own + first - kept_start)
        whole += block.size
        own += block.width


def _matrix_name(part: TensorPart) -> str:
    """The name of the module or parameter within its layer: "qkv", "down_bias"."""
    path = part.parameter.removesuffix(".weight").removesuffix(".bias")
    return path.rpartition(".")[2]


def _blocks(part: TensorPart, config: ModelConfig, shard: Shard) -> tuple[DividedRows, ...]:
    """The blocks that divide a matrix of the decoder; empty if it is not divided."""
    if shard.degree == 1:
        return ()
    matrix = _matrix_name(part)
    if matrix in ("embedding", "lm_head"):
        return (divide_evenly(config.vocab_size, shard),)
    if not part.parameter.startswith("layers."):
        return ()
    own_index = int(part.parameter.split(".")[1])
    layer = shard.layers.start + own_index
    config = config.of_layer(layer)
    is_mixer = matrix == "output" or ".mixer." in part.parameter
    if config.recurrent is not None and config.is_recurrent(layer) and is_mixer:
        return mixer_blocks(matrix, config.recurrent, shard)
    if matrix in ("output", "output_gate"):
        return (divide_evenly(config.output_size, shard),)
    if matrix == "sinks":
        return (divide_evenly(config.num_heads, shard),)
    if matrix in _FEED_FORWARD:
        return _feed_forward_blocks(matrix, part, config, shard)
    if config.attention.mla is not None:
        return _latent_blocks(matrix, config, config.attention.mla, shard)
    return _attention_blocks(matrix, config, shard)


def _attention_blocks(matrix: str, config: ModelConfig, shard: Shard) -> tuple[DividedRows, ...]:
    """Heads are divided; ranks share a key-value head where there are fewer of them."""
    size = config.head_dim
    query = divide_evenly(config.num_heads * size, shard)
    heads = shard.kv_heads(config.num_kv_heads)
    kept = range(heads.start * size, heads.stop * size)
    key = DividedRows(config.num_kv_heads * size, kept, len(kept))
    if matrix == "qkv":
        blocks = (query, key, key)
        return blocks[: len(config.qkv_sizes)]
    if config.attention.qk_norm_spans_heads and matrix == "query_norm":
        return (query,)
    if config.attention.qk_norm_spans_heads and matrix == "key_norm":
        return (key,)
    return ()


def _feed_forward_blocks(
    matrix: str, part: TensorPart, config: ModelConfig, shard: Shard
) -> tuple[DividedRows, ...]:
    """The inner size of a feed-forward part, of shared experts, or of each expert is divided."""
    size = config.intermediate_size
    of_expert = part.expert is not None or matrix.endswith("_bias")
    takes_turns = False
    is_gated = config.feed_forward.is_gated
    if config.moe is not None and ".shared." in part.parameter:
        size = config.moe.shared_size
    elif config.moe is not None and of_expert:
        size = config.moe.intermediate_size
        takes_turns = config.moe.style == "gpt_oss"
    width = config.inner_part(size, shard.degree)
    kept = shard.share(size, width)
    inner = DividedRows(size, kept, width)
    if matrix in ("down", "down_bias"):
        return (inner,)
    if takes_turns:  # a row of gate, then its row of up
        return (DividedRows(2 * size, range(2 * kept.start, 2 * kept.stop), 2 * width),)
    if matrix == "gate_up_bias" or not is_gated:
        return (inner,)
    return inner, inner


def _latent_blocks(
    matrix: str, config: ModelConfig, mla: MlaConfig, shard: Shard
) -> tuple[DividedRows, ...]:
    """Heads are divided; latents, which all heads share, are whole on every rank."""
    if matrix == "latent_up":
        return (divide_evenly(mla.expanded_size(config.num_heads), shard),)
    query = divide_evenly(mla.query_size(config.num_heads), shard)
    if matrix == "query_up":
        return (query,)
    if matrix != "qkv" or mla.q_lora_rank:
        return ()
    latent = DividedRows(config.head_dim, range(config.head_dim), config.head_dim)
    return query, latent
