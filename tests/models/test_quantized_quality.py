"""Cost of quantized weights on the bundled storyteller: perplexity beside that of the same
weights in float32."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from nanoserve.config.model_config import ModelConfig
from nanoserve.models.attention import DenseCausalAttention
from nanoserve.models.decoder import Decoder
from nanoserve.models.gguf_directory import gguf_directory
from nanoserve.models.hub import LINK_NAME, resolve_model
from nanoserve.models.loading import load_model
from tests.oracle.gguf_files import write_gguf

STORIES, LENGTH = 40, 200


def ours(decoder: Decoder, config: ModelConfig, tokens: Tensor) -> Tensor:
    positions = torch.arange(len(tokens))
    return decoder.compute_logits(
        decoder(tokens, positions, DenseCausalAttention(config, 1, len(tokens)))
    )


def perplexity(logits: list[Tensor], stories: Tensor) -> float:
    losses = [
        torch.nn.functional.cross_entropy(found[:-1], story[1:])
        for found, story in zip(logits, stories, strict=True)
    ]
    return math.exp(float(torch.stack(losses).mean()))


@pytest.mark.slow
@pytest.mark.parametrize(("block_type", "most"), [("Q8_0", 0.001), ("Q4_0", 0.01)])
def test_perplexity_is_that_of_the_dequantized_model(
    block_type: str, most: float, tmp_path: Path
) -> None:
    """In bfloat16, where activations are rounded to 8 bits, too. The stories are the model's
    own."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        resolve_model(None).directory, dtype=torch.float32
    ).eval()
    with torch.inference_mode():
        beginnings = torch.zeros(STORIES, 1, dtype=torch.long)
        stories = model.generate(
            beginnings,
            do_sample=True,
            top_k=0,
            max_new_tokens=LENGTH,
            eos_token_id=-1,
            pad_token_id=0,
        )
    write_gguf(model, tmp_path / LINK_NAME, block_type)
    directory = gguf_directory(tmp_path / LINK_NAME)
    with torch.inference_mode():
        wanted = perplexity(list(model(stories).logits), stories)
        for dtype, allowed in (("float32", 1e-5), ("bfloat16", most)):
            found = perplexity(
                [*map(partial(ours, *load_model(directory, dtype)), stories)], stories
            )
            print(
                f"{block_type} in {dtype}: {found:.4f} against {wanted:.4f} "
                f"({found / wanted - 1:+.3%})"
            )
            assert found == pytest.approx(wanted, rel=allowed)
