"""Shapes of real models as data, for models with random weights: `dummy:NAME` or `dummy:path/to/config.json`.

The values are those of the models' published config.json files. No torch here: planning and simulation read shapes too.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoserve.config import ModelConfig
from nanoserve.errors import ModelError
from nanoserve.files import read_json_object

DUMMY_PREFIX = "dummy:"


def _shape(
    model_type: str, vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **more: Any
) -> Mapping[str, Any]:
    return {
        "model_type": model_type,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


def _llama3(
    hidden: int, inner: int, layers: int, heads: int, *, factor: float, tied: bool = False
) -> Mapping[str, Any]:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return _shape(
        *("llama", 128256, hidden, inner, layers, heads, 8),
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=scaling,
        tie_word_embeddings=tied,
    )


def _llama2(hidden: int, inner: int, layers: int, heads: int) -> Mapping[str, Any]:
    return _shape("llama", 32000, hidden, inner, layers, heads, heads, max_position_embeddings=4096, rms_norm_eps=1e-5)


def _smollm2(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, theta: float) -> Mapping[str, Any]:
    return _shape(
        *("llama", 49152, hidden, inner, layers, heads, kv_heads),
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=theta,
        tie_word_embeddings=True,
    )


def _qwen2(
    vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, *, tied: bool = False
) -> Mapping[str, Any]:
    return _shape(
        *("qwen2", vocab, hidden, inner, layers, heads, kv_heads),
        max_position_embeddings=32768,
        rope_theta=1e6,
        tie_word_embeddings=tied,
    )


def _qwen3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool = False) -> Mapping[str, Any]:
    return _shape(
        *("qwen3", 151936, hidden, inner, layers, heads, 8),
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1e6,
        tie_word_embeddings=tied,
    )


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "smollm2-135m": _smollm2(576, 1536, 30, 9, 3, 1e5),
    "smollm2-360m": _smollm2(960, 2560, 32, 15, 5, 1e5),
    "smollm2-1.7b": _smollm2(2048, 8192, 24, 32, 32, 1.3e5),
    "llama-2-7b": _llama2(4096, 11008, 32, 32),
    "llama-2-13b": _llama2(5120, 13824, 40, 40),
    "llama-3.2-1b": _llama3(2048, 8192, 16, 32, factor=32.0, tied=True),
    "llama-3.2-3b": _llama3(3072, 8192, 28, 24, factor=32.0, tied=True),
    "llama-3.1-8b": _llama3(4096, 14336, 32, 32, factor=8.0),
    "llama-3.1-70b": _llama3(8192, 28672, 80, 64, factor=8.0),
    "mistral-7b": _shape(
        *("mistral", 32768, 4096, 14336, 32, 32, 8),
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        sliding_window=None,
    ),
    "mixtral-8x7b": _shape(
        "mixtral", 32000, 4096, 14336, 32, 32, 8, max_position_embeddings=32768, sliding_window=None
    ),
    "qwen2.5-0.5b": _qwen2(151936, 896, 4864, 24, 14, 2, tied=True),
    "qwen2.5-1.5b": _qwen2(151936, 1536, 8960, 28, 12, 2, tied=True),
    "qwen2.5-3b": _qwen2(151936, 2048, 11008, 36, 16, 2, tied=True),
    "qwen2.5-7b": _qwen2(152064, 3584, 18944, 28, 28, 4),
    "qwen2.5-14b": _qwen2(152064, 5120, 13824, 48, 40, 8),
    "qwen2.5-32b": _qwen2(152064, 5120, 27648, 64, 40, 8),
    "qwen2.5-72b": _qwen2(152064, 8192, 29568, 80, 64, 8),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),
    "qwen3-30b-a3b": _shape(
        *("qwen3_moe", 151936, 2048, 6144, 48, 32, 4),
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1e6,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
    "glm-4-9b": _shape("glm", 151552, 4096, 13696, 40, 32, 2),
    "glm-4-32b": _shape(
        "glm4", 151552, 6144, 23040, 61, 48, 2, attention_bias=False, max_position_embeddings=32768, rms_norm_eps=1e-5
    ),
}


def dummy_config(spec: str) -> ModelConfig:
    """The config of `NAME` from SHAPES, or of a config.json at that path; a leading "dummy:" is accepted.

    Raises ModelError naming the known shapes when it is neither.
    """
    name = spec.removeprefix(DUMMY_PREFIX)
    if name.endswith(".json"):
        path = Path(name)
        if not path.is_file():
            raise ModelError(f"{path}: no such file; dummy: takes a config.json or a name")
        return ModelConfig.from_hf(read_json_object(path), source=str(path))
    if name.lower() not in SHAPES:
        raise ModelError(f"unknown shape {name!r}; use a path to a config.json or one of: {', '.join(SHAPES)}")
    return ModelConfig.from_hf(SHAPES[name.lower()], source=f"{DUMMY_PREFIX}{name}")
