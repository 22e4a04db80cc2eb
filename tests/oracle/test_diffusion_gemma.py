"""DiffusionGemma's encoder and single passes of its canvases, in the decoder by itself, against
transformers' DiffusionGemma."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DiffusionGemmaConfig

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import CanvasConfig, RenoisingConfig
from nanoserve.errors import ModelError, UsageError
from nanoserve.models.attention import AttentionBatch, CanvasInputs, PagedAttention
from nanoserve.models.decoder import Decoder
from nanoserve.models.loading import load_model
from nanoserve.models.packed import PackedMatrix
from nanoserve.models.shards import make_shards
from tests.models.test_decoder import layer_caches
from tests.oracle.checkpoints import VOCAB_SIZE
from tests.oracle.diffusion_gemma import (
    LENGTH,
    TEXT,
    VISION,
    WINDOW,
    canvas_logits,
    encode,
    encoder_logits,
    make_diffusion_gemma,
)
from tests.oracle.test_families import BLOCK_SIZE, TOLERANCE, dense_logits
from triton_ops import packed_linear, reference_operators

BLOCKS_PER_ROW = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("diffusion_gemma")
    return directory, make_diffusion_gemma(directory)


def random_tokens(count: int, seed: int) -> Tensor:
    return torch.randint(3, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed))


@dataclass
class DrivenRow:
    """A row of a step: known tokens behind those of an earlier step, or a whole canvas."""

    sequence: int
    start: int
    tokens: Tensor
    soft_embeddings: Tensor | None = None
    """Soft embeddings of a canvas; None: its tokens are known."""


class Driven:
    """Sequences whose steps a test drives by hand."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.caches = layer_caches(decoder.config, 4 * BLOCKS_PER_ROW, BLOCK_SIZE)

    def step(self, rows: Sequence[DrivenRow]) -> list[Tensor]:
        """The logits of each row, [its tokens, vocab_size]."""
        lengths = [len(row.tokens) for row in rows]
        positions = [torch.arange(row.start, row.start + len(row.tokens)) for row in rows]
        first_slots = [BLOCKS_PER_ROW * BLOCK_SIZE * row.sequence for row in rows]
        slots = [first + own for first, own in zip(first_slots, positions, strict=True)]
        spans = [
            (1, 0) if row.soft_embeddings is None else (len(row.tokens), row.start) for row in rows
        ]
        batch = AttentionBatch(
            block_tables=torch.tensor(
                [
                    [BLOCKS_PER_ROW * row.sequence + block for block in range(BLOCKS_PER_ROW)]
                    for row in rows
                ],
                dtype=torch.int32,
            ),
            query_starts=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int(),
            context_lengths=torch.tensor(
                [row.start + len(row.tokens) for row in rows], dtype=torch.int32
            ),
            slot_mapping=torch.cat(slots),
            spans=torch.tensor(spans, dtype=torch.int32),
        )
        attention = PagedAttention(self.decoder.config, *self.caches, batch)
        tokens = torch.cat([row.tokens for row in rows])
        with torch.inference_mode():
            hidden = self.decoder(
                tokens, torch.cat(positions), attention, canvas=self._canvases(rows)
            )
            logits = self.decoder.compute_logits(hidden)
        return list(logits.split(lengths))

    def _canvases(self, rows: Sequence[DrivenRow]) -> CanvasInputs | None:
        soft = [row.soft_embeddings for row in rows if row.soft_embeddings is not None]
        if not soft:
            return None
        is_canvas = [
            torch.full((len(row.tokens),), row.soft_embeddings is not None) for row in rows
        ]
        flags = torch.cat(is_canvas)
        return CanvasInputs(flags, flags.nonzero()[:, 0], torch.cat(soft))

    def no_expectations(self) -> Tensor:
        """The soft embeddings of a canvas's first step."""
        return torch.zeros(LENGTH, self.decoder.config.hidden_size)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert expected.std() > 0.5, "a flat reference would prove nothing"
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def test_the_encoder_is_that_of_transformers(checkpoint: tuple[Path, Any]) -> None:
    directory, model = checkpoint
    decoder, config = load_model(directory, "fp32")
    assert config.family == "diffusion_gemma_text" and config.eos_token_ids == (2,)
    assert config.canvas == CanvasConfig(LENGTH, mask_token=None, renoising=RenoisingConfig())
    tokens = random_tokens(3 * WINDOW, 0)
    expected = encoder_logits(model, tokens)
    assert_close(dense_logits(decoder, config, tokens), expected)
    driven, found = Driven(decoder), list[Tensor]()
    for start, chunk in zip((0, 5, 18), tokens.split([5, 13, 6]), strict=True):
        found += driven.step([DrivenRow(0, start, chunk)])
    assert_close(torch.cat(found), expected)


@pytest.mark.parametrize("known", [1, WINDOW - 1, WINDOW, 3 * WINDOW + 1])
def test_passes_over_a_canvas_are_those_of_transformers(
    known: int, checkpoint: tuple[Path, Any]
) -> None:
    """The first step, and a later one, which reads what the one before it expected."""
    directory, model = checkpoint
    decoder, _ = load_model(directory, "fp32")
    prompt, canvas = random_tokens(known, 1), random_tokens(LENGTH, 2)
    cache = encode(model, prompt).cache
    first = canvas_logits(model, cache, canvas)
    driven = Driven(decoder)
    driven.step([DrivenRow(0, 0, prompt)])
    (found,) = driven.step([DrivenRow(0, known, canvas, driven.no_expectations())])
    assert_close(found, first)
    processed, canvas = first / 0.6, random_tokens(LENGTH, 3)
    expected = canvas_logits(model, cache, canvas, processed)
    soft = decoder.soft_embeddings(processed)
    (found,) = driven.step([DrivenRow(0, known, canvas, soft)])
    assert_close(found, expected)
    (without,) = driven.step([DrivenRow(0, known, canvas, driven.no_expectations())])
    assert (without - expected).abs().max() > 0.1, "soft embeddings must matter"


def test_a_final_canvas_is_encoded_before_the_next_one(checkpoint: tuple[Path, Any]) -> None:
    """Its keys and values take the place of those that its steps have left, also where an end token
    has cut it."""
    directory, model = checkpoint
    driven = Driven(load_model(directory, "fp32")[0])
    prompt, final = random_tokens(11, 1), random_tokens(LENGTH - 2, 2)
    driven.step([DrivenRow(0, 0, prompt)])
    driven.step([DrivenRow(0, 11, random_tokens(LENGTH, 3), driven.no_expectations())])
    driven.step([DrivenRow(0, 11, final)])
    canvas = random_tokens(LENGTH, 4)
    start = 11 + len(final)
    (found,) = driven.step([DrivenRow(0, start, canvas, driven.no_expectations())])
    cache = encode(model, final, encode(model, prompt).cache).cache
    assert_close(found, canvas_logits(model, cache, canvas))


def test_canvases_and_prompts_share_a_step(checkpoint: tuple[Path, Any]) -> None:
    """Each token has the layers' scale of its own kind."""
    directory, model = checkpoint
    decoder, _ = load_model(directory, "fp32")
    driven = Driven(decoder)
    prompts = [random_tokens(count, count) for count in (10, 19, 27)]
    driven.step([DrivenRow(number, 0, prompt) for number, prompt in enumerate(prompts[:2])])
    canvases = [random_tokens(LENGTH, seed) for seed in (5, 6)]
    expectations = torch.randn(LENGTH, VOCAB_SIZE, generator=torch.Generator().manual_seed(7)) * 5
    rows = [
        DrivenRow(0, 10, canvases[0], driven.no_expectations()),
        DrivenRow(2, 0, prompts[2]),
        DrivenRow(1, 19, canvases[1], decoder.soft_embeddings(expectations)),
    ]
    found = driven.step(rows)
    caches = [encode(model, prompt).cache for prompt in prompts[:2]]
    assert_close(found[0], canvas_logits(model, caches[0], canvases[0]))
    assert_close(found[1], encoder_logits(model, prompts[2]))
    assert_close(found[2], canvas_logits(model, caches[1], canvases[1], expectations))


def numbers_of(matrix: PackedMatrix) -> Tensor:
    """The numbers that a packed matrix stands for, or the packed matrices of all experts."""
    (segment,), (packed,) = matrix.shape.segments, matrix.packed
    units = torch.eye(matrix.shape.columns)
    if not matrix.shape.experts:
        return packed_linear(units, packed, None, segment.rows, segment.format).T
    by_expert = [packed_linear(units, one, None, segment.rows, segment.format).T for one in packed]
    return torch.stack(by_expert)


def test_rounded_weights_condition_canvases_too(checkpoint: tuple[Path, Any]) -> None:
    """A decoder of the numbers that packed matrices stand for computes the same."""
    directory, _ = checkpoint
    rounded, _ = load_model(directory, "fp32", quantization="int8")
    exact, _ = load_model(directory, "fp32")
    packed = set[str]()
    logits = torch.randn(LENGTH, VOCAB_SIZE, generator=torch.Generator().manual_seed(8)) * 5
    passes = []
    with torch.inference_mode(), reference_operators():
        for name, module in rounded.named_modules():
            if isinstance(module, PackedMatrix) and not name.startswith("embedding"):
                exact.get_parameter(name).data = numbers_of(module)
                packed.add(name)
        exact.embedding.weight.data = rounded.embedding(torch.arange(VOCAB_SIZE))
        for decoder in (rounded, exact):
            driven = Driven(decoder)
            driven.step([DrivenRow(0, 0, random_tokens(20, 1))])
            soft = decoder.soft_embeddings(logits)
            passes += driven.step([DrivenRow(0, 20, random_tokens(LENGTH, 2), soft)])
    assert {"self_conditioning.feed_forward.down.weight", "layers.0.feed_forward.down"} < packed
    assert_close(passes[0], passes[1])


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        ({"pipeline_parallel": 2, "tensor_parallel": 1}, "--pp 2: the first layer of diffusion_"),
        ({"pipeline_parallel": 1, "tensor_parallel": 2}, "--tp 2: diffusion_gemma_text reads"),
    ],
)
def test_it_is_not_divided(
    layout: dict[str, int], problem: str, checkpoint: tuple[Path, Any]
) -> None:
    config = ModelConfig.from_directory(checkpoint[0])
    with pytest.raises(UsageError, match=f"^{problem}[^\n]*$"):
        make_shards(config, **layout)


def test_every_default_is_that_of_transformers() -> None:
    """A config.json with the sizes alone, as transformers fills it. It writes no cap of logits: the
    class has one."""
    names = ("num_experts", "top_k_experts", "moe_intermediate_size", "hidden_size")
    text = {name: TEXT[name] for name in (*names, "intermediate_size", "num_hidden_layers")}
    text |= {"model_type": "diffusion_gemma_text", "num_hidden_layers": 6, "num_experts": 8}
    filled = DiffusionGemmaConfig(text_config=text, vision_config=VISION)
    values = json.loads(filled.to_json_string(use_diff=False))
    found = ModelConfig.from_hf({"model_type": "diffusion_gemma", "text_config": text})
    assert values["text_config"].keys() > {"rope_parameters", "per_layer_config", "sliding_window"}
    assert replace(found, bos_token_id=2, eos_token_ids=(1,)) == ModelConfig.from_hf(values)
    assert (found.canvas or CanvasConfig(0, 0)).length == filled.canvas_length
    assert found.logits.soft_cap == filled.text_config.final_logit_softcapping


def test_weights_that_encoder_and_decoder_do_not_share_are_refused(
    checkpoint: tuple[Path, Any],
) -> None:
    config = json.loads((checkpoint[0] / "config.json").read_text())
    with pytest.raises(ModelError, match="tie_word_embeddings false is not supported"):
        ModelConfig.from_hf(config | {"tie_word_embeddings": False})


def test_every_tensor_of_the_text_model_counts(
    checkpoint: tuple[Path, Any], tmp_path: Path
) -> None:
    """Only the encoder's copies of the decoder's weights, and what reads images, are left alone."""
    directory, _ = checkpoint
    (tmp_path / "config.json").symlink_to(directory / "config.json")
    tensors = load_file(directory / "model.safetensors")
    copy = "layers.0.mlp.up_proj.weight"
    tensors[f"model.encoder.language_model.{copy}"] = tensors[f"model.decoder.{copy}"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    load_model(tmp_path, "fp32")
    for name in (
        "model.encoder.language_model.layers.1.layer_scalar",
        "model.decoder.layers.3.layer_scalar",
        "model.decoder.self_conditioning.pre_norm.weight",
    ):
        left = {other: tensor for other, tensor in tensors.items() if other != name}
        save_file(left, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=f"tensor {name} is missing from the checkpoint$"):
            load_model(tmp_path, "fp32")
    tensors["model.decoder.layers.0.self_attn.v_proj.bias"] = torch.ones(32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"v_proj\.bias does not belong to a diffusion_gemma"):
        load_model(tmp_path, "fp32")
