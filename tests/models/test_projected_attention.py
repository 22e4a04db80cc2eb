"""A GPU's ways through a layer, followed on the CPU: attention takes the product of a layer as it is,
so that one operator normalizes, rotates and writes, and the last product adds to the residual. They
give the numbers that the plain steps give, for the layers that they fit."""

import pytest
import torch
from torch import Tensor, nn

from nanoserve.config.model_config import ModelConfig
from nanoserve.models import decoder as decoders
from nanoserve.models.attention import (
    AttentionFunction,
    DenseCausalAttention,
    PagedAttention,
    takes_projected,
)
from nanoserve.models.decoder import Decoder, DecoderLayer, SingleRank, adds_in_place
from tests.executor.small_model import small_config
from tests.models.test_decoder import build, paged, random_tokens
from tests.oracle.checkpoints import FAMILIES

LENGTHS = [1, 30, 4, 13]
CPU, GPU = torch.device("cpu"), torch.device("cuda")
TAKEN = ("llama", "llama-tied-biased", "qwen2", "qwen3", "gemma3_text", "cohere2", "glm4")
NOT_TAKEN = ("deepseek_v3", "olmo3", "gemma4_text", "ministral3")
"""Latents, norms over all heads, norms of values, and queries that grow."""
ADDED = ("llama", "qwen2", "qwen3", "mistral")
NOT_ADDED = ("llama-tied-biased", "gemma3_text", "cohere2", "mixtral", "granitemoehybrid")
"""Biases, a norm of the output, a sum of both parts, experts, and a factor."""


def as_on_a_gpu(attention: AttentionFunction, config: ModelConfig, device: torch.device) -> bool:
    return takes_projected(attention, config, GPU)


def step(decoder: Decoder, config: ModelConfig) -> tuple[Tensor, PagedAttention]:
    """Logits of prompts of all LENGTHS, and attention with its caches."""
    tokens = random_tokens(config, sum(LENGTHS))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    attention = paged(config, LENGTHS)
    with torch.inference_mode():
        return decoder.compute_logits(decoder(tokens, positions, attention)), attention


def bend_vectors(decoder: Decoder) -> None:
    """Give norms and biases numbers that leave a mark."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("family", TAKEN)
def test_logits_and_caches_are_those_of_the_plain_steps(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, config = build(family)
    bend_vectors(decoder)
    expected, plain = step(decoder, config)
    monkeypatch.setattr(decoders, "takes_projected", as_on_a_gpu)
    monkeypatch.setattr(decoders.DecoderLayer, "pre_attention", None)  # is not run
    found, joined = step(decoder, config)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for kind in ("key_caches", "value_caches"):
        for one, other in zip(getattr(joined, kind), getattr(plain, kind), strict=True):
            assert other.isfinite().any()
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("family", [*TAKEN, *NOT_TAKEN])
def test_layers_that_it_fits_take_it_on_a_gpu_alone(family: str) -> None:
    config = ModelConfig.from_hf(FAMILIES[family]().to_dict())
    own = config.of_layer(0)
    attention = PagedAttention(config, [], [], paged(config, [1]).batch)
    assert takes_projected(attention, own, GPU) == (family in TAKEN)
    assert not takes_projected(attention, own, CPU)
    assert not takes_projected(DenseCausalAttention(config, batch=1, length=1), own, GPU)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs_as_on_a_gpu(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, config = build(family)
    bend_vectors(decoder)
    expected, _ = step(decoder, config)
    monkeypatch.setattr(decoders, "takes_projected", as_on_a_gpu)
    monkeypatch.setattr(decoders, "adds_in_place", lambda layer, device: adds_in_place(layer, GPU))
    found, _ = step(decoder, config)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ADDED)
def test_a_product_that_adds_leaves_what_came_in(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, config = build(family)
    layer, hidden = decoder.layers[1], torch.randn(6, config.hidden_size)
    attended, before = torch.randn(6, config.output_size), hidden.clone()
    with torch.inference_mode():
        expected = layer.post_attention(attended, hidden)
        monkeypatch.setattr(decoders, "adds_in_place", lambda layer, device: True)
        monkeypatch.setattr(DecoderLayer, "between_sums", None)  # is not run
        found = layer.post_attention(attended, hidden)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(hidden, before)


@pytest.mark.parametrize("family", [*ADDED, *NOT_ADDED])
def test_products_add_where_nothing_else_happens_on_a_gpu_alone(family: str) -> None:
    decoder, _ = build(family)
    layer = decoder.layers[2]
    with torch.no_grad():
        assert adds_in_place(layer, GPU) == (family in ADDED)
        assert not adds_in_place(layer, CPU)


def test_products_do_not_add_for_ranks_and_training_and_packed_weights() -> None:
    layer = DecoderLayer(small_config(), 0)
    assert not adds_in_place(layer, GPU)  # gradients are computed
    with torch.no_grad():
        assert adds_in_place(layer, GPU)
        assert not adds_in_place(DecoderLayer(small_config(), 0, SingleRank()), GPU)
        layer.feed_forward.down = nn.Identity()
        assert not adds_in_place(layer, GPU)
