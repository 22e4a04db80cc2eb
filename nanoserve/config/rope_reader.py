"""Read the rotary position embedding of each family from its config.json. No torch here."""

from typing import Any, get_args

from nanoserve.config.config_fields import LEAST_ROPE_NUMBER, ConfigFields
from nanoserve.config.families import RopeRules
from nanoserve.config.model_parts import RopeConfig, RopeKind
from nanoserve.errors import ModelError, shown

_PLAIN_ROPE = RopeConfig(0)
_ROPE_KINDS = tuple(kind for kind in get_args(RopeKind) if kind != "none")
_ROPE_NUMBERS = (
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)


def read_ropes(
    fields: ConfigFields,
    rules: RopeRules,
    sliding_dim: int,
    full_dim: int,
    windows: tuple[int, ...],
) -> tuple[RopeConfig, tuple[RopeConfig, ...]]:
    """Read how most layers rotate, and how each layer does, where they differ. Heads of layers with
    a window have ``sliding_dim`` dimensions, heads of the others ``full_dim``."""
    num_layers = fields.positive("num_hidden_layers")
    if rules.differ:
        full = _rope(fields, rules, full_dim, "full_attention")
        sliding = _rope(fields, rules, sliding_dim, "sliding_attention")
        ropes = [full] * num_layers
        for layer, window in enumerate(windows):
            if window:
                ropes[layer] = sliding
        return full, tuple(ropes)
    rope = _rope(fields, rules, full_dim)
    rotated = _rotated(fields, rules, windows, num_layers)
    if all(rotated):
        return rope, ()
    still = RopeConfig(rope.rotary_dim, kind="none", interleaved=rope.interleaved)
    if not any(rotated):
        return still, ()
    ropes = [rope] * num_layers
    for layer, rotates in enumerate(rotated):
        if not rotates:
            ropes[layer] = still
    return rope, tuple(ropes)


def _rotated(
    fields: ConfigFields, rules: RopeRules, windows: tuple[int, ...], num_layers: int
) -> list[bool]:
    """For each layer, whether it rotates."""
    if rules.unrotated == "listed":
        return listed_rotations(fields, num_layers)
    if rules.unrotated == "all":
        return [False] * num_layers
    if rules.unrotated == "unless_rope":
        return [fields.get("position_embedding_type") == "rope"] * num_layers
    if rules.unrotated == "full":
        if not windows:
            return [False] * num_layers
        return [window > 0 for window in windows]
    return [True] * num_layers


def listed_rotations(fields: ConfigFields, num_layers: int) -> list[bool]:
    """For each layer of SmolLM3, whether it rotates: `no_rope_layers` has a 0 for a layer that does
    not."""
    interval = fields.positive("no_rope_layer_interval")
    listed = fields.get("no_rope_layers")
    if listed is None:
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    problem = (
        f"{fields.source}: no_rope_layers must have a 0 or a 1 for each of {num_layers} layers"
    )
    if not isinstance(listed, list) or len(listed) != num_layers:
        raise ModelError(problem)
    if not all(entry in (0, 1) for entry in listed):
        raise ModelError(problem)
    return [bool(entry) for entry in listed]


def _rope_section(fields: ConfigFields, kind: str | None) -> dict[str, Any]:
    """`rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (before), over the
    rest of config.json; those for one kind of layers, where each has its own. Of the two,
    `rope_scaling` wins, as in transformers."""
    merged = dict(fields.values)
    given = {key: fields.section(key) or {} for key in ("rope_parameters", "rope_scaling")}
    nested = set()
    for key, section in given.items():
        if any(isinstance(value, dict) for value in section.values()):
            nested.add(key)
    if kind is None:
        if nested:
            raise ModelError(
                f"{fields.source}: {min(nested)} must be the same for all layers of this model"
            )
        return merged | (given["rope_scaling"] or given["rope_parameters"])
    if kind == "sliding_attention":
        merged["rope_theta"] = fields.get("rope_local_base_freq", merged.get("rope_theta"))
    for key, section in given.items():
        if key in nested:
            own = section.get(kind)
            if not isinstance(own, dict):
                raise ModelError(f"{fields.source}: {key} must have an object for {kind}")
            merged |= own
        # before transformers 5, only layers without a window were stretched
        elif kind != "sliding_attention":
            merged |= section
    return merged


def _rope(
    fields: ConfigFields, rules: RopeRules, head_dim: int, layer_kind: str | None = None
) -> RopeConfig:
    """Read the rotation of all layers, or of the layers of one kind."""
    rope = ConfigFields(_rope_section(fields, layer_kind), fields.source)
    kind: Any = rope.values.get("rope_type") or rope.values.get("type") or "default"
    if kind not in _ROPE_KINDS:
        supported = ", ".join(_ROPE_KINDS)
        raise ModelError(
            f"{fields.source}: rope type {shown(kind)} is not supported; supported: {supported}"
        )
    rotary_dim = head_dim
    if rules.rotary_share is not None:
        rotary_dim = int(head_dim * rope.number("partial_rotary_factor", rules.rotary_share))
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ModelError(
            f"{fields.source}: head_dim {head_dim} gives an impossible rotary size of {rotary_dim}"
        )
    max_position = fields.positive("max_position_embeddings")
    original = rope.positive("original_max_position_embeddings", max_position)
    factor = _rope_factor(rope, kind, max_position / original)
    theta = rope.number("rope_theta", 10000.0)
    if min(factor, theta) < LEAST_ROPE_NUMBER:
        raise ModelError(
            f"{fields.source}: rope factor and rope_theta must be positive, found {factor} and "
            f"{theta}"
        )
    proportion = 1.0
    if kind == "proportional":
        proportion = rope.number("partial_rotary_factor", 1.0, least=0.0)
    query_growth = 0.0
    if rules.grows_queries:
        query_growth = rope.number("llama_4_scaling_beta", 0.0)
    rope_config = RopeConfig(
        rotary_dim=rotary_dim,
        theta=theta,
        kind=kind,
        interleaved=rules.interleaved and rope.flag("rope_interleave", default=True),
        factor=factor,
        original_max_position_embeddings=original,
        truncate=rope.flag("truncate", default=True),
        attention_factor=rope.optional_number("attention_factor"),
        frequency_factors=rope.positive_numbers("frequency_factors", count=rotary_dim // 2),
        proportion=proportion,
        query_growth=query_growth,
        **{name: rope.number(name, getattr(_PLAIN_ROPE, name)) for name in _ROPE_NUMBERS},
    )
    _check_borders(rope_config, fields.source)
    return rope_config


def _rope_factor(rope: ConfigFields, kind: RopeKind, stretch: float) -> float:
    """The factor of a scaling rule. Only YaRN may leave it to be inferred from the two lengths, as
    ``stretch``."""
    if kind == "default":
        return 1.0
    if kind == "proportional":
        return rope.number("factor", 1.0)
    if kind != "yarn" and rope.get("factor") is None:
        raise ModelError(
            f"{rope.source}: the rope factor is missing, without which rope type {kind} means "
            "nothing"
        )
    return rope.number("factor", stretch)


def _check_borders(rope: RopeConfig, source: str) -> None:
    """The rules that blend kept and stretched frequencies need two different borders between
    them."""
    if rope.kind == "llama3":
        if not 0 < rope.low_freq_factor < rope.high_freq_factor:
            raise ModelError(
                f"{source}: rope type llama3 needs 0 < low_freq_factor < high_freq_factor"
            )
    elif rope.kind == "yarn":
        in_order = 0 < rope.beta_slow < rope.beta_fast
        if not in_order or rope.theta <= 1:
            raise ModelError(
                f"{source}: rope type yarn needs 0 < beta_slow < beta_fast and rope_theta above 1"
            )
