"""EAGLE, EAGLE-3 and Medusa heads with random weights: loaded from the published formats they
compute what a plain reading of those formats does, and files that do not fit are refused in one
line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from nanoserve.config.model_config import ModelConfig
from nanoserve.errors import ModelError
from nanoserve.models.attention import DenseCausalAttention
from nanoserve.models.decoder import Decoder
from nanoserve.models.draft_heads import Eagle3Head, EagleHead, load_eagle, load_medusa
from tests.models.test_decoder import paged
from tests.oracle.checkpoints import FAMILIES

VOCABULARY, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LENGTH = 90, 24, 40, 4, 2, 6, 13
DRAFT_VOCABULARY = 30
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
}
EAGLE3 = CONFIG | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": DRAFT_VOCABULARY,
}


def target_of(family: str) -> Decoder:
    """A random target with the sizes of the heads and six layers."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 6,
        "layer_types": None,
    }
    torch.manual_seed(1)
    return Decoder(ModelConfig.from_hf(FAMILIES[family]().to_dict() | sizes)).eval()


def random(*shape: int) -> Tensor:
    return torch.randn(shape) * 0.3


def layer_tensors(prefix: str, width: int) -> dict[str, Tensor]:
    """A Llama layer whose attention takes vectors of this width, without the norms before
    attention."""
    query, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    return {
        f"{prefix}self_attn.q_proj.weight": random(query, width),
        f"{prefix}self_attn.k_proj.weight": random(kv, width),
        f"{prefix}self_attn.v_proj.weight": random(kv, width),
        f"{prefix}self_attn.o_proj.weight": random(HIDDEN, query),
        f"{prefix}mlp.gate_proj.weight": random(INNER, HIDDEN),
        f"{prefix}mlp.up_proj.weight": random(INNER, HIDDEN),
        f"{prefix}mlp.down_proj.weight": random(HIDDEN, INNER),
        f"{prefix}post_attention_layernorm.weight": 1 + random(HIDDEN),
    }


def eagle_tensors(*, biased: bool) -> dict[str, Tensor]:
    tensors = layer_tensors("layers.0.", HIDDEN) | {"fc.weight": random(HIDDEN, 2 * HIDDEN)}
    return (
        tensors
        | {"embed_tokens.weight": random(VOCABULARY, HIDDEN)}
        | ({"fc.bias": random(HIDDEN)} if biased else {})
    )


def eagle3_tensors(width: int = HIDDEN) -> dict[str, Tensor]:
    targets = torch.randperm(VOCABULARY)[:DRAFT_VOCABULARY].sort().values
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm")
    return {
        **layer_tensors("midlayer.", 2 * HIDDEN),
        **{f"{name}.weight": 1 + random(HIDDEN) for name in norms},
        "fc.weight": random(HIDDEN, 3 * width),
        "lm_head.weight": random(DRAFT_VOCABULARY, HIDDEN),
        "d2t": targets - torch.arange(DRAFT_VOCABULARY),
        "t2d": torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, targets, value=True),
    }


def medusa_tensors() -> dict[str, Tensor]:
    blocks = {
        f"{head}.{layer}.linear.weight": random(HIDDEN, HIDDEN)
        for head in range(3)
        for layer in range(2)
    }
    biases = {
        f"{head}.{layer}.linear.bias": random(HIDDEN) for head in range(3) for layer in range(2)
    }
    return blocks | biases | {f"{head}.2.weight": random(VOCABULARY, HIDDEN) for head in range(3)}


def write(
    directory: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    name: str = "model.safetensors",
) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / name)
    return directory


# ---- the plain reading of the formats ------------------------------------------------------------


def norm(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden / (hidden.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turn(heads: Tensor) -> Tensor:
    """Rotary embedding of [T, H, D], whose rows are positions from 0 on, by complex numbers."""
    half = HEAD_DIM // 2
    angles = torch.arange(len(heads))[:, None] / 5000.0 ** (torch.arange(half) / half)
    turned = (
        torch.complex(heads[..., :half], heads[..., half:])
        * torch.polar(torch.ones(angles.shape), angles)[:, None]
    )
    return torch.cat((turned.real, turned.imag), -1)


def run_layer(tensors: dict[str, Tensor], prefix: str, normed: Tensor, residual: Tensor) -> Tensor:
    """A Llama layer on one sequence: normed [T, width] goes into attention, residual [T, HIDDEN]
    around it."""
    weights = {
        name.removeprefix(prefix).removesuffix(".weight"): found for name, found in tensors.items()
    }
    query, key, value = (
        (normed @ weights[f"self_attn.{kind}_proj"].T).view(len(normed), -1, HEAD_DIM)
        for kind in "qkv"
    )
    query, key = turn(query), turn(key).repeat_interleave(HEADS // KV_HEADS, 1)
    value = value.repeat_interleave(HEADS // KV_HEADS, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / HEAD_DIM**0.5
    scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)
    residual = residual + attended @ weights["self_attn.o_proj"].T
    inner = norm(residual, weights["post_attention_layernorm"])
    gated = functional.silu(inner @ weights["mlp.gate_proj"].T) * (inner @ weights["mlp.up_proj"].T)
    return residual + gated @ weights["mlp.down_proj"].T


def tokens_and_features(width: int) -> tuple[Tensor, Tensor]:
    return torch.randint(VOCABULARY, (LENGTH,)), torch.randn(LENGTH, width)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("biased", [False, True])
def test_an_eagle_head_draft_tokens_the_next_feature_from_a_token_and_a_feature(
    tmp_path: Path, family: str, *, biased: bool
) -> None:
    target, tensors = target_of(family), eagle_tensors(biased=biased)
    head = load_eagle(write(tmp_path, CONFIG, tensors), target)
    assert type(head) is EagleHead
    assert head.feature_layers == ()
    tokens, features = tokens_and_features(HIDDEN)
    with torch.inference_mode():
        pairs = head.pair(tokens, head.fuse(features))
        found = head(pairs, torch.arange(LENGTH), DenseCausalAttention(head.config, 1, LENGTH))
        pair = torch.cat((target.embedding.weight[tokens], features), -1) @ tensors["fc.weight"].T
        pair = pair + tensors.get("fc.bias", torch.zeros(HIDDEN))
        expected = run_layer(tensors, "layers.0.", pair, pair)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
        logits = expected @ target.lm_head.weight.T
        torch.testing.assert_close(head.compute_logits(found), logits, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("own_embedding", [False, True])
def test_an_eagle_3_head_reads_three_layers_and_answers_in_the_targets_vocabulary(
    tmp_path: Path, family: str, *, own_embedding: bool
) -> None:
    target, tensors = target_of(family), eagle3_tensors()
    if own_embedding:
        tensors["embed_tokens.weight"] = random(VOCABULARY, HIDDEN)
    head = load_eagle(write(tmp_path, EAGLE3, tensors), target)
    assert isinstance(head, Eagle3Head)
    # inputs of layers 2, 6 // 2 and 6 - 3, as their authors count
    assert head.feature_layers == (1, 2, 2)
    tokens, features = tokens_and_features(3 * HIDDEN)
    with torch.inference_mode():
        pairs = head.pair(tokens, head.fuse(features))
        found = head(pairs, torch.arange(LENGTH), DenseCausalAttention(head.config, 1, LENGTH))
        fused = features @ tensors["fc.weight"].T
        embedded = tensors.get("embed_tokens.weight", target.embedding.weight)[tokens]
        embedded = norm(embedded, tensors["midlayer.input_layernorm.weight"])
        pair = torch.cat((embedded, norm(fused, tensors["midlayer.hidden_norm.weight"])), -1)
        expected = run_layer(tensors, "midlayer.", pair, fused)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
        logits = norm(expected, tensors["norm.weight"]) @ tensors["lm_head.weight"].T
        answered = head.compute_logits(found)
    assert answered.shape == (LENGTH, VOCABULARY)
    targets = [draft + offset for draft, offset in enumerate(tensors["d2t"].tolist())]
    torch.testing.assert_close(answered[:, targets], logits, atol=2e-5, rtol=1e-4)
    assert (answered.isfinite().sum(1) == DRAFT_VOCABULARY).all()
    assert answered[:, tensors["t2d"]].isfinite().all()


def test_an_eagle_3_head_may_be_narrower_than_its_target_and_name_its_layers(
    tmp_path: Path,
) -> None:
    config = EAGLE3 | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 4, 5]}}
    torch.manual_seed(1)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 6,
        "layer_types": None,
    }
    target = Decoder(ModelConfig.from_hf(FAMILIES["qwen3"]().to_dict() | sizes))
    tensors = eagle3_tensors(width=32)
    with pytest.raises(ModelError, match="hidden_size 24, the model 32"):
        load_eagle(write(tmp_path, config, tensors), target)
    tensors["embed_tokens.weight"] = random(VOCABULARY, HIDDEN)
    head = load_eagle(write(tmp_path, config, tensors), target)
    assert head.feature_layers == (0, 4, 5)
    assert head.fuse(torch.randn(2, 96)).shape == (2, HIDDEN)


@pytest.mark.parametrize(
    "tensors", [eagle_tensors(biased=True), eagle3_tensors()], ids=["eagle", "eagle3"]
)
def test_a_head_over_a_paged_cache_equals_each_sequence_alone(
    tmp_path: Path, tensors: dict[str, Tensor]
) -> None:
    config = EAGLE3 if "d2t" in tensors else CONFIG
    head, lengths = load_eagle(write(tmp_path, config, tensors), target_of("llama")), [1, 9, 4]
    tokens, positions = (
        torch.randint(VOCABULARY, (14,)),
        torch.cat([torch.arange(length) for length in lengths]),
    )
    features = torch.randn(14, HIDDEN)
    with torch.inference_mode():
        pairs = head.pair(tokens, features)
        together = head(pairs, positions, paged(head.config, lengths)).split(lengths)
        for found, inputs in zip(together, pairs.split(lengths), strict=True):
            dense = DenseCausalAttention(head.config, 1, len(inputs))
            alone = head(inputs, torch.arange(len(inputs)), dense)
            torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["medusa_lm_head.safetensors", "model.safetensors"])
def test_medusa_heads_are_residual_blocks_and_a_matrix(tmp_path: Path, name: str) -> None:
    tensors, config = medusa_tensors(), {"medusa_num_heads": 3, "medusa_num_layers": 2}
    heads = load_medusa(write(tmp_path, config, tensors, name), target_of("qwen3"))
    hidden = torch.randn(5, HIDDEN)
    with torch.inference_mode():
        found = heads(hidden, 2)
        assert len(heads(hidden, 9)) == 3
    assert found.shape == (2, 5, VOCABULARY)
    for number, logits in enumerate(found):
        expected = hidden
        for layer in range(2):
            weight, bias = (
                tensors[f"{number}.{layer}.linear.{kind}"] for kind in ("weight", "bias")
            )
            expected = expected + functional.silu(expected @ weight.T + bias)
        torch.testing.assert_close(
            logits, expected @ tensors[f"{number}.2.weight"].T, atol=2e-5, rtol=1e-4
        )


# ---- refusals ------------------------------------------------------------------------------------


def refusal(load: Callable[[Path, Decoder], object], directory: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(directory, target_of("llama"))
    message = str(caught.value)
    assert "\n" not in message
    assert str(directory) in message
    return message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"vocab_size": 91},
            "the head has vocab_size 91, the model 90; it was made for another model",
        ),
        (
            {"hidden_size": 32},
            "the head has hidden_size 32, the model 24; it was made for another model",
        ),
        ({"num_hidden_layers": 2}, "only EAGLE heads of one dense layer are read; this has 2"),
        ({"intermediate_size": 48}, "tensor layers.0.mlp.gate_proj.weight has shape [40, 24]"),
    ],
)
def test_an_eagle_head_of_another_size_is_refused(
    tmp_path: Path, change: dict[str, int], said: str
) -> None:
    assert said in refusal(
        load_eagle, write(tmp_path, CONFIG | change, eagle_tensors(biased=False))
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"draft_vocab_size": 20}, "d2t does not lead from 20 tokens to tokens of the target"),
        ({"draft_vocab_size": 0}, "draft_vocab_size must be an integer from 1 on, found 0"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}},
            "reads the layers [1, 3, 6], the target has 6",
        ),
    ],
)
def test_an_eagle_3_head_that_does_not_fit_is_refused(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    assert said in refusal(load_eagle, write(tmp_path, EAGLE3 | change, eagle3_tensors()))


def test_offsets_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    tensors = eagle3_tensors()
    tensors["d2t"][-1] = VOCABULARY
    assert "d2t does not lead from 30 tokens" in refusal(
        load_eagle, write(tmp_path, EAGLE3, tensors)
    )


def test_medusa_heads_of_another_width_or_number_are_refused(tmp_path: Path) -> None:
    wide = medusa_tensors() | {"0.0.linear.weight": random(HIDDEN + 1, HIDDEN)}
    assert "0.0.linear.weight has shape" in refusal(
        load_medusa, write(tmp_path, {"medusa_num_layers": 2}, wide)
    )
    config = {"medusa_num_heads": 2, "medusa_num_layers": 2}
    assert "tensor 2." in refusal(load_medusa, write(tmp_path, config, medusa_tensors()))
    assert "tensor 3." in refusal(
        load_medusa, write(tmp_path, config | {"medusa_num_heads": 4}, medusa_tensors())
    )


@pytest.mark.parametrize("pickle", ["pytorch_model.bin", "medusa_lm_head.pt"])
def test_a_pickled_head_is_refused(tmp_path: Path, pickle: str) -> None:
    write(tmp_path, CONFIG, {})
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / pickle).write_bytes(b"\x80\x04.")
    for load in load_eagle, load_medusa:
        assert "which are not read; convert them to safetensors" in refusal(load, tmp_path)


def test_a_damaged_head_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path, CONFIG, eagle_tensors(biased=False))
    tensors = load_file(directory / "model.safetensors")
    tensors["fc.weight"][3, 3] = torch.nan
    save_file(tensors, directory / "model.safetensors")
    assert "fc.weight has NaN or infinite values" in refusal(load_eagle, directory)
    del tensors["fc.weight"]
    save_file(tensors, directory / "model.safetensors")
    assert "tensor fc.weight is missing" in refusal(load_eagle, directory)
    (directory / "model.safetensors").write_bytes(b"not safetensors")
    assert "not a complete safetensors file" in refusal(load_eagle, directory)
