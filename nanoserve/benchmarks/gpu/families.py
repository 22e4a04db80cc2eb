"""Small random models of every family, in the shapes that the GPU's kernels take."""

from collections.abc import Mapping
from typing import Any

VOCAB_SIZE = 4096
"""As many tokens as the tokenizer of dummy models knows."""

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_SPARSE = {"moe_intermediate_size": 64, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True}


def _family(model_type: str, **settings: Any) -> dict[str, Any]:
    return {"model_type": model_type, **_SHAPE, **settings}


FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": _family("llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama-llama3": _family("llama", rope_parameters=_LLAMA3_ROPE),
    "llama-yarn": _family("llama", rope_parameters=_YARN_ROPE),
    "mistral": _family("mistral", sliding_window=24),
    "qwen2": _family("qwen2", head_dim=80, num_key_value_heads=1),
    "qwen2-window": _family("qwen2", use_sliding_window=True, sliding_window=20, max_window_layers=1),
    "qwen3": _family("qwen3", head_dim=128, tie_word_embeddings=True),
    "glm": _family("glm", attention_bias=True),
    "glm4": _family("glm4", head_dim=256),
    "mixtral": _family("mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=24),
    "qwen3_moe": _family("qwen3_moe", mlp_only_layers=[1], **_SPARSE),
}
"""As config.json would say it: biases, ties, windows, ropes and experts in every combination that the decoder knows."""
