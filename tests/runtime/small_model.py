"""A decoder small enough to run in a test, and what it computes without any cache."""

from collections.abc import Sequence

import torch

from nanoserve.config import ModelConfig, RopeConfig
from nanoserve.models.attention import DenseCausalAttention
from nanoserve.models.decoder import Decoder

VOCAB_SIZE = 61


def small_config(*, sliding_window: int = 0) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rms_norm_eps=1e-6,
        rope=RopeConfig(rotary_dim=8),
        sliding_windows=(sliding_window, sliding_window),
    )


def small_decoder(config: ModelConfig | None = None) -> Decoder:
    """Random weights, large enough that attention and logits are far from uniform."""
    torch.manual_seed(0)
    decoder = Decoder(config or small_config())
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return decoder.eval()


@torch.inference_mode()
def dense_logits(decoder: Decoder, tokens: Sequence[int]) -> torch.Tensor:
    """Logits at every position of one sequence, computed at once: [length, vocab_size]."""
    attention = DenseCausalAttention(decoder.config, 1, len(tokens))
    hidden = decoder(torch.tensor(tokens), torch.arange(len(tokens)), attention)
    return decoder.compute_logits(hidden)


def dense_greedy(decoder: Decoder, prompt: Sequence[int], count: int) -> list[int]:
    """The tokens of greedy decoding, with everything computed anew for each."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(dense_logits(decoder, tokens)[-1].argmax()))
    return tokens[len(prompt) :]
