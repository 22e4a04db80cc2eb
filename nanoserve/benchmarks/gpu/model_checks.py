"""Every model family on the device against the same weights in float32 on the CPU, step by step from a paged cache."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanoserve.benchmarks.gpu.cases import Case
from nanoserve.benchmarks.gpu.families import FAMILIES, VOCAB_SIZE
from nanoserve.benchmarks.gpu.setting import Setting
from nanoserve.config import ModelConfig
from nanoserve.models.attention import AttentionBatch, PagedAttention
from nanoserve.models.decoder import Decoder
from nanoserve.models.loading import empty_decoder
from triton_ops import reference_operators

WEIGHT_STANDARD_DEVIATION = 0.15
"""Wider than at initialization, so that attention, norms and biases all leave their mark on the logits."""
FLOAT32_TOLERANCE = 2e-3
"""Largest difference of a logit, in standard deviations of the logits."""
BFLOAT16_TOLERANCE = 0.05
"""Median difference: a rounding may send a token to another expert, and then some logits are quite different."""
CHUNKS = (17, 17, 11, 1, 1, 1, 1)
"""Tokens of each step: a prompt in three pieces, then single tokens."""
_BLOCK_SIZE = 16


def model_cases(setting: Setting) -> Iterator[Case]:
    """Each family in float32 and in the format that the device is used with; in a dry run two of them."""
    families = list(FAMILIES)
    for family in families[:: len(families) - 1] if setting.dry_run else families:
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            yield Case(f"family {family}, {name}", partial(_check_family, setting, family, dtype))


def _check_family(setting: Setting, family: str, dtype: torch.dtype) -> dict[str, Any]:
    config = ModelConfig.from_hf(FAMILIES[family], source=family)
    cpu = torch.device("cpu")
    weights = _random_decoder(config).state_dict()
    tokens = torch.randint(0, VOCAB_SIZE, (sum(CHUNKS),), generator=torch.Generator().manual_seed(1))
    with reference_operators():
        expected = stepwise_logits(_with_weights(config, weights, torch.float32, cpu), tokens, cpu)
    found = stepwise_logits(_with_weights(config, weights, dtype, setting.device), tokens, setting.device).cpu()
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


def _random_decoder(config: ModelConfig) -> Decoder:
    decoder = empty_decoder(config, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in decoder.named_parameters():
        centre = 1.0 if "norm" in name else 0.0
        parameter.normal_(centre, WEIGHT_STANDARD_DEVIATION, generator=generator)
    return decoder


def _with_weights(config: ModelConfig, weights: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> Decoder:
    decoder = empty_decoder(config, dtype, device)
    decoder.load_state_dict(weights)
    return decoder


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
