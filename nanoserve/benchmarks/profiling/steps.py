"""Timing steps of a model: all layers together, and what an executor does beside them."""

import random
from collections.abc import Callable

import torch
from torch import Tensor

from nanoserve.benchmarks.profiling.attention import AttentionShape, Stopwatch
from nanoserve.models.attention import AttentionFunction
from nanoserve.models.decoder import Decoder, DecoderLayer, LayerFunction
from nanoserve.request import SamplingParams
from nanoserve.runtime.model_runner import ModelRunner
from nanoserve.scheduler.plan import Begin, Row, StepPlan

_GREEDY = SamplingParams(temperature=0.0)
_PROMPT = 8
_TWICE_TOKENS = 256


class LayerClock:
    """A LayerFunction that notes when the layers of a step began and ended."""

    def __init__(self, run_layer: LayerFunction, num_layers: int, watch: Stopwatch) -> None:
        self.began = self.ended = 0.0
        self._run_layer, self._last, self._watch = run_layer, num_layers - 1, watch

    def __call__(
        self, layer: DecoderLayer, hidden: Tensor, cos: Tensor, sin: Tensor, attention: AttentionFunction
    ) -> Tensor:
        if layer.index == 0:
            self.began = self._watch.now()
        output = self._run_layer(layer, hidden, cos, sin, attention)
        if layer.index == self._last:
            self.ended = self._watch.now()
        return output


class StepTimer:
    """Runs steps of a decoder on a cache of its own.

    Args:
        run_layer: as the engine runs layers.
        max_tokens, max_rows: of a step.
    """

    def __init__(
        self,
        decoder: Decoder,
        run_layer: LayerFunction,
        *,
        block_size: int,
        device: torch.device,
        max_tokens: int,
        max_rows: int,
    ) -> None:
        config = decoder.config
        self._block_size, self._num_layers = block_size, config.num_layers
        self._watch = Stopwatch(device)
        self._clock = LayerClock(run_layer, config.num_layers, self._watch)
        self._blocks = max(-(-max_tokens // block_size), max_rows * -(-(_PROMPT + 1) // block_size))
        self._runner = ModelRunner(
            decoder, num_blocks=self._blocks, block_size=block_size, device=device, run_layer=self._clock
        )
        with torch.inference_mode():
            for cache in (*self._runner.key_caches, *self._runner.value_caches):
                cache.normal_()  # numbers as a step finds them: memory nobody has written is neither cold nor full
        generator = random.Random(0)
        self._tokens = tuple(generator.randrange(config.vocab_size) for _ in range(max(max_tokens, _PROMPT + 1)))
        self._begun: set[int] = set()

    def layer_seconds(self, tokens: int) -> float:
        """A layer with the attention of ``attention_shape``, which is small: prompts of a block each are computed."""
        shape = self.attention_shape(tokens)
        size = shape.queries
        texts = [self._tokens[number * size : min((number + 1) * size, tokens)] for number in range(shape.rows)]
        begin = tuple(Begin(-1 - number, text, len(text), 0, 0, _GREEDY) for number, text in enumerate(texts))
        rows = tuple(Row(-1 - number, 0, text, sample=False, new_blocks=(number,)) for number, text in enumerate(texts))
        self._run(StepPlan(0, begin=begin, rows=rows), tokens)
        return (self._clock.ended - self._clock.began) / self._num_layers

    def attention_shape(self, tokens: int) -> AttentionShape:
        """What attention the layers of ``layer_seconds`` have, the last row perhaps a shorter one."""
        size = min(tokens, self._block_size)
        return AttentionShape(-(-tokens // size), size, size)

    def inputs_seconds(self, rows: int) -> float:
        """What precedes the layers in a step of so many decodes: its tensors and the embedding."""
        began = self._run(self._decode_plan(rows), rows)
        return self._clock.began - began

    def head_seconds(self, rows: int) -> float:
        """What follows the layers in a step of so many decodes: the last norm, logits and greedy sampling."""
        self._run(self._decode_plan(rows), rows)
        return self._watch.now() - self._clock.ended

    def _run(self, plan: StepPlan, tokens: int) -> float:
        """Run a step and say when it began. Small ones run twice: they come one after the other, and find what the one
        before left in the caches."""
        if tokens <= _TWICE_TOKENS:
            self._runner.execute(plan)
        began = self._watch.now()
        self._runner.execute(plan)
        return began

    def _decode_plan(self, rows: int) -> StepPlan:
        """Decodes at one position, the same one each time."""
        text, each = self._tokens[: _PROMPT + 1], -(-(_PROMPT + 1) // self._block_size)
        new = [number for number in range(rows) if number not in self._begun]
        if new:
            begin = tuple(Begin(number, text, _PROMPT, 0, 0, _GREEDY) for number in new)
            blocks = {number: tuple(range(number * each, (number + 1) * each)) for number in new}
            rows_of_new = tuple(
                Row(number, _PROMPT, text[-1:], sample=False, new_blocks=blocks[number]) for number in new
            )
            self._runner.execute(StepPlan(0, begin=begin, rows=rows_of_new))
            self._begun.update(new)
        return StepPlan(0, rows=tuple(Row(number, _PROMPT, text[-1:], sample=True) for number in range(rows)))


def copy_probe(num_bytes: int, device: torch.device) -> Callable[[], float]:
    """Between the device's memory and the CPU's; on a CPU, from one place to another."""
    watch = Stopwatch(device)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def copy() -> float:
        began = watch.now()
        target.copy_(source, non_blocking=True)
        return watch.now() - began

    return copy
