"""A model and a machine small enough to count by hand."""

from dataclasses import replace

import pytest

from nanoserve.config.mixers import GatedDeltaNetConfig, ShortConvolutionConfig
from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import (
    MoeConfig,
    RecurrentConfig,
)
from nanoserve.config.published_shapes import load_shape
from nanoserve.costs.hardware import Device, Link, Machine


def tiny_model(**changes: object) -> ModelConfig:
    """Two layers of 8, two query heads and one KV head of 4, feed-forward 16, vocabulary 32."""
    sizes: dict[str, object] = {
        "hidden_size": 8,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 4,
    }
    sizes |= {"intermediate_size": 16, "vocab_size": 32, "tie_word_embeddings": False}
    return replace(load_shape("llama-3.1-8b"), **(sizes | changes))  # type: ignore[arg-type]


def tiny_experts(**changes: object) -> ModelConfig:
    """That model with 4 experts of 6, two for each token, in its second layer."""
    moe = MoeConfig(
        num_experts=4,
        experts_per_token=2,
        intermediate_size=6,
        normalize_weights=True,
        sparse_layers=frozenset({1}),
    )
    return tiny_model(moe=moe, **changes)


def round_machine(**changes: object) -> Machine:
    """100 bytes and 1000 operations a second, links of 10 bytes a second and 1 second: measured, no
    shares taken."""
    link = Link(name="link", bandwidth=10.0, latency=1.0, measured=True)
    machine = Machine(
        name="round",
        device=Device(
            name="round", memory_bytes=1e4, memory_bandwidth=100.0, flops=1000.0, measured=True
        ),
        devices_per_node=4,
        link=link,
        network=None,
        host_link=replace(link, bandwidth=5.0),
        processor=Device(name="cpu", memory_bandwidth=20.0, flops=1e9, measured=True),
        host_memory_bytes=0.0,
        source="made up",
    )
    return replace(machine, **changes)  # type: ignore[arg-type]


@pytest.fixture
def machine() -> Machine:
    return round_machine()


def tiny_delta_net(**changes: object) -> ModelConfig:
    """Three layers, the first two with Gated DeltaNet: two key heads of 4, four value heads of 6,
    and a convolution over 4 positions of 2 * 8 + 24 channels."""
    heads = GatedDeltaNetConfig(
        num_key_heads=2, num_value_heads=4, key_head_dim=4, value_head_dim=6
    )
    recurrent = RecurrentConfig(frozenset({0, 1}), heads, kernel_size=4)
    return tiny_model(num_layers=3, num_kv_heads=2, recurrent=recurrent, **changes)


def tiny_convolutions(**changes: object) -> ModelConfig:
    """That model with short convolutions over 3 positions of 8 channels in its first two layers."""
    recurrent = RecurrentConfig(frozenset({0, 1}), ShortConvolutionConfig(8), kernel_size=3)
    return tiny_model(num_layers=3, num_kv_heads=2, recurrent=recurrent, **changes)


def tiny_mamba(model_type: str, **sizes: int) -> ModelConfig:
    """Two layers of 8 without attention, with 16 channels of 3 numbers each and convolutions over 4
    positions. Mamba makes steps of 2 numbers; Mamba-2 has four heads in two groups."""
    values: dict[str, object] = {
        "model_type": model_type,
        "vocab_size": 32,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "state_size": 3,
        "time_step_rank": 2,
        "num_heads": 4,
        "head_dim": 4,
        "n_groups": 2,
        "tie_word_embeddings": False,
    }
    return ModelConfig.from_hf(values | sizes)


def qwen3_next() -> ModelConfig:
    return load_shape("qwen3-next-80b-a3b")
