"""Read from a GGUF file's metadata what models with recurrent states have beside attention: keys of
config.json."""

from typing import Any

from nanoserve.models.gguf_file import GgufFile

_SIGMOID = 2
"""The number that GGUF has for the function of a router's logits."""


def short_convolutions(file: GgufFile, architecture: str) -> dict[str, Any]:
    """Read LFM2. Layers without key-value heads are short convolutions."""
    key = f"{architecture}.attention.head_count_kv"
    counts = file.whole_numbers(key, file.need(f"{architecture}.block_count", int))
    attending = sorted(set(counts) - {0})
    if len(attending) > 1:
        raise file.fail(f"{key} must be the same in all layers that attend, found {attending}")
    if file.get(f"{architecture}.attention.sliding_window", int, 0):
        raise file.fail(f"{architecture}.attention.sliding_window is not supported")
    kinds = {0: "conv"} | dict.fromkeys(attending, "full_attention")
    found: dict[str, Any] = {
        "layer_types": [kinds[count] for count in counts],
        "conv_L_cache": file.need(f"{architecture}.shortconv.l_cache", int),
        "norm_eps": file.need(f"{architecture}.attention.layer_norm_rms_epsilon", float),
        "block_auto_adjust_ff_dim": False,
    }
    if attending:
        found["num_key_value_heads"] = attending[0]
    if architecture == "lfm2moe":
        found |= _sigmoid_experts(file, architecture)
    return found


def _sigmoid_experts(file: GgufFile, architecture: str) -> dict[str, Any]:
    """How the router of LFM2 chooses and weights experts, and in which layers."""
    key = f"{architecture}.expert_gating_func"
    function = file.need(key, int)
    if function != _SIGMOID:
        raise file.fail(f"{key} of {function} is not supported; only {_SIGMOID} (sigmoid) is")
    num_dense = file.get(f"{architecture}.leading_dense_block_count", int, 0)
    scale = file.get(f"{architecture}.expert_weights_scale", float, 0.0)
    if scale == 0:  # llama.cpp's word for none
        scale = 1.0
    return {
        "num_dense_layers": num_dense,
        "use_expert_bias": f"blk.{num_dense}.exp_probs_b.bias" in file.tensors,
        "routed_scaling_factor": scale,
    }
