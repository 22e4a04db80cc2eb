"""Read the layers with a recurrent state of each family from its config.json. No torch here."""

from nanoserve.config.config_fields import ConfigFields
from nanoserve.config.model_parts import RecurrentConfig


def short_convolutions(fields: ConfigFields, num_layers: int) -> RecurrentConfig | None:
    """Short convolutions in the layers that layer_types calls conv. Older checkpoints list the
    others in full_attn_idxs. None if all layers attend, as they do without both keys."""
    kinds = fields.layer_types(num_layers, ("conv", "full_attention"))
    if kinds is not None:
        recurrent = [layer for layer in range(num_layers) if kinds[layer] == "conv"]
    elif fields.get("full_attn_idxs") is not None:
        attending = fields.integers("full_attn_idxs")
        recurrent = [layer for layer in range(num_layers) if layer not in attending]
    else:
        return None
    if not recurrent:
        return None
    return RecurrentConfig(
        recurrent_layers=frozenset(recurrent),
        channels=fields.positive("hidden_size"),
        kernel_size=fields.positive("conv_L_cache"),
        bias=fields.flag("conv_bias", default=False),
    )
