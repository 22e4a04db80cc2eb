"""Read the layers with a recurrent state of each family from its config.json. No torch here."""

from nanoserve.config.config_fields import ConfigFields
from nanoserve.config.model_parts import GatedDeltaNetConfig, RecurrentConfig
from nanoserve.errors import ModelError

_QWEN_KINDS = ("linear_attention", "full_attention")

_LFM2_KINDS = ("conv", "full_attention")


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
    return RecurrentConfig(
        recurrent_layers=frozenset(recurrent),
        channels=fields.positive("hidden_size"),
        kernel_size=fields.positive("conv_L_cache"),
        bias=fields.flag("conv_bias", default=False),
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
        channels=heads.channels,
        kernel_size=fields.positive("linear_conv_kernel_dim"),
        delta_net=heads,
    )
