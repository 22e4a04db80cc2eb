"""Contents of a config.json that are read, and others that are refused in one line."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nanoserve.config.model_config import ModelConfig, SamplingDefaults
from nanoserve.config.model_parts import AttentionConfig, LayerDifferences, NormConfig, RopeConfig
from nanoserve.config.published_shapes import load_shape, published_shapes
from nanoserve.errors import ModelError, UsageError
from nanoserve.models.decoder import RotaryEmbedding
from tests.oracle.checkpoints import FAMILIES


def llama(**changes: Any) -> dict[str, Any]:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
    }
    return {**config, **changes}


def qwen2(**changes: Any) -> dict[str, Any]:
    return llama(model_type="qwen2", architectures=["Qwen2ForCausalLM"], **changes)


def test_a_llama_config_says_what_it_says() -> None:
    config = ModelConfig.from_hf(llama(eos_token_id=[2, 7], bos_token_id=1, torch_dtype="bfloat16"))
    assert (config.head_dim, config.group_size, config.eos_token_ids, config.bos_token_id) == (
        16,
        2,
        (2, 7),
        1,
    )
    assert config.dtype == "bfloat16"
    assert config.rope == RopeConfig(
        rotary_dim=16, theta=10000.0, original_max_position_embeddings=256
    )
    assert config.norms == NormConfig(eps=1e-5)
    assert config.attention == AttentionConfig() and config.layers == LayerDifferences()
    assert not config.tie_word_embeddings and config.moe is None


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("llama-2-7b", set()),
        ("mistral-7b", set()),
        ("qwen3-8b", {"attention"}),
        ("qwen3-30b-a3b", {"attention", "moe"}),
        ("gpt-oss-20b", {"attention", "moe", "layers"}),
        ("olmo-3-7b", {"attention", "norms", "layers"}),
        ("deepseek-v3", {"attention", "moe"}),
        ("gemma-3-27b", {"attention", "norms", "feed_forward", "embedding", "layers"}),
    ],
)
def test_a_model_differs_from_llama_in_the_parts_that_its_paper_names(
    name: str, parts: set[str]
) -> None:
    """Norms are compared but for their eps."""
    config, llama_config = load_shape(name), load_shape("llama-3.1-8b")
    config = replace(config, norms=replace(config.norms, eps=llama_config.norms.eps))
    grouped = ("attention", "norms", "feed_forward", "moe", "embedding", "logits", "layers")
    assert {
        part for part in grouped if getattr(config, part) != getattr(llama_config, part)
    } == parts


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_of_each_family_is_read_back_as_it_was_written(family: str) -> None:
    """Profiles and compiling processes have configs as JSON."""
    config = ModelConfig.from_hf(FAMILIES[family]().to_dict())
    assert msgspec.json.decode(msgspec.json.encode(config), type=ModelConfig) == config


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive integer, found 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10000"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be a positive integer"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, found '64'"),
        ({"vocab_size": None}, "vocab_size must be a positive integer, found None"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads 4 is not a multiple of num_key_value_heads 3",
        ),
        ({"hidden_size": 65}, "hidden_size 65 is not a multiple of num_attention_heads 4"),
        (
            {"model_type": "rwkv", "architectures": ["RwkvForCausalLM"]},
            "architecture RwkvForCausalLM",
        ),
        ({"model_type": None}, "model_type None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "not a text generation model"),
        (
            {"quantization_config": {"bits": 4}},
            "quantization method None is not read; choose one of",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2}},
            "rope type 'longrope' is not supported",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2}},
            "rope type 'dynamic' is not supported",
        ),
        (
            {"rope_scaling": {"type": "linear"}},
            "the rope factor is missing, without which rope type linear",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3"}},
            "the rope factor is missing, without which rope type llama3",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 0}},
            "rope factor and rope_theta must be positive",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta must be positive"),
        ({"head_dim": 15}, "impossible rotary size"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps must be a number"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a number"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a number"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps must be at least 0"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "beta_slow": 0}},
            "0 < beta_slow < beta_fast",
        ),
        (
            {"rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 4}},
            "low_freq_factor < high_freq_factor",
        ),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be an integer from 0 on"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError) as refusal:
        ModelConfig.from_hf(llama(**changes), source="somewhere/config.json")
    message = str(refusal.value)
    assert complaint in message
    assert message.startswith("somewhere/config.json: ")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"n_group": 7}, "256 experts cannot be in 7 groups"),
        ({"topk_group": 9}, "cannot be in 8 groups, 9 of them chosen"),
        ({"kv_lora_rank": 0}, "kv_lora_rank must be a positive integer"),
        (
            {"mlp_layer_types": ["dense"]},
            "mlp_layer_types must have dense or sparse for each of 61 layers",
        ),
        ({"num_experts_per_tok": 300}, "more than the 256 experts"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantized weights of latent attention are not supported",
        ),
    ],
)
def test_what_cannot_be_in_deepseek_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        ModelConfig.from_hf(dict(published_shapes()["deepseek-v3"]) | changes)
    with pytest.raises(UsageError, match="latent attention is not rounded"):
        ModelConfig.from_hf(published_shapes()["deepseek-v3"]).rounded("int8")


def test_the_state_of_qwen3_next_is_as_large_as_its_keys_and_values_of_3144_tokens() -> None:
    """In 36 of 48 layers: 3 inputs of 2 * 16 * 128 + 32 * 128 channels in 16 bits, and 32 matrices
    of 128 * 128 numbers in 32 bits. The other 12 cache 2 * 2 * 256 numbers of a token."""
    config = ModelConfig.from_hf(published_shapes()["qwen3-next-80b-a3b"])
    state = 36 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)
    assert config.state_bytes(2) == state
    token = 2 * sum(config.layer_kv_numbers())
    assert token == 12 * 2 * 2 * 256 * 2
    assert state // token == 3144 and round(state / 2**20, 1) == 73.7
    assert [layer for layer in range(9) if not config.is_recurrent(layer)] == [3, 7]
    assert config.rope.rotary_dim == 64


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"linear_num_value_heads": 24},
            "linear_num_value_heads 24 is not a multiple of linear_num_key_heads 16",
        ),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim must be a positive integer, found 0"),
        ({"full_attention_interval": 0}, "full_attention_interval must be a positive integer"),
        (
            {"layer_types": ["linear_attention"] * 47 + ["sliding_attention"]},
            "layer_types names 'sliding_attention'; known are linear_attention and full_attention",
        ),
        ({"layer_types": ["full_attention"]}, "must name a kind for each of 48 layers, found 1"),
        ({"num_experts_per_tok": 513}, "more than the 512 experts"),
    ],
)
def test_what_cannot_be_in_qwen3_next_is_refused(changes: dict[str, Any], complaint: str) -> None:
    shape = dict(published_shapes()["qwen3-next-80b-a3b"])
    with pytest.raises(ModelError, match=complaint):
        ModelConfig.from_hf(shape | changes)
    assert ModelConfig.from_hf(shape | {"layer_types": ["full_attention"] * 48}).recurrent is None


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"n_groups": 7}, "48 heads of a state are not a multiple of 7 groups"),
        ({"num_heads": 47}, "num_heads 47 of head_dim 64 are not expand * hidden_size, 3072"),
        ({"time_step_limit": [0.1]}, "time_step_limit must be the least and the largest step, not"),
        ({"time_step_limit": [0.2, 0.1]}, "time_step_limit must be the least and the largest"),
        ({"time_step_limit": [0.0, math.nan]}, "time_step_limit must be the least and the largest"),
        (
            {"time_step_limit": "none"},
            "time_step_limit must be the least and the largest step, not",
        ),
    ],
)
def test_what_cannot_be_in_mamba2_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=re.escape(complaint)):
        ModelConfig.from_hf(dict(published_shapes()["mamba2-780m"]) | changes)


@pytest.mark.parametrize("largest", [math.inf, {"__float__": "Infinity"}])
def test_steps_without_a_limit_are_written_in_several_ways(largest: object) -> None:
    """Infinity is a word of Python's JSON, and an object in newer files."""
    shape = dict(published_shapes()["mamba2-780m"])
    unlimited = json.loads(json.dumps(shape | {"time_step_limit": [0.0, largest]}))
    assert ModelConfig.from_hf(unlimited) == ModelConfig.from_hf(shape)


def test_original_checkpoints_of_mamba_are_refused_by_name() -> None:
    original = {"d_model": 768, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {"layer": "Mamba2"}}
    with pytest.raises(ModelError, match=r"^config.json: this is an original .* ends in -hf, such"):
        ModelConfig.from_hf(original)


def test_yarn_sharpens_the_scores_of_latents() -> None:
    """DeepSeek-V3: heads of 192 before they are absorbed, and a magnitude of 0.1 ln 40 + 1,
    squared."""
    config = ModelConfig.from_hf(published_shapes()["deepseek-v3"])
    assert (config.num_kv_heads, config.head_dim, config.value_dim, config.rope.rotary_dim) == (
        1,
        576,
        512,
        64,
    )
    assert config.softmax_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)


def test_qwen_windows_start_at_max_window_layers_when_switched_on() -> None:
    sliding = {"sliding_window": 8, "max_window_layers": 2}
    assert ModelConfig.from_hf(qwen2(**sliding)).layers.sliding_windows == ()
    switched_on = ModelConfig.from_hf(qwen2(**sliding, use_sliding_window=True))
    assert switched_on.layers.sliding_windows == (0, 0, 8, 8)
    listed = qwen2(
        **sliding,
        use_sliding_window=True,
        layer_types=["sliding_attention", *["full_attention"] * 3],
    )
    assert ModelConfig.from_hf(listed).layers.sliding_windows == (8, 0, 0, 0)


def test_layer_types_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ModelError, match="layer_types"):
        ModelConfig.from_hf(
            qwen2(sliding_window=8, use_sliding_window=True, layer_types=["full_attention"])
        )


def gemma3(**changes: Any) -> dict[str, Any]:
    family = {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 8,
    }
    return llama(**family | {"architectures": ["Gemma3ForCausalLM"]} | changes)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"sliding_window": 0}, "sliding_window must be a positive integer, found 0"),
        ({"sliding_window": 257}, "sliding_window 257 is beyond max_position_embeddings 256"),
        (
            {"layer_types": ["full_attention"] * 3},
            "layer_types must name a kind for each of 4 layers, found 3",
        ),
        (
            {"layer_types": "full_attention"},
            "layer_types must name a kind for each of 4 layers, found 'full_attention'",
        ),
        (
            {"layer_types": ["full_attention", "linear_attention"] * 2},
            "layer_types names 'linear_attention'; known are sliding_attention and full_attention",
        ),
        ({"layer_types": [None] * 4}, "layer_types names None; known are"),
        (
            {"rope_parameters": {"full_attention": {}}},
            "rope_parameters must have an object for sliding_attention",
        ),
        (
            {"hidden_activation": "gelu"},
            "hidden_act 'gelu' is not supported; only gelu_pytorch_tanh is",
        ),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        (
            {"model_type": "smollm3", "hidden_activation": "silu", "no_rope_layers": [1, 2, 0, 1]},
            "no_rope_layers must",
        ),
        (
            {"model_type": "gemma5_text"},
            "(model_type 'gemma5_text') is not supported; supported model types: llama,",
        ),
    ],
)
def test_windows_and_kinds_of_layers_that_cannot_be_are_refused(
    changes: dict[str, Any], complaint: str
) -> None:
    check_refused(gemma3(**changes), complaint)


GEMMA4_LAYERS = ["sliding_attention", "full_attention"] * 2


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"sliding_window": 0}, "sliding_window must be a positive integer, found 0"),
        ({"layer_types": GEMMA4_LAYERS[::-1]}, "layer_types must end in full_attention"),
        (
            {"layer_types": GEMMA4_LAYERS[:3]},
            "layer_types must name a kind for each of 4 layers, found 3",
        ),
        (
            {"num_kv_shared_layers": 3},
            "num_kv_shared_layers 3 leaves no layer of each kind with keys and values",
        ),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers 4 leaves no"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers must be at least 0, found -1"),
        (
            {"num_global_key_value_heads": 3, "attention_k_eq_v": True},
            "is not a multiple of num_key_value_heads 3",
        ),
        ({"per_layer_config": [1]}, "per_layer_config must be an object, found [1]"),
        (
            {"per_layer_config": {"1": {"head_dim": 0}}},
            "head_dim must be a positive integer, found 0",
        ),
        (
            {"enable_moe_block": True, "use_double_wide_mlp": True},
            "use_double_wide_mlp is not supported beside experts",
        ),
        ({"enable_moe_block": True}, "num_experts must be a positive integer"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is not supported"),
    ],
)
def test_gemma4_layers_that_cannot_be_are_refused(changes: dict[str, Any], complaint: str) -> None:
    check_refused(
        gemma3(**{"model_type": "gemma4_text", "layer_types": GEMMA4_LAYERS} | changes), complaint
    )


def check_refused(config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError) as refusal:
        ModelConfig.from_hf(config, source="somewhere/config.json")
    message = str(refusal.value)
    assert complaint in message
    assert message.startswith("somewhere/config.json: ")
    assert "\n" not in message


def test_gemma_3_stretches_its_full_layers_and_turns_the_others_faster() -> None:
    """Gemma 3 as its config.json says it: a pattern, a local base, and a scaling that does not say whose it
    is."""
    published = {"sliding_window_pattern": 3, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    config = ModelConfig.from_hf(
        gemma3(**published, rope_scaling={"rope_type": "linear", "factor": 8.0})
    )
    assert config.layers.sliding_windows == (8, 8, 0, 8)
    assert [(rope.theta, rope.kind, rope.factor) for rope in config.layers.ropes] == [
        *[(1e4, "default", 1.0)] * 2,
        (1e6, "linear", 8.0),
        (1e4, "default", 1.0),
    ]
    assert (
        config.attention.scale == 256**-0.5
        and config.embedding.scale == 8.0
        and config.head_dim == 256
    )


def test_mistral_slides_unless_null_says_otherwise() -> None:
    mistral = llama(model_type="mistral", architectures=["MistralForCausalLM"])
    assert ModelConfig.from_hf(mistral).sliding_window(0) == 4096
    assert ModelConfig.from_hf({**mistral, "sliding_window": None}).sliding_window(0) == 0


def test_generation_config_wins_for_end_tokens_and_recommends_sampling() -> None:
    generation = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "eos_token_id": [5, 6],
    }
    config = ModelConfig.from_hf(llama(eos_token_id=2), generation)
    assert config.eos_token_ids == (5, 6)
    assert config.sampling_defaults == SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20)


def test_without_do_sample_only_the_repetition_penalty_is_meant() -> None:
    config = ModelConfig.from_hf(llama(), {"temperature": 0.6, "repetition_penalty": 1.1})
    assert config.sampling_defaults == SamplingDefaults(repetition_penalty=1.1)


def test_top_k_is_a_whole_number() -> None:
    assert (
        ModelConfig.from_hf(llama(), {"do_sample": True, "top_k": 20.0}).sampling_defaults.top_k
        == 20
    )
    with pytest.raises(
        ModelError, match=r"^a/config\.json/generation_config\.json: top_k must be a whole number"
    ):
        ModelConfig.from_hf(
            llama(), {"do_sample": True, "top_k": 2.5}, source="a/config.json/config.json"
        )


def test_a_directory_is_read_and_its_faults_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such model directory"):
        ModelConfig.from_directory(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no config\.json"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ModelError, match=r"config\.json is not (valid JSON|UTF-8 text)"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"config\.json is not (valid JSON|UTF-8 text)"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match=r"config\.json is not (valid JSON|UTF-8 text)"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="must hold a JSON object, not list"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(llama()))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert ModelConfig.from_directory(tmp_path).eos_token_ids == (9,)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"temperature": "hot", "do_sample": True})
    )
    with pytest.raises(ModelError, match=r"generation_config\.json: temperature must be a number"):
        ModelConfig.from_directory(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=4,
)
FULL_CONFIGS = {
    name: {**json.loads(FAMILIES[name]().to_json_string()), "max_window_layers": 1}
    for name in (
        "qwen2-window",
        "qwen3_moe",
        "gpt_oss",
        "gemma2",
        "gemma3_text",
        "gemma4_text",
        "olmo3",
        "smollm3",
        "cohere2",
        "ministral3",
        "lfm2",
        "qwen3_next",
    )
} | {"llama": llama(rope_scaling={"type": "yarn", "factor": 2.0, "beta_fast": 30})}


@settings(max_examples=120, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(FULL_CONFIGS)))
def test_any_value_anywhere_is_accepted_or_refused_in_one_line(
    data: st.DataObject, name: str
) -> None:
    config = dict(FULL_CONFIGS[name])
    keys = sorted(
        {
            *config,
            "rope_parameters",
            "rope_scaling",
            "layer_types",
            "head_dim",
            "rope_theta",
            "mlp_only_layers",
        }
        | {"sliding_window_pattern", "no_rope_layers", "query_pre_attn_scalar", "logit_scale"}
    )
    for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3)):
        config[key] = data.draw(JSON, label=key)
    try:
        accepted = ModelConfig.from_hf(config, {"eos_token_id": data.draw(JSON)})
    except ModelError as refusal:
        assert "\n" not in str(refusal)
        return
    assume(accepted.head_dim <= 4096)
    for rope in accepted.rope_kinds:
        assert RotaryEmbedding(rope).inverse_frequencies.isfinite().all()
