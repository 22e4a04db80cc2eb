"""Read from a GGUF file's metadata which layers have a window or rotate, how queries grow, and what
attention over latents needs: keys of config.json."""

import math
from collections.abc import Mapping
from typing import Any

from nanoserve.models.gguf_file import GgufFile, is_array
from nanoserve.models.gguf_recurrent import num_drafting_layers

_SOFTMAX, _SIGMOID = 1, 2
"""The numbers that GGUF has for the functions of a router's logits."""
_MULTIPLIER_SHARE = 0.1
"""The factor of YaRN's logarithm, which files of DeepSeek have in the multiplier."""
_WINDOW_PERIOD = 4
"""The period of layers without a window where a file does not say which these are."""


def olmo(file: GgufFile, architecture: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Read Olmo 3. Its layers with a window are never stretched. Olmo 2 has no windows."""
    theta = file.get(f"{architecture}.rope.freq_base_swa", float, rope["rope_theta"])
    found: dict[str, Any] = {
        "rope_parameters": {
            "full_attention": dict(rope),
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        }
    }
    if file.get(f"{architecture}.attention.sliding_window", int, 0):
        found["layer_types"] = _layers_with_windows(file, architecture)
    return found


def cohere(file: GgufFile, architecture: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Read Cohere 2, in which only layers with a window rotate."""
    if rope["partial_rotary_factor"] != 1:
        raise file.fail(f"{architecture}.rope.dimension_count must be the size of a head")
    return {
        "layer_norm_eps": file.need(f"{architecture}.attention.layer_norm_epsilon", float),
        "logit_scale": file.need(f"{architecture}.logit_scale", float),
        "sliding_window": file.need(f"{architecture}.attention.sliding_window", int),
        "layer_types": _layers_with_windows(file, architecture),
    }


def ministral(file: GgufFile, architecture: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Read Ministral 3, whose queries grow with their position."""
    scaled = dict(rope)
    scaled["llama_4_scaling_beta"] = file.get(
        f"{architecture}.attention.temperature_scale", float, 0.0
    )
    if rope["rope_type"] == "yarn":
        key = f"{architecture}.rope.scaling.yarn_log_multiplier"
        multiplier = file.get(key, float, 0.0)
        if multiplier < 0:
            raise file.fail(f"{key} must not be negative, found {multiplier:g}")
        scaled["attention_factor"] /= _magnitude(rope["factor"], multiplier)
    return {"rope_parameters": scaled}


def latent_attention(file: GgufFile, architecture: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Read DeepSeek-V2, V3 and GLM-4.7-Flash, which llama.cpp calls deepseek2 alike. The last
    layers may be for drafts, which are left out."""
    for key in ("attention.temperature_scale", "rope.scaling.attn_factor"):
        if f"{architecture}.{key}" in file.metadata:
            raise file.fail(f"{architecture}.{key} is not supported")
    if f"{architecture}.attention.key_length_mla" not in file.metadata:
        raise file.fail(
            f"{architecture}.attention.key_length_mla is missing, as in files of before April "
            "2025; take a newer file, or convert the model again"
        )
    num_layers = file.need(f"{architecture}.block_count", int)
    rotated = file.need(f"{architecture}.rope.dimension_count", int)
    return _experts(file, architecture) | {
        "num_hidden_layers": num_layers - num_drafting_layers(file, architecture),
        "num_key_value_heads": file.need(f"{architecture}.attention.head_count", int),
        "q_lora_rank": file.find(f"{architecture}.attention.q_lora_rank", int),
        "kv_lora_rank": file.need(f"{architecture}.attention.kv_lora_rank", int),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": file.need(f"{architecture}.attention.key_length_mla", int) - rotated,
        "v_head_dim": file.need(f"{architecture}.attention.value_length_mla", int),
        "rope_parameters": _latent_rope(file, architecture, rope),
    }


def _latent_rope(file: GgufFile, architecture: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    """The rope, with the multiplier that sharpens scores. It stands for two numbers of config.json,
    mscale and mscale_all_dim, which are equal. So rotated dimensions keep their size."""
    scaled = dict(rope)
    multiplier = file.get(f"{architecture}.rope.scaling.yarn_log_multiplier", float, 0.0)
    if rope["rope_type"] == "yarn" and multiplier != 0:
        scaled["attention_factor"] = 1.0
        scaled["mscale_all_dim"] = multiplier / _MULTIPLIER_SHARE
    return scaled


def _experts(file: GgufFile, architecture: str) -> dict[str, Any]:
    """The experts, and the family, which is told by the function of the router's logits. Files of
    GLM-4.7-Flash do not name it."""
    num_dense = file.get(f"{architecture}.leading_dense_block_count", int, 0)
    has_bias = f"blk.{num_dense}.exp_probs_b.bias" in file.tensors
    key = f"{architecture}.expert_gating_func"
    function = file.get(key, int, 0)
    family = {_SOFTMAX: "deepseek_v2", _SIGMOID: "deepseek_v3"}.get(function)
    if function == 0:
        family = "glm4_moe_lite" if has_bias else "deepseek_v2"
    if family is None:
        raise file.fail(f"{key} of {function} is not supported; only 1 (softmax) and 2 (sigmoid)")
    normalizes = file.get(f"{architecture}.expert_weights_norm", bool, False)
    if family == "deepseek_v2" and normalizes:
        raise file.fail(
            f"{architecture}.expert_weights_norm is not supported with a softmax of the router"
        )
    num_groups = file.get(f"{architecture}.expert_group_count", int, 1)
    scale = file.get(f"{architecture}.expert_weights_scale", float, 0.0)
    if scale == 0:  # llama.cpp's word for none
        scale = 1.0
    return {
        "model_type": family,
        "n_routed_experts": file.need(f"{architecture}.expert_count", int),
        "n_shared_experts": file.get(f"{architecture}.expert_shared_count", int, 0),
        "first_k_dense_replace": num_dense,
        "norm_topk_prob": normalizes,
        "routed_scaling_factor": scale,
        "n_group": num_groups,
        "topk_group": file.get(f"{architecture}.expert_group_used_count", int, 1),
        "topk_method": "greedy" if num_groups == 1 else "group_limited_greedy",
    }


def _layers_with_windows(file: GgufFile, architecture: str) -> list[str]:
    """Whether each layer has a window: an array says so, or the period of layers without one."""
    key = f"{architecture}.attention.sliding_window_pattern"
    num_layers = file.need(f"{architecture}.block_count", int)
    if is_array(file.metadata.get(key)):
        slides = file.listed(key, bool, num_layers)
    else:
        period = max(1, file.get(key, int, _WINDOW_PERIOD))
        slides = [(layer + 1) % period != 0 for layer in range(num_layers)]
    kinds = {True: "sliding_attention", False: "full_attention"}
    return [kinds[has_window] for has_window in slides]


def _magnitude(factor: float, scale: float) -> float:
    """YaRN's factor of rotated dimensions in a context that is ``factor`` times as long."""
    if factor <= 1:
        return 1.0
    return 0.1 * scale * math.log(factor) + 1.0
