"""Read the mixture of experts of each family from its config.json. No torch here."""

from dataclasses import replace
from typing import Literal

from nanoserve.config.config_fields import ConfigFields
from nanoserve.config.layer_blocks import nemotron_layers
from nanoserve.config.model_parts import MoeConfig
from nanoserve.errors import ModelError, shown


def mixtral_experts(fields: ConfigFields, num_layers: int) -> MoeConfig:
    return MoeConfig(
        num_experts=fields.positive("num_local_experts", fields.positive("num_experts", 8)),
        experts_per_token=fields.positive("num_experts_per_tok", 2),
        intermediate_size=fields.positive("intermediate_size"),
        normalize_weights=True,
        sparse_layers=_sparse_layers(fields, num_layers),
    )


def qwen3_experts(fields: ConfigFields, num_layers: int) -> MoeConfig:
    return MoeConfig(
        num_experts=fields.positive("num_experts", fields.positive("num_local_experts", 128)),
        experts_per_token=fields.positive("num_experts_per_tok", 8),
        intermediate_size=fields.positive("moe_intermediate_size"),
        normalize_weights=fields.flag("norm_topk_prob", default=False),
        sparse_layers=_sparse_layers(fields, num_layers),
    )


def qwen3_next_experts(fields: ConfigFields, num_layers: int) -> MoeConfig:
    """Read the experts of Qwen3 beside a shared expert with a gate."""
    moe = qwen3_experts(fields, num_layers)
    return replace(
        moe,
        normalize_weights=fields.flag("norm_topk_prob", default=True),
        shared_size=fields.positive("shared_expert_intermediate_size"),
        gates_shared=True,
    )


def qwen3_5_experts(fields: ConfigFields, num_layers: int) -> MoeConfig:
    """Read the experts of Qwen3-Next for all layers, with normalized weights, whatever config.json
    says."""
    moe = qwen3_next_experts(fields, num_layers)
    return replace(moe, normalize_weights=True, sparse_layers=frozenset(range(num_layers)))


def gpt_oss_experts(fields: ConfigFields, num_layers: int) -> MoeConfig:
    limit = fields.number("swiglu_limit", 7.0)
    alpha = fields.number("swiglu_alpha", 1.702)
    if limit != 7.0 or alpha != 1.702:
        raise ModelError(
            f"{fields.source}: gpt-oss with another swiglu_limit or swiglu_alpha is not supported"
        )
    return MoeConfig(
        num_experts=fields.positive("num_local_experts", fields.positive("num_experts", 128)),
        experts_per_token=fields.positive("num_experts_per_tok", 4),
        intermediate_size=fields.positive("intermediate_size"),
        normalize_weights=True,
        sparse_layers=_sparse_layers(fields, num_layers),
        style="gpt_oss",
    )


def deepseek_v2_experts(fields: ConfigFields, num_layers: int) -> MoeConfig:
    """Softmax scores. Transformers leaves a token's weights as they are, whatever norm_topk_prob
    says."""
    groups, chosen = _groups(fields)
    method = fields.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(f"{fields.source}: topk_method {shown(method)} is not supported")
    if method == "greedy":
        groups = chosen = 1
    return _deepseek_experts(
        fields, num_layers, groups, chosen, scores="softmax", normalize_weights=False
    )


def deepseek_v3_experts(fields: ConfigFields, num_layers: int) -> MoeConfig:
    """Sigmoid scores. GLM-4.7-Flash has the same experts."""
    groups, chosen = _groups(fields)
    normalize = fields.flag("norm_topk_prob", default=True)
    return _deepseek_experts(
        fields, num_layers, groups, chosen, scores="sigmoid", normalize_weights=normalize
    )


def lfm2_experts(fields: ConfigFields, num_layers: int) -> MoeConfig:
    """Sigmoid scores, in all layers but the first `num_dense_layers`."""
    num_dense = int(fields.number("num_dense_layers", 2, least=0.0))
    return MoeConfig(
        num_experts=fields.positive("num_experts", 32),
        experts_per_token=fields.positive("num_experts_per_tok", 4),
        intermediate_size=fields.positive("moe_intermediate_size", 1792),
        normalize_weights=fields.flag("norm_topk_prob", default=True),
        sparse_layers=frozenset(range(num_dense, num_layers)),
        scores="sigmoid",
        corrects_choice=fields.flag("use_expert_bias", default=True),
        sum_eps=1e-6,
        weight_scale=fields.number("routed_scaling_factor", 1.0),
    )


def nemotron_experts(fields: ConfigFields, _num_layers: int) -> MoeConfig | None:
    """Experts without gates, in the layers of Nemotron-H that end with some; sigmoid scores."""
    layers = nemotron_layers(fields)
    sparse = [place for place, layer in enumerate(layers) if layer.feed_forward == "experts"]
    if not sparse:
        return None
    if fields.get("moe_latent_size") is not None:
        raise ModelError(
            f"{fields.source}: moe_latent_size {shown(fields.get('moe_latent_size'))} is not "
            "supported: experts must be over hidden states"
        )
    groups, chosen = _groups(fields)
    return MoeConfig(
        num_experts=fields.positive("n_routed_experts"),
        experts_per_token=fields.positive("num_experts_per_tok"),
        intermediate_size=fields.positive("moe_intermediate_size"),
        normalize_weights=fields.flag("norm_topk_prob", default=True),
        sparse_layers=frozenset(sparse),
        style="relu2",
        shared_size=fields.positive("moe_shared_expert_intermediate_size"),
        scores="sigmoid",
        corrects_choice=True,
        num_groups=groups,
        groups_per_token=chosen,
        sum_eps=1e-20,
        weight_scale=fields.number("routed_scaling_factor", 1.0),
    )


def jamba_experts(fields: ConfigFields, num_layers: int) -> MoeConfig | None:
    """Read the experts of every `expert_layer_period`th layer, whose weights are not normalized. A
    single one is no mixture."""
    num_experts = fields.positive("num_local_experts", fields.positive("num_experts", 16))
    if num_experts == 1:
        return None
    period = fields.positive("expert_layer_period", 2)
    offset = fields.offset("expert_layer_offset", 1, period)
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=fields.positive("num_experts_per_tok", 2),
        intermediate_size=fields.positive("intermediate_size"),
        normalize_weights=False,
        sparse_layers=frozenset(range(offset, num_layers, period)),
    )


def granite_experts(fields: ConfigFields, num_layers: int) -> MoeConfig | None:
    """Read the experts of all layers of Granite, if there are any."""
    if fields.number("num_local_experts", 8.0, least=0.0) == 0:
        return None
    return MoeConfig(
        num_experts=fields.positive("num_local_experts", 8),
        experts_per_token=fields.positive("num_experts_per_tok", 2),
        intermediate_size=fields.positive("intermediate_size"),
        normalize_weights=True,
        sparse_layers=frozenset(range(num_layers)),
    )


def granite_hybrid_experts(fields: ConfigFields, num_layers: int) -> MoeConfig | None:
    """Read the experts of Granite beside a shared feed-forward part."""
    moe = granite_experts(fields, num_layers)
    if moe is None:
        return None
    return replace(moe, shared_size=fields.positive("shared_intermediate_size"))


def gemma4_experts(fields: ConfigFields, num_layers: int) -> MoeConfig | None:
    """Read the experts of all layers of Gemma 4, if there are any. The feed-forward part of a model
    without experts is beside them."""
    if not fields.flag("enable_moe_block", default=False):
        return None
    if fields.flag("use_double_wide_mlp", default=False):
        raise ModelError(
            f"{fields.source}: use_double_wide_mlp is not supported beside experts "
            "(enable_moe_block): all layers must be of one size"
        )
    return MoeConfig(
        num_experts=fields.positive("num_experts"),
        experts_per_token=fields.positive("top_k_experts"),
        intermediate_size=fields.positive("moe_intermediate_size"),
        normalize_weights=True,
        sparse_layers=frozenset(range(num_layers)),
        style="geglu",
        shared_size=fields.positive("intermediate_size"),
        norms_apart=True,
    )


def _sparse_layers(fields: ConfigFields, num_layers: int) -> frozenset[int]:
    step = fields.positive("decoder_sparse_step", 1)
    dense = fields.integers("mlp_only_layers")
    sparse = set()
    for layer in range(num_layers):
        if layer not in dense and (layer + 1) % step == 0:
            sparse.add(layer)
    return frozenset(sparse)


def _groups(fields: ConfigFields) -> tuple[int, int]:
    """Groups of experts, and how many of them a token chooses among."""
    return fields.positive("n_group", 1), fields.positive("topk_group", 1)


def _deepseek_experts(
    fields: ConfigFields,
    num_layers: int,
    groups: int,
    chosen: int,
    *,
    scores: Literal["softmax", "sigmoid"],
    normalize_weights: bool,
) -> MoeConfig:
    """Experts in groups beside shared experts."""
    num_experts = fields.positive("n_routed_experts")
    inner = fields.positive("moe_intermediate_size")
    num_shared = int(fields.number("n_shared_experts", 0.0, least=0.0))
    if num_experts % groups or chosen > groups:
        raise ModelError(
            f"{fields.source}: {num_experts} experts cannot be in {groups} groups, {chosen} of "
            "them chosen"
        )
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=fields.positive("num_experts_per_tok"),
        intermediate_size=inner,
        normalize_weights=normalize_weights,
        sparse_layers=_listed_sparse_layers(fields, num_layers),
        shared_size=inner * num_shared,
        scores=scores,
        corrects_choice=scores == "sigmoid",
        num_groups=groups,
        groups_per_token=chosen,
        weight_scale=fields.number("routed_scaling_factor", 1.0),
    )


def _listed_sparse_layers(fields: ConfigFields, num_layers: int) -> frozenset[int]:
    """The layers that mlp_layer_types calls sparse, or else all but the first
    `first_k_dense_replace`."""
    num_dense = int(fields.number("first_k_dense_replace", 0.0, least=0.0))
    kinds = fields.get("mlp_layer_types")
    if kinds is None:
        return frozenset(range(num_dense, num_layers))
    problem = (
        f"{fields.source}: mlp_layer_types must have dense or sparse for each of {num_layers} "
        "layers"
    )
    if not isinstance(kinds, list) or len(kinds) < num_layers:
        raise ModelError(problem)
    if not all(kind in ("dense", "sparse") for kind in kinds):
        raise ModelError(problem)
    return frozenset(layer for layer in range(num_layers) if kinds[layer] == "sparse")
