"""The decoder by itself: it trains, it compiles, its two halves are separate, and batches do not
mix."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import MoeConfig
from nanoserve.models.attention import AttentionBatch, DenseCausalAttention, PagedAttention
from nanoserve.models.decoder import Decoder, MixtureOfExperts
from nanoserve.models.mixer import RecurrentStates, make_states
from tests.executor.small_model import small_config
from tests.oracle.checkpoints import FAMILIES

BLOCK_SIZE = 4


def build(family: str, seed: int = 0) -> tuple[Decoder, ModelConfig]:
    config = ModelConfig.from_hf(FAMILIES[family]().to_dict())
    torch.manual_seed(seed)
    return Decoder(config), config


def random_tokens(config: ModelConfig, count: int) -> Tensor:
    return torch.randint(config.vocab_size, (count,), generator=torch.Generator().manual_seed(4))


def layer_caches(
    config: ModelConfig, num_blocks: int, block_size: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values of each layer, in tensors of its own, or in those of the layer whose it
    shares."""
    caches: list[tuple[Tensor, Tensor]] = []
    for layer in range(config.num_layers):
        own = config.of_layer(layer)
        shape = (num_blocks, own.num_kv_heads, block_size, own.head_dim)
        values = shape if own.attention.mla is None else (*shape[:3], 0)
        if own.attention.has_kv:
            caches.append((torch.full(shape, torch.nan), torch.full(values, torch.nan)))
        else:
            caches.append(caches[config.layers.kv_sources[layer]])
    keys, values = zip(*caches, strict=True)
    return list(keys), list(values)


def layer_states(config: ModelConfig, slots: int) -> list[RecurrentStates | None]:
    """The states of each layer that has them."""
    made = list[RecurrentStates | None]()
    for layer in range(config.num_layers):
        states = None
        if config.is_recurrent(layer):
            states = make_states(config, slots, torch.get_default_dtype())
            states.convolution.fill_(torch.nan)
        made.append(states)
    return made


def set_segments(states: Sequence[RecurrentStates | None], segments: list[list[int]]) -> None:
    for of_layer in states:
        if of_layer is not None:
            of_layer.segments = torch.tensor(segments, dtype=torch.int32)


def paged(config: ModelConfig, lengths: list[int]) -> PagedAttention:
    """Whole prompts of these lengths, each on blocks of its own."""
    starts = [sum(lengths[:row]) for row in range(len(lengths) + 1)]
    most = -(-max(lengths) // BLOCK_SIZE)
    tables = torch.arange(len(lengths) * most).view(len(lengths), most)
    slots = [
        int(tables[row, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
        for row, length in enumerate(lengths)
        for position in range(length)
    ]
    keys, values = layer_caches(config, tables.numel(), BLOCK_SIZE)
    states = layer_states(config, len(lengths))
    set_segments(
        states, [[starts[row], starts[row + 1], -1, row, 0] for row in range(len(lengths))]
    )
    return PagedAttention(
        config,
        key_caches=keys,
        value_caches=values,
        batch=AttentionBatch(
            block_tables=tables.int(),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            context_lengths=torch.tensor(lengths, dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
        ),
        states=states,
    )


@pytest.mark.parametrize("family", ["llama-tied-biased", "glm4", "qwen3", "mixtral"])
def test_every_parameter_learns(family: str) -> None:
    decoder, config = build(family)
    tokens = random_tokens(config, 24).view(2, 12)
    positions, attention = (
        torch.arange(12).repeat(2),
        DenseCausalAttention(config, batch=2, length=12),
    )
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        logits = decoder.compute_logits(decoder(tokens.flatten(), positions, attention)).view(
            2, 12, -1
        )
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert [
        name for name, weight in decoder.named_parameters() if not weight.grad.abs().sum() > 0
    ] == []


@pytest.mark.parametrize("family", ["llama", "mistral", "mixtral"])
def test_sequences_of_a_batch_do_not_see_each_other(family: str) -> None:
    decoder, config = build(family)
    tokens = random_tokens(config, 60)
    positions = torch.arange(30)
    together = decoder(
        tokens, positions.repeat(2), DenseCausalAttention(config, batch=2, length=30)
    )
    alone = decoder(tokens[30:], positions, DenseCausalAttention(config, batch=1, length=30))
    torch.testing.assert_close(together[30:], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama-llama3", "glm", "mistral", "qwen3_moe", "qwen3_next"])
def test_a_ragged_paged_batch_equals_each_prompt_alone(family: str) -> None:
    decoder, config = build(family)
    lengths = [1, 30, 4, 13]
    tokens = random_tokens(config, sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    with torch.inference_mode():
        together = decoder(tokens, positions, paged(config, lengths)).split(lengths)
        for prompt, hidden in zip(tokens.split(lengths), together, strict=True):
            dense = DenseCausalAttention(config, batch=1, length=len(prompt))
            torch.testing.assert_close(
                hidden, decoder(prompt, torch.arange(len(prompt)), dense), atol=1e-5, rtol=1e-5
            )


@pytest.mark.parametrize(("family", "index"), [("qwen3", 1), ("qwen3_5_text", 3)])
def test_the_two_halves_of_a_layer_make_the_layer(family: str, index: int) -> None:
    decoder, config = build(family)
    layer = decoder.layers[index]
    hidden = torch.randn(6, config.hidden_size)
    cos, sin = decoder.rotary[0](torch.arange(6), torch.float32)
    attention = DenseCausalAttention(config, batch=1, length=6)
    query, key, value = layer.pre_attention(hidden, cos, sin)
    assert query.shape == (6, config.num_heads, config.head_dim)
    assert key.shape == value.shape == (6, config.num_kv_heads, config.head_dim)
    by_halves = layer.post_attention(attention(index, query, key, value), hidden)
    assert torch.equal(by_halves, layer(hidden, cos, sin, attention))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama-tied-biased", "mistral", "glm4"])
def test_the_whole_forward_is_one_graph(family: str) -> None:
    decoder, config = build(family)
    tokens, positions = random_tokens(config, 30), torch.arange(30)
    dense = DenseCausalAttention(config, batch=1, length=30)
    whole = torch.compile(
        lambda attention: decoder(tokens, positions, attention), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(
        whole(dense), decoder(tokens, positions, dense), atol=1e-5, rtol=1e-5
    )
    with torch.inference_mode():
        traced = whole(paged(config, [30]))
        torch.testing.assert_close(
            traced, decoder(tokens, positions, paged(config, [30])), atol=1e-5, rtol=1e-5
        )


def test_soft_embeddings_are_the_mean_of_all_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoserve.models.decoder._VOCABULARY_PIECE", 48)
    decoder, config = build("gemma3_text")
    logits = torch.randn(5, config.vocab_size, generator=torch.Generator().manual_seed(4)) * 9
    wanted = logits.softmax(-1) @ decoder.embedding.weight * config.hidden_size**0.5
    found = decoder.soft_embeddings(logits)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_a_new_decoder_with_states_has_random_kernels() -> None:
    decoder, _ = build("qwen3_5_text")
    kernels = [one for name, one in decoder.named_parameters() if name.endswith(".kernel")]
    assert len(kernels) == 4
    assert all(0.015 < kernel.std().item() < 0.025 for kernel in kernels)


@pytest.mark.parametrize("normalize", [True, False])
def test_experts_are_the_weighted_sum_of_each_tokens_choices(*, normalize: bool) -> None:
    moe = MoeConfig(7, 3, 12, normalize_weights=normalize, sparse_layers=frozenset({0}))
    torch.manual_seed(2)
    experts = MixtureOfExperts(small_config(), moe)
    for matrix in experts.router.weight, experts.gate_up, experts.down:
        torch.nn.init.normal_(matrix)
    hidden = torch.randn(9, 32)
    expected = torch.zeros_like(hidden)
    for token, state in enumerate(hidden):
        probabilities = experts.router(state).softmax(-1)
        chosen = probabilities.argsort(descending=True)[:3]
        total = probabilities[chosen].sum() if normalize else 1.0
        for expert in chosen.tolist():
            gate, up = (experts.gate_up[expert] @ state).chunk(2)
            output = experts.down[expert] @ (functional.silu(gate) * up)
            expected[token] += probabilities[expert] / total * output
    torch.testing.assert_close(experts(hidden), expected, atol=1e-4, rtol=1e-4)
