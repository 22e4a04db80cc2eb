"""The layers of a decoder on a GPU, compiled by torch.compile in this process: one compilation serves a kind of layer.

What differs between layers of a kind are their weights and caches, which are arguments, as in the libraries of the CPU
(`compiled_layers`). torch keeps the kernels on disk, so that later processes find them.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from nanoserve.config import ModelConfig
from nanoserve.models.attention import AttentionFunction
from nanoserve.models.decoder import Decoder, DecoderLayer
from nanoserve.runtime.compile.layer_compiler import (
    LayerAsFunction,
    LayerPart,
    layer_config,
    piece_config,
    step_arguments,
)
from nanoserve.runtime.launch.memory import out_of_memory


class TorchCompileLayers:
    """A LayerFunction, and LayerPieces: each kind of layer or piece is compiled when it first runs.

    All run eagerly where that cannot be.
    """

    def __init__(self, decoder: Decoder, *, backend: str | Callable[..., object] = "inductor") -> None:
        """backend: of torch.compile."""
        self.problem: str | None = None  # why layers run eagerly, if they do; told in a notice, once
        config, layers = decoder.config, _layers(decoder)
        of_pieces = [piece_config(config, layer.index) for layer in layers]
        self._kinds: dict[LayerPart, list[ModelConfig]] = {
            "layer": [layer_config(config, layer.index) for layer in layers],
            "pre_attention": of_pieces,
            "post_attention": of_pieces,
        }
        kinds = {(part, kind) for part, of_part in self._kinds.items() for kind in of_part}
        self._functions = {(part, kind): _compiled(kind, part, decoder, backend) for part, kind in kinds}
        self._ran: set[tuple[LayerPart, ModelConfig]] = set()
        self._weights = [list(layer.parameters()) for layer in layers]

    @property
    def loaded(self) -> bool:
        """Whether layers run compiled."""
        return self.problem is None

    def __call__(
        self, layer: DecoderLayer, hidden: Tensor, cos: Tensor, sin: Tensor, attention: AttentionFunction
    ) -> Tensor:
        outputs = self._outputs("layer", layer, step_arguments(layer.index, hidden, cos, sin, attention))
        if outputs is None:
            output: Tensor = layer(hidden, cos, sin, attention)  # writes the cache once more, with the same numbers
            return output
        (output,) = outputs
        return output

    def pre_attention(
        self, layer: DecoderLayer, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        outputs = self._outputs("pre_attention", layer, (hidden, cos, sin))
        if outputs is None:
            return layer.pre_attention(hidden, cos, sin)
        query, key, value = outputs
        return query, key, value

    def post_attention(self, layer: DecoderLayer, attention_output: Tensor, residual: Tensor) -> Tensor:
        outputs = self._outputs("post_attention", layer, (attention_output, residual))
        if outputs is None:
            return layer.post_attention(attention_output, residual)
        (output,) = outputs
        return output

    def _outputs(self, part: LayerPart, layer: DecoderLayer, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """What the part makes of these tensors; None where it is to run eagerly."""
        if self.problem is not None:
            return None
        try:
            return self._run(part, layer.index, tensors)
        except Exception as error:  # whatever torch's compiler stumbles over, the layers run without it
            if out_of_memory(error) or not self._failed_to_compile(part, layer, error):
                raise
            self._give_up(error)
            return None

    def _run(self, part: LayerPart, index: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for tensor in tensors:
            _mark_any_length(tensor)
        kind = self._kinds[part][index]
        outputs = self._functions[part, kind](tensors, self._weights[index])
        self._ran.add((part, kind))
        return outputs

    def _failed_to_compile(self, part: LayerPart, layer: DecoderLayer, error: Exception) -> bool:
        """Whether the compiler is to blame: what has run once fails for another reason, unless torch says otherwise."""
        of_compiler = isinstance(error, torch._dynamo.exc.TorchDynamoException)
        return of_compiler or (part, self._kinds[part][layer.index]) not in self._ran

    def _give_up(self, error: Exception) -> None:
        cause = getattr(error, "inner_exception", error)  # torch wraps what its backends raise
        lines = str(cause).strip().splitlines() or [""]
        self.problem = f"{type(cause).__name__}: {lines[0]}"
        logging.getLogger("nanoserve").warning("nanoserve: layers run uncompiled, which is slower: %s", self.problem)


def _compiled(
    kind: ModelConfig, part: LayerPart, decoder: Decoder, backend: str | Callable[..., object]
) -> Callable[..., tuple[Tensor, ...]]:
    """The function of `layer_compiler.LayerAsFunction` for layers of one kind.

    The sums over the ranks of a tensor-parallel group become a part of it: torch's compiler knows its own collectives.
    """
    with torch.device("meta"):  # weights are arguments: these are never used
        layer = DecoderLayer(kind, 0, decoder.group).to(decoder.dtype).requires_grad_(False).eval()
    function = LayerAsFunction(layer, part)
    compiled: Callable[..., tuple[Tensor, ...]] = torch.compile(function, fullgraph=True, backend=backend)
    return compiled


def _mark_any_length(tensor: Tensor) -> None:
    """Have the compiler assume nothing of the first size of a step's tensor, nor of the width of a table of blocks.

    Not even that it is not 1: for a size that is merely dynamic, torch compiles that a second time.
    """
    if not hasattr(tensor, "_dynamo_unbacked_indices"):
        torch._dynamo.decorators.mark_unbacked(tensor, 0)
        if tensor.dtype == torch.int32 and tensor.dim() == 2:
            torch._dynamo.decorators.mark_unbacked(tensor, 1)


def _layers(decoder: Decoder) -> list[DecoderLayer]:
    return [layer for layer in decoder.layers if isinstance(layer, DecoderLayer)]
