"""Read the layers with a recurrent state of each family from its config.json. No torch here."""

from nanoserve.config.config_fields import ConfigFields
from nanoserve.config.mixers import (
    NO_LIMIT,
    GatedDeltaNetConfig,
    Mamba2Config,
    MambaConfig,
    ShortConvolutionConfig,
)
from nanoserve.config.model_parts import RecurrentConfig
from nanoserve.errors import ModelError, shown

_QWEN_KINDS = ("linear_attention", "full_attention")

_LFM2_KINDS = ("conv", "full_attention")
_MAMBA_KINDS = ("mamba", "linear_attention")
"""Two words for layers with a state of Mamba, the older one first."""
_MAMBA_LAYER_TYPES = (*_MAMBA_KINDS, "attention", "full_attention")


def lfm2_recurrent(fields: ConfigFields, num_layers: int) -> RecurrentConfig:
    """The layers that `layer_types` calls conv. Older checkpoints list the others in
    `full_attn_idxs`; without both keys all layers attend."""
    kinds = fields.layer_types(_LFM2_KINDS, num_layers)
    if kinds is not None:
        recurrent = [layer for layer in range(num_layers) if kinds[layer] == "conv"]
    elif fields.get("full_attn_idxs") is not None:
        attending = fields.integers("full_attn_idxs")
        recurrent = [layer for layer in range(num_layers) if layer not in attending]
    else:
        recurrent = []
    bias = fields.flag("conv_bias", default=False)
    return RecurrentConfig(
        recurrent_layers=frozenset(recurrent),
        mixer=ShortConvolutionConfig(fields.positive("hidden_size")),
        kernel_size=fields.positive("conv_L_cache"),
        bias=bias,
        kernel_bias=bias,
    )


def gated_delta_net(fields: ConfigFields, num_layers: int) -> RecurrentConfig:
    """Gated DeltaNet in the layers that layer_types calls linear_attention, or else in all but
    every `full_attention_interval`th."""
    kinds = fields.layer_types(_QWEN_KINDS, num_layers)
    if kinds is not None:
        recurrent = [layer for layer in range(num_layers) if kinds[layer] == "linear_attention"]
    else:
        interval = fields.positive("full_attention_interval", 4)
        recurrent = [layer for layer in range(num_layers) if (layer + 1) % interval != 0]
    heads = GatedDeltaNetConfig(
        num_key_heads=fields.positive("linear_num_key_heads"),
        num_value_heads=fields.positive("linear_num_value_heads"),
        key_head_dim=fields.positive("linear_key_head_dim"),
        value_head_dim=fields.positive("linear_value_head_dim"),
    )
    if heads.num_value_heads % heads.num_key_heads:
        raise ModelError(
            f"{fields.source}: linear_num_value_heads {heads.num_value_heads} is not a multiple of "
            f"linear_num_key_heads {heads.num_key_heads}"
        )
    return RecurrentConfig(
        recurrent_layers=frozenset(recurrent),
        mixer=heads,
        kernel_size=fields.positive("linear_conv_kernel_dim"),
    )


def mamba2_layers(fields: ConfigFields, num_layers: int) -> RecurrentConfig:
    """Mamba-2 in all layers."""
    heads = Mamba2Config(
        num_heads=fields.positive("num_heads"),
        head_dim=fields.positive("head_dim"),
        num_groups=fields.positive("n_groups"),
        state_size=fields.positive("state_size"),
        time_step_limits=time_step_limits(fields),
    )
    check_groups(fields, heads)
    return RecurrentConfig(
        recurrent_layers=frozenset(range(num_layers)),
        mixer=heads,
        kernel_size=fields.positive("conv_kernel"),
        bias=fields.flag("use_bias", default=False),
        kernel_bias=fields.flag("use_conv_bias", default=True),
    )


def mamba_layers(fields: ConfigFields, num_layers: int) -> RecurrentConfig:
    """Mamba in all layers."""
    hidden_size = fields.positive("hidden_size")
    return RecurrentConfig(
        recurrent_layers=frozenset(range(num_layers)),
        mixer=MambaConfig(
            channels=hidden_size * fields.positive("expand"),
            state_size=fields.positive("state_size"),
            time_step_rank=_time_step_rank(fields, "time_step_rank"),
        ),
        kernel_size=fields.positive("conv_kernel"),
        bias=fields.flag("use_bias", default=False),
        kernel_bias=fields.flag("use_conv_bias", default=True),
    )


def jamba_layers(fields: ConfigFields, num_layers: int) -> RecurrentConfig:
    """Mamba with further norms, in all layers but those that layer_types says attend, or every
    `attn_layer_period`th."""
    hidden_size = fields.positive("hidden_size")
    period = fields.positive("attn_layer_period", 8)
    offset = fields.offset("attn_layer_offset", 4, period)
    attending = range(offset, num_layers, period)
    recurrent = _listed_mamba_layers(fields, num_layers)
    if recurrent is None:
        recurrent = frozenset(range(num_layers)) - frozenset(attending)
    return RecurrentConfig(
        recurrent_layers=recurrent,
        mixer=MambaConfig(
            channels=hidden_size * fields.positive("mamba_expand"),
            state_size=fields.positive("mamba_d_state"),
            time_step_rank=_time_step_rank(fields, "mamba_dt_rank"),
            has_norms=True,
        ),
        kernel_size=fields.positive("mamba_d_conv"),
        bias=fields.flag("mamba_proj_bias", default=False),
        kernel_bias=fields.flag("mamba_conv_bias", default=True),
    )


def granite_hybrid_layers(fields: ConfigFields, num_layers: int) -> RecurrentConfig:
    """Mamba-2 in the layers that layer_types says have a state; without the key, in all."""
    heads = _mamba2_heads(fields)
    recurrent = _listed_mamba_layers(fields, num_layers)
    if recurrent is None:
        recurrent = frozenset(range(num_layers))
    return RecurrentConfig(
        recurrent_layers=recurrent,
        mixer=heads,
        kernel_size=fields.positive("mamba_d_conv"),
        bias=fields.flag("mamba_proj_bias", default=False),
        kernel_bias=fields.flag("mamba_conv_bias", default=True),
    )


def _mamba2_heads(fields: ConfigFields) -> Mamba2Config:
    """The heads of a hybrid model's Mamba-2, which have `mamba_expand` times the hidden size."""
    inner_size = fields.positive("hidden_size") * fields.positive("mamba_expand")
    num_heads = fields.positive("mamba_n_heads")
    head_dim = inner_size // num_heads
    if fields.get("mamba_d_head") != "auto":
        head_dim = fields.positive("mamba_d_head", head_dim)
    if num_heads * head_dim != inner_size:
        raise ModelError(
            f"{fields.source}: {num_heads} heads of {head_dim} are not the {inner_size} numbers of "
            "mamba_expand * hidden_size"
        )
    heads = Mamba2Config(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=fields.positive("mamba_n_groups"),
        state_size=fields.positive("mamba_d_state"),
        time_step_limits=time_step_limits(fields),
    )
    check_groups(fields, heads)
    return heads


def _listed_mamba_layers(fields: ConfigFields, num_layers: int) -> frozenset[int] | None:
    """The layers with a state by layer_types; None without the key."""
    kinds = fields.layer_types(_MAMBA_LAYER_TYPES, num_layers)
    if kinds is None:
        return None
    return frozenset(layer for layer in range(num_layers) if kinds[layer] in _MAMBA_KINDS)


def _time_step_rank(fields: ConfigFields, key: str) -> int:
    """The numbers that the steps of Mamba are made of; as many as a sixteenth of the hidden size,
    where the key is missing or "auto"."""
    rank = -(-fields.positive("hidden_size") // 16)
    if fields.get(key) == "auto":
        return rank
    return fields.positive(key, rank)


def time_step_limits(fields: ConfigFields) -> tuple[float, float]:
    """The least and the largest step of Mamba-2; without the key steps have no limits.
    transformers writes infinity as an object."""
    limits = fields.get("time_step_limit")
    if limits is None:
        return 0.0, NO_LIMIT
    if isinstance(limits, list) and len(limits) == 2:
        least, largest = limits
        if largest == {"__float__": "Infinity"}:
            largest = NO_LIMIT
        is_number = isinstance(least, int | float) and isinstance(largest, int | float)
        if is_number and 0 <= least <= largest:
            return min(float(least), NO_LIMIT), min(float(largest), NO_LIMIT)
    raise ModelError(
        f"{fields.source}: time_step_limit must be the least and the largest step, "
        f"not {shown(limits)}"
    )


def check_groups(fields: ConfigFields, heads: Mamba2Config) -> None:
    """Raise ModelError if groups do not have equally many heads."""
    if heads.num_heads % heads.num_groups:
        raise ModelError(
            f"{fields.source}: {heads.num_heads} heads of a state are not a multiple of "
            f"{heads.num_groups} groups"
        )
