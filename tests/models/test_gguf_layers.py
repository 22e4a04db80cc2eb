"""Metadata of GGUF files about layers: windows, rotations, YaRN's multiplier and experts. The right
values follow from the graphs of llama.cpp (olmo2, cohere2, smollm3, mistral3, deepseek2) and from
its converter."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoserve.config.model_config import ModelConfig
from nanoserve.errors import ModelError
from nanoserve.models.decoder import RotaryEmbedding
from nanoserve.models.gguf_checkpoint import GgufCheckpoint
from nanoserve.models.gguf_directory import gguf_config
from tests.models.test_gguf_bad_input import file, tensor
from tests.models.test_gguf_metadata import described

MAGNITUDE = 1 + 0.1 * math.log(4)
YARN: dict[str, Any] = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 1024,
}
SIZES: dict[str, Any] = {
    "block_count": 4,
    "context_length": 4096,
    "embedding_length": 64,
    "feed_forward_length": 32,
    "attention.head_count": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
WINDOW: dict[str, Any] = {"attention.sliding_window": 8}
COHERE: dict[str, Any] = WINDOW | {"attention.layer_norm_epsilon": 2.0**-17, "logit_scale": 0.25}
LATENT: dict[str, Any] = {
    "attention.kv_lora_rank": 16,
    "attention.key_length_mla": 24,
    "attention.value_length_mla": 12,
    "rope.dimension_count": 8,
    "leading_dense_block_count": 1,
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 16,
    "expert_shared_count": 2,
}

CHOICE_BIAS = tensor("blk.1.exp_probs_b.bias", (4,), offset=2048)


def config_of(path: Path, architecture: str, keys: dict[str, Any], *more: bytes) -> ModelConfig:
    """The config of a file with these keys and tensors."""
    entries = [described("general.architecture", architecture)]
    for key, value in (SIZES | keys).items():
        entries.append(described(f"{architecture}.{key}", value))
    content = file(entries, [tensor("token_embd.weight", (8, 64)), *more], 4096)
    (path / "model.gguf").write_bytes(content)
    return gguf_config(path / "model.gguf")


@pytest.mark.parametrize(
    ("architecture", "keys", "windows"),
    [
        ("olmo2", {}, ()),
        ("olmo2", WINDOW, (8, 8, 8, 0)),
        ("olmo2", WINDOW | {"attention.sliding_window_pattern": 2}, (8, 0, 8, 0)),
        (
            "olmo2",
            WINDOW | {"attention.sliding_window_pattern": [False, True, False, False]},
            (0, 8, 0, 0),
        ),
        ("cohere2", COHERE, (8, 8, 8, 0)),
        ("mistral3", {}, ()),
        ("smollm3", {}, ()),
    ],
)
def test_layers_have_the_windows_that_llama_cpp_gives_them(
    architecture: str, keys: dict[str, Any], windows: tuple[int, ...], tmp_path: Path
) -> None:
    assert config_of(tmp_path, architecture, keys).layers.sliding_windows == windows


@pytest.mark.parametrize(("architecture", "keys"), [("smollm3", {}), ("cohere2", COHERE)])
def test_every_fourth_layer_does_not_rotate(
    architecture: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    config = config_of(tmp_path, architecture, keys)
    assert [rope.kind for rope in config.layers.ropes] == ["default"] * 3 + ["none"]


def test_layers_of_olmo_with_a_window_are_not_stretched(tmp_path: Path) -> None:
    keys = WINDOW | YARN | {"rope.freq_base": 5e5, "rope.freq_base_swa": 1e4}
    ropes = config_of(tmp_path, "olmo2", keys).layers.ropes
    assert [rope.kind for rope in ropes] == ["default"] * 3 + ["yarn"]
    assert [rope.theta for rope in ropes] == [1e4, 1e4, 1e4, 5e5]


def test_norms_and_logits_of_cohere(tmp_path: Path) -> None:
    config = config_of(tmp_path, "cohere2", COHERE)
    assert (config.norms.eps, config.logits.scale) == (2.0**-17, 0.25)
    with pytest.raises(ModelError, match="dimension_count must be the size of a head"):
        config_of(tmp_path, "cohere2", COHERE | {"rope.dimension_count": 16})


@pytest.mark.parametrize(
    ("architecture", "numbers", "magnitude"),
    [
        ("olmo2", {"yarn_attn_factor": MAGNITUDE}, MAGNITUDE),
        ("mistral3", {}, MAGNITUDE),
        ("mistral3", {"yarn_log_multiplier": 0.0}, MAGNITUDE),
        ("mistral3", {"yarn_log_multiplier": 1.0}, 1.0),
        ("mistral3", {"yarn_log_multiplier": 0.5}, MAGNITUDE / (1 + 0.05 * math.log(4))),
        ("deepseek2", {}, MAGNITUDE),
        ("deepseek2", {"yarn_log_multiplier": 0.1}, 1.0),
        ("deepseek2", {"yarn_log_multiplier": 0.0707}, 1.0),
    ],
)
def test_yarn_enlarges_what_rotates(
    architecture: str, numbers: dict[str, float], magnitude: float, tmp_path: Path
) -> None:
    keys: dict[str, Any] = {**YARN}
    if architecture == "deepseek2":
        keys |= LATENT
    keys |= {f"rope.scaling.{name}": number for name, number in numbers.items()}
    config = config_of(tmp_path, architecture, keys)
    assert RotaryEmbedding(config.rope).attention_factor == pytest.approx(magnitude)


@pytest.mark.parametrize(("multiplier", "share"), [(0.1, 1.0), (0.0707, 0.707)])
def test_yarn_sharpens_the_scores_of_deepseek(
    multiplier: float, share: float, tmp_path: Path
) -> None:
    """The multiplier is a tenth of mscale_all_dim; heads have 24 dimensions."""
    keys = LATENT | YARN | {"rope.scaling.yarn_log_multiplier": multiplier}
    config = config_of(tmp_path, "deepseek2", keys)
    assert config.softmax_scale == pytest.approx((1 + 0.1 * share * math.log(4)) ** 2 / 24**0.5)


def test_queries_of_ministral_grow(tmp_path: Path) -> None:
    config = config_of(tmp_path, "mistral3", YARN | {"attention.temperature_scale": 0.25})
    assert (config.rope.query_growth, config.rope.original_max_position_embeddings) == (0.25, 1024)


@pytest.mark.parametrize(
    ("keys", "biases", "family"),
    [
        ({}, [], "deepseek_v2"),
        ({"expert_gating_func": 1}, [], "deepseek_v2"),
        ({"expert_gating_func": 2}, [CHOICE_BIAS], "deepseek_v3"),
        ({}, [CHOICE_BIAS], "glm4_moe_lite"),
    ],
)
def test_the_router_tells_the_family(
    keys: dict[str, Any], biases: list[bytes], family: str, tmp_path: Path
) -> None:
    config = config_of(tmp_path, "deepseek2", LATENT | keys, *biases)
    assert config.family == family
    assert config.attention.mla is not None
    assert config.attention.mla.qk_nope_head_dim == 16
    assert config.moe is not None
    assert (sorted(config.moe.sparse_layers), config.moe.shared_size) == ([1, 2, 3], 32)


def test_the_last_layer_of_glm_may_be_for_drafts(tmp_path: Path) -> None:
    keys = LATENT | {"nextn_predict_layers": 1}
    assert config_of(tmp_path, "deepseek2", keys).num_layers == 3


@pytest.mark.parametrize(
    ("architecture", "keys", "complaint"),
    [
        ("deepseek2", {"attention.temperature_scale": 0.1}, "temperature_scale is not supported"),
        ("deepseek2", {"rope.scaling.attn_factor": 1.0}, "attn_factor is not supported"),
        ("deepseek2", {"expert_gating_func": 3}, "expert_gating_func of 3 is not supported"),
        (
            "deepseek2",
            {"expert_gating_func": 1, "expert_weights_norm": True},
            "expert_weights_norm is not supported with a softmax",
        ),
        (
            "mistral3",
            YARN | {"rope.scaling.yarn_log_multiplier": -1.0},
            "must not be negative, found -1",
        ),
        ("olmo2", YARN | {"rope.scaling.yarn_attn_factor": 1.5}, "yarn_attn_factor of 1.5 is not"),
        ("olmo2", YARN | {"rope.scaling.yarn_log_multiplier": 1.0}, "multiplier of 1 is not"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    architecture: str, keys: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    given = LATENT | keys if architecture == "deepseek2" else keys
    with pytest.raises(ModelError, match=complaint):
        config_of(tmp_path, architecture, given)


def test_old_files_of_deepseek_are_refused(tmp_path: Path) -> None:
    keys = {name: value for name, value in LATENT.items() if not name.endswith("key_length_mla")}
    with pytest.raises(ModelError, match="of before April 2025; take a newer file"):
        config_of(tmp_path, "deepseek2", keys)


def test_the_parts_of_a_latent_matrix_are_put_together_by_heads(tmp_path: Path) -> None:
    """Two heads of 3 key rows, which are stored as columns, and 1 value row, for latents of 2."""
    numbers = torch.arange(16, dtype=torch.float32)
    more = [tensor("blk.0.attn_k_b.weight", (2, 2, 3), offset=2048)]
    more.append(tensor("blk.0.attn_v_b.weight", (2, 1, 2), offset=2112))
    config_of(tmp_path, "deepseek2", LATENT, *more)
    path = tmp_path / "model.gguf"
    content = bytearray(path.read_bytes())
    first = len(content) - 4096 + 2048
    content[first : first + 48] = numbers[:12].numpy().tobytes()
    content[first + 64 : first + 80] = numbers[12:].numpy().tobytes()
    path.write_bytes(content)
    with GgufCheckpoint(path) as checkpoint:
        matrix = checkpoint.get_slice("blk.0.attn_kv_b.weight")
        assert matrix.get_shape() == [8, 2]
        rows = [[0, 3], [1, 4], [2, 5], [12, 13], [6, 9], [7, 10], [8, 11], [14, 15]]
        assert matrix[:, :].tolist() == rows
        assert matrix[2:6, 1:].tolist() == [[5], [13], [9], [10]]


def test_a_part_of_a_latent_matrix_that_is_missing_is_named(tmp_path: Path) -> None:
    more = tensor("blk.0.attn_k_b.weight", (2, 2, 3), offset=2048)
    config_of(tmp_path, "deepseek2", LATENT, more)
    with pytest.raises(
        ModelError, match=r"blk.0.attn_k_b.weight has no attn_v_b of the same heads"
    ):
        GgufCheckpoint(tmp_path / "model.gguf")
