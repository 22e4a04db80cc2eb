"""Blocks of Nemotron-H, each of which is one part of a layer."""

from typing import Any

import pytest

from nanoserve.config.model_config import ModelConfig
from nanoserve.errors import ModelError

SHAPE: dict[str, Any] = {
    "model_type": "nemotron_h",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 6,
}


def test_a_feed_forward_block_belongs_to_the_layer_before_it() -> None:
    config = ModelConfig.from_hf(SHAPE | {"hybrid_override_pattern": "M-M*EM"})
    assert config.num_layers == 4
    assert config.layers.stored_blocks == (0, 2, 3, 5)
    assert config.layers.feed_forwards == (True, False, True, False)
    assert [config.is_recurrent(layer) for layer in range(4)] == [True, True, False, True]
    assert [config.is_sparse(layer) for layer in range(4)] == [False, False, True, False]
    assert config.moe is not None and not config.moe.is_gated


@pytest.mark.parametrize(
    "blocks",
    [
        {"layers_block_type": ["mamba", "mlp", "mamba", "attention", "moe", "mamba"]},
        {
            "layers_block_type": [
                *("linear_attention", "mlp", "linear_attention"),
                *("full_attention", "moe", "linear_attention"),
            ]
        },
    ],
)
def test_names_of_blocks_say_what_letters_say(blocks: dict[str, list[str]]) -> None:
    expected = ModelConfig.from_hf(SHAPE | {"hybrid_override_pattern": "M-M*EM"})
    assert ModelConfig.from_hf(SHAPE | blocks) == expected


def test_without_experts_there_is_no_mixture() -> None:
    assert ModelConfig.from_hf(SHAPE | {"hybrid_override_pattern": "M-*-"}).moe is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hybrid_override_pattern": "-M"}, "block 0 is a feed-forward part without attention"),
        ({"hybrid_override_pattern": "M-E"}, "block 2 is a feed-forward part without attention"),
        ({"hybrid_override_pattern": "M?"}, "hybrid_override_pattern names '?'; known are M, "),
        ({"hybrid_override_pattern": ""}, "hybrid_override_pattern must name the blocks"),
        ({"layers_block_type": ["mamba", 3]}, "layers_block_type names 3; known are mamba, "),
        ({"layers_block_type": 7}, "layers_block_type must name the blocks, found 7"),
        ({"hybrid_override_pattern": "ME", "moe_latent_size": 8}, "moe_latent_size 8 is not"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act 'gelu' is not supported; only silu is"),
        ({"mlp_hidden_act": "silu"}, "hidden_act 'silu' is not supported; only relu2 is"),
    ],
)
def test_what_cannot_be_read_is_one_line(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelError) as refused:
        ModelConfig.from_hf(SHAPE | {"hybrid_override_pattern": "M*"} | changes)
    assert problem in str(refused.value)
    assert "\n" not in str(refused.value)
