"""The forward pass of a step: from its inputs to hidden states, over the paged cache."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoserve.config import ModelConfig
from nanoserve.models.attention import AttentionFunction, PagedAttention
from nanoserve.models.decoder import Decoder, DecoderLayer, LayerFunction
from nanoserve.runtime.moves.layer_marks import LayerComputed
from nanoserve.runtime.step.step_inputs import StepInputs

ForwardFunction = Callable[[StepInputs], Tensor]
"""Hidden states of all tokens of a step, one row after another: [T, hidden_size]. They are good until the next call."""


@dataclass(frozen=True, slots=True)
class Caches:
    """Keys and values, one tensor per layer: [num_blocks, num_kv_heads, block_size, head_dim]."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]


def make_caches(
    config: ModelConfig,
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    storage: Tensor | None = None,
) -> Caches:
    """A KV cache. It holds anything at first: memory that is never touched costs no time.

    Args:
        storage: uint8, of that device, that the caches are laid out in, one behind the other; None takes new memory.
            What is written through one cache over a storage overwrites the others over it.
    """
    shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
    with torch.inference_mode():  # as steps run: compiled code is made for tensors of one mode
        if storage is None:
            keys, values = (
                [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers)] for _ in "kv"
            )
            return Caches(keys, values)
        size = math.prod(shape) * dtype.itemsize
        places = [storage[number * size : (number + 1) * size] for number in range(2 * config.num_layers)]
        tensors = [place.view(dtype).view(shape) for place in places]
    return Caches(tensors[::2], tensors[1::2])


class ForwardPass:
    """A ForwardFunction: the decoder over its caches, each layer by `run_layer`."""

    def __init__(self, decoder: Decoder, caches: Caches, run_layer: LayerFunction = DecoderLayer.__call__) -> None:
        self._decoder = decoder
        self._caches = caches
        self._run_layer = run_layer

    def __call__(self, inputs: StepInputs) -> Tensor:
        attention = attention_over(self._caches, self._decoder.config, inputs)
        run_layer = self._run_layer if inputs.computed is None else _telling(self._run_layer, inputs.computed)
        hidden: Tensor = self._decoder(inputs.first, inputs.positions, attention, run_layer)
        return hidden


def _telling(run_layer: LayerFunction, computed: LayerComputed) -> LayerFunction:
    """A LayerFunction that tells of each layer that it has run."""

    def run(layer: DecoderLayer, hidden: Tensor, cos: Tensor, sin: Tensor, attention: AttentionFunction) -> Tensor:
        output = run_layer(layer, hidden, cos, sin, attention)
        computed(layer.index)
        return output

    return run


def attention_over(caches: Caches, config: ModelConfig, inputs: StepInputs) -> PagedAttention:
    """The attention of a step's rows over the caches."""
    return PagedAttention(
        config=config,
        key_caches=caches.keys,
        value_caches=caches.values,
        block_tables=inputs.block_tables,
        query_starts=inputs.query_starts,
        context_lengths=inputs.context_lengths,
        slot_mapping=inputs.slot_mapping,
    )
