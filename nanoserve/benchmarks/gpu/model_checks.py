"""Small random models of every family: their logits against float32 on the CPU, and the engine against itself.

Logits are compared step by step from a paged cache. Engines are compared by tokens: captured graphs against eager
steps, overlapped steps against plain ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanoserve.benchmarks.gpu.engines import EngineShelf, TimedEngine
from nanoserve.benchmarks.gpu.running import GpuCase
from nanoserve.benchmarks.gpu.setting import GpuSetting
from nanoserve.config import ModelConfig
from nanoserve.measures.workloads import random_prompts
from nanoserve.models.attention import AttentionBatch, PagedAttention
from nanoserve.models.decoder import Decoder
from nanoserve.models.dtypes import format_name
from nanoserve.models.loading import empty_decoder
from triton_ops import reference_operators

VOCAB_SIZE = 4096
"""Number of tokens in the tokenizer of dummy models."""

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_SPARSE = {"moe_intermediate_size": 64, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True}


def _family(model_type: str, **settings: Any) -> dict[str, Any]:
    return {"model_type": model_type, **_SHAPE, **settings}


FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": _family("llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama-llama3": _family("llama", rope_parameters=_LLAMA3_ROPE),
    "llama-yarn": _family("llama", rope_parameters=_YARN_ROPE),
    "mistral": _family("mistral", sliding_window=24),
    "qwen2": _family("qwen2", head_dim=80, num_key_value_heads=1),
    "qwen2-window": _family("qwen2", use_sliding_window=True, sliding_window=20, max_window_layers=1),
    "qwen3": _family("qwen3", head_dim=128, tie_word_embeddings=True),
    "glm": _family("glm", attention_bias=True),
    "glm4": _family("glm4", head_dim=256),
    "mixtral": _family("mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=24),
    "qwen3_moe": _family("qwen3_moe", mlp_only_layers=[1], **_SPARSE),
}
"""Configurations of all model families: biases, ties, windows, ropes and experts in every combination that exists."""


WEIGHT_STANDARD_DEVIATION = 0.15
"""Wider than at initialization, so that attention, norms and biases all leave their mark on the logits."""
FLOAT32_TOLERANCE = 2e-3
"""Largest difference of a logit, in standard deviations of the logits."""
BFLOAT16_TOLERANCE = 0.05
"""Median difference: a rounding may send a token to another expert, and then some logits are quite different."""
CHUNKS = (17, 17, 11, 1, 1, 1, 1)
"""Tokens of each step: a prompt in three pieces, then single tokens."""
_BLOCK_SIZE = 16
_CPU = torch.device("cpu")


def model_cases(setting: GpuSetting) -> Iterator[GpuCase]:
    """Each family in float32 and in the format that the device is used with; in a dry run two of them."""
    families = list(FAMILIES)
    for family in families[:: len(families) - 1] if setting.dry_run else families:
        for dtype in (torch.float32, torch.bfloat16):
            yield GpuCase(f"family {family}, {format_name(dtype)}", partial(_check_family, setting, family, dtype))


def _check_family(setting: GpuSetting, family: str, dtype: torch.dtype) -> dict[str, Any]:
    config = ModelConfig.from_hf(FAMILIES[family], source=family)
    reference = empty_decoder(config, torch.float32, _CPU)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in reference.named_parameters():
        parameter.normal_(1.0 if "norm" in name else 0.0, WEIGHT_STANDARD_DEVIATION, generator=generator)
    decoder = empty_decoder(config, dtype, setting.device)
    decoder.load_state_dict(reference.state_dict())
    tokens = torch.randint(0, VOCAB_SIZE, (sum(CHUNKS),), generator=torch.Generator().manual_seed(1))
    with reference_operators():
        expected = stepwise_logits(reference, tokens, _CPU)
    found = stepwise_logits(decoder, tokens, setting.device).cpu()
    difference = (found - expected).abs() / expected.std()
    exact = dtype == torch.float32
    measured = float(difference.max() if exact else difference.median())
    tolerance = FLOAT32_TOLERANCE if exact else BFLOAT16_TOLERANCE
    unwanted = int((~found.isfinite()).sum())
    return {
        "check": "family",
        "largest_difference" if exact else "median_difference": measured if unwanted == 0 else None,
        "tolerance": tolerance,
        "of_tolerance": measured / tolerance if unwanted == 0 else None,
        "unwanted_nans": unwanted,
        "ok": unwanted == 0 and measured <= tolerance,
    }


@torch.inference_mode()
def stepwise_logits(decoder: Decoder, tokens: Tensor, device: torch.device) -> Tensor:
    """Logits of one sequence whose tokens come in CHUNKS, on shuffled blocks of a poisoned cache: [T, vocab_size]."""
    config, dtype = decoder.config, decoder.dtype
    num_blocks = -(-len(tokens) // _BLOCK_SIZE) + 2
    blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(2)).to(device)
    shape = (2, config.num_layers, num_blocks, config.num_kv_heads, _BLOCK_SIZE, config.head_dim)
    caches = torch.full(shape, torch.nan, dtype=dtype, device=device)
    logits, length = [], 0
    for chunk in torch.split(tokens.to(device), list(CHUNKS)):
        positions = torch.arange(length, length + len(chunk), device=device)
        length += len(chunk)
        batch = AttentionBatch(
            block_tables=blocks[None].int(),
            query_starts=torch.tensor([0, len(chunk)], dtype=torch.int32, device=device),
            context_lengths=torch.tensor([length], dtype=torch.int32, device=device),
            slot_mapping=blocks[positions // _BLOCK_SIZE] * _BLOCK_SIZE + positions % _BLOCK_SIZE,
        )
        attention = PagedAttention(config, caches[0].unbind(), caches[1].unbind(), batch)
        logits.append(decoder.compute_logits(decoder(chunk, positions, attention)))
    return torch.cat(logits)


SPARSE = ("mixtral", "qwen3_moe")
CHECKED = ("qwen3", "mistral", "qwen3_moe")
"""One with norms of queries and keys, one with windows, one with experts."""
PROMPT_LENGTHS = tuple(5 + 9 * place % 83 for place in range(20))
OUTPUT_LENGTHS = tuple(3 + 7 * place % 29 for place in range(20))
"""Requests come and go in the midst of others, so that batches grow, shrink, and mix prompts with single tokens."""


def engine_check_cases(shelf: EngineShelf, families: Sequence[str]) -> Iterator[GpuCase]:
    """In float32, where rounding does not decide between tokens."""
    for family in families:
        yield GpuCase(f"graph against eager, {family}", partial(_check_graphs, shelf, family))
        yield GpuCase(f"overlapped against plain, {family}", partial(_check_overlap, shelf, family))


def _check_graphs(shelf: EngineShelf, family: str) -> dict[str, Any]:
    eager, _ = _generate(shelf, family, eager=True, overlapped=False)
    captured, engine = _generate(shelf, family, eager=False, overlapped=False)
    fields, facts = same_tokens("graph against eager", captured, eager), engine.llm.gpu
    if facts is None:  # a dry run has no graphs
        return fields
    # Experts in float32 wait to learn how many tokens each gets: such steps are compiled, and cannot be captured.
    as_meant = facts.graphs > 0 or FAMILIES[family]["model_type"] in SPARSE
    return _as_meant(fields, "" if as_meant else "no decode step was captured") | {"graphs": facts.graphs}


def _check_overlap(shelf: EngineShelf, family: str) -> dict[str, Any]:
    plain, _ = _generate(shelf, family, eager=False, overlapped=False)
    overlapped, engine = _generate(shelf, family, eager=False, overlapped=True)
    fields = same_tokens("overlapped against plain", overlapped, plain)
    as_meant = engine.overlaps or engine.llm.gpu is None  # a CPU has nothing to gain by it
    in_flight = engine.llm.engine.executor.max_in_flight
    return _as_meant(fields, "" if as_meant else "steps were not overlapped") | {"in_flight": in_flight}


def _as_meant(fields: dict[str, Any], problem: str) -> dict[str, Any]:
    """The same tokens prove nothing if what was to be checked did not run."""
    return fields | {"ok": False, "problem": problem} if problem else fields


def _generate(
    shelf: EngineShelf, family: str, *, eager: bool, overlapped: bool
) -> tuple[Sequence[tuple[int, ...]], TimedEngine]:
    engine = shelf.get(
        shape=shelf.config_file(family, FAMILIES[family]),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        kv_cache_memory=32 * 2**20,
        eager=eager,
    )
    engine.overlap(steps=overlapped)
    prompts = random_prompts(PROMPT_LENGTHS, VOCAB_SIZE, seed=0)
    return engine.driver.run(prompts, OUTPUT_LENGTHS).tokens, engine


def same_tokens(what: str, found: Sequence[tuple[int, ...]], expected: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """The fields of a check."""
    different = [place for place, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other]
    return {"check": what, "requests": len(expected), "different_requests": different, "ok": not different}
