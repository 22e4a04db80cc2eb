"""Read in what the layers of a model differ: windows, and the shapes of Gemma 4. No torch here."""

import re

from nanoserve.config.config_fields import ConfigFields
from nanoserve.config.families import Family
from nanoserve.config.model_parts import LayerDifferences, LayerShape
from nanoserve.config.rope_reader import listed_rotations
from nanoserve.errors import ModelError, shown

_WINDOWS = {"sliding_attention": True, "full_attention": False}
"""The kinds of layers that are known, and whether they have a window."""


def read_windows(fields: ConfigFields, family: Family, num_layers: int) -> tuple[int, ...]:
    """Each layer's window; empty if there are none."""
    if family.recurrent is not None:  # its layer_types say which layers have a state
        return ()
    listed = fields.layer_types(_WINDOWS, num_layers)
    if family.windows.layers == "none" or fields.get("sliding_window") is None:
        return ()
    if family.windows.are_switched and not fields.flag("use_sliding_window", default=False):
        return ()
    window = fields.positive("sliding_window")
    context = fields.positive("max_position_embeddings")
    # Olmo 3's own default is beyond
    if window > context and window != family.defaults.get("sliding_window"):
        raise ModelError(
            f"{fields.source}: sliding_window {window} is beyond max_position_embeddings {context}"
        )
    if family.windows.layers == "all":
        return (window,) * num_layers
    if listed is None:
        sliding = _unlisted_windows(fields, family, num_layers)
    else:
        sliding = [_WINDOWS[kind] for kind in listed]
    windows = [0] * num_layers
    for layer, slides in enumerate(sliding):
        if slides:
            windows[layer] = window
    return tuple(windows)


def _unlisted_windows(fields: ConfigFields, family: Family, num_layers: int) -> list[bool]:
    """For each layer, whether it has a window where the checkpoint has no `layer_types`."""
    if family.windows.unlisted == "upper":
        first_sliding = int(fields.number("max_window_layers", 28))
        return [layer >= first_sliding for layer in range(num_layers)]
    if family.windows.unlisted == "unrotated":
        return [not rotates for rotates in listed_rotations(fields, num_layers)]
    if family.windows.full_every == 0:
        return [True] * num_layers
    period = fields.positive("sliding_window_pattern", family.windows.full_every)
    slides = [(layer + 1) % period != 0 for layer in range(num_layers)]
    if family.windows.last_layer_is_full:
        slides[-1] = False
    return slides


def read_layer_shapes(
    fields: ConfigFields, windows: tuple[int, ...], num_kv_heads: int
) -> LayerDifferences:
    """Read how the layers of Gemma 4 differ. Layers without a window have other heads. The last
    layers share keys and values, each with the last layer before them that has the same window."""
    source = fields.source
    num_layers = len(windows)
    num_sharing = int(fields.number("num_kv_shared_layers", 0.0, least=0.0))
    if not windows or windows[-1]:
        raise ModelError(
            f"{source}: layer_types must end in full_attention, and some layer must have a "
            "sliding_window"
        )
    first_sharing = max(0, num_layers - num_sharing)
    last = {window: layer for layer, window in enumerate(windows[:first_sharing])}
    if set(windows) - last.keys():
        told = f"num_kv_shared_layers {num_sharing}"
        raise ModelError(f"{source}: {told} leaves no layer of each kind with keys and values")
    shapes = _layer_shapes(fields, windows, num_kv_heads, first_sharing)
    heads = {
        (window, shape.head_dim, shape.num_kv_heads)
        for window, shape in zip(windows, shapes, strict=True)
    }
    if len(heads) > len(last):
        raise ModelError(
            f"{source}: per_layer_config must give all layers of a kind the same heads"
        )
    sources = list(range(first_sharing))
    for window in windows[first_sharing:]:
        sources.append(last[window])
    return LayerDifferences(sliding_windows=windows, kv_sources=tuple(sources), shapes=shapes)


def _layer_shapes(
    fields: ConfigFields, windows: tuple[int, ...], num_kv_heads: int, first_sharing: int
) -> tuple[LayerShape, ...]:
    """Each layer's shape. Layers from ``first_sharing`` on make no keys and values."""
    values_are_keys = fields.flag("attention_k_eq_v", default=False)
    is_doubled = fields.flag("use_double_wide_mlp", default=False)
    own = _own_sizes(fields, windows, num_kv_heads, values_are_keys=values_are_keys)
    shapes = []
    for layer, window in enumerate(windows):
        sizes = own.get(layer, ConfigFields({}, fields.source))
        has_kv = layer < first_sharing
        inner = fields.positive("intermediate_size")
        if is_doubled and not has_kv:
            inner *= 2
        shape = LayerShape(
            head_dim=sizes.positive("head_dim", fields.positive("head_dim")),
            num_kv_heads=read_kv_heads(sizes, num_kv_heads, fields.positive("num_attention_heads")),
            intermediate_size=inner,
            values_are_keys=values_are_keys and window == 0,
            has_kv=has_kv,
        )
        shapes.append(shape)
    return tuple(shapes)


def _own_sizes(
    fields: ConfigFields, windows: tuple[int, ...], num_kv_heads: int, *, values_are_keys: bool
) -> dict[int, ConfigFields]:
    """For layers of Gemma 4, the sizes in which they differ from the rest of config.json. The keys
    of `per_layer_config` are numbers of layers, written with as many digits as the last one has."""
    source = fields.source
    if "per_layer_config" not in fields.values:
        full = {"head_dim": fields.positive("global_head_dim")}
        if values_are_keys:
            full["num_key_value_heads"] = fields.positive(
                "num_global_key_value_heads", num_kv_heads
            )
        return {
            layer: ConfigFields(full, source) for layer, window in enumerate(windows) if not window
        }
    own: dict[int, ConfigFields] = {}
    for key, sizes in (fields.section("per_layer_config") or {}).items():
        layer = len(windows)
        if re.fullmatch("[0-9]{1,5}", key):
            layer = int(key)
        if layer >= len(windows) or layer in own:
            raise ModelError(
                f"{source}: per_layer_config must have layers below {len(windows)} as keys, each "
                "once"
            )
        if not isinstance(sizes, dict) or not sizes.keys() <= {"head_dim", "num_key_value_heads"}:
            wanted = "head_dim and num_key_value_heads alone"
            raise ModelError(
                f"{source}: per_layer_config of layer {layer} must have {wanted}, found "
                f"{shown(sizes)}"
            )
        own[layer] = ConfigFields(sizes, source)
    return own


def read_kv_heads(fields: ConfigFields, default: int, num_heads: int) -> int:
    """Read the number of key-value heads, which must divide the query heads."""
    found = fields.positive("num_key_value_heads", default)
    if num_heads % found:
        heads = f"num_attention_heads {num_heads}"
        raise ModelError(
            f"{fields.source}: {heads} is not a multiple of num_key_value_heads {found}"
        )
    return found
