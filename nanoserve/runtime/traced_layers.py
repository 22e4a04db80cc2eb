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
from nanoserve.runtime.layer_compiler import FunctionalLayer, layer_config, step_arguments
from nanoserve.runtime.memory import out_of_memory


class TracedLayers:
    """A LayerFunction: each kind of layer is compiled when it first runs; all run eagerly where that cannot be.

    Attributes:
        problem: why layers run eagerly, if they do; told in a notice, once.
    """

    def __init__(self, decoder: Decoder, *, backend: str | Callable[..., object] = "inductor") -> None:
        """backend: of torch.compile."""
        self.problem: str | None = None
        kinds = [layer_config(decoder.config, layer.index) for layer in _layers(decoder)]
        functions = {kind: _compiled(kind, decoder, backend) for kind in dict.fromkeys(kinds)}
        self._of_layer = [functions[kind] for kind in kinds]
        self._kinds = kinds
        self._ran: set[ModelConfig] = set()
        self._weights = [list(layer.parameters()) for layer in _layers(decoder)]

    @property
    def loaded(self) -> bool:
        """Whether layers run compiled."""
        return self.problem is None

    def __call__(
        self, layer: DecoderLayer, hidden: Tensor, cos: Tensor, sin: Tensor, attention: AttentionFunction
    ) -> Tensor:
        if self.problem is None:
            step = step_arguments(layer.index, hidden, cos, sin, attention)
            try:
                return self._run(layer.index, step)
            except Exception as error:  # whatever torch's compiler stumbles over, the layers run without it
                if out_of_memory(error) or not self._failed_to_compile(layer, error):
                    raise
                self._give_up(error)
        output: Tensor = layer(hidden, cos, sin, attention)  # writes the cache once more, with the same numbers
        return output

    def _run(self, index: int, step: tuple[Tensor, ...]) -> Tensor:
        for tensor in step:
            _mark_any_length(tensor)
        output = self._of_layer[index](*step, self._weights[index])
        self._ran.add(self._kinds[index])
        return output

    def _failed_to_compile(self, layer: DecoderLayer, error: Exception) -> bool:
        """Whether the compiler is to blame: what has run once fails for another reason, unless torch says otherwise."""
        of_compiler = isinstance(error, torch._dynamo.exc.TorchDynamoException)
        return of_compiler or self._kinds[layer.index] not in self._ran

    def _give_up(self, error: Exception) -> None:
        cause = getattr(error, "inner_exception", error)  # torch wraps what its backends raise
        lines = str(cause).strip().splitlines() or [""]
        self.problem = f"{type(cause).__name__}: {lines[0]}"
        logging.getLogger("nanoserve").warning("nanoserve: layers run uncompiled, which is slower: %s", self.problem)


def _compiled(kind: ModelConfig, decoder: Decoder, backend: str | Callable[..., object]) -> Callable[..., Tensor]:
    """The function of `layer_compiler.FunctionalLayer` for layers of one kind.

    The sums over the ranks of a tensor-parallel group become a part of it: torch's compiler knows its own collectives.
    """
    with torch.device("meta"):  # weights are arguments: these are never used
        layer = DecoderLayer(kind, 0, decoder.group).to(decoder.dtype).requires_grad_(False).eval()
    function: Callable[..., Tensor] = torch.compile(FunctionalLayer(layer), fullgraph=True, backend=backend)
    return function


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
