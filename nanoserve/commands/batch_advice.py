"""What the planner says of a batch before it runs: how fast it is predicted to be, and what would be faster."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import nanoserve
from nanoserve.costs import Machine, Precision
from nanoserve.costs.counts import ModelCounts
from nanoserve.costs.efficiency import Efficiency
from nanoserve.costs.measured_machine import MachineSpeeds, measured_machine, precision_of
from nanoserve.errors import UsageError
from nanoserve.layout import ParallelLayout
from nanoserve.measures.workloads import RequestShape
from nanoserve.request import SamplingParams
from nanoserve.simulator.advice import advise
from nanoserve.simulator.planning import CacheLimits

_SAMPLED_ROWS = 200
"""The most rows whose prompts are tokenized; the others are taken to be like them."""


def advice_for(
    llm: "nanoserve.LLM", layouts: Sequence[ParallelLayout], items: Sequence[tuple[Any, SamplingParams]]
) -> str | None:
    """A few lines for the user, or None where the speeds of workers were not measured.

    Args:
        layouts: that of prompts and that of decodes, of all engines together.
        items: prompts with their settings.
    """
    speeds, shapes = llm.speeds, _shapes(llm, items)
    if speeds is None or not shapes:
        return None
    import torch

    from nanoserve.models.dtypes import resolve_dtype

    config = llm.engine_config
    dtype = resolve_dtype(config.dtype, torch.device(config.device), llm.config.dtype)
    precision, limits = precision_of(str(dtype).removeprefix("torch.")), _limits(llm, dtype.itemsize)
    try:
        return advise(
            llm.config,
            _machine(llm, speeds, precision, limits),
            layouts,
            shapes,
            precision=precision,
            limits=limits,
            policy=config.policy_name,
            token_budget=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
        ).text
    except UsageError as error:
        return f"nothing can be predicted: {error}"


def _shapes(llm: "nanoserve.LLM", items: Sequence[tuple[Any, SamplingParams]]) -> list[RequestShape]:
    """The lengths of all items, from the prompts of some, evenly over all. Answers are as long as they may become."""
    count = min(len(items), _SAMPLED_ROWS)
    sampled = [items[place * len(items) // count] for place in range(count)]
    shapes = list(chain.from_iterable(_shape(llm, *item) for item in sampled))
    return [shapes[place * len(shapes) // len(items)] for place in range(len(items))] if shapes else []


def _shape(llm: "nanoserve.LLM", prompt: Any, params: SamplingParams) -> Iterator[RequestShape]:
    """Nothing for a prompt that will be refused."""
    encode = llm.tokenizer.encode if isinstance(prompt, str) else llm.tokenizer.encode_chat
    try:
        tokens = len(encode(prompt))
    except UsageError:
        return
    room = llm.max_model_len - tokens
    if tokens and room > 0:
        yield RequestShape(tokens, params.n * min(params.max_tokens or room, room))


def _limits(llm: "nanoserve.LLM", item_bytes: int) -> CacheLimits:
    """What the engines' own caches take."""
    model, config, status = llm.config, llm.engine_config, llm.status
    block = 2 * model.num_layers * model.num_kv_heads * model.head_dim * config.block_size * item_bytes
    return CacheLimits(
        device_bytes=status.total_blocks * block / config.data_parallel, host_bytes=status.total_host_blocks * block
    )


def _machine(llm: "nanoserve.LLM", speeds: MachineSpeeds, precision: Precision, limits: CacheLimits) -> Machine:
    """This one: memory is what the engines hold, and on CPUs what is free: of a GPU workers have taken all they can."""
    from nanoserve.runtime.launch.memory import available_memory

    config, usable = llm.engine_config, Efficiency().usable_memory
    devices = config.data_parallel * config.num_workers
    weights = ModelCounts(llm.config, precision=precision).stage_weight_bytes(0)
    host = available_memory("cpu")
    free = host / devices if config.device == "cpu" else 0.0
    held = (weights + (limits.device_bytes or 0.0)) / config.num_workers
    return measured_machine(
        speeds,
        devices=devices,
        memory_bytes=(free + held) / usable,
        host_memory_bytes=(host + weights + (limits.host_bytes or 0.0)) / usable,
    )
