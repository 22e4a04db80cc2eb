"""Metadata of GGUF files: rope scaling as llama.cpp reads it, missing keys, and values of other
types."""

import math
import re
import struct
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanoserve.config.mixers import GatedDeltaNetConfig, Mamba2Config, MambaConfig
from nanoserve.config.model_config import ModelConfig
from nanoserve.errors import ModelError
from nanoserve.models.decoder import RotaryEmbedding
from nanoserve.models.gguf_checkpoint import GgufCheckpoint
from nanoserve.models.gguf_directory import gguf_config, gguf_directory, model_directory
from nanoserve.models.gguf_file import GgufFile, GgufStrings, open_gguf
from nanoserve.models.hub import resolve_model
from nanoserve.models.loading import load_model
from nanoserve.text.tokenizer import load_tokenizer
from nanoserve.utils.temporary import remove_directory
from tests.models.test_gguf_bad_input import entry, file, tensor, text
from tests.oracle.gguf_files import write_vocabulary

U32, I32, FLOAT, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
PLAIN: Mapping[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 4096,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 1,
    "llama.attention.layer_norm_rms_epsilon": 2.0**-17,
    "llama.rope.freq_base": 5e5,
}


def written(tmp_path: Path, metadata: Mapping[str, Any]) -> Path:
    """A file with these metadata and the tensor that tells the size of a vocabulary."""
    path = tmp_path / "model.gguf"
    entries = [described(key, value) for key, value in metadata.items()]
    path.write_bytes(file(entries, [tensor("token_embd.weight", (8, 64))], 2048))
    return path


def described(key: str, value: Any) -> bytes:
    if isinstance(value, bool):
        return entry(key, BOOL, struct.pack("<?", value))
    if isinstance(value, int):
        return entry(key, I32, struct.pack("<i", value))
    if isinstance(value, float):
        return entry(key, FLOAT, struct.pack("<f", value))
    if isinstance(value, str):
        return entry(key, STRING, text(value))
    if value and isinstance(value[0], str):
        return entry(
            key, ARRAY, struct.pack("<IQ", STRING, len(value)) + b"".join(map(text, value))
        )
    kind, letter = U32, "I"
    if value and isinstance(value[0], float):
        kind, letter = FLOAT, "f"
    elif value and isinstance(value[0], bool):
        kind, letter = BOOL, "?"
    return entry(key, ARRAY, struct.pack(f"<IQ{len(value)}{letter}", kind, len(value), *value))


def angles_of_llama_cpp(
    factor: float, beta_fast: float = 32.0, beta_slow: float = 1.0, original: int = 4096
) -> list[float]:
    """Its rope_yarn for a mixture of 1 (ext_factor): radians per position of each pair of a head of
    64."""

    def corrected(turns: float) -> float:
        return 64 * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(5e5))

    low, high = max(0, math.floor(corrected(beta_fast))), min(63, math.ceil(corrected(beta_slow)))
    angles = []
    for pair in range(32):
        plain = 5e5 ** (-2 * pair / 64)
        mixed = 1 - min(1.0, max(0.0, (pair - low) / max(0.001, high - low)))
        angles.append(plain / factor * (1 - mixed) + plain * mixed)
    return angles


PLAIN_ANGLES = [5e5 ** (-2 * pair / 64) for pair in range(32)]
QUARTERS = [angle / 4 for angle in PLAIN_ANGLES]
YARN = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 1024}
MAGNITUDE = 1 + 0.1 * math.log(4)


@pytest.mark.parametrize(
    ("metadata", "angles", "magnitude"),
    [
        ({}, PLAIN_ANGLES, 1.0),
        ({"scale_linear": 4.0}, QUARTERS, 1.0),
        ({"scaling.factor": 4.0}, QUARTERS, 1.0),
        ({"scaling.factor": 4.0, "scale_linear": 8.0}, QUARTERS, 1.0),
        ({"scaling.type": "linear", "scale_linear": 4.0}, QUARTERS, 1.0),
        (
            {"scaling.type": "linear", "scaling.factor": 4.0, "scaling.finetuned": True},
            QUARTERS,
            1.0,
        ),
        ({"scaling.type": "linear"}, PLAIN_ANGLES, 1.0),
        ({"scaling.factor": 0.0}, PLAIN_ANGLES, 1.0),
        ({"scaling.type": "none", "scaling.factor": 4.0}, PLAIN_ANGLES, 1.0),
        ({"scaling.type": "yarn"}, PLAIN_ANGLES, 1.0),
        ({"scaling.type": "yarn", "scale_linear": 4.0}, angles_of_llama_cpp(4.0), MAGNITUDE),
        (YARN, angles_of_llama_cpp(4.0, original=1024), MAGNITUDE),
        (
            {**YARN, "scaling.attn_factor": 0.75},
            angles_of_llama_cpp(4.0, original=1024),
            0.75 * MAGNITUDE,
        ),
        (
            {**YARN, "scaling.yarn_ext_factor": 1.0, "scaling.yarn_attn_factor": 1.0},
            angles_of_llama_cpp(4.0, original=1024),
            MAGNITUDE,
        ),
        (
            {**YARN, "scaling.yarn_beta_fast": 16.0, "scaling.yarn_beta_slow": 2.0},
            angles_of_llama_cpp(4.0, 16.0, 2.0, 1024),
            MAGNITUDE,
        ),
    ],
)
def test_positions_turn_as_in_llama_cpp(
    metadata: dict[str, Any], angles: list[float], magnitude: float, tmp_path: Path
) -> None:
    more = {f"llama.rope.{key}": value for key, value in metadata.items()}
    rotary = RotaryEmbedding(gguf_config(written(tmp_path, {**PLAIN, **more})).rope)
    assert rotary.inverse_frequencies.tolist() == pytest.approx(angles, rel=2e-6)
    assert rotary.attention_factor == pytest.approx(magnitude)


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        ({"scaling.type": "longrope"}, "rope type 'longrope' is not supported"),
        ({"scaling.factor": -4.0}, "rope factor and rope_theta must be positive"),
        ({**YARN, "scaling.factor": -4.0}, "rope factor and rope_theta must be positive"),
        (
            {"scaling.attn_factor": 0.5},
            "scaling.attn_factor of 0.5 is not supported with rope scaling of type default",
        ),
        (
            {"scale_linear": 4.0, "scaling.attn_factor": 0.5},
            "scaling.attn_factor of 0.5 is not supported with",
        ),
        (
            {"scaling.factor": 4.0, "scaling.yarn_ext_factor": 1.0},
            "scaling.yarn_ext_factor of 1 is not supported with",
        ),
        (
            {**YARN, "scaling.yarn_ext_factor": 0.5},
            "scaling.yarn_ext_factor of 0.5 is not supported with",
        ),
        (
            {**YARN, "scaling.yarn_attn_factor": 0.5},
            "scaling.yarn_attn_factor of 0.5 is not supported with",
        ),
        (
            {**YARN, "scaling.yarn_log_multiplier": 0.1},
            "scaling.yarn_log_multiplier of 0.1 is not supported with",
        ),
        ({"scaling.alpha": 2.0}, "llama.rope.scaling.alpha is not supported"),
        ({"dimension_sections": [8, 8, 8, 8]}, "llama.rope.dimension_sections is not supported"),
    ],
)
def test_angles_that_cannot_be_followed_are_refused(
    metadata: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    path = written(
        tmp_path, {**PLAIN, **{f"llama.rope.{key}": value for key, value in metadata.items()}}
    )
    with pytest.raises(ModelError, match=complaint) as refusal:
        gguf_config(path)
    assert str(refusal.value).startswith(f"{path}: ") and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "key", [key for key in PLAIN if key not in ("general.architecture", "llama.rope.freq_base")]
)
def test_what_llama_cpp_needs_is_not_assumed(key: str, tmp_path: Path) -> None:
    """Keys without which llama.cpp loads no file are needed; it takes a rope.freq_base of
    10,000."""
    left = {other: value for other, value in PLAIN.items() if other != key}
    with pytest.raises(ModelError, match=f"{key} is missing"):
        gguf_config(written(tmp_path, left))


def test_what_llama_cpp_assumes_is_assumed_for_every_family(tmp_path: Path) -> None:
    """Mixtral's configuration class takes a rope_theta of a million, and eight heads of keys."""
    left = {key: value for key, value in PLAIN.items() if key != "llama.rope.freq_base"} | {
        "llama.attention.head_count": 2
    }
    assert gguf_config(written(tmp_path, left)).rope.theta == 1e4
    found = gguf_config(
        written(tmp_path, {**left, "llama.expert_count": 4, "llama.expert_used_count": 2})
    )
    assert (found.family, found.rope.theta, found.num_kv_heads) == ("mixtral", 1e4, 2)
    with pytest.raises(ModelError, match=r"llama\.expert_used_count is missing"):
        gguf_config(written(tmp_path, {**left, "llama.expert_count": 4}))


LFM2_MOE: Mapping[str, Any] = {
    **{key.replace("llama", "lfm2moe"): value for key, value in PLAIN.items()},
    "general.architecture": "lfm2moe",
    "lfm2moe.block_count": 4,
    "lfm2moe.attention.head_count": 4,
    "lfm2moe.attention.head_count_kv": [0, 2, 0, 2],
    "lfm2moe.shortconv.l_cache": 3,
    "lfm2moe.expert_count": 4,
    "lfm2moe.expert_used_count": 2,
    "lfm2moe.expert_feed_forward_length": 32,
    "lfm2moe.expert_gating_func": 2,
    "lfm2moe.leading_dense_block_count": 1,
    "lfm2moe.expert_weights_scale": 1.5,
}


def test_layers_of_lfm2_without_key_value_heads_have_a_state(tmp_path: Path) -> None:
    found = gguf_config(written(tmp_path, LFM2_MOE))
    assert found.recurrent is not None and found.moe is not None
    assert found.recurrent.recurrent_layers == {0, 2} and found.recurrent.kernel_size == 3
    assert (found.num_heads, found.num_kv_heads, found.intermediate_size) == (4, 2, 32)
    assert found.norms.eps == 2.0**-17
    assert found.moe.sparse_layers == {1, 2, 3} and found.moe.weight_scale == 1.5
    assert not found.moe.corrects_choice, "there is no tensor of biases"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"expert_gating_func": 1}, "expert_gating_func of 1 is not supported; only 2 (sigmoid)"),
        (
            {"attention.head_count_kv": 2},
            "head_count_kv is missing or not an array of 4 items of int",
        ),
        ({"attention.head_count_kv": [0, 2]}, "is missing or not an array of 4 items of int"),
        (
            {"attention.head_count_kv": [0, 2, 0, 4]},
            "head_count_kv must be the same in all layers that attend, found [2, 4]",
        ),
        ({"attention.sliding_window": 16}, "attention.sliding_window is not supported"),
        ({"shortconv.l_cache": 0}, "conv_L_cache must be a positive integer, found 0"),
    ],
)
def test_lfm2_that_cannot_be_is_one_line(
    changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    changed = {f"lfm2moe.{key}": value for key, value in changes.items()}
    with pytest.raises(ModelError, match=re.escape(complaint)):
        gguf_config(written(tmp_path, {**LFM2_MOE, **changed}))


JAMBA: Mapping[str, Any] = {
    **{key.replace("llama", "jamba"): value for key, value in PLAIN.items()},
    "general.architecture": "jamba",
    "jamba.block_count": 4,
    "jamba.attention.head_count": 4,
    "jamba.attention.head_count_kv": [0, 2, 0, 2],
    "jamba.expert_count": 4,
    "jamba.expert_used_count": 2,
    "jamba.ssm.conv_kernel": 3,
    "jamba.ssm.inner_size": 128,
    "jamba.ssm.state_size": 8,
    "jamba.ssm.time_step_rank": 5,
}


def with_routers(directory: Path, layers: Sequence[int]) -> Path:
    """A file of Jamba with tensors of routers in these layers."""
    names = ["token_embd.weight", *(f"blk.{layer}.ffn_gate_inp.weight" for layer in layers)]
    tensors = [tensor(name, (8, 64), offset=2048 * number) for number, name in enumerate(names)]
    entries = [described(key, value) for key, value in JAMBA.items()]
    path = directory / "model.gguf"
    path.write_bytes(file(entries, tensors, 2048 * len(names)))
    return path


def test_layers_of_jamba_without_key_value_heads_have_a_state(tmp_path: Path) -> None:
    found = gguf_config(with_routers(tmp_path, [1, 3]))
    assert found.recurrent is not None and found.moe is not None
    assert found.recurrent.recurrent_layers == {0, 2} and found.moe.sparse_layers == {1, 3}
    assert found.recurrent.mixer == MambaConfig(128, 8, 5, has_norms=True)
    assert found.recurrent.kernel_size == 3 and found.rope.kind == "none"
    assert found.moe.intermediate_size == found.intermediate_size == 32
    assert gguf_config(with_routers(tmp_path, [])).moe is None
    with pytest.raises(
        ModelError, match=r"experts in layers \[1, 2\] are not supported: they must"
    ):
        gguf_config(with_routers(tmp_path, [1, 2]))


GRANITE: Mapping[str, Any] = {
    **{key.replace("llama", "granitehybrid"): value for key, value in PLAIN.items()},
    "general.architecture": "granitehybrid",
    "granitehybrid.block_count": 4,
    "granitehybrid.attention.head_count": 4,
    "granitehybrid.attention.head_count_kv": [0, 2, 0, 2],
    "granitehybrid.ssm.conv_kernel": 4,
    "granitehybrid.ssm.inner_size": 128,
    "granitehybrid.ssm.state_size": 8,
    "granitehybrid.ssm.time_step_rank": 4,
    "granitehybrid.ssm.group_count": 1,
    "granitehybrid.rope.scaling.finetuned": False,
    "granitehybrid.residual_scale": 0.25,
    "granitehybrid.logit_scale": 4.0,
}


def test_multipliers_of_granite_that_are_left_out_leave_numbers_as_they_are(tmp_path: Path) -> None:
    """llama.cpp then scales scores as usual, and not by 1, as transformers does."""
    found = gguf_config(written(tmp_path, GRANITE))
    assert (found.residual_multiplier, found.logits.scale, found.embedding.scale) == (0.25, 0.25, 1)
    assert found.attention.scale == 16**-0.5 and found.rope.kind == "none"
    assert found.recurrent is not None and found.recurrent.mixer == Mamba2Config(4, 32, 1, 8)
    assert found.moe is None and found.intermediate_size == 32
    shared = {"expert_shared_feed_forward_length": 24, "expert_count": 3, "expert_used_count": 2}
    more = {f"granitehybrid.{key}": value for key, value in shared.items()}
    moe = gguf_config(written(tmp_path, {**GRANITE, **more})).moe
    assert moe is not None and (moe.shared_size, moe.intermediate_size) == (24, 32)
    rotating = {"granitehybrid.rope.scaling.finetuned": True}
    assert gguf_config(written(tmp_path, {**GRANITE, **rotating})).rope.kind == "default"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"ssm.time_step_rank": 5}, "ssm.time_step_rank 5 does not divide 128"),
        ({"ssm.inner_size": 100}, "ssm.inner_size 100 is not a multiple of the hidden size 64"),
        ({"ssm.group_count": 3}, "4 heads of a state are not a multiple of 3 groups"),
        ({"attention.head_count_kv": 2}, "head_count_kv is missing or not an array of 4 items"),
        ({"logit_scale": -1.0}, "logits_scaling must be at least 1e-06"),
        ({"attention.head_count_kv": [0, 2, 0, 4]}, "must be the same in all layers that attend"),
    ],
)
def test_granite_that_cannot_be_is_one_line(
    changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    changed = {f"granitehybrid.{key}": value for key, value in changes.items()}
    with pytest.raises(ModelError, match=re.escape(complaint)):
        gguf_config(written(tmp_path, {**GRANITE, **changed}))


def test_granite_with_attention_alone_that_does_not_rotate_is_refused(tmp_path: Path) -> None:
    plain = {key.replace("llama", "granite"): value for key, value in PLAIN.items()}
    still = {"general.architecture": "granite", "granite.rope.scaling.finetuned": False}
    with pytest.raises(ModelError, match=r"granite\.rope\.scaling\.finetuned of false is not"):
        gguf_config(written(tmp_path, {**plain, **still}))


QWEN3_5: Mapping[str, Any] = {
    **{key.replace("llama", "qwen35"): value for key, value in PLAIN.items()},
    "general.architecture": "qwen35",
    "qwen35.block_count": 6,
    "qwen35.ssm.conv_kernel": 4,
    "qwen35.ssm.state_size": 8,
    "qwen35.ssm.group_count": 2,
    "qwen35.ssm.time_step_rank": 6,
    "qwen35.ssm.inner_size": 72,
    "qwen35.nextn_predict_layers": 1,
    "qwen35.full_attention_interval": 3,
}


@pytest.mark.parametrize(
    ("changes", "recurrent"),
    [
        ({}, {0, 1, 3, 4}),
        ({"full_attention_interval": 2}, {0, 2, 4}),
        ({"attention.recurrent_layers": [True, False, True, True, False, False]}, {0, 2, 3}),
        ({"attention.recurrent_layers": [False] * 6}, set()),
    ],
)
def test_layers_of_qwen3_5_with_a_state(
    changes: dict[str, Any], recurrent: set[int], tmp_path: Path
) -> None:
    """The last of six layers is for drafts."""
    changed = {f"qwen35.{key}": value for key, value in changes.items()}
    found = gguf_config(written(tmp_path, {**QWEN3_5, **changed}))
    assert found.num_layers == 5
    assert {layer for layer in range(5) if found.is_recurrent(layer)} == recurrent
    if found.recurrent is not None:
        assert found.recurrent.mixer == GatedDeltaNetConfig(2, 6, 8, 12)
        assert found.recurrent.kernel_size == 4


def test_tensors_of_layers_for_drafts_are_left_out(tmp_path: Path) -> None:
    entries = [described(key, value) for key, value in QWEN3_5.items()]
    names = ("token_embd.weight", "blk.4.ffn_norm.weight", "blk.5.ffn_norm.weight")
    tensors = [tensor(name, (8, 64), offset=2048 * number) for number, name in enumerate(names)]
    path = tmp_path / "model.gguf"
    path.write_bytes(file(entries, tensors, 3 * 2048))
    assert list(GgufCheckpoint(path).keys()) == ["token_embd.weight", "blk.4.ffn_norm.weight"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"ssm.time_step_rank": 5}, "ssm.time_step_rank 5 does not divide 72"),
        ({"ssm.time_step_rank": 0}, "ssm.time_step_rank 0 does not divide 72"),
        ({"ssm.group_count": 4}, "linear_num_value_heads 6 is not a multiple of"),
        ({"ssm.group_count": 0}, "linear_num_key_heads must be a positive integer, found 0"),
        ({"nextn_predict_layers": 6}, "num_hidden_layers must be a positive integer, found 0"),
        (
            {"attention.recurrent_layers": [True, False]},
            "recurrent_layers is missing or not an array of 6 items of bool",
        ),
    ],
)
def test_qwen3_5_that_cannot_be_is_one_line(
    changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    changed = {f"qwen35.{key}": value for key, value in changes.items()}
    with pytest.raises(ModelError, match=re.escape(complaint)):
        gguf_config(written(tmp_path, {**QWEN3_5, **changed}))


class Asked(dict[str, Any]):
    """Metadata that remember which keys were looked up."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.keys_asked = set[str]()

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_asked.add(key)
        return super().get(key, default)


VOCABULARY = {
    "tokenizer.ggml.tokens": [*"abcdefg", "ab"],
    "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1, 1, 1],
    "tokenizer.ggml.scores": [-1.0] * 8,
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.chat_template": "{{ messages }}",
}


def test_a_value_of_another_type_is_one_line_whatever_its_key(tmp_path: Path) -> None:
    others = (True, -1, 2.5, "x", memoryview(bytes(8)), memoryview(bytes(8)).cast("f"), ["a", "b"])
    lines = set()
    for model, metadata in (("llama", PLAIN), ("gpt2", LFM2_MOE), ("gpt2", QWEN3_5)):
        path = written(tmp_path, {**metadata, **VOCABULARY, "tokenizer.ggml.model": model})
        found = GgufFile(path)
        asked = Asked(found.metadata)
        found.metadata = asked
        remove_directory(model_directory.__wrapped__(found))
        assert {
            "general.basename",
            "general.sampling.temp",
            "tokenizer.ggml.add_bos_token",
        } < asked.keys_asked
        for key in asked.keys_asked:
            for value in others:
                found.metadata = {**asked, key: value}
                try:
                    remove_directory(model_directory.__wrapped__(found))
                except ModelError as refusal:
                    lines.add(str(refusal))
    assert all(
        line.startswith(f"{path}: ") and "\n" not in line and "<memory" not in line
        for line in lines
    )
    assert f"{path}: general.basename must be of type str, not an array" in lines
    assert f"{path}: llama.block_count must be of type int, not True" in lines


@pytest.mark.parametrize("merges", [["a c"], ["a x"], ["a"], [""], [" a"]])
def test_merges_that_make_no_token_are_one_line(merges: list[str], tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {**PLAIN, **VOCABULARY, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": merges},
    )
    with pytest.raises(ModelError, match="the tokenizer's merges do not fit its tokens") as refusal:
        gguf_directory(path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("letter", "BbHhIifd?Qq")
def test_arrays_of_numbers_take_no_memory(letter: str, tmp_path: Path) -> None:
    kind = {
        "B": 0,
        "b": 1,
        "H": 2,
        "h": 3,
        "I": 4,
        "i": 5,
        "f": 6,
        "?": 7,
        "Q": 10,
        "q": 11,
        "d": 12,
    }[letter]
    count = 200_000
    numbers = struct.pack(f"<IQ{count}{letter}", kind, count, *[1] * (count - 1), 0)
    path = tmp_path / "model.gguf"
    path.write_bytes(
        file(
            [entry("k", ARRAY, numbers), entry("x" * 5, U32, struct.pack("<I", 7))],
            [tensor("w", (4, 16))],
        )
    )
    tracemalloc.start()
    try:
        found = GgufFile(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    array = found.metadata["k"]
    assert isinstance(array, memoryview) and (len(array), array[0], array[-1]) == (count, 1, 0)
    assert found.metadata["x" * 5] == 7
    assert peak < 100_000


def test_arrays_of_strings_take_no_memory(tmp_path: Path) -> None:
    """They are decoded when they are read."""
    count = 200_000
    strings = struct.pack("<IQ", STRING, count) + b"".join(
        text(f"token {number}") for number in range(count)
    )
    path = tmp_path / "model.gguf"
    path.write_bytes(
        file([entry("k", ARRAY, strings), entry("x", STRING, text("é"))], [tensor("w", (4, 16))])
    )
    tracemalloc.start()
    try:
        found = GgufFile(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    array = found.metadata["k"]
    assert isinstance(array, GgufStrings) and len(array) == count
    assert list(array) == list(array) == [f"token {number}" for number in range(count)]
    assert found.metadata["x"] == "é"
    assert peak < 100_000


def test_a_token_that_is_not_utf8_is_one_line(tmp_path: Path) -> None:
    path = written(tmp_path, {**PLAIN, **VOCABULARY, "tokenizer.ggml.model": "llama"})
    path.write_bytes(path.read_bytes().replace(text("g"), text("g")[:-1] + b"\xff"))
    assert gguf_config(path).num_layers == 1  # which reads no tokens
    with pytest.raises(ModelError) as refusal:
        gguf_directory(path)
    assert str(refusal.value) == f"{path}: a text in the header is not UTF-8"


def test_a_header_is_read_once_in_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search for the model, its tokenizer, and each portion of its weights open the same
    file."""
    read: list[Path] = []
    read_header = GgufFile._read_header
    monkeypatch.setattr(
        GgufFile, "_read_header", lambda self: (read.append(self.path), read_header(self))
    )
    path = write_vocabulary(
        tmp_path / "model.gguf", ["a", "b", "c", "Ġ", "ab"], model="gpt2", words="gpt-2"
    )
    found = resolve_model(str(path))
    assert found.directory is not None
    load_tokenizer(found.tokenizer_directory).close()
    load_model(found.directory, "float32")
    assert gguf_config(path).num_layers == 1
    assert read == [path]


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    path = written(tmp_path, PLAIN)
    assert open_gguf(path) is open_gguf(path)
    assert gguf_config(path).max_position_embeddings == 4096
    written(tmp_path, {**PLAIN, "llama.context_length": 2048, "general.name": "another size"})
    assert gguf_config(path).max_position_embeddings == 2048


@pytest.mark.skipif(
    not Path("/proc/self/smaps").exists(), reason="the memory of a mapping is read from Linux"
)
def test_a_closed_checkpoint_keeps_no_memory(tmp_path: Path) -> None:
    """Weights are read in portions, so that a large file never stays in memory as a whole."""
    path = tmp_path / "model.gguf"
    path.write_bytes(file([], [tensor("weight", (1024, 1024))], 4 << 20))
    with GgufCheckpoint(path) as checkpoint:
        assert int(checkpoint.get_slice("weight")[:, :].count_nonzero()) == 0
        assert resident_bytes(path) >= 4 << 20
    assert resident_bytes(path) == 0
    assert open_gguf(path).tensors["weight"].shape == (1024, 1024)


def resident_bytes(path: Path) -> int:
    """Count the bytes of a file's mappings that are in memory."""
    total, is_mapping = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_mapping = line.endswith(str(path))
        elif is_mapping and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_a_generated_directory_reads_as_the_file(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {**PLAIN, **VOCABULARY, "tokenizer.ggml.model": "llama", "llama.rope.scale_linear": 4.0},
    )
    directory = gguf_directory(path)
    shape = gguf_config(path)  # which knows no tokens
    assert ModelConfig.from_directory(directory) == replace(
        shape, bos_token_id=1, eos_token_ids=(2,)
    )
    remove_directory(directory)
