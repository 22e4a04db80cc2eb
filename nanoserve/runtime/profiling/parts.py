"""Probes for all parts of a step over their sizes, and curves of their samples (as APEX's profiler)."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from nanoserve.errors import UsageError
from nanoserve.runtime.host.host_processor import HostProcessor
from nanoserve.runtime.profiling.rounds import (
    Point,
    Samples,
    curve_of,
    difference_of,
    grid_of,
    quartiles,
    seconds_of,
)
from nanoserve.runtime.profiling.timers import (
    AttentionSize,
    AttentionTimer,
    HostAttentionTimer,
    KvRegions,
    StepTimer,
    copy_probe,
    linear_pieces,
)
from nanoserve.runtime.step.model_runner import ModelRunner

_PAUSE = 1e-4
Sampling = dict[Point, Callable[[], float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSizes:
    """The sizes at which the parts of a step are timed; ascending, two or more of each."""

    tokens: tuple[int, ...]
    """Tokens of a step, for its layers."""
    prompts: tuple[int, ...]
    """Tokens of one prompt, for its attention."""
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    """Sequences, and keys of each, for decode attention on the device and in host memory."""
    rows: tuple[int, ...]
    """Rows of a step, for its inputs, logits and scheduling."""
    copies: tuple[int, ...]
    """Bytes of copies between device and host memory."""
    kv_bytes: int
    """Bytes of keys and values that attention is timed over, on the device and in host memory each."""

    def within(self, *, step_tokens: int, step_rows: int, context: int, kv_token_bytes: int) -> "ProfileSizes":
        """The sizes that an engine with these limits reaches; UsageError if one does not allow two sizes.

        Args:
            step_tokens, step_rows: the most of a step.
            context: the longest sequence.
            kv_token_bytes: size of one token's keys and values in one layer. Contexts with which the largest batch
                takes more than ``kv_bytes`` are left out.
        """
        fitting = self.kv_bytes // (self.batches[-1] * kv_token_bytes)
        return replace(
            self,
            tokens=_up_to(self.tokens, step_tokens),
            prompts=_up_to(self.prompts, min(context, step_tokens)),
            contexts=_up_to(self.contexts, max(2, min(context, fitting))),
            rows=_up_to(self.rows, min(step_rows, step_tokens)),
        )


def _up_to(sizes: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """The sizes up to the limit; half of it and all of it if fewer than two remain."""
    if limit < 2:
        raise UsageError("an engine whose steps hold one token, or one row, cannot be profiled")
    found = tuple(size for size in sizes if size <= limit)
    return found if len(found) > 1 else (limit // 2, limit)


@contextmanager
def open_probes(
    runner: ModelRunner, processor: HostProcessor, sizes: ProfileSizes, *, block_size: int
) -> Iterator[dict[str, Sampling]]:
    """Probes for an idle runner, and for the part of the CPU that attends in host memory. Of the runner only the
    content of the KV cache changes. The sizes are within this cache: see ``cache_limits``."""
    config, device = runner.config, runner.device
    steps = StepTimer(runner, block_size=block_size)
    shapes = [AttentionSize(sizes.batches[-1], 1, sizes.contexts[-1]), AttentionSize(1, 1, sizes.prompts[-1])]
    shapes += [steps.attention_shape(tokens) for tokens in sizes.tokens]
    regions = partial(
        KvRegions,
        config,
        largest=max(shape.blocks(block_size) for shape in shapes),
        block_size=block_size,
        dtype=runner.decoder.dtype,
        most_bytes=sizes.kv_bytes,
    )
    attention = AttentionTimer(config, regions(device=device))
    shares_memory = processor.device is not None
    keep_busy = linear_pieces(runner.decoder) if shares_memory else lambda: time.sleep(_PAUSE)
    host = HostAttentionTimer(
        config, regions(device=torch.device("cpu")), processor, device=device, keep_busy=keep_busy
    )
    largest = sizes.batches[-1], sizes.contexts[-1]
    try:
        probes: dict[str, Sampling] = {
            "layer": _over(sizes.tokens, steps.layer_seconds),
            "its attention": _over(sizes.tokens, lambda size: attention.seconds(steps.attention_shape(size))),
            "decode attention": _cells(
                sizes, lambda batch, context: attention.seconds(AttentionSize(batch, 1, context))
            ),
            "prefill attention": _over(sizes.prompts, lambda size: attention.seconds(AttentionSize(1, size, size))),
            "host attention": _cells(sizes, host.seconds),
            "host exchange": _over(sizes.batches, lambda batch: host.seconds(batch, 1)),
            "inputs": _over(sizes.rows, steps.inputs_seconds),
            "head": _over(sizes.rows, steps.head_seconds),
            "copy": {(size,): copy_probe(size, device) for size in sizes.copies},
        }
        if shares_memory:
            probes["alone"] = {largest: partial(seconds_of, keep_busy)}
            probes["beside host"] = {largest: partial(host.device_seconds, *largest)}
        yield probes
    finally:
        host.close()
        steps.close()


def cache_limits(runner: ModelRunner, block_size: int) -> tuple[int, int]:
    """Tokens, and rows of one block each, that fit into the runner's cache."""
    blocks = len(runner.caches.keys[0])
    return blocks * block_size, blocks


def fields_of(found: Samples, processor: HostProcessor) -> dict[str, Any]:
    """Fields of a Profile by name. Call it from the thread that computes."""
    return {
        "beside_host": beside_host(found, processor.threads / torch.get_num_threads() + 1),
        "linear": difference_of(found["layer"], found["its attention"]),
        "decode_attention": grid_of(found["decode attention"]),
        "host_attention": grid_of(found["host attention"]),
        "host_exchange": curve_of(found["host exchange"]),
        "prefill_attention": curve_of(found["prefill attention"]),
        "copy": curve_of(found["copy"]),
        "inputs": curve_of(found["inputs"]),
        "head": curve_of(found["head"]),
    }


def beside_host(found: Samples, most: float) -> float:
    """The factor by which the device slows down while the host attends; 1 if they do not share the CPU's memory.

    Args:
        most: threads of both over those of the device. Both share the memory's bandwidth by threads, so a larger factor
            comes from other programs.
    """
    if "beside host" not in found:
        return 1.0
    (beside,), (alone,) = found["beside host"].values(), found["alone"].values()
    return min(max(1.0, quartiles(beside)[0] / quartiles(alone)[0]), most)


def _over(sizes: Sequence[int], sample: Callable[[int], float]) -> Sampling:
    return {(size,): partial(sample, size) for size in sizes}


def _cells(sizes: ProfileSizes, sample: Callable[[int, int], float]) -> Sampling:
    return {(batch, context): partial(sample, batch, context) for batch in sizes.batches for context in sizes.contexts}
