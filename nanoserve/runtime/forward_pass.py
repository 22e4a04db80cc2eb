"""The forward pass of a step: from its inputs to hidden states, over the paged cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from nanoserve.models.attention import PagedAttention
from nanoserve.models.decoder import Decoder, DecoderLayer, LayerFunction
from nanoserve.runtime.step_inputs import StepInputs

ForwardFunction = Callable[[StepInputs], Tensor]
"""Hidden states of all tokens of a step, one row after another: [T, hidden_size]. They are good until the next call."""


@dataclass(frozen=True, slots=True)
class Caches:
    """Keys and values, one tensor per layer: [num_blocks, num_kv_heads, block_size, head_dim]."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]


class ForwardPass:
    """A ForwardFunction: the decoder over its caches, each layer by `run_layer`."""

    def __init__(self, decoder: Decoder, caches: Caches, run_layer: LayerFunction = DecoderLayer.__call__) -> None:
        self._decoder = decoder
        self._caches = caches
        self._run_layer = run_layer

    def __call__(self, inputs: StepInputs) -> Tensor:
        attention = PagedAttention(
            config=self._decoder.config,
            key_caches=self._caches.keys,
            value_caches=self._caches.values,
            block_tables=inputs.block_tables,
            query_starts=inputs.query_starts,
            context_lengths=inputs.context_lengths,
            slot_mapping=inputs.slot_mapping,
        )
        entering = inputs.token_ids if inputs.entering is None else inputs.entering
        hidden: Tensor = self._decoder(entering, inputs.positions, attention, self._run_layer)
        return hidden
