"""Read from a GGUF file's metadata what models with recurrent states have beside attention: keys of
config.json."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nanoserve.models.gguf_file import GgufFile

_SIGMOID = 2
"""The number that GGUF has for the function of a router's logits."""


def short_convolutions(file: GgufFile, architecture: str) -> dict[str, Any]:
    """Read LFM2. Layers without key-value heads are short convolutions."""
    key = f"{architecture}.attention.head_count_kv"
    counts = file.listed(key, int, file.need(f"{architecture}.block_count", int))
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


def gated_delta_net(file: GgufFile, architecture: str) -> dict[str, Any]:
    """Read Qwen3-Next and Qwen3.5. The last layers may be for drafts, which are left out."""
    num_blocks = file.need(f"{architecture}.block_count", int)
    num_layers = num_blocks - num_drafting_layers(file, architecture)
    num_heads = file.need(f"{architecture}.ssm.time_step_rank", int)
    size = file.need(f"{architecture}.ssm.inner_size", int)
    if num_heads <= 0 or size % num_heads:
        raise file.fail(f"{architecture}.ssm.time_step_rank {num_heads} does not divide {size}")
    found: dict[str, Any] = {
        "num_hidden_layers": num_layers,
        "linear_conv_kernel_dim": file.need(f"{architecture}.ssm.conv_kernel", int),
        "linear_key_head_dim": file.need(f"{architecture}.ssm.state_size", int),
        "linear_num_key_heads": file.need(f"{architecture}.ssm.group_count", int),
        "linear_num_value_heads": num_heads,
        "linear_value_head_dim": size // num_heads,
        "full_attention_interval": file.get(f"{architecture}.full_attention_interval", int, 4),
    }
    key = f"{architecture}.attention.recurrent_layers"
    if key in file.metadata:
        kinds = {True: "linear_attention", False: "full_attention"}
        flags = file.listed(key, bool, num_blocks)[:num_layers]
        found["layer_types"] = [kinds[flag] for flag in flags]
    if architecture != "qwen35":
        found["shared_expert_intermediate_size"] = file.need(
            f"{architecture}.expert_shared_feed_forward_length", int
        )
    return found


def mamba(file: GgufFile, architecture: str) -> dict[str, Any]:
    """Read Mamba. Its inner size is that of all layers, as in transformers."""
    if file.get(f"{architecture}.ssm.dt_b_c_rms", bool, False):
        raise file.fail(f"{architecture}.ssm.dt_b_c_rms (FalconMamba) is not supported")
    return _state_space(file, architecture) | {
        "intermediate_size": file.need(f"{architecture}.ssm.inner_size", int),
        "time_step_rank": file.need(f"{architecture}.ssm.time_step_rank", int),
    }


def mamba2(file: GgufFile, architecture: str) -> dict[str, Any]:
    """Read Mamba-2, whose heads have a step each."""
    num_heads = file.need(f"{architecture}.ssm.time_step_rank", int)
    size = file.need(f"{architecture}.ssm.inner_size", int)
    hidden_size = file.need(f"{architecture}.embedding_length", int)
    for number, name in ((num_heads, "ssm.time_step_rank"), (hidden_size, "embedding_length")):
        if number <= 0 or size % number:
            raise file.fail(f"{architecture}.{name} {number} does not divide {size}")
    return _state_space(file, architecture) | {
        "num_heads": num_heads,
        "head_dim": size // num_heads,
        "n_groups": file.need(f"{architecture}.ssm.group_count", int),
        "expand": size // hidden_size,
    }


def _state_space(file: GgufFile, architecture: str) -> dict[str, Any]:
    """The keys that both kinds of Mamba have."""
    return {
        "conv_kernel": file.need(f"{architecture}.ssm.conv_kernel", int),
        "state_size": file.need(f"{architecture}.ssm.state_size", int),
        "layer_norm_epsilon": file.need(f"{architecture}.attention.layer_norm_rms_epsilon", float),
        "use_bias": "blk.0.ssm_in.bias" in file.tensors,
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in file.tensors,
    }


def num_drafting_layers(file: GgufFile, architecture: str) -> int:
    """Layers behind the model's own that predict further tokens."""
    return file.get(f"{architecture}.nextn_predict_layers", int, 0)


@dataclass(frozen=True, slots=True)
class TiledHeads:
    """Value heads of Qwen3.5 in the order of llama.cpp: the first of each key head, then the second
    of each, and so on. In safetensors those that share a key head are neighbours."""

    num_key_heads: int
    shared: int
    """Value heads that share a key head."""
    size: int
    """Rows or columns of a head."""
    first: int = 0
    """Rows before them."""

    def places(self, rows: Tensor) -> Tensor:
        """The places in the file of rows that are numbered as in safetensors."""
        inside = rows - self.first
        head = inside // self.size
        stored_head = head % self.shared * self.num_key_heads + head // self.shared
        stored = self.first + stored_head * self.size + inside % self.size
        return stored.where(inside >= 0, rows)


def tiled_heads(file: GgufFile) -> dict[str, TiledHeads]:
    """The order of value heads in the tensors of a layer, by their names in it; none where it is
    that of safetensors."""
    architecture = file.get("general.architecture", str, "")
    if architecture not in ("qwen35", "qwen35moe"):
        return {}
    config = gated_delta_net(file, architecture)
    num_key_heads = config["linear_num_key_heads"]
    shared = config["linear_num_value_heads"] // max(1, num_key_heads)
    size = config["linear_value_head_dim"]
    if num_key_heads < 1 or shared < 1 or size < 1:
        return {}  # the config is refused
    first = 2 * num_key_heads * config["linear_key_head_dim"]
    behind_keys = TiledHeads(num_key_heads, shared, size, first)
    of_heads = TiledHeads(num_key_heads, shared, size)
    of_numbers = TiledHeads(num_key_heads, shared, 1)
    return {
        "attn_qkv": behind_keys,
        "ssm_conv1d": behind_keys,
        "attn_gate": of_heads,
        "ssm_out": of_heads,
        "ssm_alpha": of_numbers,
        "ssm_beta": of_numbers,
        "ssm_a": of_numbers,
        "ssm_dt": of_numbers,
    }
