"""Read the blocks of Nemotron-H, each of which is one part of a layer. No torch here.

A block is a norm and attention, a mixer with a state, or a feed-forward part. A layer here is
attention or a mixer together with the feed-forward part that follows, if one does: it computes the
same, and everything else sees layers of the usual form.
"""

from typing import Literal, NamedTuple

from nanoserve.config.config_fields import ConfigFields
from nanoserve.errors import ModelError, shown

BlockKind = Literal["attention", "state", "dense", "experts"]

_LETTERS: dict[str, BlockKind] = {
    "M": "state",
    "*": "attention",
    "-": "dense",
    "E": "experts",
}
"""The letters of `hybrid_override_pattern`."""
_NAMES: dict[str, BlockKind] = {
    "mamba": "state",
    "linear_attention": "state",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "dense",
    "moe": "experts",
}
"""The names in `layers_block_type`, of older checkpoints too."""
_DEFAULT = ["linear_attention", "moe", "full_attention", "mlp"]


class StoredLayer(NamedTuple):
    """The blocks that are one layer."""

    block: int
    """The number of the block of attention or mixer. A feed-forward part is the next block."""
    has_state: bool
    feed_forward: Literal["none", "dense", "experts"]


def nemotron_layers(fields: ConfigFields) -> list[StoredLayer]:
    """The layers that the blocks are. Raises ModelError if a feed-forward part follows another, or
    nothing."""
    layers = list[StoredLayer]()
    for number, kind in enumerate(_block_kinds(fields)):
        if kind in ("attention", "state"):
            layers.append(StoredLayer(number, kind == "state", "none"))
            continue
        if not layers or layers[-1].feed_forward != "none":
            raise ModelError(
                f"{fields.source}: block {number} is a feed-forward part without attention or a "
                "state before it, which is not supported"
            )
        assert kind in ("dense", "experts")
        layers[-1] = layers[-1]._replace(feed_forward=kind)
    return layers


def _block_kinds(fields: ConfigFields) -> list[BlockKind]:
    """The kind of each block, by their list of names, or else by the pattern of letters."""
    known, found = _NAMES, fields.get("layers_block_type")
    key = "layers_block_type"
    if found is None:
        found = fields.get("layer_types")
        key = "layer_types"
    if found is None and fields.get("hybrid_override_pattern") is not None:
        key = "hybrid_override_pattern"
        known, found = _LETTERS, fields.get(key)
        if isinstance(found, str):
            found = list(found)
    if found is None:
        found = _DEFAULT
    if not isinstance(found, list) or not found:
        raise ModelError(f"{fields.source}: {key} must name the blocks, found {shown(found)}")
    kinds = list[BlockKind]()
    for name in found:
        if not isinstance(name, str) or name not in known:
            raise ModelError(
                f"{fields.source}: {key} names {shown(name)}; known are {', '.join(known)}"
            )
        kinds.append(known[name])
    return kinds
