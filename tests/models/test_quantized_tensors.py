"""Quantized Hugging Face checkpoints against transformers with the values that they stand for."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nanoserve.models.attention import DenseCausalAttention
from nanoserve.models.loading import load_model
from tests.models.test_decoder import random_tokens
from tests.oracle.packed_checkpoints import make_packed_checkpoint

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "compressed-tensors", {"bits": 4, "group": 32}),
    ("qwen3", "compressed-tensors", {"bits": 4, "group": 32, "symmetric": False}),
    ("glm4", "compressed-tensors", {"bits": 8, "group": 64}),
    ("qwen2", "compressed-tensors", {"bits": 8, "group": 32, "symmetric": False}),
    ("mistral", "compressed-tensors", {"bits": 3, "group": 32}),
    ("llama", "int8", {}),
    ("qwen3", "gptq", {"bits": 4, "group": 32}),
    ("llama", "gptq_v2", {"bits": 8, "group": 64}),
    ("qwen2", "gptq", {"bits": 4, "group": 32, "act_order": True}),
    ("mistral", "awq", {"bits": 4, "group": 64}),
    ("qwen3", "fp8", {}),
]


@pytest.mark.parametrize(("family", "method", "settings"), CASES)
def test_logits_are_those_of_transformers(family: str, method: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = make_packed_checkpoint(family, method, tmp_path, **settings)
    decoder, found = load_model(tmp_path, "float32")
    tokens = random_tokens(found, 40)
    with torch.inference_mode():
        hidden = decoder(tokens, torch.arange(40), DenseCausalAttention(found, batch=1, length=40))
        logits, wanted = decoder.compute_logits(hidden), model(tokens[None]).logits[0]
    torch.testing.assert_close(logits, wanted, atol=2e-4 * float(wanted.abs().max()), rtol=0)
