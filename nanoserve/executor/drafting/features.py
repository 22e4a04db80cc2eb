"""FeatureCache and FeaturePass: what steps of the model keep for a head that drafts tokens."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nanoserve.executor.step.forward_pass import Caches, ForwardPass, StepInputs
from nanoserve.models.decoder import Decoder, DecoderLayer, LayerFunction


class FeatureCache:
    """The decoder's features that a head proposes tokens from: a vector of each position, in the
    slot of its keys.

    So features are found with a cached prefix, and what a wrong draft token left is overwritten.
    Blocks that come back from host memory come without theirs: what is there instead makes draft
    tokens worse, and no answer.
    """

    def __init__(
        self,
        size: int,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        layers: Sequence[int],
        fuse: Callable[[Tensor], Tensor],
    ) -> None:
        """Vectors of this size: what `fuse` makes of the outputs of these layers side by side, [T,
        features] -> [T, size]; without layers, of the final hidden states."""
        self.layers, self.fuse = layers, fuse
        with torch.inference_mode():
            # The last block is for padding. What was never written must be numbers.
            self._blocks = torch.zeros(num_blocks + 1, block_size, size, dtype=dtype, device=device)
        self._vectors = self._blocks.view(-1, size)

    def write(self, slots: Tensor, vectors: Tensor) -> None:
        """Keep vectors [T, size] in slots int64 [T], some of which may be SKIPPED_SLOT."""
        self._vectors.index_copy_(0, slots.where(slots >= 0, len(self._vectors) - 1), vectors)

    def read(self, slots: Tensor) -> Tensor:
        """A copy of what is in slots int64 [T]: [T, size]."""
        return self._vectors[slots]

    def copy(self, blocks: Tensor) -> None:
        """Copy whole blocks, int64 [copies, 2], sources and targets."""
        self._blocks.index_copy_(0, blocks[:, 1], self._blocks[blocks[:, 0]])


class FeaturePass:
    """A ForwardFunction: a ForwardPass that writes what the decoder computes of each token into a
    feature cache."""

    def __init__(
        self, decoder: Decoder, caches: Caches, run_layer: LayerFunction, features: FeatureCache
    ) -> None:
        self._features = features
        self._run_layer = run_layer
        self._outputs = dict[int, Tensor]()  # of the layers that the features are made of
        self._forward = ForwardPass(
            decoder, caches, self._run_and_keep if features.layers else run_layer
        )

    def __call__(self, inputs: StepInputs) -> Tensor:
        hidden = self._forward(inputs)
        source = hidden
        if self._features.layers:
            source = torch.cat([self._outputs[layer] for layer in self._features.layers], dim=-1)
            self._outputs.clear()
        self._features.write(inputs.batch.slot_mapping, self._features.fuse(source))
        return hidden

    def _run_and_keep(self, layer: DecoderLayer, *arguments: Any) -> Tensor:
        output = self._run_layer(layer, *arguments)
        if layer.index in self._features.layers:
            self._outputs[layer.index] = output
        return output
