"""Compiles the layers of a decoder ahead of time, into a library without Python. A program of its own.

One library serves all layers of a kind: their weights are arguments, as are the tensors of a step, with any number of
tokens, rows and blocks. A chat can begin and end while it is being compiled.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import torch
from torch import Tensor, nn

from nanoserve.config import ModelConfig, RopeConfig
from nanoserve.models.attention import AttentionFunction, PagedAttention
from nanoserve.models.decoder import DecoderLayer
from triton_ops.cpu import CannotBuild, Shelf

_EXAMPLE_ROWS, _EXAMPLE_TOKENS, _EXAMPLE_BLOCKS = 3, 6, 5


@dataclass(frozen=True, slots=True)
class LayerJob(Shelf):
    """What to compile and where to keep it.

    Attributes:
        config: of a model with this layer alone, in JSON; see `layer_config`.
        dtype: of weights, cache and hidden states, as torch names it.
        block_size: tokens per KV block.
        threads: that the library uses.
    """

    config: str
    dtype: str
    block_size: int
    threads: int


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


class FunctionalLayer(nn.Module):
    """A layer as a function of the step's tensors and of its weights."""

    def __init__(self, layer: DecoderLayer) -> None:
        super().__init__()
        self._names = [name for name, _ in layer.named_parameters()]
        self._layer = (layer,)  # not as a submodule: its own weights are no part of the function

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lengths: Tensor,
        slot_mapping: Tensor,
        weights: list[Tensor],
    ) -> Tensor:
        (layer,) = self._layer
        attention = PagedAttention(
            config=layer.config,
            key_caches=[key_cache],
            value_caches=[value_cache],
            block_tables=block_tables,
            query_starts=query_starts,
            context_lengths=context_lengths,
            slot_mapping=slot_mapping,
        )
        named = dict(zip(self._names, weights, strict=True))
        output: Tensor = torch.func.functional_call(layer, named, (hidden, cos, sin, attention))
        return output


def step_arguments(
    index: int, hidden: Tensor, cos: Tensor, sin: Tensor, attention: AttentionFunction
) -> tuple[Tensor, ...]:
    """What `FunctionalLayer` takes before the weights, for the layer of that index."""
    assert isinstance(attention, PagedAttention), "layers are compiled with a paged cache"
    return (
        hidden,
        cos,
        sin,
        attention.key_caches[index],
        attention.value_caches[index],
        attention.block_tables,
        attention.query_starts,
        attention.context_lengths,
        attention.slot_mapping,
    )


def compile_layer(job: LayerJob, temporary: Path) -> Path:
    """Compile the library; `temporary` as in `Shelf.fill`. Raises CannotBuild."""
    torch.set_num_threads(job.threads)
    config, dtype = msgspec.json.decode(job.config, type=ModelConfig), getattr(torch, job.dtype)
    with torch.device("meta"):
        layer = DecoderLayer(config, 0).to(dtype)
    layer = layer.to_empty(device="cpu").requires_grad_(False).eval()  # memory that is never touched costs nothing
    function = FunctionalLayer(layer)
    step = _example_step(config, dtype, job.block_size)
    weights: list[Tensor] = list(layer.parameters())
    arguments = (*step, weights)
    counts = torch.export.Dim.DYNAMIC
    dynamic = ({0: counts},) * 5 + ({0: counts, 1: counts},) + ({0: counts},) * 3 + ([None] * len(weights),)
    try:
        with torch.no_grad(), TemporaryDirectory(prefix=f"{temporary.name}.", dir=job.directory) as folder:
            program = torch.export.export(function, arguments, dynamic_shapes=dynamic, strict=False)
            options = {"aot_inductor.output_path": f"{folder}/layer.so"}
            made = Path(str(torch._inductor.aot_compile(program.module(), arguments, options=options)))
            (operator_calls,) = made.parent.glob("*.wrapper.json")
            # torch looks for the calls of our operators in a file that differs from the library in its suffix.
            operator_calls.rename(temporary.with_name(temporary.name + ".json"))
            return made.rename(temporary.with_name(temporary.name + ".so"))
    except Exception as error:  # whatever torch's compiler stumbles over, the layers run without it
        lines = str(error).strip().splitlines() or [""]
        raise CannotBuild(f"{type(error).__name__}: {lines[0]}") from error


def _example_step(config: ModelConfig, dtype: torch.dtype, block_size: int) -> tuple[Tensor, ...]:
    """Tensors of the right kinds whose sizes are examples: neither 0 nor 1, which a compiler takes for a promise."""
    tokens, rows = _EXAMPLE_TOKENS, _EXAMPLE_ROWS
    angles = torch.zeros(tokens, 1, config.rope.rotary_dim // 2, dtype=dtype)
    cache = torch.zeros(_EXAMPLE_BLOCKS, config.num_kv_heads, block_size, config.head_dim, dtype=dtype)
    return (
        torch.zeros(tokens, config.hidden_size, dtype=dtype),
        angles,
        angles.clone(),
        cache,
        cache.clone(),
        torch.zeros(rows, 2, dtype=torch.int32),
        torch.zeros(rows + 1, dtype=torch.int32),
        torch.ones(rows, dtype=torch.int32),
        torch.zeros(tokens, dtype=torch.int64),
    )


def main(job: str) -> bool:
    """Compile what a LayerJob in JSON says; whether that was possible."""
    os.nice(19)  # whoever is chatting meanwhile goes first
    decoded = msgspec.json.decode(job, type=LayerJob)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{decoded.directory}/inductor")  # headers, kernels in common
    return decoded.fill(lambda temporary: compile_layer(decoded, temporary))
