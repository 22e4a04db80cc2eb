"""Models that write canvases, as config.json describes them, and the settings of how they do."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaGenerationConfig,
    EntropyBoundSamplerConfig,
)

from nanoserve.config.canvases import diffusion_gemma_canvas
from nanoserve.config.config_fields import ConfigFields
from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import CanvasConfig, RenoisingConfig
from nanoserve.engine_config import Denoising, EngineConfig
from nanoserve.errors import ModelError, UsageError
from nanoserve.models.hub import find_shape

SDAR_4B: dict[str, Any] = {
    "architectures": ["SDARForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "block_size": 4,
    "mask_token_id": 151669,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_position_embeddings": 32768,
    "max_window_layers": 36,
    "model_type": "sdar",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""As published for SDAR-4B-Chat, without what it says of training."""
GENERATION: dict[str, Any] = json.loads(
    DiffusionGemmaGenerationConfig(
        max_denoising_steps=12,
        sampler_config=EntropyBoundSamplerConfig(entropy_bound=0.25),
        t_min=0.1,
        t_max=0.9,
        stability_threshold=3,
        confidence_threshold=0.02,
    ).to_json_string()
)


def test_sdar_is_qwen3_that_writes_blocks() -> None:
    config = ModelConfig.from_hf(SDAR_4B)
    qwen = ModelConfig.from_hf(SDAR_4B | {"model_type": "qwen3", "architectures": None})
    assert config.canvas == CanvasConfig(length=4, mask_token=151669)
    assert qwen.canvas is None
    assert (config.attention, config.rope, config.norms) == (qwen.attention, qwen.rope, qwen.norms)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"mask_token_id": 151936}, "mask_token_id 151936 is none of the 151936 tokens"),
        ({"block_size": 0}, "block_size must be a positive integer"),
        ({"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window is not supported"),
        ({"model_type": "llada2_moe", "architectures": ["LLaDA2MoeModelLM"]}, "LLaDA2MoeModelLM"),
    ],
)
def test_other_models_are_refused_in_one_line(changed: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelError, match=f"^config.json: [^\n]*{problem}[^\n]*$"):
        ModelConfig.from_hf(SDAR_4B | changed)


def read_free_canvas(config: dict[str, Any], generation: dict[str, Any]) -> CanvasConfig:
    return diffusion_gemma_canvas(
        ConfigFields(config, "config.json"), ConfigFields(generation, "generation_config.json")
    )


def test_settings_of_free_canvases_are_in_the_generation_config() -> None:
    canvas = read_free_canvas({"canvas_length": 6}, GENERATION)
    assert canvas == CanvasConfig(
        length=6, mask_token=None, renoising=RenoisingConfig(12, 0.25, 0.1, 0.9, 3, 0.02)
    )
    assert canvas.is_free


def test_free_canvases_have_the_settings_of_transformers_where_none_are_given() -> None:
    unset = DiffusionGemmaGenerationConfig()
    usual = unset._get_default_generation_params()
    renoising = read_free_canvas({}, json.loads(unset.to_json_string())).renoising
    assert renoising is not None
    found = {key: getattr(renoising, key, None) for key in usual}
    found["sampler_config"] = EntropyBoundSamplerConfig(renoising.entropy_bound)
    assert found | {"max_new_tokens": 256} == usual


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"t_min": 0.9}, "t_max 0.9 must be above t_min 0.9"),
        ({"max_denoising_steps": 0}, "max_denoising_steps must be a positive integer"),
        ({"sampler_config": {"entropy_bound": 0}}, "entropy_bound must be at least 1e-06"),
        ({"stability_threshold": -1}, "stability_threshold must be at least 0"),
    ],
)
def test_settings_of_free_canvases_that_make_no_sense(
    changed: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ModelError, match=f"^generation_config.json: {problem}[^\n]*$"):
        read_free_canvas({}, GENERATION | changed)


def test_costs_of_canvases_are_not_predicted(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SDAR_4B))
    with pytest.raises(UsageError, match=r"config\.json: sdar writes 4 tokens at a time; choose a"):
        find_shape(str(path), None)


def test_denoising_is_named_with_its_settings() -> None:
    assert Denoising.parse("confidence") == Denoising()
    assert Denoising.parse("confidence:threshold=0.9:steps=2").settings == {
        "threshold": 0.9,
        "steps": 2,
    }
    assert Denoising.parse("entropy").settings == {"bound": 0.35}
    assert Denoising.parse("renoise").settings == {}, "those of the model"
    chosen = Denoising.parse("renoise:max_denoising_steps=9:t_min=0.5").settings
    changed = RenoisingConfig(entropy_bound=0.3).changed(chosen)
    assert changed == RenoisingConfig(max_denoising_steps=9, entropy_bound=0.3, t_min=0.5)
    assert isinstance(changed.max_denoising_steps, int)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("sequential", "choose one of confidence, static, entropy"),
        ("static:threshold=0.5", "static has steps, each once"),
        ("static:steps=2:steps=3", "static has steps, each once"),
        ("confidence:threshold", "say threshold=NUMBER"),
        ("confidence:threshold=1.5", "threshold must be from 0 to 1"),
        ("entropy:bound=nan", "bound must be from 0 to 1e"),
        ("renoise:steps=3", "renoise has max_denoising_steps and entropy_bound and t_min"),
        ("renoise:max_denoising_steps=0", "max_denoising_steps must be from 1 to 1024"),
    ],
)
def test_denoising_that_makes_no_sense_is_refused(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=f"--denoising '?{text}'?: {problem}"):
        EngineConfig(denoising=text)
