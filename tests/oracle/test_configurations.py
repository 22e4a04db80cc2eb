"""Keys that a config.json leaves out or gives, against the configuration classes of
transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.published_shapes import published_shapes
from nanoserve.errors import ModelError
from nanoserve.models.decoder import RotaryEmbedding
from nanoserve.models.loading import load_model
from nanoserve.models.weights import tensor_parts
from tests.oracle.checkpoints import FAMILIES, VOCAB_SIZE, randomize
from tests.oracle.test_families import TOLERANCE, dense_logits, prompt, reference_logits

MODEL_TYPES = sorted({make().model_type for make in FAMILIES.values()})
SIZES = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
}
"""Sizes that are never assumed: a config.json without these is refused, except by Gemma 3 and 4,
whose published ones leave some out."""
TOKENS = {"bos_token_id", "eos_token_id"}
"""Token ids that config.json does not name are the tokenizer's, not the family's."""
NOT_SAVED = {"gemma4_text": {"per_layer_config"}}
"""Keys whose null transformers reads and does not write;
test_layers_of_gemma_4_as_transformers_saves_them has it."""

UNUSED = {
    *(
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "chunk_size_feed_forward",
        "dtype",
        "id2label",
    ),
    *(
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "output_attentions",
        "output_hidden_states",
    ),
    *(
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "router_aux_loss_coef",
    ),
    *(
        "router_jitter_noise",
        "transformers_version",
        "use_cache",
        "_sliding_window_pattern",
        "qk_head_dim",
    ),
}
"""Keys that are for training, or that repeat others."""
SWITCHED_OFF = {"use_sliding_window", "sliding_window", "layer_types", "max_window_layers"}
"""Keys that need another one to mean anything."""
MAMBA = {
    "initializer_range",
    "residual_in_fp32",  # in half precision, residuals have the precision of everything else
    "rescale_prenorm_residual",
    "time_step_floor",
    "time_step_max",
    "time_step_min",
}
UNUSED_BY = {
    # intermediate_size counts; others choose among equal algorithms
    "mamba": MAMBA
    | {"expand", "time_step_init_scheme", "time_step_scale"}
    | {"use_mambapy", "use_associative_scan"},
    "mamba2": MAMBA | {"chunk_size", "time_step_rank"},
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe"), SWITCHED_OFF),
    "smollm3": SWITCHED_OFF | {"no_rope_layer_interval"},
    # Those of the expert groups need a topk_method; weights are as the router has them; the loader
    # knows no mlp_bias.
    "deepseek_v2": {
        "n_group",
        "topk_group",
        "norm_topk_prob",
        "head_dim",
        "num_key_value_heads",
        "mlp_bias",
    },
    "deepseek_v3": {"head_dim", "num_key_value_heads", "num_nextn_predict_layers"},
    "glm4_moe_lite": {"num_key_value_heads"},
    "lfm2": {"full_attn_idxs"},  # layer_types counts
    # Training alone chunks and chooses otherwise.
    "jamba": {"use_mamba_kernels", "use_mambapy", "use_associative_scan"},
    "granitemoehybrid": {"mamba_chunk_size"},
    "gemma3_text": {"attn_logit_softcapping"},  # nor does transformers' model read it
    "gemma4_text": {"num_experts", "top_k_experts", "moe_intermediate_size", "use_double_wide_mlp"}
    | {"vocab_size_per_layer_input"},
    # Nor does its model read most of these; the others are for training, or how it computes.
    # The least step is one that only prompts have in transformers.
    "nemotron_h": {
        *("attention_bias", "chunk_size", "expand", "hidden_dropout", "mamba_proj_bias"),
        *("mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "mtp_layers_block_type"),
        *("n_shared_experts", "num_logits_to_keep", "num_nextn_predict_layers"),
        *("rescale_prenorm_residual", "residual_in_fp32", "sliding_window"),
        *("time_step_min", "time_step_max", "time_step_floor", "use_mamba_kernels"),
    },
}


def infinite(section: dict[str, Any]) -> Any:
    """A section of a config.json as it is, or the number that transformers writes as one."""
    if section.keys() == {"__float__"}:
        return float(section["__float__"])
    return section


def filled(model_type: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration that transformers makes of a config.json, with every key."""
    given = json.loads(
        json.dumps({key: value for key, value in values.items() if key != "model_type"}),
        object_hook=infinite,
    )
    config = transformers.AutoConfig.for_model(model_type, **given)
    whole: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return whole


OF_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16, "intermediate_size": 11000},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "nemotron_h": {"time_step_min": 1e-9},
    "granitemoehybrid": {"position_embedding_type": "rope"},
}
"""Values in place of defaults that cannot run, or with which some keys mean nothing."""


def whole_default(model_type: str) -> dict[str, Any]:
    return filled(model_type, OF_DEFAULTS.get(model_type, {}))


def read(values: Mapping[str, Any]) -> ModelConfig | str:
    """The model of a config.json, or why it is refused."""
    try:
        return ModelConfig.from_hf(values)
    except ModelError as refusal:
        return str(refusal)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_default_is_that_of_transformers(model_type: str) -> None:
    """Each key alone is left out, or null where transformers takes that, and then all but the sizes
    are."""
    whole = whole_default(model_type)
    expected = ModelConfig.from_hf(whole)
    for key in whole.keys() - TOKENS - {"model_type"}:
        left = {other: value for other, value in whole.items() if other != key}
        if key in SIZES and (key != "intermediate_size" or model_type != "mamba"):
            missing = f"config.json: {key} must be a positive integer, found None"
            assert read(left) == missing or model_type.startswith("gemma")
            assert read({**left, key: None}) == read(left)
            continue
        assert read(left) == read(filled(model_type, left)), f"{key} left out"
        try:
            of_null = filled(model_type, {**left, key: None})
        except Exception:  # transformers has an error of its own for each key that must not be null
            continue
        if key not in NOT_SAVED.get(model_type, set()):
            assert read({**left, key: None}) == read(of_null), f"{key} is null"
    kept = SIZES | TOKENS | {"model_type"} | OF_DEFAULTS.get(model_type, {}).keys()
    assert read({key: value for key, value in whole.items() if key in kept}) == expected


def other(value: Any) -> Any:
    """A value of the same kind."""
    if isinstance(value, dict):
        return {"rope_type": "something else"}
    if isinstance(value, bool):
        return not value
    if isinstance(value, list) and value:
        return value[::-1] if value[::-1] != value else ["full_attention"] * len(value)
    return f"not {value}" if isinstance(value, str) else 2 * (value or 1)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_value_that_transformers_reads_changes_the_model_or_is_refused(
    model_type: str,
) -> None:
    whole = whole_default(model_type)
    expected = ModelConfig.from_hf(whole)
    ignored = set()
    for key in whole.keys() - UNUSED - UNUSED_BY.get(model_type, set()):
        if read({**whole, key: other(whole[key])}) == expected:
            ignored.add(key)
    assert not ignored


def test_layers_that_differ_are_refused_by_families_that_have_none() -> None:
    """transformers reads `per_layer_config` for every family."""
    for model_type in set(MODEL_TYPES) - {"gemma4_text"}:
        whole = whole_default(model_type)
        with pytest.raises(ModelError, match=f"per_layer_config is not supported for {model_type}"):
            ModelConfig.from_hf({**whole, "per_layer_config": {"1": {"intermediate_size": 8}}})
        assert ModelConfig.from_hf({**whole, "per_layer_config": {}}) == ModelConfig.from_hf(whole)


@pytest.mark.parametrize("name", ["mamba-130m", "mamba-2.8b", "mamba2-130m", "mamba2-780m"])
def test_published_shapes_of_mamba_have_the_weights_of_transformers(name: str) -> None:
    shape = dict(published_shapes()[name])
    theirs = transformers.AutoConfig.for_model(**shape)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    parts = {part.name: part.shape for part in tensor_parts(ModelConfig.from_hf(shape))}
    assert parts == {key: tuple(one.shape) for key, one in model.named_parameters()}


@pytest.mark.parametrize(
    ("changes", "inner", "recurrent"),
    [
        ({}, 112, {0, 2}),  # 2 / 3 of 151 are 100, and 8 divides 104 and 112
        ({"block_ffn_dim_multiplier": 0.5}, 56, {0, 2}),
        ({"block_ffn_dim_multiplier": None}, 100, {0, 2}),
        ({"block_auto_adjust_ff_dim": False, "full_attn_idxs": []}, 151, {0, 1, 2, 3}),
        ({"full_attn_idxs": None}, 112, set()),
        ({"layer_types": ["conv"] + ["full_attention"] * 3}, 112, {0}),
    ],
)
def test_keys_of_the_first_lfm2_checkpoints(
    changes: dict[str, Any], inner: int, recurrent: set[int]
) -> None:
    """They name the feed-forward size, the layers that attend and the tied matrix otherwise."""
    older = {
        "model_type": "lfm2",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "block_ff_dim": 151,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.08,
        "full_attn_idxs": [1, 3],
        "tie_embedding": False,
        "rope_theta": 5e5,
        "bos_token_id": 1,
        "eos_token_id": 7,
        **changes,
    }
    found = ModelConfig.from_hf(older)
    if "block_ffn_dim_multiplier" not in changes or changes["block_ffn_dim_multiplier"]:
        assert found == ModelConfig.from_hf(filled("lfm2", older))
    assert found.intermediate_size == inner and not found.tie_word_embeddings
    assert {layer for layer in range(4) if found.is_recurrent(layer)} == recurrent
    assert (found.recurrent is None) == (not recurrent)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"intermediate_size": 1}, "intermediate_size must be a positive integer, found 0"),
        ({"block_ffn_dim_multiplier": 1e30}, "intermediate_size must be at most"),
        (
            {"layer_types": ["conv", "mamba"]},
            "layer_types names 'mamba'; known are conv and full_attention",
        ),
        ({"layer_types": ["conv"]}, "layer_types must name a kind for each of 2 layers, found 1"),
        ({"layer_types": None, "full_attn_idxs": [-1]}, "full_attn_idxs must be an integer from"),
        ({"conv_L_cache": 0}, "conv_L_cache must be a positive integer, found 0"),
    ],
)
def test_layers_with_a_state_that_cannot_be_are_refused(
    changes: dict[str, Any], complaint: str
) -> None:
    sizes = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], **changes}
    with pytest.raises(ModelError, match=complaint):
        ModelConfig.from_hf({**whole_default("lfm2"), **sizes})


def test_older_words_for_layers_of_mamba() -> None:
    """Published checkpoints of Granite say mamba and attention; the first ones of Jamba, and those of
    other tools, list them as layers_block_type."""
    words = {"linear_attention": "mamba", "full_attention": "attention"}
    for name in ("granitemoehybrid", "granitemoehybrid-dense", "jamba"):
        whole = json.loads(FAMILIES[name]().to_json_string(use_diff=False))
        expected = ModelConfig.from_hf(whole)
        assert expected.recurrent is not None
        kinds = FAMILIES[name]().layer_types
        older = [words[kind] for kind in kinds]
        assert expected.recurrent.recurrent_layers == {
            layer for layer, kind in enumerate(older) if kind == "mamba"
        }
        assert ModelConfig.from_hf({**whole, "layer_types": older}) == expected
        assert ModelConfig.from_hf({**whole, "layers_block_type": older}) == expected


@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        ("jamba", {"attn_layer_offset": 3}, "attn_layer_offset must be a layer of a period of 3"),
        ("jamba", {"expert_layer_offset": -1}, "expert_layer_offset must be a layer of a period"),
        ("jamba", {"mamba_dt_rank": "some"}, "mamba_dt_rank must be a positive integer"),
        ("jamba", {"num_experts": 2}, "num_experts_per_tok is 3, more than the 2 experts"),
        ("granitemoehybrid", {"mamba_n_heads": 7}, "7 heads of 18 are not the 144 numbers of"),
        ("granitemoehybrid", {"mamba_n_groups": 3}, "8 heads of a state are not a multiple of 3"),
        ("granitemoehybrid", {"layer_types": ["conv"] * 4}, "layer_types names 'conv'; known are"),
        ("granite", {"logits_scaling": 0}, "logits_scaling must be at least 1e-06"),
        ("granite", {"residual_multiplier": "x"}, "residual_multiplier must be a number"),
    ],
)
def test_jamba_and_granite_that_cannot_be_are_refused(
    name: str, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ModelError, match=complaint):
        ModelConfig.from_hf({**FAMILIES[name]().to_dict(), **changes})


YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e5,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
}


@pytest.mark.parametrize(
    ("model_type", "given"),
    [
        ("ministral3", {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}}),
        ("ministral3", {"rope_parameters": {"rope_type": "default"}}),
        ("ministral3", {"rope_scaling": YARN}),
        ("ministral3", {"rope_scaling": {}}),
        ("gpt_oss", {"rope_parameters": YARN}),
        (
            "gpt_oss",
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 512,
                }
            },
        ),
        ("gpt_oss", {"rope_theta": 1e6}),
        (
            "llama",
            {
                "rope_parameters": {**YARN, "mscale": 2.0, "mscale_all_dim": 1.0},
                "rope_scaling": YARN,
            },
        ),
    ],
)
def test_a_given_rope_leaves_nothing_of_the_default(model_type: str, given: dict[str, Any]) -> None:
    values = {
        **{key: value for key, value in whole_default(model_type).items() if key in SIZES},
        **given,
    }
    theirs = transformers.AutoConfig.for_model(model_type, **json.loads(json.dumps(values)))
    found = ModelConfig.from_hf({"model_type": model_type, **values}).rope
    if theirs.rope_parameters["rope_type"] == "default":
        exponents = torch.arange(0, theirs.head_dim, 2).float() / theirs.head_dim
        frequencies, factor = theirs.rope_parameters["rope_theta"] ** -exponents, 1.0
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]](theirs)
    torch.testing.assert_close(
        RotaryEmbedding(found).inverse_frequencies, frequencies, rtol=1e-6, atol=0
    )
    assert RotaryEmbedding(found).attention_factor == pytest.approx(factor)
    assert found.query_growth == theirs.rope_parameters.get("llama_4_scaling_beta", 0.0)


def test_kinds_of_layers_have_their_own_default_angles() -> None:
    kinds = {
        "full_attention": {"rope_type": "default"},
        "sliding_attention": {"rope_type": "default"},
    }
    for model_type in ("gemma3_text", "olmo3"):
        given = {**whole_default(model_type), "rope_parameters": kinds}
        assert ModelConfig.from_hf(given) == ModelConfig.from_hf(filled(model_type, given))
    with pytest.raises(
        ModelError, match="rope_parameters must be the same for all layers of this model"
    ):
        ModelConfig.from_hf({**whole_default("qwen3"), "rope_parameters": kinds})


GEMMA4 = {
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 16,
    "hidden_size_per_layer_input": 0,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "sliding_window": 20,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize(
    ("num_layers", "global_head_dim"), [(4, 8), (4, 16), (10, 16), (30, 16), (100, 16)]
)
def test_layers_of_gemma_4_as_transformers_saves_them(
    num_layers: int, global_head_dim: int, tmp_path: Path
) -> None:
    """Keys of `per_layer_config` have as many digits as the last one needs; there are none if all
    heads are equal."""
    sizes = {"head_dim": 8, "global_head_dim": global_head_dim}
    config = transformers.AutoConfig.for_model(
        "gemma4_text", num_hidden_layers=num_layers, **sizes, **GEMMA4
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model)
    # scores are not scaled: with wide ones, a hundred layers make much of every rounding
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.mul_(0.2)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    full = [layer for layer, kind in enumerate(config.layer_types) if kind == "full_attention"]
    keys = [str(layer).zfill(len(str(num_layers - 1))) for layer in full if global_head_dim != 8]
    assert list(saved.pop("per_layer_config")) == keys and "global_head_dim" not in saved
    decoder, found = load_model(tmp_path, "fp32")
    of_layers = [(one.head_dim, one.num_key_value_heads) for one in config.per_layer_config]
    assert [(shape.head_dim, shape.num_kv_heads) for shape in found.layers.shapes] == of_layers
    if not keys:  # null means so, too
        assert ModelConfig.from_hf({**saved, "per_layer_config": None}) == found
    logits, expected = dense_logits(decoder, found, prompt()), reference_logits(model, prompt())
    torch.testing.assert_close(logits, expected, atol=TOLERANCE * num_layers / 10, rtol=0)


@pytest.mark.parametrize(
    ("per_layer", "complaint"),
    [
        ({"4": {"head_dim": 16}}, "per_layer_config must have layers below 4 as keys, each once"),
        (
            {"3": {"head_dim": 16}, "03": {"head_dim": 16}},
            "must have layers below 4 as keys, each once",
        ),
        ({"-1": {"head_dim": 16}}, "must have layers below 4 as keys"),
        ({"9" * 5000: {"head_dim": 16}}, "must have layers below 4 as keys"),
        (
            {"3": {"sliding_window": 8}},
            "of layer 3 must have head_dim and num_key_value_heads alone, found",
        ),
        (
            {"3": {"skip": ["mlp"]}},
            "of layer 3 must have head_dim and num_key_value_heads alone, found",
        ),
        ({"3": 16}, "of layer 3 must have head_dim and num_key_value_heads alone, found 16"),
        ({"1": {"head_dim": 16}}, "per_layer_config must give all layers of a kind the same heads"),
    ],
)
def test_sizes_of_layers_that_cannot_be_are_refused(
    per_layer: dict[str, Any], complaint: str
) -> None:
    """The first three layers have a window, the last one has none."""
    sizes = {
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "head_dim": 8,
        "per_layer_config": per_layer,
    }
    with pytest.raises(ModelError, match=complaint):
        ModelConfig.from_hf({**GEMMA4, **sizes})


def test_layers_with_a_window_may_have_heads_of_their_own() -> None:
    """They rotate by the angles of their own size."""
    config = transformers.AutoConfig.for_model(
        "gemma4_text",
        num_hidden_layers=4,
        head_dim=8,
        **GEMMA4,
        per_layer_config={n: {"head_dim": 16} for n in "012"},
    )
    found = ModelConfig.from_hf(json.loads(config.to_json_string()))
    assert [shape.head_dim for shape in found.layers.shapes] == [16, 16, 16, 8]
    assert [rope.rotary_dim for rope in found.layers.ropes] == [16, 16, 16, 8]
