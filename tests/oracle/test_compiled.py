"""Compiled layers against Hugging Face transformers and against the same layers run eagerly."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from nanoserve.executor.compile.layer_runner import LayerRunner
from nanoserve.models.attention import AttentionBatch, PagedAttention
from nanoserve.models.decoder import Decoder, LayerFunction
from nanoserve.models.loading import load_model
from nanoserve.models.shards import make_shards
from nanoserve.request import Request, SamplingParams
from tests.models.test_decoder import layer_caches
from tests.models.thread_ranks import ThreadGroup, on_every_rank
from tests.oracle.test_engine import OUTPUT_TOKENS, SETTINGS, prompts, run, transformers_choices
from triton_ops import reference_operators
from triton_ops.cpu import cpu_operators

Checkpoint = Callable[[str], tuple[Path, PreTrainedModel]]

BLOCK_SIZE = 16
FAMILIES = [
    "llama-tied-biased",
    "glm4",
    "qwen3_moe",
    "gemma2",
    "gpt_oss",
    "cohere2",
    "ministral3",
    "olmo3",
]
FAMILIES += ["deepseek_v3", "gemma4_text", "gemma4_text-moe"]
"""All that a layer may be made of: biases, four norms and interleaved rotation, norms of heads and
experts, other activations, caps and sinks, parallel halves, queries that grow, norms over heads,
latents, several shapes of layers, experts beside another part. `test_engine` runs every family eagerly."""
WITH_PIECES = {"glm4", "qwen3_moe", "ministral3"}
"""Families whose pieces are compiled too."""
IN_RANKS = ["glm4", "qwen3_moe", "cohere2", "olmo3", "deepseek_v3", "gemma4_text-moe"]
"""Families whose pieces differ over ranks: norms between sums, experts, one sum, norms that span heads,
latents, two parts side by side."""
COUNTS = [(1, 1), (1, 2), (2, 2), (1, 7), (16, 16), (17, 17), (3, 39), (1, 64)]
"""Rows and tokens: 0 and 1 are what compilers like to take for constants; the rest lies around
powers of two."""


def compiled(decoder: Decoder, *, with_pieces: bool) -> LayerRunner:
    if not cpu_operators().wait():
        pytest.skip(f"nothing can be built: {cpu_operators().problem}")
    layers = LayerRunner.ahead_of_time(
        decoder, block_size=BLOCK_SIZE, operators=cpu_operators(), with_pieces=with_pieces
    )
    layers.start()
    layers.wait()
    assert layers.loaded
    return layers


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_layers_give_the_tokens_of_transformers(
    family: str, checkpoint: Checkpoint
) -> None:
    directory, model = checkpoint(family)
    decoder, config = load_model(directory, "fp32")
    layers = compiled(decoder, with_pieces=family in WITH_PIECES)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS)
    requests = [
        Request(str(number), prompt, params, seed=0) for number, prompt in enumerate(prompts())
    ]
    for setting in [setting for setting in SETTINGS if setting.block_size == BLOCK_SIZE]:
        outputs, _ = run(decoder, config, setting, requests, layers)
        assert outputs == transformers_choices(model, prompts(), outputs), setting
    with reference_operators():
        outputs, _ = run(decoder, config, SETTINGS[0], requests, layers)
    assert outputs == transformers_choices(model, prompts(), outputs)
    for rows, tokens in COUNTS:
        torch.testing.assert_close(
            *hidden_states(decoder, layers, rows, tokens), rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(
            *hidden_states(decoder, layers.in_pieces, rows, tokens), rtol=1e-4, atol=1e-4
        )
    if family in WITH_PIECES:
        check_pieces_of_parts_of_batches(decoder, layers)


@pytest.mark.slow
@pytest.mark.parametrize("family", IN_RANKS)
def test_compiled_pieces_of_two_ranks_compute_what_the_whole_model_does(
    family: str, checkpoint: Checkpoint
) -> None:
    directory, _ = checkpoint(family)
    whole, config = load_model(directory, "fp32")
    shards = make_shards(config, pipeline_parallel=1, tensor_parallel=2)

    def run_rank(rank: int, group: ThreadGroup) -> list[torch.Tensor]:
        decoder, _ = load_model(directory, "fp32", shard=shards[rank], group=group)
        layers = compiled(decoder, with_pieces=False)
        return [hidden_states(decoder, layers, rows, tokens)[0] for rows, tokens in COUNTS]

    first, second = on_every_rank(run_rank, 2)
    for found, other, (rows, tokens) in zip(first, second, COUNTS, strict=True):
        assert torch.equal(found, other)
        expected, _ = hidden_states(whole, LayerRunner(), rows, tokens)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def check_pieces_of_parts_of_batches(decoder: Decoder, layers: LayerRunner) -> None:
    """Rows that lie between others, or apart, as those of host sequences do."""
    config, batch = decoder.config, torch.Generator().manual_seed(1)
    hidden = torch.randn(12, config.hidden_size, generator=batch)
    attended = torch.randn(12, config.num_heads * config.value_dim, generator=batch)
    cos, sin = decoder.rotary[0](torch.arange(12), decoder.dtype)
    for rows in (slice(5, 6), slice(3, 11), slice(1, None, 3)):
        for layer in decoder.layers:
            found = layers.pre_attention(layer, hidden[rows], cos[rows], sin[rows])
            expected = layer.pre_attention(hidden[rows], cos[rows], sin[rows])
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            after = layers.post_attention(layer, attended[rows], hidden[rows])
            torch.testing.assert_close(
                after, layer.post_attention(attended[rows], hidden[rows]), rtol=1e-4, atol=1e-4
            )


@torch.inference_mode()
def hidden_states(
    decoder: Decoder, layers: LayerFunction, rows: int, tokens: int
) -> tuple[torch.Tensor, ...]:
    """Hidden states of equally long prompts, compiled and eager."""
    length = tokens // rows
    blocks = -(-length // BLOCK_SIZE)
    keys, values = layer_caches(decoder.config, rows * blocks, BLOCK_SIZE)
    places = torch.arange(length).repeat(rows)
    attention = PagedAttention(
        config=decoder.config,
        key_caches=keys,
        value_caches=values,
        batch=AttentionBatch(
            block_tables=torch.arange(rows * blocks, dtype=torch.int32).view(rows, blocks),
            query_starts=torch.arange(0, tokens + 1, length, dtype=torch.int32),
            context_lengths=torch.full((rows,), length, dtype=torch.int32),
            slot_mapping=places
            + torch.arange(rows).repeat_interleave(length) * blocks * BLOCK_SIZE,
        ),
    )
    ids = torch.arange(tokens) % decoder.config.vocab_size
    return decoder(ids, places, attention, layers), decoder(ids, places, attention)
