"""A decoder layer as a function of tensors, and a program that compiles that function with
ahead-of-time Inductor.

Layers are compiled whole or as their two pieces. Layers of one kind share one library: their
weights are arguments, as are the tensors of a step, with any number of tokens, rows and blocks. The
program runs in a process of its own, so a chat can begin and end while it compiles. The result is a
library that needs no Python.
"""

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
import torch
from torch import Tensor, nn

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import EmbeddingConfig, LayerDifferences, RopeConfig
from nanoserve.errors import first_line
from nanoserve.models.attention import AttentionBatch, AttentionFunction, PagedAttention
from nanoserve.models.decoder import SINGLE_RANK, DecoderLayer, TensorParallelGroup, layer_type
from nanoserve.models.dtypes import default_dtype
from nanoserve.models.packed import PackedShape, pack_layers
from triton_ops.cpu import CannotBuild, Shelf

if TYPE_CHECKING:  # for models with such layers
    from nanoserve.models.recurrent import RecurrentLayer

LayerPart = Literal["layer", "pre_attention", "post_attention", "between_sums"]
"""The part of a layer that is compiled: all of it with its paged attention, the piece before or
after attention, or, within the latter, the computation between its two all-reduces."""
_OF_MODELS = {
    "tie_word_embeddings",
    "logits",
    "groups",
    "dtype",
    "quantization",
    "tensor_names",
    "bos_token_id",
    "eos_token_ids",
    "sampling_defaults",
}
"""Fields of ModelConfig that a layer alone does not depend on."""
_EXAMPLE_ROWS, _EXAMPLE_TOKENS, _EXAMPLE_BLOCKS = 3, 6, 5


@dataclass(frozen=True, slots=True)
class CompiledKind:
    """Everything that compiled code depends on. Layers of the same kind share their code."""

    part: LayerPart
    config: ModelConfig
    """A model with this layer alone. Fields that the part does not depend on have fixed values."""
    packed: tuple[PackedShape, ...] = ()
    """Its packed matrices."""


def layer_kind(
    part: LayerPart, config: ModelConfig, index: int, packed: tuple[PackedShape, ...] = ()
) -> CompiledKind:
    """The kind of layer `index` of a model, with these packed matrices. The pieces do not depend on
    the layer's sliding window."""
    moe = config.moe
    if moe is not None:
        moe = replace(moe, sparse_layers=frozenset({0})) if config.is_sparse(index) else None
    recurrent = None
    if config.recurrent is not None and config.is_recurrent(index):
        recurrent = replace(config.recurrent, recurrent_layers=frozenset({0}))
    own = config.of_layer(index)
    layers = LayerDifferences(feed_forwards=(config.has_feed_forward(index),))
    if part == "layer":
        layers = replace(layers, sliding_windows=(config.sliding_window(index),))
    defaults: dict[str, Any] = {
        field.name: field.default for field in fields(own) if field.name in _OF_MODELS
    }
    alone = replace(
        own,
        family="",
        vocab_size=1,
        num_layers=1,
        max_position_embeddings=1,
        rope=replace(
            RopeConfig(rotary_dim=own.rope.rotary_dim, interleaved=own.rope.interleaved),
            query_growth=1.0 if own.rope.query_growth else 0.0,
        ),
        embedding=EmbeddingConfig(per_layer_size=own.embedding.per_layer_size),
        layers=layers,
        moe=moe,
        recurrent=recurrent,
        **defaults,
    )
    return CompiledKind(part, alone, packed)


def step_arguments(
    layer: DecoderLayer, hidden: Tensor, cos: Tensor, sin: Tensor, attention: AttentionFunction
) -> tuple[Tensor, ...]:
    """The tensors that the part "layer" takes, for this layer."""
    assert isinstance(attention, PagedAttention), "layers are compiled with a paged cache"
    index = layer.index
    if layer.has_state:
        return (hidden, *attention.states_of(index).tensors)
    caches = attention.key_caches[index], attention.value_caches[index]
    return (hidden, cos, sin, *caches, *attention.batch_of(index).tensors)


class _PartModule(nn.Module):
    """One part of a layer. It takes and returns tensors only."""

    def __init__(self, layer: DecoderLayer, part: LayerPart) -> None:
        super().__init__()
        self.layer = layer
        self.part = part

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if self.part == "pre_attention":
            return self.layer.pre_attention(*tensors)
        if self.part == "post_attention":
            attended, residual = tensors
            return (self.layer.post_attention(attended, residual),)
        if self.part == "between_sums":
            return self.layer.between_sums(*tensors)
        if self.layer.has_state:
            hidden, *states = tensors
            return (cast("RecurrentLayer", self.layer).of_tensors(hidden, *states),)
        hidden, cos, sin, key_cache, value_cache, *batch = tensors
        attention = PagedAttention(
            self.layer.config, [key_cache], [value_cache], AttentionBatch(*batch)
        )
        return (self.layer(hidden, cos, sin, attention),)


class FunctionalLayer(nn.Module):
    """A part of a layer as a function of a step's tensors and of the layer's weights."""

    def __init__(self, layer: DecoderLayer, part: LayerPart) -> None:
        super().__init__()
        module = _PartModule(layer, part)
        self._names = [name for name, _ in module.named_parameters()]
        # a tuple hides it from torch: its weights are arguments, not state
        self._module = (module,)

    def forward(self, tensors: tuple[Tensor, ...], weights: list[Tensor]) -> tuple[Tensor, ...]:
        """weights: all parameters of the layer in their order, even those that the part does not
        read."""
        (module,) = self._module
        named = dict(zip(self._names, weights, strict=True))
        outputs: tuple[Tensor, ...] = torch.func.functional_call(module, named, tensors)
        return outputs


def layer_without_numbers(
    kind: CompiledKind, dtype: torch.dtype, group: TensorParallelGroup = SINGLE_RANK
) -> DecoderLayer:
    """A layer of this kind on the meta device. Its parameters have the dtypes that they have in a
    decoder of `dtype`: compiled code reads the decoder's own."""
    with default_dtype(dtype), torch.device("meta"):
        layer = layer_type(kind.config, 0)(kind.config, 0, group)
        pack_layers(layer, kind.packed)
    return layer


@dataclass(frozen=True, slots=True)
class LayerJob(Shelf):
    """A part of a layer to compile, and the shelf that keeps the result."""

    kind: CompiledKind
    dtype: str
    """torch's name of the dtype of weights, cache and hidden states."""
    block_size: int
    """Tokens per KV block; 0 for a piece, which reads no cache."""
    threads: int


def compile_layer(job: LayerJob, temporary: Path) -> Path:
    """Compile the library; `temporary` as in `Shelf.fill`. Raises CannotBuild if torch's compiler
    fails."""
    torch.set_num_threads(job.threads)
    dtype: torch.dtype = getattr(torch, job.dtype)
    layer = layer_without_numbers(job.kind, dtype)
    # memory that is never touched costs nothing
    layer = layer.to_empty(device="cpu").requires_grad_(False).eval()
    function = FunctionalLayer(layer, job.kind.part)
    weights: list[Tensor] = list(layer.parameters())
    tensors, dynamic = _examples(job.kind, dtype, job.block_size)
    arguments, dynamic_shapes = (tensors, weights), (dynamic, [None] * len(weights))
    try:
        with (
            torch.no_grad(),
            TemporaryDirectory(prefix=f"{temporary.name}.", dir=job.directory) as folder,
        ):
            program = torch.export.export(
                function, arguments, dynamic_shapes=dynamic_shapes, strict=False
            )
            options = {"aot_inductor.output_path": f"{folder}/layer.so"}
            made = Path(
                str(torch._inductor.aot_compile(program.module(), arguments, options=options))
            )
            # written only if our operators are called
            for operator_calls in made.parent.glob("*.wrapper.json"):
                # torch looks for these calls in a file that differs from the library in its suffix.
                operator_calls.rename(temporary.with_name(temporary.name + ".json"))
            return made.rename(temporary.with_name(temporary.name + ".so"))
    except Exception as error:  # torch's compiler may fail in any way; layers then run without it
        if _is_the_end(error):
            raise SystemExit(1) from error
        cause = getattr(error, "inner_exception", error)  # torch wraps what its backends raise
        raise CannotBuild(f"{type(cause).__name__}: {first_line(cause)}") from error


def _is_the_end(error: BaseException) -> bool:
    """Whether the process is being ended. Python makes a RuntimeError of a SystemExit that is
    raised while a class is made, as torch does when its modules are imported."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, SystemExit):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _examples(
    kind: CompiledKind, dtype: torch.dtype, block_size: int
) -> tuple[tuple[Tensor, ...], tuple[dict[int, Any], ...]]:
    """Example tensors for a part of a layer, and which of their sizes vary.

    No example size is 0 or 1, because export takes these for constants.
    """
    config, tokens, rows = kind.config, _EXAMPLE_TOKENS, _EXAMPLE_ROWS
    hidden = torch.zeros(tokens, config.hidden_size, dtype=dtype)
    angles = torch.zeros(
        tokens, 2 if config.rope.query_growth else 1, config.rope.rotary_dim // 2, dtype=dtype
    )
    any_length = {0: torch.export.Dim.DYNAMIC}
    if kind.part == "pre_attention":
        return (hidden, angles, angles.clone()), (any_length,) * 3
    if kind.part == "post_attention":
        return (torch.zeros(tokens, config.num_heads * config.value_dim, dtype=dtype), hidden), (
            any_length,
        ) * 2
    if kind.part == "between_sums":
        return (hidden, hidden.clone()), (any_length,) * 2
    if config.recurrent is not None:
        from nanoserve.models.mixer import make_states  # for models with such layers

        states = make_states(config, _EXAMPLE_BLOCKS, dtype)
        states.segments = torch.zeros(rows, *states.segments.shape[1:], dtype=torch.int32)
        tensors = (hidden, *states.tensors)
        return tensors, (any_length,) * len(tensors)
    cache = torch.zeros(
        _EXAMPLE_BLOCKS, config.num_kv_heads, block_size, config.head_dim, dtype=dtype
    )
    tensors = (
        hidden,
        angles,
        angles.clone(),
        cache,
        cache[..., : config.head_dim if config.attention.mla is None else 0].clone(),
        torch.zeros(rows, 2, dtype=torch.int32),
        torch.zeros(rows + 1, dtype=torch.int32),
        torch.ones(rows, dtype=torch.int32),
        torch.zeros(tokens, dtype=torch.int64),
    )
    any_table = {**any_length, 1: torch.export.Dim.DYNAMIC}
    return tensors, (any_length,) * 5 + (any_table,) + (any_length,) * 3


def main(job: str) -> bool:
    """Carry out a LayerJob in JSON. Returns whether the library could be made."""
    decoded = msgspec.json.decode(job, type=LayerJob)
    # headers, kernels in common
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{decoded.directory}/inductor")
    return decoded.fill(lambda temporary: compile_layer(decoded, temporary))
