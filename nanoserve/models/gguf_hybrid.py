"""Read from a GGUF file's metadata what Jamba, Granite and Nemotron-H have beside attention: keys
of config.json."""

from typing import Any

from nanoserve.models.gguf_file import GgufFile, is_array
from nanoserve.models.gguf_recurrent import num_drafting_layers

_BLOCK_KINDS = {
    "ssm_in": "linear_attention",
    "attn_q": "full_attention",
    "ffn_gate_inp": "moe",
    "ffn_up": "mlp",
}
"""The kind of a block of Nemotron-H, by a matrix that only this kind has."""
GRANITES = ("granite", "granitemoe", "granitehybrid")
_MULTIPLIERS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def jamba(file: GgufFile, architecture: str) -> dict[str, Any]:
    """Read Jamba. Layers without key-value heads have a state; those with a router have experts."""
    found = _attending_layers(file, architecture) | _mixer(file, architecture)
    num_layers = file.need(f"{architecture}.block_count", int)
    sparse = []
    for layer in range(num_layers):
        if f"blk.{layer}.ffn_gate_inp.weight" in file.tensors:
            sparse.append(layer)
    found["mamba_dt_rank"] = file.need(f"{architecture}.ssm.time_step_rank", int)
    if not sparse:
        return found | {"num_local_experts": 1}
    period = num_layers
    if len(sparse) > 1:
        period = sparse[1] - sparse[0]
    if sparse != list(range(sparse[0], num_layers, period)) or sparse[0] >= period:
        raise file.fail(f"experts in layers {sparse} are not supported: they must be in every nth")
    return found | {"expert_layer_period": period, "expert_layer_offset": sparse[0]}


def granite_family(architecture: str, *, has_experts: bool, has_shared: bool) -> str:
    """The family of config.json. Experts beside a shared part are those of the hybrid family, also
    where all layers attend."""
    if architecture == "granitehybrid" or (has_experts and has_shared):
        return "granitemoehybrid"
    if has_experts:
        return "granitemoe"
    return "granite"


def granite(file: GgufFile, architecture: str) -> dict[str, Any]:
    """Read the multipliers of Granite, and whether its layers rotate. llama.cpp takes 0 for a
    multiplier that is missing; then scores have the usual scale."""
    found: dict[str, Any] = {}
    is_listed = is_array(file.metadata.get(f"{architecture}.attention.head_count_kv"))
    if is_listed or architecture == "granitehybrid":
        found = _attending_layers(file, architecture)
    for key, name in _MULTIPLIERS.items():
        multiplier = file.get(f"{architecture}.{name}", float, 0.0)
        if multiplier != 0:
            found[key] = multiplier
    if "attention_multiplier" not in found:
        width = file.need(f"{architecture}.embedding_length", int)
        heads = file.need(f"{architecture}.attention.head_count", int)
        head_dim = file.get(f"{architecture}.attention.key_length", int, width // max(heads, 1))
        found["attention_multiplier"] = max(head_dim, 1) ** -0.5
    inner = file.get(f"{architecture}.expert_shared_feed_forward_length", int, 0)
    if inner == 0:
        inner = file.need(f"{architecture}.feed_forward_length", int)
    found["shared_intermediate_size"] = inner
    found["position_embedding_type"] = "rope"
    key = f"{architecture}.rope.scaling.finetuned"  # llama.cpp's switch for Granite
    if not file.get(key, bool, True):
        if architecture != "granitehybrid":
            raise file.fail(f"{key} of false is not supported for {architecture}")
        found["position_embedding_type"] = "nope"
    if file.get(f"{architecture}.expert_count", int, 0) == 0:
        found["num_local_experts"] = 0
        found["intermediate_size"] = inner
    return found


def granite_hybrid(file: GgufFile, architecture: str) -> dict[str, Any]:
    """Read Granite 4. Layers without key-value heads have a state of Mamba-2."""
    size = file.need(f"{architecture}.ssm.inner_size", int)
    num_heads = file.need(f"{architecture}.ssm.time_step_rank", int)
    if num_heads <= 0 or size % num_heads:
        raise file.fail(f"{architecture}.ssm.time_step_rank {num_heads} does not divide {size}")
    return _mixer(file, architecture) | {
        "mamba_n_heads": num_heads,
        "mamba_d_head": size // num_heads,
        "mamba_n_groups": file.need(f"{architecture}.ssm.group_count", int),
    }


def nemotron_h(file: GgufFile, architecture: str) -> dict[str, Any]:
    """Read Nemotron-H, whose blocks are one part of a layer each. The tensors say which."""
    num_blocks = file.need(f"{architecture}.block_count", int)
    num_blocks -= num_drafting_layers(file, architecture)
    kinds = []
    for block in range(num_blocks):
        found = [name for name in _BLOCK_KINDS if f"blk.{block}.{name}.weight" in file.tensors]
        if not found:
            raise file.fail(f"block {block} has no part of a layer that is known")
        kinds.append(_BLOCK_KINDS[found[0]])
    counts = file.listed(f"{architecture}.attention.head_count_kv", int, num_blocks)
    size = file.need(f"{architecture}.ssm.inner_size", int)
    num_heads = file.need(f"{architecture}.ssm.time_step_rank", int)
    if num_heads <= 0 or size % num_heads:
        raise file.fail(f"{architecture}.ssm.time_step_rank {num_heads} does not divide {size}")
    config: dict[str, Any] = {
        "layers_block_type": kinds,
        "num_key_value_heads": max(counts, default=0) or None,
        "layer_norm_epsilon": file.need(f"{architecture}.attention.layer_norm_epsilon", float),
        "mamba_num_heads": num_heads,
        "mamba_head_dim": size // num_heads,
        "n_groups": file.need(f"{architecture}.ssm.group_count", int),
        "ssm_state_size": file.need(f"{architecture}.ssm.state_size", int),
        "conv_kernel": file.need(f"{architecture}.ssm.conv_kernel", int),
        "use_bias": _has_any(file, ".ssm_in.bias"),
        "use_conv_bias": _has_any(file, ".ssm_conv1d.bias"),
        "mlp_bias": _has_any(file, ".ffn_up.bias", ".ffn_up_shexp.bias"),
        "rope_parameters": {"rope_theta": 10000.0},  # nothing rotates
    }
    if "mlp" in kinds:
        config["intermediate_size"] = file.tensors[f"blk.{kinds.index('mlp')}.ffn_up.weight"].shape[
            0
        ]
    if "moe" in kinds:
        config |= _nemotron_experts(file, architecture)
    return config


def _nemotron_experts(file: GgufFile, architecture: str) -> dict[str, Any]:
    """The experts of Nemotron-H."""
    if f"{architecture}.moe_latent_size" in file.metadata:
        raise file.fail(f"{architecture}.moe_latent_size is not supported")
    return {
        "n_routed_experts": file.need(f"{architecture}.expert_count", int),
        "num_experts_per_tok": file.need(f"{architecture}.expert_used_count", int),
        "moe_intermediate_size": file.need(f"{architecture}.expert_feed_forward_length", int),
        "moe_shared_expert_intermediate_size": file.need(
            f"{architecture}.expert_shared_feed_forward_length", int
        ),
        "norm_topk_prob": file.get(f"{architecture}.expert_weights_norm", bool, True),
        "routed_scaling_factor": file.get(f"{architecture}.expert_weights_scale", float, 1.0),
        "n_group": file.get(f"{architecture}.expert_group_count", int, 1),
        "topk_group": file.get(f"{architecture}.expert_group_used_count", int, 1),
    }


def _has_any(file: GgufFile, *endings: str) -> bool:
    """Whether any tensor's name has one of these endings."""
    return any(name.endswith(endings) for name in file.tensors)


def _attending_layers(file: GgufFile, architecture: str) -> dict[str, Any]:
    """The layers that attend, which have key-value heads, and how many of these."""
    key = f"{architecture}.attention.head_count_kv"
    counts = file.listed(key, int, file.need(f"{architecture}.block_count", int))
    attending = sorted(set(counts) - {0})
    if len(attending) > 1:
        raise file.fail(f"{key} must be the same in all layers that attend, found {attending}")
    kinds = {0: "linear_attention"} | dict.fromkeys(attending, "full_attention")
    found: dict[str, Any] = {"layer_types": [kinds[count] for count in counts]}
    if attending:
        found["num_key_value_heads"] = attending[0]
    return found


def _mixer(file: GgufFile, architecture: str) -> dict[str, Any]:
    """The sizes that both kinds of Mamba have. Whether there are biases, the tensors say."""
    size = file.need(f"{architecture}.ssm.inner_size", int)
    hidden_size = file.need(f"{architecture}.embedding_length", int)
    if hidden_size <= 0 or size % hidden_size:
        raise file.fail(
            f"{architecture}.ssm.inner_size {size} is not a multiple of the hidden size "
            f"{hidden_size}"
        )
    return {
        "mamba_expand": size // hidden_size,
        "mamba_d_conv": file.need(f"{architecture}.ssm.conv_kernel", int),
        "mamba_d_state": file.need(f"{architecture}.ssm.state_size", int),
        "mamba_conv_bias": _has_any(file, ".ssm_conv1d.bias"),
        "mamba_proj_bias": _has_any(file, ".ssm_in.bias"),
    }
