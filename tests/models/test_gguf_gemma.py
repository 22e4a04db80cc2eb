"""Gemma and gpt-oss in GGUF files: keys of layers that differ, what is refused, and tokenizers."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from nanoserve.config.model_config import ModelConfig
from nanoserve.errors import ModelError
from nanoserve.models.gguf_checkpoint import GgufCheckpoint
from nanoserve.models.gguf_directory import gguf_config, gguf_directory
from nanoserve.text.tokenizer import load_tokenizer
from tests.oracle.gguf_files import BYTES, write_vocabulary

SIZES: Mapping[str, Any] = {
    "block_count": 6,
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 32,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.sliding_window": 20,
    "rope.freq_base": 1e6,
}
GEMMA4: Mapping[str, Any] = {
    **SIZES,
    "attention.key_length_swa": 16,
    "attention.sliding_window_pattern": [True, True, False] * 2,
    "attention.shared_kv_layers": 3,
    "embedding_length_per_layer_input": 0,
}
HALF_TURN = (1.0,) * 8 + (1e30,) * 8


def written(
    tmp_path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Sequence[str] = (),
    factors: Sequence[float] = HALF_TURN,
) -> Path:
    """A file with these keys, tensors of zeros and these divisors of frequencies."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        add = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        add[type(value)](f"{architecture}.{key}", value)
    for name in ("token_embd.weight", *tensors):
        writer.add_tensor(name, np.zeros((8, 64), np.float32))
    if architecture == "gemma4" and factors:
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def windows(config: ModelConfig) -> list[bool]:
    return [window > 0 for window in config.layers.sliding_windows]


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("gemma2", {}, [True, False] * 3),
        ("gemma3", {}, [True] * 5 + [False]),
        ("gpt-oss", {}, [True, False] * 3),
        ("gemma3", {"attention.sliding_window_pattern": 3}, [True, True, False] * 2),
        (
            "gemma3",
            {"attention.sliding_window_pattern": [False, True, True] * 2},
            [False, True, True] * 2,
        ),
    ],
)
def test_layers_with_a_window(
    architecture: str, changes: dict[str, Any], expected: list[bool], tmp_path: Path
) -> None:
    experts = {"expert_count": 2, "expert_used_count": 1, "expert_feed_forward_length": 32}
    keys = {**SIZES, **changes}
    if architecture == "gpt-oss":
        keys |= experts
    assert windows(gguf_config(written(tmp_path, architecture, keys))) == expected


def test_layers_of_gemma_3_turn_at_two_speeds(tmp_path: Path) -> None:
    stretched = {**SIZES, "rope.scaling.factor": 8.0}
    found = gguf_config(written(tmp_path, "gemma3", stretched))
    assert [(rope.theta, rope.factor) for rope in found.layers.ropes] == [(1e4, 1.0)] * 5 + [
        (1e6, 8.0)
    ]
    own = {**SIZES, "rope.freq_base_swa": 2e4}
    found = gguf_config(written(tmp_path, "gemma3", own))
    assert found.layers.ropes[0].theta == 2e4


@pytest.mark.parametrize(("architecture", "largest"), [("gemma2", 46), ("gemma3", 62)])
def test_scores_of_the_largest_are_scaled_by_width(
    architecture: str, largest: int, tmp_path: Path
) -> None:
    """A head has 32 of 64 dimensions, of which each of 4 heads would have 16."""
    for layers, width in ((largest, 16), (26, 32)):
        path = written(tmp_path, architecture, {**SIZES, "block_count": layers})
        assert gguf_config(path).attention.scale == pytest.approx(width**-0.5)


def test_layers_of_gemma_4(tmp_path: Path) -> None:
    doubled = {"feed_forward_length": [32] * 3 + [64] * 3}
    counts = {"attention.head_count_kv": [2, 2, 1] * 2}
    tensors = ["blk.2.attn_k.weight"]
    path = written(tmp_path, "gemma4", {**GEMMA4, **doubled, **counts}, tensors)
    found = gguf_config(path)
    assert windows(found) == [True, True, False] * 2
    assert [tuple(shape) for shape in found.layers.shapes] == [
        (16, 2, 32, False, True),
        (16, 2, 32, False, True),
        (32, 1, 32, True, True),
        (16, 2, 64, False, False),
        (16, 2, 64, False, False),
        (32, 1, 64, True, False),
    ]
    assert found.layers.kv_sources == (0, 1, 2, 1, 1, 2)
    full, sliding = found.layers.ropes[2], found.layers.ropes[0]
    assert (full.kind, full.theta, full.proportion) == ("proportional", 1e6, 0.5)
    assert (sliding.kind, sliding.theta) == ("default", 1e4)


@pytest.mark.parametrize(
    ("changes", "tensors", "factors", "complaint"),
    [
        ({"rope.dimension_count_swa": 8}, (), HALF_TURN, "must be the whole head of 16, not 8"),
        ({"rope.freq_base_other": 1.0}, (), HALF_TURN, "rope.freq_base_other is not supported"),
        ({"rope.scaling.type": 1}, (), HALF_TURN, "must be of type str"),
        (
            {"feed_forward_length": [32] * 4 + [64] * 2},
            (),
            HALF_TURN,
            "feed_forward_length must be 32, and perhaps 64 in the last 3",
        ),
        ({}, (), (), "rope_freqs.weight must have ones"),
        ({}, (), (2.0,) * 16, "rope_freqs.weight must have ones"),
        ({}, ("blk.0.ffn_gate_inp.weight",), HALF_TURN, "mixture of experts"),
    ],
)
def test_gemma_4_that_cannot_be_is_one_line(
    changes: dict[str, Any],
    tensors: Sequence[str],
    factors: Sequence[float],
    complaint: str,
    tmp_path: Path,
) -> None:
    path = written(tmp_path, "gemma4", {**GEMMA4, **changes}, tensors, factors)
    with pytest.raises(ModelError, match=re.escape(complaint)):
        gguf_config(path)


def test_gate_and_up_of_gpt_oss_belong_together(tmp_path: Path) -> None:
    path = written(tmp_path, "gpt-oss", SIZES, ["blk.0.ffn_gate_exps.bias"])
    with pytest.raises(ModelError, match=r"ffn_up_exps.bias must have the same shape and type"):
        GgufCheckpoint(path)


def test_gemma_4_merges_characters(tmp_path: Path) -> None:
    """Spaces are characters of words, and bytes spell a character that is no token."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *BYTES]
    words = ["<turn|>", "a", "b", "▁", "é", "\n", "ab", "▁ab", "\n\n"]
    ids = {word: number for number, word in enumerate(words, start=len(tokens))}
    types = [3, 3, 3, 2] + [6] * 256 + [3] + [1] * 8
    path = write_vocabulary(
        tmp_path / "model.gguf",
        tokens + words,
        model="gpt2",
        words="gemma4",
        types=types,
        merges=["a b", "▁ ab", "\n \n"],
        bos_token_id=2,
        eos_token_id=1,
        unknown_token_id=3,
    )
    tokenizer = load_tokenizer(gguf_directory(path))
    found = tokenizer.encode("ab  ab\n\nüé")
    spelled = [ids[word] for word in ("ab", "▁", "▁ab", "\n\n")]
    assert found == [2, *spelled, 4 + 0xC3, 4 + 0xBC, ids["é"]]
    assert tokenizer.decode(found) == "ab  ab\n\nüé"
    tokenizer.close()


def test_words_of_gpt_oss(tmp_path: Path) -> None:
    """Capitals begin words, endings such as n't belong to them, digits are in threes."""
    path = write_vocabulary(tmp_path / "model.gguf", ["a", "b", "ab"], model="gpt2", words="gpt-4o")
    tokenizer = Tokenizer.from_file(str(gguf_directory(path) / "tokenizer.json"))
    text = "CamelCase DON'T 12345 x/\n\n  y"
    found = [
        text[first:after] for _, (first, after) in tokenizer.pre_tokenizer.pre_tokenize_str(text)
    ]
    expected = ["Camel", "Case", " DON'T", " ", "123", "45", " x", "/\n\n", " ", " y"]
    assert found == expected
