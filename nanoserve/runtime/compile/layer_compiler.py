"""Compiles layers of a decoder, or their pieces, ahead of time, into a library without Python. A program of its own.

One library serves all layers of a kind: their weights are arguments, as are the tensors of a step, with any number of
tokens, rows and blocks. A chat can begin and end while it is being compiled.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import msgspec
import torch
from torch import Tensor, nn

from nanoserve.config import ModelConfig, RopeConfig
from nanoserve.models.attention import AttentionBatch, AttentionFunction, PagedAttention
from nanoserve.models.decoder import DecoderLayer
from triton_ops.cpu import CannotBuild, Shelf

LayerPart = Literal["layer", "pre_attention", "post_attention"]
"""What is compiled: a whole layer, or one of its pieces."""
_EXAMPLE_ROWS, _EXAMPLE_TOKENS, _EXAMPLE_BLOCKS = 3, 6, 5


@dataclass(frozen=True, slots=True)
class LayerJob(Shelf):
    """What to compile and where to keep it."""

    config: str
    """Of a model with this layer alone, in JSON; see `layer_config` and `piece_config`."""
    part: LayerPart
    """What of the layer."""
    dtype: str
    """Of weights, cache and hidden states, as torch names it."""
    block_size: int
    """Tokens per KV block; 0 for a piece, which knows of none."""
    threads: int
    """That the library uses."""


def layer_config(config: ModelConfig, index: int) -> ModelConfig:
    """A model of which this is the only layer, with nothing in it that the layer does not depend on: layers whose
    configs are equal share their library."""
    moe = config.moe
    if moe is not None:
        moe = replace(moe, sparse_layers=frozenset({0})) if config.is_sparse(index) else None
    return ModelConfig(
        family="",
        vocab_size=1,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=1,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=1,
        rms_norm_eps=config.rms_norm_eps,
        rope=RopeConfig(rotary_dim=config.rope.rotary_dim, interleaved=config.rope.interleaved),
        qkv_bias=config.qkv_bias,
        output_bias=config.output_bias,
        mlp_bias=config.mlp_bias,
        qk_norm=config.qk_norm,
        norms_per_layer=config.norms_per_layer,
        sliding_windows=(config.sliding_window(index),),
        moe=moe,
    )


def piece_config(config: ModelConfig, index: int) -> ModelConfig:
    """As `layer_config`, for the pieces of that layer: how attention looks back does not matter to them."""
    return replace(layer_config(config, index), sliding_windows=())


class WholeLayer(nn.Module):
    """A layer with attention over its paged cache; see `step_arguments`."""

    def __init__(self, layer: DecoderLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, key_cache: Tensor, value_cache: Tensor, *batch: Tensor
    ) -> tuple[Tensor]:
        attention = PagedAttention(self.layer.config, [key_cache], [value_cache], AttentionBatch(*batch))
        return (self.layer(hidden, cos, sin, attention),)


class PreAttention(nn.Module):
    """The first piece of a layer."""

    def __init__(self, layer: DecoderLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.layer.pre_attention(hidden, cos, sin)


class PostAttention(nn.Module):
    """The second piece of a layer."""

    def __init__(self, layer: DecoderLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, attention_output: Tensor, residual: Tensor) -> tuple[Tensor]:
        return (self.layer.post_attention(attention_output, residual),)


_PARTS: Mapping[LayerPart, Callable[[DecoderLayer], nn.Module]] = {
    "layer": WholeLayer,
    "pre_attention": PreAttention,
    "post_attention": PostAttention,
}


class LayerAsFunction(nn.Module):
    """A layer, or a piece of it, as a function of tensors and of the layer's weights."""

    def __init__(self, layer: DecoderLayer, part: LayerPart) -> None:
        super().__init__()
        module = _PARTS[part](layer)
        self._names = [name for name, _ in module.named_parameters()]
        self._module = (module,)  # not as a submodule: its own weights are no part of the function

    def forward(self, tensors: tuple[Tensor, ...], weights: list[Tensor]) -> tuple[Tensor, ...]:
        """weights: all of the layer's, in its own order, whichever of them the part needs."""
        (module,) = self._module
        named = dict(zip(self._names, weights, strict=True))
        outputs: tuple[Tensor, ...] = torch.func.functional_call(module, named, tensors)
        return outputs


def step_arguments(
    index: int, hidden: Tensor, cos: Tensor, sin: Tensor, attention: AttentionFunction
) -> tuple[Tensor, ...]:
    """What `WholeLayer` takes, for the layer of that index."""
    assert isinstance(attention, PagedAttention), "layers are compiled with a paged cache"
    return (
        hidden,
        cos,
        sin,
        attention.key_caches[index],
        attention.value_caches[index],
        *attention.batch.tensors,
    )


def compile_layer(job: LayerJob, temporary: Path) -> Path:
    """Compile the library; `temporary` as in `Shelf.fill`. Raises CannotBuild."""
    torch.set_num_threads(job.threads)
    config, dtype = msgspec.json.decode(job.config, type=ModelConfig), getattr(torch, job.dtype)
    with torch.device("meta"):
        layer = DecoderLayer(config, 0).to(dtype)
    layer = layer.to_empty(device="cpu").requires_grad_(False).eval()  # memory that is never touched costs nothing
    function = LayerAsFunction(layer, job.part)
    weights: list[Tensor] = list(layer.parameters())
    tensors, dynamic = _examples(config, job.part, dtype, job.block_size)
    arguments, dynamic_shapes = (tensors, weights), (dynamic, [None] * len(weights))
    try:
        with torch.no_grad(), TemporaryDirectory(prefix=f"{temporary.name}.", dir=job.directory) as folder:
            program = torch.export.export(function, arguments, dynamic_shapes=dynamic_shapes, strict=False)
            options = {"aot_inductor.output_path": f"{folder}/layer.so"}
            made = Path(str(torch._inductor.aot_compile(program.module(), arguments, options=options)))
            for operator_calls in made.parent.glob("*.wrapper.json"):  # there is none if nothing calls our operators
                # torch looks for these calls in a file that differs from the library in its suffix.
                operator_calls.rename(temporary.with_name(temporary.name + ".json"))
            return made.rename(temporary.with_name(temporary.name + ".so"))
    except Exception as error:  # whatever torch's compiler stumbles over, the layers run without it
        lines = str(error).strip().splitlines() or [""]
        raise CannotBuild(f"{type(error).__name__}: {lines[0]}") from error


def _examples(
    config: ModelConfig, part: LayerPart, dtype: torch.dtype, block_size: int
) -> tuple[tuple[Tensor, ...], tuple[dict[int, object], ...]]:
    """Tensors of the right kinds for a part of a layer, and which of their sizes are mere examples: these are neither 0
    nor 1, which a compiler takes for a promise."""
    tokens, rows = _EXAMPLE_TOKENS, _EXAMPLE_ROWS
    hidden = torch.zeros(tokens, config.hidden_size, dtype=dtype)
    angles = torch.zeros(tokens, 1, config.rope.rotary_dim // 2, dtype=dtype)
    any_length: dict[int, object] = {0: torch.export.Dim.DYNAMIC}
    if part == "pre_attention":
        return (hidden, angles, angles.clone()), (any_length,) * 3
    if part == "post_attention":
        return (torch.zeros(tokens, config.num_heads * config.head_dim, dtype=dtype), hidden), (any_length,) * 2
    cache = torch.zeros(_EXAMPLE_BLOCKS, config.num_kv_heads, block_size, config.head_dim, dtype=dtype)
    tensors = (
        hidden,
        angles,
        angles.clone(),
        cache,
        cache.clone(),
        torch.zeros(rows, 2, dtype=torch.int32),
        torch.zeros(rows + 1, dtype=torch.int32),
        torch.ones(rows, dtype=torch.int32),
        torch.zeros(tokens, dtype=torch.int64),
    )
    any_table: dict[int, object] = {**any_length, 1: torch.export.Dim.DYNAMIC}
    return tensors, (any_length,) * 5 + (any_table,) + (any_length,) * 3


def main(job: str) -> bool:
    """Compile what a LayerJob in JSON says; whether that was possible."""
    decoded = msgspec.json.decode(job, type=LayerJob)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{decoded.directory}/inductor")  # headers, kernels in common
    return decoded.fill(lambda temporary: compile_layer(decoded, temporary))
