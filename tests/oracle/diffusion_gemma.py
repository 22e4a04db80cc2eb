"""Small random checkpoints of DiffusionGemma as transformers saves them, and transformers' encoder
and decoder, for tests."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

from tests.oracle.checkpoints import VOCAB_SIZE, randomize

LENGTH = 6
WINDOW = 8
END_TOKEN = 2
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "num_experts": 6,
    "top_k_experts": 3,
    "moe_intermediate_size": 64,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": END_TOKEN,
    "pad_token_id": 0,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
}


def make_diffusion_gemma(directory: Path, **text: Any) -> Any:
    """Write a checkpoint that writes `LENGTH` tokens at a time; returns its model."""
    config = transformers.DiffusionGemmaConfig(
        text_config=transformers.DiffusionGemmaTextConfig(**TEXT | text),
        vision_config=transformers.Gemma4VisionConfig(**VISION),
        canvas_length=LENGTH,
    )
    torch.manual_seed(0)
    model = transformers.DiffusionGemmaForBlockDiffusion(config).eval()
    randomize(model)
    model.save_pretrained(directory)
    return model


def encode(model: Any, tokens: Tensor, cache: DynamicCache | None = None) -> Any:
    """The encoder's output for tokens behind those of the cache, which it extends."""
    if cache is None:
        cache = DynamicCache(config=model.config.get_text_config())
    with torch.inference_mode():
        return model.model.encoder(input_ids=tokens[None], cache=cache)


def encoder_logits(model: Any, tokens: Tensor) -> Tensor:
    """Multiply the encoder's hidden states by the output matrix, [T, vocab_size]."""
    hidden = encode(model, tokens).last_hidden_state[0]
    cap = model.final_logit_softcapping
    with torch.inference_mode():
        logits: Tensor = (model.lm_head(hidden) / cap).tanh() * cap
    return logits


def canvas_logits(
    model: Any, cache: DynamicCache, canvas: Tensor, last_logits: Tensor | None = None
) -> Tensor:
    """The decoder's logits of a canvas behind the cache, [LENGTH, vocab_size], given the processed
    logits of its last step."""
    if last_logits is not None:
        last_logits = last_logits[None]
    with torch.inference_mode():
        outputs = model(
            decoder_input_ids=canvas[None], cache=cache, self_conditioning_logits=last_logits
        )
    logits: Tensor = outputs.logits[0]
    return logits
