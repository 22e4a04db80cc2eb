"""The importance of the parts of a model, from what they compute for some texts.

This is the importance of Minitron (arXiv 2407.14679, section 2.2): forward passes only, and all
parts are measured in the same passes, once. Activations of a sample are averaged over its tokens by
their absolute values, and the samples are put together by the L2 norm.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from nanoserve.models.decoder import Decoder, DecoderLayer, FeedForward
from nanoserve.models.loading import Progress
from nanoserve.models.rounding import run_texts


@dataclass(frozen=True, slots=True)
class Importance:
    """Numbers by which the parts of a model are ranked; the least important ones leave first."""

    layers: Tensor
    """[num_layers]."""
    hidden: Tensor
    """Importance of the channels of hidden states, [hidden_size]. A channel leaves all layers or
    none."""
    groups: Tensor
    """Importance of a key-value head with the query heads that share it, [num_layers,
    num_kv_heads]."""
    neurons: Tensor
    """Importance of the inner channels of feed-forward parts, [num_layers, intermediate_size]."""


class _Activations:
    """The importance of the columns of activations that come sample by sample."""

    def __init__(self) -> None:
        self._squares: Tensor | float = 0.0

    def add(self, sample: Tensor) -> None:
        """Add the activations [T, N] of a sample."""
        self._squares = self._squares + sample.double().abs().mean(0).square()

    @property
    def scores(self) -> Tensor:
        """[N]"""
        return cast(Tensor, self._squares).sqrt()


class _LayerMeasures:
    """All that is measured of one layer."""

    def __init__(self, layer: DecoderLayer) -> None:
        config = layer.config
        self._num_heads = config.num_heads
        self._group_size = config.group_size
        self._attention_inputs = _Activations()
        self._feed_forward_inputs = _Activations()
        self._heads = _Activations()
        self._neurons = _Activations()
        self._similarity = torch.zeros((), dtype=torch.float64)
        self._tokens = 0

    @contextmanager
    def listening(self, layer: DecoderLayer) -> Iterator[None]:
        """Measure what the layer computes within the block."""
        feed_forward = cast(FeedForward, layer.feed_forward)
        listeners: list[tuple[nn.Module, Callable[[Tensor], None]]] = [
            (layer.qkv, self._attention_inputs.add),
            (feed_forward.gate_up, self._feed_forward_inputs.add),
            (feed_forward.down, self._neurons.add),
            (layer.output, self._add_heads),
        ]
        with ExitStack() as hooks:
            for module, listener in listeners:
                hook = module.register_forward_pre_hook(partial(_show_input, listener))
                hooks.callback(hook.remove)
            hook = layer.register_forward_hook(self._compare)
            hooks.callback(hook.remove)
            yield

    @property
    def hidden(self) -> Tensor:
        """Channels of hidden states count by what the norms of the layer make of them, which is
        what its two parts read."""
        return self._attention_inputs.scores + self._feed_forward_inputs.scores

    @property
    def groups(self) -> Tensor:
        """A head counts by the L2 norm of what it attends to; a group is the sum of its heads."""
        return self._heads.scores.view(-1, self._group_size).sum(1)

    @property
    def neurons(self) -> Tensor:
        """A neuron counts by what the second matrix of the feed-forward part reads of it."""
        return self._neurons.scores

    @property
    def block_importance(self) -> Tensor:
        """One less the mean cosine of a token's hidden states before and after the layer."""
        return 1 - self._similarity / self._tokens

    def _add_heads(self, attended: Tensor) -> None:
        by_head = attended.view(len(attended), self._num_heads, -1)
        self._heads.add(by_head.norm(dim=-1))

    def _compare(self, _: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        similarity = functional.cosine_similarity(inputs[0].double(), output.double(), dim=-1)
        self._similarity += similarity.sum()
        self._tokens += len(output)


@torch.inference_mode()
def measure_importance(
    decoder: Decoder, samples: Sequence[Tensor], progress: Progress
) -> Importance:
    """Run samples, token ids [T] each, through a dense model. Layers count by Block Importance, the
    second of Minitron's two measures of depth (section 2.2): the first, the perplexity without a
    layer, takes as many runs as there are layers. `progress` is called with the samples that are
    done."""
    layers = cast(Sequence[DecoderLayer], decoder.layers)
    measures = [_LayerMeasures(layer) for layer in layers]
    with ExitStack() as listening:
        for layer, measured in zip(layers, measures, strict=True):
            listening.enter_context(measured.listening(layer))
        for done, sample in enumerate(samples):
            progress(done, len(samples))
            run_texts(decoder, [sample])
        progress(len(samples), len(samples))
    return Importance(
        layers=torch.stack([measured.block_importance for measured in measures]),
        hidden=torch.stack([measured.hidden for measured in measures]).sum(0),
        groups=torch.stack([measured.groups for measured in measures]),
        neurons=torch.stack([measured.neurons for measured in measures]),
    )


def _show_input(listener: Callable[[Tensor], None], _: nn.Module, inputs: tuple[Tensor]) -> None:
    listener(inputs[0])
