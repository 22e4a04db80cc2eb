"""Read from a GGUF file's metadata what Gemma and gpt-oss have of their own: keys of config.json
for layers that differ. What a file leaves out is filled in as llama.cpp does."""

from typing import Any

from nanoserve.models.gguf_file import ROPE_FACTORS, GgufFile, is_array

_LARGEST = {"gemma2": 46, "gemma3": 62}
"""Layers of the models of 27 billion weights. Their attention scores are scaled by the width of the
hidden states for each head; llama.cpp knows them by their layers alone, too."""
_HUGE = 1e20
"""A frequency that is divided by more than this turns nothing."""


def gemma2(file: GgufFile, architecture: str) -> dict[str, Any]:
    """Read Gemma 2, in which every other layer has a window."""
    return _windows(file, architecture) | _bounds_and_scale(file, architecture)


def gemma3(file: GgufFile, architecture: str) -> dict[str, Any]:
    """Read Gemma 3. Layers with a window turn at another speed, and are not stretched."""
    found = _windows(file, architecture) | _bounds_and_scale(file, architecture)
    theta = file.get(f"{architecture}.rope.freq_base_swa", float, 10000.0)
    return found | {"rope_local_base_freq": theta}


def gemma4(file: GgufFile, architecture: str) -> dict[str, Any]:
    """Read Gemma 4. Layers without a window have heads of their own, and the last layers share keys
    and values."""
    num_layers = file.need(f"{architecture}.block_count", int)
    slides = file.listed(f"{architecture}.attention.sliding_window_pattern", bool, num_layers)
    counts = _by_layer(file, f"{architecture}.attention.head_count_kv", num_layers)
    head_dim = file.need(f"{architecture}.attention.key_length", int)
    sliding_dim = file.need(f"{architecture}.attention.key_length_swa", int)
    rotated = file.get(f"{architecture}.rope.dimension_count_swa", int, sliding_dim)
    if rotated != sliding_dim:
        raise file.fail(
            f"{architecture}.rope.dimension_count_swa must be the whole head of {sliding_dim}, "
            f"not {rotated}"
        )
    if any(".ffn_gate_inp." in name for name in file.tensors):
        raise file.fail("a Gemma 4 with a mixture of experts loads from safetensors alone")
    own = {}
    for layer, has_window in enumerate(slides):
        if not has_window:
            own[str(layer)] = {"head_dim": head_dim, "num_key_value_heads": counts[layer]}
    sliding_counts = [count for count, has_window in zip(counts, slides, strict=True) if has_window]
    found = _bounds_and_scale(file, architecture) | _inner_sizes(file, architecture, num_layers)
    return found | {
        "layer_types": _named(slides),
        "head_dim": sliding_dim,
        "num_key_value_heads": max(sliding_counts, default=counts[0]),
        "per_layer_config": own,
        "attention_k_eq_v": not _all_have_values(file, slides),
        "hidden_size_per_layer_input": file.get(
            f"{architecture}.embedding_length_per_layer_input", int, 0
        ),
        "rope_parameters": _proportional_rope(file, architecture),
        "rope_local_base_freq": file.get(f"{architecture}.rope.freq_base_swa", float, 10000.0),
    }


def _proportional_rope(file: GgufFile, architecture: str) -> dict[str, Any]:
    """How layers of Gemma 4 without a window turn: a share of the pairs of a head does. The others
    have a frequency that is divided by a huge number."""
    factors = file.rope_factors()
    turning = factors.count(1.0)
    if not factors or min(factors[turning:], default=_HUGE) < _HUGE:
        raise file.fail(f"tensor {ROPE_FACTORS} must have ones, and then numbers above {_HUGE:g}")
    if f"{architecture}.rope.scaling.type" in file.metadata:
        raise file.fail(f"{architecture}.rope.scaling.type is not supported")
    return {
        "rope_type": "proportional",
        "rope_theta": file.get(f"{architecture}.rope.freq_base", float, 10000.0),
        "partial_rotary_factor": turning / len(factors),
    }


def gpt_oss(file: GgufFile, architecture: str) -> dict[str, Any]:
    """Read gpt-oss, in which every other layer has a window."""
    size = file.need(f"{architecture}.expert_feed_forward_length", int)
    return _windows(file, architecture) | {"intermediate_size": size}


def _windows(file: GgufFile, architecture: str) -> dict[str, Any]:
    """The layers that have a window, where the file says so: a flag for each layer, or the period
    of those that have none."""
    key = f"{architecture}.attention.sliding_window_pattern"
    if is_array(file.metadata.get(key)):
        num_layers = file.need(f"{architecture}.block_count", int)
        return {"layer_types": _named(file.listed(key, bool, num_layers))}
    period = file.find(key, int)
    if period is None:
        return {}
    return {"sliding_window_pattern": period}


def _named(slides: list[bool]) -> list[str]:
    kinds = {True: "sliding_attention", False: "full_attention"}
    return [kinds[has_window] for has_window in slides]


def _bounds_and_scale(file: GgufFile, architecture: str) -> dict[str, Any]:
    """Read the bounds of attention's scores and of logits, where the file has them, and the scale
    of the scores."""
    found: dict[str, Any] = {}
    for key, name in {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    }.items():
        bound = file.find(f"{architecture}.{name}", float)
        if bound is not None:
            found[key] = bound
    width = file.need(f"{architecture}.embedding_length", int)
    heads = file.need(f"{architecture}.attention.head_count", int)
    scalar = file.get(f"{architecture}.attention.key_length", int, width // max(heads, 1))
    if file.need(f"{architecture}.block_count", int) == _LARGEST.get(architecture):
        scalar = width // max(heads, 1)
    found["query_pre_attn_scalar"] = scalar
    return found


def _by_layer(file: GgufFile, key: str, num_layers: int) -> list[int]:
    """A number for each layer; a file may have one for all."""
    if is_array(file.metadata.get(key)):
        return file.listed(key, int, num_layers)
    return [file.need(key, int)] * num_layers


def _inner_sizes(file: GgufFile, architecture: str, num_layers: int) -> dict[str, Any]:
    """The inner size of Gemma 4's feed-forward parts, which may be twice as large in layers that
    share keys and values."""
    sharing = file.get(f"{architecture}.attention.shared_kv_layers", int, 0)
    key = f"{architecture}.feed_forward_length"
    sizes = _by_layer(file, key, num_layers)
    first = sizes[0]
    is_doubled = sizes[-1] == 2 * first
    last = first
    if is_doubled:
        last = 2 * first
    if sizes != [first] * (num_layers - sharing) + [last] * sharing:
        raise file.fail(f"{key} must be {first}, and perhaps {2 * first} in the last {sharing}")
    return {
        "num_kv_shared_layers": sharing,
        "intermediate_size": first,
        "use_double_wide_mlp": is_doubled,
    }


def _all_have_values(file: GgufFile, slides: list[bool]) -> bool:
    """Whether every layer without a window that has a matrix of keys has one of values, too."""
    for layer, has_window in enumerate(slides):
        names = [f"blk.{layer}.attn_{part}.weight" for part in "kv"]
        if not has_window and names[0] in file.tensors and names[1] not in file.tensors:
            return False
    return True
