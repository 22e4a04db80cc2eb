"""Cut the least important parts out of a checkpoint. A dense model of smaller sizes is left.

The tensors are sliced as they are stored, in the format that they are stored in.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoserve.config.checkpoint_names import checkpoint_names
from nanoserve.config.model_config import ModelConfig
from nanoserve.errors import UsageError
from nanoserve.models import rounding
from nanoserve.models.checkpoint_writing import (
    copy_other_files,
    file_names,
    write_config,
    write_index,
    write_tensors,
)
from nanoserve.models.decoder import Decoder
from nanoserve.models.loading import Checkpoint, Progress, load_model, open_checkpoint
from nanoserve.models.pruning.importance import Importance, measure_importance
from nanoserve.models.tensor_parts import TensorPart
from nanoserve.utils.files import read_json_object, unwritable_as_failure
from nanoserve.utils.interrupts import deferred_interrupts

_HEADS_DIVIDE_HIDDEN_SIZE = ("llama", "gemma2", "gemma3_text")
"""Families that transformers loads only if the number of heads divides the hidden size, although
the size of a head is a number of its own."""
_LISTS_OF_LAYERS = ("layer_types", "no_rope_layers")
"""Keys of config.json with an entry for each layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a pruned model; None keeps the size."""

    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    """Query heads of each layer."""


@dataclass(frozen=True, slots=True)
class KeptUnits:
    """The parts of a model that stay, in order. Numbers are those of the whole model."""

    layers: tuple[int, ...]
    hidden: Tensor
    """Channels of hidden states, int64."""
    groups: Sequence[Tensor]
    """Key-value heads of each layer of the whole model, int64."""
    neurons: Sequence[Tensor]
    """Inner channels of the feed-forward part of each layer of the whole model, int64."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """The result of pruning."""

    perplexity_before: float
    perplexity_after: float
    layers: tuple[int, ...]
    """The layers of the whole model that stayed."""


@torch.inference_mode()
def prune_checkpoint(
    source: Path,
    output: Path,
    sizes: Sizes,
    calibration: Sequence[Tensor],
    held_out: Sequence[Tensor],
    progress: Progress,
) -> Pruned:
    """Write the model directory `source`, pruned to these sizes, to `output`, which is new or
    empty. Texts are token ids, int64 [T] each. `progress` is called with the calibrating texts that
    are done.

    Raises ModelError if the model cannot be read, UsageError if it, the sizes or the output do not
    suit, and RuntimeFailure if it cannot be written. After an error or Ctrl-C nothing is left.
    """
    config = ModelConfig.from_directory(source)
    check_prunable(source, config)
    check_sizes(sizes, config)
    with new_directory(output):
        decoder, _ = load_model(source, "float32")
        importance = measure_importance(decoder, calibration, progress)
        before = _perplexity_of(decoder, held_out)
        del decoder
        kept = choose(importance, sizes, config)
        trim_checkpoint(source, output, kept)
        trimmed, _ = load_model(output, "float32")
        return Pruned(before, _perplexity_of(trimmed, held_out), kept.layers)


def trim_checkpoint(source: Path, output: Path, kept: KeptUnits) -> None:
    """Write the parts of the model directory `source` that are kept to the empty directory
    `output`. Raises as `prune_checkpoint` does."""
    config = ModelConfig.from_directory(source)
    check_prunable(source, config)
    files = file_names(output, len(kept.layers) + 1)
    described = _trimmed_description(source, config, kept)
    with open_checkpoint(source, config) as checkpoint:
        beside_layers = [part for part in checkpoint.parts if _layer_of(part) is None]
        write_tensors(files[0], dict(_trimmed(beside_layers, checkpoint, config, kept)))
        for place, layer in enumerate(kept.layers):
            parts = [part for part in checkpoint.parts if _layer_of(part) == layer]
            prefix = checkpoint_names(config).layer_prefix
            renamed = {
                prefix.format(place) + name.removeprefix(prefix.format(layer)): tensor
                for name, tensor in _trimmed(parts, checkpoint, config, kept)
            }
            write_tensors(files[place + 1], renamed)
    copy_other_files(source, output)
    write_index(output, files)
    write_config(output, described)


def choose(importance: Importance, sizes: Sizes, config: ModelConfig) -> KeptUnits:
    """The most important parts, as many as the sizes say; in each layer as many."""
    groups = config.num_kv_heads
    if sizes.num_heads is not None:
        groups = sizes.num_heads // config.group_size
    hidden_size = sizes.hidden_size or config.hidden_size
    inner = sizes.intermediate_size or config.intermediate_size
    layers = _best(importance.layers, sizes.num_layers or config.num_layers)
    return KeptUnits(
        layers=tuple(layers.tolist()),
        hidden=_best(importance.hidden, hidden_size),
        groups=[_best(scores, groups) for scores in importance.groups],
        neurons=[_best(scores, inner) for scores in importance.neurons],
    )


def _best(scores: Tensor, count: int) -> Tensor:
    """The places of the highest scores, in order; of equal ones the first."""
    ranked = scores.argsort(descending=True, stable=True)
    return ranked[:count].sort().values


# ---- what is refused -----------------------------------------------------------------------------


def check_prunable(source: Path, config: ModelConfig) -> None:
    """Raise UsageError, which names the reason, unless models of this kind are pruned here."""
    reason = None
    if config.tensor_names == "gguf":
        raise UsageError(
            "a GGUF file cannot be pruned; give the Hugging Face directory of the model"
        )
    if config.quantization is not None:
        raise UsageError(
            f"{source} is quantized ({config.quantization.method}) and cannot be pruned; give the "
            "model in 16 bits, and quantize it afterwards"
        )
    if config.moe is not None:
        reason = "a mixture of experts"
    elif config.recurrent is not None:
        reason = "layers with a recurrent state"
    elif config.attention.mla is not None:
        reason = "latent attention"
    elif config.canvas is not None:
        reason = "text diffusion"
    elif config.layers.shapes:
        reason = "layers of different shapes"
    elif config.tensor_names is not None:
        reason = f"tensor names of {config.tensor_names} models"
    if reason is not None:
        raise UsageError(
            f"{config.family} has {reason}, which is not pruned; choose a dense model whose layers "
            "all attend"
        )


def check_sizes(sizes: Sizes, config: ModelConfig) -> None:
    """Raise UsageError unless the model can have these sizes."""
    given = {
        "--hidden-size": (sizes.hidden_size, config.hidden_size),
        "--ffn-size": (sizes.intermediate_size, config.intermediate_size),
        "--layers": (sizes.num_layers, config.num_layers),
        "--heads": (sizes.num_heads, config.num_heads),
    }
    if all(size is None for size, _ in given.values()):
        raise UsageError(f"nothing is to be pruned: give {' or '.join(given)}")
    for flag, (size, whole) in given.items():
        if size is not None and not 1 <= size <= whole:
            raise UsageError(f"{flag} {size}: the model has {whole}; give 1 to {whole}")
    group_size = config.group_size
    if sizes.num_heads is not None and sizes.num_heads % group_size:
        raise UsageError(
            f"--heads {sizes.num_heads}: {group_size} query heads share a key-value head and leave "
            f"together; give a multiple of {group_size}"
        )
    if sizes.num_heads is not None and config.attention.qk_norm_spans_heads:
        raise UsageError(
            f"--heads: a norm of {config.family} spans all heads, so they cannot leave one by one; "
            "leave it out"
        )
    if sizes.hidden_size is not None and config.embedding.scale == config.hidden_size**0.5:
        raise UsageError(
            f"--hidden-size: {config.family} multiplies embeddings by the root of the hidden size, "
            "so that a smaller one changes all of them; leave it out"
        )
    _check_division(sizes, config)


def _check_division(sizes: Sizes, config: ModelConfig) -> None:
    hidden_size = sizes.hidden_size or config.hidden_size
    num_heads = sizes.num_heads or config.num_heads
    if config.family in _HEADS_DIVIDE_HIDDEN_SIZE and hidden_size % num_heads:
        raise UsageError(
            f"{num_heads} heads do not divide a hidden size of {hidden_size}, and transformers "
            f"loads no such model of {config.family}; choose another --heads or --hidden-size"
        )


# ---- config.json ---------------------------------------------------------------------------------


def _trimmed_description(source: Path, config: ModelConfig, kept: KeptUnits) -> dict[str, Any]:
    """The config.json of the trimmed model. Raises UsageError if it would be read as another
    model: the kind of a layer may follow from its number."""
    described = read_json_object(source / "config.json")
    groups = len(kept.groups[0])
    described |= {
        "hidden_size": len(kept.hidden),
        "intermediate_size": len(kept.neurons[0]),
        "num_hidden_layers": len(kept.layers),
        "num_attention_heads": groups * config.group_size,
        "num_key_value_heads": groups,
        "head_dim": config.head_dim,
    }
    for key in _LISTS_OF_LAYERS:
        if described.get(key):
            described[key] = [described[key][layer] for layer in kept.layers]
    windows = tuple(config.sliding_window(layer) for layer in kept.layers)
    ropes = tuple(config.rope_of(layer) for layer in kept.layers)
    found = ModelConfig.from_hf(described, source=str(source / "config.json"))
    for place in range(len(kept.layers)):
        if (found.sliding_window(place), found.rope_of(place)) != (windows[place], ropes[place]):
            raise UsageError(
                f"the windows and positions of layers of {config.family} follow from their numbers "
                "here, and would change; leave out --layers"
            )
    return described


# ---- tensors -------------------------------------------------------------------------------------


def _trimmed(
    parts: Sequence[TensorPart], checkpoint: Checkpoint, config: ModelConfig, kept: KeptUnits
) -> Iterator[tuple[str, Tensor]]:
    """The names of parts, and what stays of them."""
    for part in parts:
        tensor = checkpoint.view(part)
        rows, columns = _kept_rows_and_columns(part, config, kept)
        if rows is not None:
            # a matrix of the decoder may be stored in several parts, one below the other
            own = rows - part.first_row
            tensor = tensor[own[(own >= 0) & (own < part.num_rows)]]
        if columns is not None:
            tensor = tensor[:, columns]
        yield part.name, tensor


def _layer_of(part: TensorPart) -> int | None:
    """The layer that a part belongs to, if it belongs to one."""
    if not part.parameter.startswith("layers."):
        return None
    return int(part.parameter.split(".")[1])


def _kept_rows_and_columns(
    part: TensorPart, config: ModelConfig, kept: KeptUnits
) -> tuple[Tensor | None, Tensor | None]:
    """The rows and the columns of a part's parameter that stay; None for all, and for the columns
    of vectors."""
    layer = _layer_of(part)
    if layer is None:
        if part.parameter == "final_norm.weight":
            return kept.hidden, None
        return None, kept.hidden
    module, _, kind = part.parameter.removeprefix(f"layers.{layer}.").rpartition(".")
    rows, columns = _kept_of_module(module, layer, config, kept)
    if kind == "bias":
        columns = None
    return rows, columns


def _kept_of_module(
    module: str, layer: int, config: ModelConfig, kept: KeptUnits
) -> tuple[Tensor | None, Tensor | None]:
    """The rows and the columns that stay of the weight of a layer's module."""
    groups, neurons = kept.groups[layer], kept.neurons[layer]
    keys = _spread(groups, config.head_dim)
    queries = _spread(groups, config.head_dim * config.group_size)
    if module == "qkv":
        first_key = config.num_heads * config.head_dim
        first_value = first_key + config.num_kv_heads * config.head_dim
        return torch.cat((queries, keys + first_key, keys + first_value)), kept.hidden
    if module == "output":
        return kept.hidden, queries
    if module == "feed_forward.gate_up" and config.feed_forward.is_gated:
        return torch.cat((neurons, neurons + config.intermediate_size)), kept.hidden
    if module == "feed_forward.gate_up":
        return neurons, kept.hidden
    if module == "feed_forward.down":
        return kept.hidden, neurons
    if module in ("query_norm", "key_norm"):  # of the channels of a head, or all heads stay
        return None, None
    return kept.hidden, None


def _spread(blocks: Tensor, size: int) -> Tensor:
    """The rows of blocks of this size, in order."""
    return (blocks[:, None] * size + torch.arange(size)).flatten()


# ---- the output directory ------------------------------------------------------------------------


@contextmanager
def new_directory(output: Path) -> Iterator[None]:
    """Make a directory, and remove it with all that is in it if the block fails. Raises UsageError
    if it is not empty, RuntimeFailure if it cannot be made."""
    is_new = not output.exists()
    with unwritable_as_failure(output):
        output.mkdir(parents=True, exist_ok=True)
        if any(output.iterdir()):
            raise UsageError(f"{output} exists and is not empty; choose another --output")
    try:
        yield
    except BaseException:
        with deferred_interrupts(), unwritable_as_failure(output):
            for path in output.iterdir():
                path.unlink()
            if is_new:
                output.rmdir()
        raise


def _perplexity_of(decoder: Decoder, texts: Sequence[Tensor]) -> float:
    return rounding.perplexity(decoder, rounding.run_texts(decoder, texts), texts)
