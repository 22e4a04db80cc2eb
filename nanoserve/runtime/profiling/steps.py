"""Timing steps of a model on the runner that will run them: inputs, layers, logits with sampling."""

import random
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import cast

import torch

from nanoserve.models.decoder import Decoder, DecoderLayer
from nanoserve.request import SamplingParams
from nanoserve.runtime.profiling.attention import AttentionCall, Stopwatch
from nanoserve.runtime.step.model_runner import ModelRunner
from nanoserve.scheduler.plan import Begin, Row, StepPlan

_GREEDY = SamplingParams(temperature=0.0)
_BRIEF = 0.05
"""Seconds. Shorter steps are run twice: in an engine a step finds its predecessor's data in the processor's caches."""
_MOST_DECODES = 64
_BUSY_ROWS = 8


class StepTimer:
    """Runs steps on an idle runner, in blocks whose content does not matter.

    Args:
        runner: computes the whole model. After `close` it has no sequences of the timer.
        block_size: of its cache.
    """

    def __init__(self, runner: ModelRunner, *, block_size: int) -> None:
        self._runner, self._block_size = runner, block_size
        self._watch = Stopwatch(runner.device)
        self._generator = random.Random(0)
        self._begun: set[int] = set()

    def layer_seconds(self, tokens: int) -> float:
        """Seconds of a layer, with the small attention of ``attention_shape``. Embedding and last norm, which are much
        smaller, are divided between all layers."""
        shape = self.attention_shape(tokens)
        sizes = [min(shape.queries, tokens - first) for first in range(0, tokens, shape.queries)]
        seconds = self._forward_seconds(sizes)
        if seconds < _BRIEF:
            seconds = self._forward_seconds(sizes)
        return seconds / self._runner.config.num_layers

    def attention_shape(self, tokens: int) -> AttentionCall:
        """The attention in ``layer_seconds``: few tokens are decodes of one key each, more are prompts of a block each,
        the last one perhaps shorter."""
        size = 1 if tokens <= min(_MOST_DECODES, len(self._runner.caches.keys[0])) else self._block_size
        return AttentionCall(-(-tokens // size), size, size)

    def inputs_seconds(self, rows: int) -> float:
        """Seconds that an executor takes before the layers in a step of `rows` decodes, after those of another step,
        which on a CPU displace these data from the processor's caches."""
        plan = self._decode_plan(rows)
        self._runner.compute(self._runner.prepare(plan))
        began = self._watch.now()
        self._runner.prepare(plan)
        return self._watch.now() - began

    def head_seconds(self, rows: int) -> float:
        """Seconds after the layers in a step of `rows` decodes: logits, greedy sampling and fetching tokens."""
        step = self._runner.prepare(self._decode_plan(rows))
        hidden = self._runner.compute(step)
        began = self._watch.now()
        self._runner.sample(step, hidden).answers()
        return self._watch.now() - began

    def close(self) -> None:
        """Have the runner forget the sequences."""
        self._runner.execute(StepPlan(0, end=tuple(self._begun)))

    def _forward_seconds(self, sizes: Sequence[int]) -> float:
        """Seconds of the layers over prompts of these sizes, in a whole step: on a CPU what follows the layers takes
        some of the processor's caches from the next ones."""
        texts = [tuple(self._generator.randrange(self._runner.config.vocab_size) for _ in range(n)) for n in sizes]
        rows = [Row(-1 - n, 0, text, sample=True, new_blocks=(n,)) for n, text in enumerate(texts)]
        step = self._runner.prepare(StepPlan(0, begin=self._begin(texts), rows=tuple(rows)))
        began = self._watch.now()
        hidden = self._runner.compute(step)
        seconds = self._watch.now() - began
        self._runner.sample(step, hidden).answers()
        return seconds

    def _decode_plan(self, rows: int) -> StepPlan:
        """A plan of decodes at the first position of sequences that have begun and have their block."""
        first = [Row(-1 - n, 0, (0,), sample=True, new_blocks=(n,)) for n in range(rows)]
        self._runner.prepare(StepPlan(0, begin=self._begin([(0,)] * rows), rows=tuple(first)))
        return StepPlan(0, rows=tuple(Row(-1 - n, 0, (0,), sample=True) for n in range(rows)))

    def _begin(self, texts: Sequence[tuple[int, ...]]) -> tuple[Begin, ...]:
        """Begins for the timer's own sequences, numbered below 0. A second Begin replaces the first."""
        begin = tuple(Begin(-1 - n, text, len(text), 0, 0, _GREEDY) for n, text in enumerate(texts))
        self._begun.update(one.sequence for one in begin)
        return begin


def linear_pieces(decoder: Decoder) -> Callable[[], object]:
    """The device's work beside attention in host memory: each call computes the products of the next layer for a few
    rows."""
    with torch.inference_mode():
        hidden = torch.randn(_BUSY_ROWS, decoder.config.hidden_size, device=decoder.device).to(decoder.dtype)
        cos, sin = decoder.rotary(torch.arange(_BUSY_ROWS, device=decoder.device))
        cos, sin = cos.to(decoder.dtype), sin.to(decoder.dtype)
    layers = cycle(cast(Sequence[DecoderLayer], decoder.layers))

    def compute() -> None:
        layer = next(layers)
        with torch.inference_mode():
            query, _, _ = layer.pre_attention(hidden, cos, sin)
            layer.post_attention(query.flatten(1), hidden)

    return compute


def copy_probe(num_bytes: int, device: torch.device) -> Callable[[], float]:
    """A probe that copies from the device's memory to the CPU's; on a CPU, from one place to another."""
    watch = Stopwatch(device)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def copy() -> float:
        began = watch.now()
        target.copy_(source, non_blocking=True)
        return watch.now() - began

    return copy
