"""The text model in a multimodal checkpoint, as transformers writes it, against the whole of
transformers' model."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from nanoserve.config.model_config import ModelConfig
from nanoserve.errors import ModelError
from nanoserve.models.loading import load_model
from tests.oracle import test_families
from tests.oracle.checkpoints import FAMILIES, randomize
from tests.oracle.test_families import TOLERANCE, dense_logits, reference_logits

VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 16,
}
GEMMA4_TOKENS = {
    f"{name}_token_id": 150 + place
    for place, name in enumerate(("image", "video", "audio", "boi", "eoi"))
}
GEMMA4_VISION = {**VISION, "num_key_value_heads": 2, "head_dim": 16}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
QWEN_TOKENS = {
    f"{name}_token_id": 150 + place
    for place, name in enumerate(("image", "video", "vision_start", "vision_end"))
}
MULTIMODAL: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {"vision_config": VISION, "mm_tokens_per_image": 4}),
    "mistral3": (
        "ministral3",
        {"vision_config": {**VISION, "model_type": "pixtral", "head_dim": 16}},
    ),
    "gemma4": ("gemma4_text", {"vision_config": GEMMA4_VISION, **GEMMA4_TOKENS}),
    "qwen3_5": ("qwen3_5_text", {"vision_config": QWEN_VISION, **QWEN_TOKENS}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {"vision_config": QWEN_VISION, **QWEN_TOKENS}),
    "lfm2_vl": (
        "lfm2",
        {
            "vision_config": {**VISION, "model_type": "siglip2_vision_model", "num_patches": 16},
            "projector_hidden_size": 32,
            "image_token_id": 150,
        },
    ),
}


def prompt() -> Tensor:
    """Text alone: the tokens of images are the last ones."""
    return test_families.prompt() % 140 + 5


def write(name: str, directory: Path, *, shard_size: str = "5GB") -> PreTrainedModel:
    family, others = MULTIMODAL[name]
    config: PreTrainedConfig = transformers.AutoConfig.for_model(
        name, text_config=FAMILIES[family](), **others
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomize(model)
    model.save_pretrained(directory, max_shard_size=shard_size)
    return model


@pytest.mark.parametrize(
    "name",
    [
        "gemma3",
        pytest.param("mistral3", marks=pytest.mark.slow),
        "gemma4",
        "qwen3_5",
        "qwen3_5_moe",
        "lfm2_vl",
    ],
)
def test_the_text_model_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    model = write(name, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert any("vis" in tensor for tensor in file.keys())  # noqa: SIM118
    decoder, config = load_model(tmp_path, "fp32")
    assert config.family == MULTIMODAL[name][0] and config.eos_token_ids == (2,)
    logits, expected = dense_logits(decoder, config, prompt()), reference_logits(model, prompt())
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    found, answers = (
        prompt(),
        model.generate(prompt()[None], max_new_tokens=8, do_sample=False, eos_token_id=-1),
    )
    for _ in range(8):
        found = torch.cat((found, dense_logits(decoder, config, found)[-1:].argmax(-1)))
    assert found.tolist() == answers[0].tolist()


def test_one_in_several_files_is_the_same(tmp_path: Path) -> None:
    model = write("gemma3", tmp_path, shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    logits = dense_logits(*load_model(tmp_path, "fp32"), prompt())
    torch.testing.assert_close(logits, reference_logits(model, prompt()), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"text_config": [1]}, "text_config must be an object"),
        ({"text_config": None}, "model_type None) is not supported"),
        ({"text_config": {"model_type": "qwen9"}}, "model_type 'qwen9') is not supported"),
        ({"model_type": "qwen2_5_vl"}, "model_type 'qwen2_5_vl') is not supported"),
    ],
)
def test_what_has_no_known_text_model_is_refused(changes: dict[str, Any], complaint: str) -> None:
    config = {"model_type": "gemma3", "text_config": FAMILIES["gemma3_text"]().to_dict()} | changes
    with pytest.raises(ModelError) as refusal:
        ModelConfig.from_hf(config, source="config.json")
    assert complaint in str(refusal.value)
