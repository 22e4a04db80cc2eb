"""Timing parts of steps: attention alone, on the device and in host memory; inputs, layers, logits
with sampling."""

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import cycle
from typing import cast

import torch
from torch import Tensor

from nanoserve.config.model_config import ModelConfig
from nanoserve.executor.cpu_attention.host_attention import HostTask
from nanoserve.executor.cpu_attention.host_processor import HostProcessor
from nanoserve.executor.kv_transfer.host_pool import HostPart
from nanoserve.executor.step.model_runner import ModelRunner, PreparedStep
from nanoserve.models.attention import AttentionBatch
from nanoserve.models.decoder import Decoder, DecoderLayer
from nanoserve.request import SamplingParams
from nanoserve.scheduler.plan import Begin, Row, StepPlan
from triton_ops import paged_attention

_SAMPLE_SECONDS = 2e-3
_MOST_CALLS = 50
_GREEDY = SamplingParams(temperature=0.0)
# seconds; shorter steps run twice: in an engine a step finds its predecessor's data in the caches
_BRIEF = 0.05
_MOST_DECODES = 64
_BUSY_ROWS = 8


class Stopwatch:
    """Wall time, with the device's queue empty at both ends."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def seconds(self, action: Callable[[], object]) -> float:
        began = self.now()
        action()
        return self.now() - began


@torch.inference_mode()
def _mean_seconds(sample: Callable[[], Iterable[float]]) -> float:
    found: list[float] = []
    while len(found) < _MOST_CALLS and sum(found) < _SAMPLE_SECONDS:
        found += sample()
    return sum(found) / len(found)


class KvRegions:
    """Random keys and values of one layer, in which consecutive calls read different blocks. In a
    step each call reads another layer's cache. So there is one region for each layer of the model,
    or as many as fit ``most_bytes``. The largest of ``calls`` (rows, keys of each) always has
    room."""

    def __init__(
        self,
        config: ModelConfig,
        calls: Iterable[tuple[int, int]],
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        most_bytes: int,
    ) -> None:
        self._block_size, self._layers = block_size, config.num_layers
        largest = max(self._num_blocks(rows, keys) for rows, keys in calls)
        block = torch.randn(
            2, 1, config.num_kv_heads, block_size, config.head_dim, device=device
        ).to(dtype)
        fitting = most_bytes // block.nbytes
        num_blocks = max(largest, min(config.num_layers * largest, fitting))
        # [2, num_blocks, num_kv_heads, block_size, head_dim], keys first.
        self.blocks = block.expand(-1, num_blocks, -1, -1, -1).contiguous()
        self._order = torch.randperm(num_blocks, dtype=torch.int32)

    def tables(self, rows: int, keys: int) -> list[Tensor]:
        """Block tables for rows of `keys` keys, int32 [rows, width] each, of one region after the
        other."""
        each = self._num_blocks(rows, keys)
        regions = min(self._layers, len(self._order) // each)
        used = self._order[: regions * each]
        return [table.view(rows, -1) for table in used.chunk(regions)]

    def _num_blocks(self, rows: int, keys: int) -> int:
        blocks_of_row = -(-keys // self._block_size)
        return rows * blocks_of_row


def attention_seconds(
    config: ModelConfig, regions: KvRegions, rows: int, queries: int, keys: int
) -> float:
    """Seconds of one layer's attention on the device of the regions, with ``queries`` queries at
    the end of the ``keys`` keys of each row. Sliding windows are not applied."""
    key_cache, value_cache = regions.blocks.unbind()
    if config.attention.mla is not None:
        value_cache = key_cache[..., : config.value_dim]
    device, dtype = regions.blocks.device, regions.blocks.dtype
    tokens, scale = rows * queries, config.head_dim**-0.5
    out = torch.empty(tokens, config.num_heads * config.value_dim, dtype=dtype, device=device)
    query = torch.randn(tokens, config.num_heads, config.head_dim, device=device).to(dtype)
    starts = torch.arange(0, tokens + 1, queries, dtype=torch.int32, device=device)
    contexts = torch.full((rows,), keys, dtype=torch.int32, device=device)
    tables = cycle([table.to(device) for table in regions.tables(rows, keys)])

    def attend() -> None:
        table = next(tables)
        paged_attention(
            out,
            query,
            key_cache,
            value_cache,
            table,
            starts,
            contexts,
            scale=scale,
            sliding_window=0,
        )

    watch = Stopwatch(device)
    return _mean_seconds(lambda: [watch.seconds(attend)])


class HostAttentionTimer:
    """Attention in host memory as in the engine, by a thread with cores of its own while the device
    computes. A CPU shares the memory's bandwidth. Windows are not applied. The regions lie in host
    memory; ``keep_busy`` is a piece of the device's work, a few milliseconds at most."""

    def __init__(
        self,
        config: ModelConfig,
        regions: KvRegions,
        processor: HostProcessor,
        *,
        device: torch.device,
        keep_busy: Callable[[], object],
    ) -> None:
        self._config, self._regions, self._device, self._keep_busy = (
            config,
            regions,
            device,
            keep_busy,
        )
        part = HostPart(regions.blocks[None], writes=True)
        without_windows = replace(config, layers=replace(config.layers, sliding_windows=()))
        self._host = processor.start(without_windows, part, device)

    def seconds(self, rows: int, keys: int) -> float:
        """Seconds of one layer for `rows` sequences of `keys` keys each, from handing over to the
        result: a mean."""
        tables = cycle(self._regions.tables(rows, keys))
        query_key_value = self._random_query_key_value(rows)

        def attend() -> list[float]:
            at = self._rows(next(tables), keys)
            task = self._host.attend(0, *query_key_value, at)
            self._keep_busy()
            self._await(task)
            return [work.seconds for work in self._host.take_work()]

        return _mean_seconds(attend)

    @torch.inference_mode()
    def device_seconds(self, rows: int, keys: int) -> float:
        """Seconds of a piece of the device's work while the host attends for `rows` sequences of
        `keys` keys."""
        first_table = self._regions.tables(rows, keys)[0]
        at = self._rows(first_table, keys)
        query_key_value = self._random_query_key_value(rows)
        watch = Stopwatch(torch.device("cpu"))
        task = self._host.attend(0, *query_key_value, at)

        def work_beside() -> list[float]:
            nonlocal task
            # otherwise the host might finish first
            following = self._host.attend(0, *query_key_value, at)
            seconds = watch.seconds(self._keep_busy)
            self._await(task)
            task = following
            return [seconds]

        seconds = _mean_seconds(work_beside)
        self._await(task)
        self._host.take_work()
        return seconds

    def close(self) -> None:
        self._host.close()

    def _await(self, task: HostTask) -> None:
        while not task.ready:
            self._keep_busy()

    def _random_query_key_value(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        config, dtype = self._config, self._regions.blocks.dtype
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        numbers = torch.randn(rows, sum(heads), config.head_dim, device=self._device).to(dtype)
        query, key, value = torch.split(numbers, heads, dim=1)
        return query, key, value

    def _rows(self, tables: Tensor, keys: int) -> AttentionBatch:
        starts = torch.arange(len(tables) + 1, dtype=torch.int32)
        contexts = torch.full((len(tables),), keys, dtype=torch.int32)
        size = self._regions.blocks.shape[3]
        place, offset = divmod(keys - 1, size)
        slots = tables[:, place].long() * size + offset
        return AttentionBatch(tables, starts, contexts, slots)


class StepTimer:
    """Runs steps on an idle runner of the whole model, in blocks whose content does not matter."""

    def __init__(self, runner: ModelRunner, *, block_size: int) -> None:
        self.runner, self.block_size = runner, block_size
        self._watch = Stopwatch(runner.device)
        self._generator = random.Random(0)
        self._begun: set[int] = set()

    def layer_seconds(self, tokens: int) -> float:
        """Seconds of a layer with the small attention of `attention_shape`, and a share of
        embedding and last norm."""
        seconds = self.pass_seconds(tokens)
        if seconds * self.runner.config.num_layers < _BRIEF:
            seconds = self.pass_seconds(tokens)
        return seconds

    def pass_seconds(self, tokens: int) -> float:
        """Time a layer as `layer_seconds` does, in exactly one pass: ranks that sum together must
        run equally many passes."""
        _, longest, _ = self.attention_shape(tokens)
        sizes = [min(longest, tokens - first) for first in range(0, tokens, longest)]
        return self._forward_seconds(sizes) / self.runner.config.num_layers

    def attention_shape(self, tokens: int) -> tuple[int, int, int]:
        """(rows, queries, keys) in `layer_seconds`: few tokens are decodes of one key, more are
        prompts of a block."""
        size, num_blocks = self.block_size, len(self.runner.caches.keys[0])
        if tokens <= min(_MOST_DECODES, num_blocks):
            size = 1
        rows = -(-tokens // size)
        return rows, size, size

    def inputs_seconds(self, rows: int) -> float:
        """Seconds before the layers of `rows` decodes, after a step that displaces their data from
        a CPU's caches."""
        plan = self._decode_plan(rows)
        self._compute(plan)
        return self._watch.seconds(lambda: self.runner.prepare(plan))

    def head_seconds(self, rows: int) -> float:
        """Seconds after the layers of `rows` decodes: logits, greedy sampling and fetching
        tokens."""
        plan = self._decode_plan(rows)
        step, hidden = self._compute(plan)
        return self._watch.seconds(lambda: self.runner.sample(step, hidden).answers())

    def close(self) -> None:
        self.runner.execute(StepPlan(0, end=tuple(self._begun)))

    def _compute(self, plan: StepPlan) -> tuple[PreparedStep, Tensor | None]:
        """Run a plan up to its last layer."""
        step = self.runner.prepare(plan)
        self.runner.begin(step)
        return step, self.runner.compute(step)

    def _forward_seconds(self, sizes: Sequence[int]) -> float:
        """Seconds of the layers over prompts of these sizes, in a whole step, whose end displaces a
        CPU's caches."""
        texts, rows = [], []
        for number, size in enumerate(sizes):
            text = self._random_tokens(size)
            # One sampled row displaces as much as many, which may take longer than the layers.
            is_sampled = number == 0
            row = Row(-1 - number, 0, text, sample=is_sampled, new_blocks=self._column(number))
            texts.append(text)
            rows.append(row)
        plan = StepPlan(0, begin=self._begin(texts), rows=tuple(rows))
        step = self.runner.prepare(plan)
        self.runner.begin(step)
        began = self._watch.now()
        hidden = self.runner.compute(step)
        seconds = self._watch.now() - began
        self.runner.sample(step, hidden).answers()
        return seconds

    def _decode_plan(self, rows: int) -> StepPlan:
        """A plan of decodes at the first position of sequences that have begun and have their
        block."""
        first = tuple(
            Row(-1 - n, 0, (0,), sample=True, new_blocks=self._column(n)) for n in range(rows)
        )
        later = tuple(Row(-1 - n, 0, (0,), sample=True) for n in range(rows))
        begin = self._begin([(0,)] * rows)
        self.runner.prepare(StepPlan(0, begin=begin, rows=first))
        return StepPlan(0, rows=later)

    def _random_tokens(self, number: int) -> tuple[int, ...]:
        vocab_size = self.runner.config.vocab_size
        return tuple(self._generator.randrange(vocab_size) for _ in range(number))

    def _column(self, block: int) -> tuple[int, ...]:
        """One block for all cache groups: what is in it does not matter."""
        return (block,) * len(self.runner.config.cache_groups.windows)

    def _begin(self, texts: Sequence[tuple[int, ...]]) -> tuple[Begin, ...]:
        """Begins for the timer's own sequences, numbered below 0. A second Begin replaces the
        first."""
        begin = tuple(Begin(-1 - n, text, len(text), 0, 0, _GREEDY) for n, text in enumerate(texts))
        self._begun.update(one.sequence for one in begin)
        return begin


def linear_pieces(decoder: Decoder) -> Callable[[], object]:
    """Work beside attention in host memory: each call computes the next layer's products for few
    rows."""
    with torch.inference_mode():
        hidden = torch.randn(_BUSY_ROWS, decoder.config.hidden_size, device=decoder.device).to(
            decoder.dtype
        )
        angles = decoder.angles(torch.arange(_BUSY_ROWS, device=decoder.device), decoder.dtype)
    layers = cycle(cast(Sequence[DecoderLayer], decoder.layers))

    def compute() -> None:
        layer = next(layers)
        with torch.inference_mode():
            query, _, _ = layer.pre_attention(hidden, *angles[layer.rope])
            layer.post_attention(query.flatten(1), hidden)

    return compute


def copy_probe(num_bytes: int, device: torch.device) -> Callable[[], float]:
    """Copies from the device's memory to the CPU's; on a CPU, from one place to another."""
    watch = Stopwatch(device)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return lambda: watch.seconds(lambda: target.copy_(source, non_blocking=True))
