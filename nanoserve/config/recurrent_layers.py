"""Read the layers with a recurrent state of each family from its config.json. No torch here."""

from nanoserve.config.config_fields import ConfigFields
from nanoserve.config.model_parts import RecurrentConfig

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
