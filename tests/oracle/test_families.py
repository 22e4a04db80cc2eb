"""Every family against Hugging Face transformers, in float32: logits at every position, and 64
greedy tokens."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter

from nanoserve.config.model_config import ModelConfig
from nanoserve.errors import ModelError
from nanoserve.models.attention import AttentionBatch, DenseCausalAttention, PagedAttention
from nanoserve.models.decoder import Decoder, route
from nanoserve.models.loading import load_model
from tests.models.test_decoder import layer_caches, layer_states, set_segments
from tests.oracle.checkpoints import (
    FAMILIES,
    VOCAB_SIZE,
    families,
    make_checkpoint,
    randomize,
    rename_glm_as_chatglm,
)

Checkpoint = Callable[[str], tuple[Path, PreTrainedModel]]

PROMPT_LENGTH = 45  # longer than every sliding window
GREEDY_TOKENS = 64
TOLERANCE = 1e-4
LOGPROB_TOLERANCE = 5e-5
WITH_SCANS = [
    name
    for name in FAMILIES
    if name.startswith(
        ("qwen3_next", "qwen3_5", "mamba", "nemotron_h", "jamba", "granitemoehybrid")
    )
]
BLOCK_SIZE = 16


def prompt(seed: int = 0) -> Tensor:
    return torch.randint(
        3, VOCAB_SIZE, (PROMPT_LENGTH,), generator=torch.Generator().manual_seed(seed)
    )


def dense_logits(decoder: Decoder, config: ModelConfig, tokens: Tensor) -> Tensor:
    attention = DenseCausalAttention(config, batch=1, length=len(tokens))
    with torch.inference_mode():
        return decoder.compute_logits(decoder(tokens, torch.arange(len(tokens)), attention))


def reference_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(tokens[None]).logits[0]
    return logits


class PagedSequence:
    """One sequence on scattered blocks, driven by hand: what a runner does, in its plainest
    form."""

    def __init__(self, decoder: Decoder, config: ModelConfig) -> None:
        self.decoder, self.config = decoder, config
        self.blocks = torch.randperm(16, generator=torch.Generator().manual_seed(1))
        self.key_caches, self.value_caches = layer_caches(config, 16, BLOCK_SIZE)
        self.states = layer_states(config, 1)
        self.length = 0

    def append(self, tokens: Tensor) -> Tensor:
        """Logits of the appended tokens, [len(tokens), vocab_size]."""
        positions = torch.arange(self.length, self.length + len(tokens))
        source = 0 if self.length else -1
        set_segments(self.states, [[0, len(tokens), source, 0, self.length]])
        self.length += len(tokens)
        attention = PagedAttention(
            config=self.config,
            key_caches=self.key_caches,
            value_caches=self.value_caches,
            batch=AttentionBatch(
                block_tables=self.blocks[None].int(),
                query_starts=torch.tensor([0, len(tokens)], dtype=torch.int32),
                context_lengths=torch.tensor([self.length], dtype=torch.int32),
                slot_mapping=self.blocks[positions // BLOCK_SIZE] * BLOCK_SIZE
                + positions % BLOCK_SIZE,
            ),
            states=self.states,
        )
        with torch.inference_mode():
            return self.decoder.compute_logits(self.decoder(tokens, positions, attention))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, checkpoint: Checkpoint) -> None:
    directory, model = checkpoint(family)
    decoder, config = load_model(directory, "fp32")
    expected = reference_logits(model, prompt())
    assert expected.std() > 0.5, "a flat reference would prove nothing"
    torch.testing.assert_close(
        dense_logits(decoder, config, prompt()), expected, atol=TOLERANCE, rtol=0
    )


@pytest.mark.parametrize("family", WITH_SCANS)
def test_a_model_with_recurrent_states_answers_as_transformers_does(
    family: str, checkpoint: Checkpoint
) -> None:
    directory, model = checkpoint(family)
    decoder, config = load_model(directory, "fp32")
    tokens = torch.cat((prompt(), prompt(1)))  # longer than a chunk of the scan
    expected = reference_logits(model, tokens)
    assert expected.std() > 0.5, "a flat reference would prove nothing"
    found = dense_logits(decoder, config, tokens)
    difference = found.log_softmax(-1) - expected.log_softmax(-1)
    assert difference.abs().max() <= LOGPROB_TOLERANCE
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("num_layers", [4, 12, 48])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_a_model_with_recurrent_states_may_have_any_number_of_layers(
    family: str, num_layers: int, tmp_path: Path
) -> None:
    model = make_checkpoint(family, tmp_path, num_layers=num_layers)
    decoder, config = load_model(tmp_path, "fp32")
    assert config.recurrent is not None
    assert len(config.recurrent.recurrent_layers) == num_layers * 3 // 4
    tokens = prompt()[:8]  # few, as each of many layers rounds
    found = dense_logits(decoder, config, tokens).log_softmax(-1)
    expected = reference_logits(model, tokens).log_softmax(-1)
    torch.testing.assert_close(found, expected, atol=LOGPROB_TOLERANCE, rtol=0)


def test_heads_for_drafts_and_images_beside_the_text_model_are_left_alone(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    directory, model = checkpoint("qwen3_5_text")
    (tmp_path / "config.json").symlink_to(directory / "config.json")
    tensors = load_file(directory / "model.safetensors")
    tensors["mtp.layers.0.self_attn.q_proj.weight"] = torch.ones(2, 2)
    tensors["model.visual.blocks.0.mlp.linear_fc1.weight"] = torch.ones(2, 2)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    logits = dense_logits(*load_model(tmp_path, "fp32"), prompt())
    torch.testing.assert_close(logits, reference_logits(model, prompt()), atol=TOLERANCE, rtol=0)
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.ones(2, 2)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"self_attn\.q_proj\.weight does not belong to a qwen3_5"):
        load_model(tmp_path, "fp32")


def test_experts_of_a_layer_may_be_one_tensor(tmp_path: Path, checkpoint: Checkpoint) -> None:
    """Transformers holds them so, and so do the published files of Qwen3.5."""
    directory, model = checkpoint("qwen3_5_moe_text")
    (tmp_path / "config.json").symlink_to(directory / "config.json")
    tensors = {
        name: tensor
        for name, tensor in load_file(directory / "model.safetensors").items()
        if ".experts." not in name
    }
    held = {name: one for name, one in model.state_dict().items() if ".experts." in name}
    assert [list(one.shape) for one in held.values()] == [[6, 80, 64], [6, 64, 40]] * 4
    save_file(tensors | held, tmp_path / "model.safetensors", {"format": "pt"})
    logits = dense_logits(*load_model(tmp_path, "fp32"), prompt())
    assert torch.equal(logits, dense_logits(*load_model(directory, "fp32"), prompt()))
    name = "model.layers.1.mlp.experts.down_proj"
    held[name] = held[name].mT.contiguous()
    save_file(tensors | held, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=rf"{name} has shape \[6, 40, 64\], config.json says"):
        load_model(tmp_path, "fp32")


@pytest.mark.parametrize("family", families())
def test_greedy_tokens_from_the_paged_cache_are_those_of_transformers(
    family: str, checkpoint: Checkpoint
) -> None:
    """Transformers reads all of them in one pass: each has to be its choice behind those before it."""
    directory, model = checkpoint(family)
    decoder, config = load_model(directory, "fp32")
    sequence = PagedSequence(decoder, config)
    chunks = [sequence.append(chunk) for chunk in prompt().split(17)]
    logits, tokens = chunks[-1][-1], []
    for _ in range(GREEDY_TOKENS):
        tokens.append(int(logits.argmax()))
        logits = sequence.append(torch.tensor(tokens[-1:]))[-1]
    reference = reference_logits(model, torch.cat((prompt(), torch.tensor(tokens))))
    torch.testing.assert_close(torch.cat(chunks), reference[:PROMPT_LENGTH], atol=TOLERANCE, rtol=0)
    assert tokens == reference[PROMPT_LENGTH - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("num_layers", [4, 12, 48])
@pytest.mark.parametrize("family", ["lfm2", "lfm2-biased", "lfm2_moe"])
def test_layers_with_a_state_as_transformers_saves_them(
    family: str, num_layers: int, tmp_path: Path
) -> None:
    config = FAMILIES[family]()
    config.num_hidden_layers = num_layers
    config.layer_types = ["conv", "full_attention"] + ["conv"] * (num_layers - 2)
    torch.manual_seed(num_layers)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model)
    model.save_pretrained(tmp_path)
    decoder, found = load_model(tmp_path, "fp32")
    assert [found.is_recurrent(layer) for layer in range(num_layers)] == [
        kind == "conv" for kind in config.layer_types
    ]
    expected = reference_logits(model, prompt())
    logits = dense_logits(decoder, found, prompt())
    torch.testing.assert_close(logits, expected, atol=TOLERANCE / 2, rtol=0)


def test_small_scores_of_experts_are_weighted_as_transformers_does() -> None:
    """It adds a small number to the sum of a token's scores."""
    config = FAMILIES["lfm2_moe"]()
    router = Lfm2MoeTopKRouter(config)
    moe = ModelConfig.from_hf(config.to_dict()).moe
    assert moe is not None
    logits = torch.linspace(-14, -12, 5)[:, None] + torch.linspace(0, 1, config.num_experts)
    router.weight = nn.Parameter(torch.eye(config.num_experts), requires_grad=False)
    bias = torch.linspace(1, 0, config.num_experts)
    _, weights, experts = router(logits, bias)
    found_weights, found_experts = route(logits, moe, bias)
    assert weights.sum(dim=1).max() < 0.97, "the number counts"
    assert torch.equal(found_experts, experts)
    torch.testing.assert_close(found_weights, weights)


@pytest.mark.parametrize("family", ["llama-tied-biased", "qwen3_moe", "glm4"])
def test_a_checkpoint_split_over_files_is_the_same_model(
    family: str, tmp_path: Path, checkpoint: Checkpoint
) -> None:
    make_checkpoint(family, tmp_path, shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    decoder, config = load_model(tmp_path, "fp32")
    expected = reference_logits(checkpoint(family)[1], prompt())
    torch.testing.assert_close(
        dense_logits(decoder, config, prompt()), expected, atol=TOLERANCE, rtol=0
    )


def test_a_chatglm_checkpoint_is_a_renamed_glm(tmp_path: Path, checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("glm")
    rename_glm_as_chatglm(directory, tmp_path)
    decoder, config = load_model(tmp_path, "fp32")
    expected = reference_logits(model, prompt())
    torch.testing.assert_close(
        dense_logits(decoder, config, prompt()), expected, atol=TOLERANCE, rtol=0
    )


def test_a_head_that_is_not_the_embedding_is_used_once_the_config_unties_them(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    """transformers takes the stored head whatever config.json says; here config.json has to say
    it."""
    directory, _ = checkpoint("llama-llama3")
    config = json.loads((directory / "config.json").read_text())
    assert config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(directory / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
    expected = reference_logits(AutoModelForCausalLM.from_pretrained(tmp_path), prompt())
    with pytest.raises(ModelError, match='set "tie_word_embeddings" to false'):
        load_model(tmp_path, "fp32")
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    torch.testing.assert_close(
        dense_logits(*load_model(tmp_path, "fp32"), prompt()), expected, atol=TOLERANCE, rtol=0
    )


@pytest.mark.parametrize("family", ["llama", "qwen3", "glm4"])
def test_part_of_a_head_rotates_only_in_families_that_have_it(
    family: str, tmp_path: Path, checkpoint: Checkpoint
) -> None:
    directory, _ = checkpoint(family)
    config = json.loads((directory / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope["rope_theta"], "partial_rotary_factor": 0.25}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(directory / "model.safetensors")
    expected = reference_logits(AutoModelForCausalLM.from_pretrained(tmp_path), prompt())
    torch.testing.assert_close(
        dense_logits(*load_model(tmp_path, "fp32"), prompt()), expected, atol=TOLERANCE, rtol=0
    )


def test_settings_written_before_transformers_5_mean_the_same(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    """rope_theta beside rope_scaling, and torch_dtype, instead of rope_parameters and dtype."""
    directory, _ = checkpoint("llama-llama3")
    config = json.loads((directory / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    assert ModelConfig.from_hf(config) == ModelConfig.from_directory(directory)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_follows_float32(dtype: str, checkpoint: Checkpoint) -> None:
    directory, model = checkpoint("llama-yarn")
    decoder, config = load_model(directory, dtype)
    logits = dense_logits(decoder, config, prompt())
    expected = reference_logits(model, prompt())
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().mean() < 0.05 * expected.std()
