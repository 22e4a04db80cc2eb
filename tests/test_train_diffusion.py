"""Training the storyteller as a block-diffusion model: what it learns from, how a run goes on, and
what is saved."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from nanoserve import LLM, SamplingParams
from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import CanvasConfig
from nanoserve.models.attention import DenseCausalAttention
from nanoserve.models.decoder import Decoder

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import storyteller_data as data
import train_diffusion
from train_diffusion import (
    BLOCK,
    STORYTELLER,
    Training,
    TwoCopies,
    are_last,
    draw_masks,
    load_storyteller,
    load_tokenizer,
    sdar_config,
    sdar_tensors,
    write_sdar,
)

MASK = 49
CONFIG = ModelConfig.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
)
STORIES = [
    "Once upon a time, there was a little dog. He had a red kite. The dog ran and ran all day.",
    "One day, Lily saw a cat and a boat. The cat was happy. They played until the sun went down.",
    "Tom had a big ball. He threw the ball to his mom. She laughed, and they went home to eat.",
    "There was a bird who could not fly. A frog helped her. Then the bird flew up to the sky.",
]


def test_a_pass_over_two_copies_predicts_every_block_from_the_clean_ones_before() -> None:
    torch.manual_seed(0)
    decoder, tokens = Decoder(CONFIG), torch.randint(49, (2, 3 * BLOCK))
    for parameter in decoder.parameters():
        parameter.data *= 8  # or attention is nearly even, whatever it sees
    masked = draw_masks(2, 3 * BLOCK, torch.Generator().manual_seed(1))
    noised = tokens.masked_fill(masked, MASK)
    positions = torch.arange(3 * BLOCK)
    canvases = replace(CONFIG, canvas=CanvasConfig(BLOCK, MASK))
    with torch.inference_mode():
        both = torch.stack((noised, tokens), 1).flatten()
        hidden = decoder(both, positions.repeat(4), TwoCopies(CONFIG, 2, 3 * BLOCK))
        found = decoder.compute_logits(hidden).unflatten(0, (2, 2, 3 * BLOCK))[:, 0]
        for row in range(2):
            for first in range(0, 3 * BLOCK, BLOCK):
                end = first + BLOCK
                known = torch.cat((tokens[row, :first], noised[row, first:end]))
                attention = DenseCausalAttention(canvases, 1, end)
                alone = decoder.compute_logits(decoder(known, positions[:end], attention))
                torch.testing.assert_close(
                    found[row, first:end], alone[first:], atol=1e-4, rtol=1e-4
                )


def test_every_number_of_masks_in_a_block_is_as_likely() -> None:
    masked = draw_masks(100, 101 * BLOCK, torch.Generator().manual_seed(0))
    assert not masked[:, 0].any()
    counts = masked[:, BLOCK:].unflatten(1, (-1, BLOCK)).sum(-1).flatten()
    found = torch.bincount(counts, minlength=BLOCK + 1).tolist()
    assert found[0] == 0
    # 10,000 blocks; four standard deviations of a share of 1/4 are 173
    assert all(abs(number - 2500) < 173 for number in found[1:])
    by_place = masked[:, BLOCK:].unflatten(1, (-1, BLOCK)).float().mean((0, 1))
    torch.testing.assert_close(by_place, torch.full((BLOCK,), 0.625), atol=0.02, rtol=0)


def test_the_masks_after_the_last_known_token_of_a_block() -> None:
    masked = torch.tensor([[False, True, False, True, True, True, True, True]])
    assert are_last(masked).tolist() == [[False, False, False, True, True, True, True, True]]
    masked = torch.tensor([[True, True, True, False, True, False, True, True]])
    assert are_last(masked).tolist() == [[False] * 4 + [False, False, True, True]]


@torch.inference_mode()
def test_layers_of_qwen3_compute_what_the_storyteller_does() -> None:
    decoder, _ = load_storyteller()
    llama = LlamaForCausalLM.from_pretrained(STORYTELLER, dtype=torch.float32)
    mask = 192
    llama.model.embed_tokens.weight[mask] = decoder.embedding.weight[mask]
    config = sdar_config(decoder.config, mask) | {"model_type": "qwen3", "use_cache": False}
    qwen = Qwen3ForCausalLM(Qwen3Config(**config)).float().eval()
    missing = qwen.load_state_dict(sdar_tensors(decoder), strict=False).missing_keys
    assert missing == ["lm_head.weight"]  # is tied
    tokens = torch.tensor([load_tokenizer(STORYTELLER).encode(" ".join(STORIES)).ids])
    assert tokens.shape[1] > 40
    torch.testing.assert_close(qwen(tokens).logits, llama(tokens).logits, atol=2e-3, rtol=1e-3)


def make_training(steps: int) -> Training:
    """A run with a batch of a few tokens."""
    torch.set_num_threads(1)
    decoder, teacher = load_storyteller()
    corpus = data.Corpus(STORIES, [], [])
    tokenizer = load_tokenizer(STORYTELLER)
    return Training(decoder, teacher, tokenizer, corpus, steps, seed=1, rows=(2, 64))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A whole run."""
    training = make_training(steps=6)
    training.run(tmp_path_factory.mktemp("whole") / "checkpoint.pt")
    return training


def test_it_learns(trained: Training) -> None:
    assert trained.step == len(trained.losses) == 6
    assert trained.losses[-1] < trained.losses[0] - 0.3


def test_a_run_that_was_stopped_ends_with_the_weights_of_one_that_was_not(
    trained: Training, tmp_path: Path
) -> None:
    make_training(steps=6).run(tmp_path / "checkpoint.pt", last_step=3)
    again = make_training(steps=6)
    again.run(tmp_path / "checkpoint.pt")
    assert again.losses == trained.losses
    for name, weight in trained.decoder.state_dict().items():
        assert torch.equal(again.decoder.state_dict()[name], weight), name


def test_a_checkpoint_of_another_seed_is_refused(tmp_path: Path) -> None:
    training = make_training(steps=6)
    training.save(tmp_path / "checkpoint.pt")
    training.seed = 2
    with pytest.raises(SystemExit, match="is of a run with --seed 1; delete it first"):
        training.load(tmp_path / "checkpoint.pt")


def test_the_saved_model_writes_canvases_of_four_tokens(trained: Training, tmp_path: Path) -> None:
    write_sdar(trained.decoder, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["block_size"]) == ("sdar", 4)
    assert config["mask_token_id"] == load_tokenizer(STORYTELLER).token_to_id(train_diffusion.MASK)
    with LLM(tmp_path, dtype="float32") as llm:
        assert llm.built.model.canvas == CanvasConfig(4, config["mask_token_id"])
        params = SamplingParams(temperature=0.8, max_tokens=8, ignore_eos=True, seed=0)
        (output,) = llm.generate("Once upon a time", params)
    tokens = output.outputs[0].token_ids
    assert len(tokens) == 8
    assert config["mask_token_id"] not in tokens


def test_no_text_has_the_mask() -> None:
    tokenizer = load_tokenizer(STORYTELLER)
    mask = train_diffusion.mask_token(tokenizer)
    text = "".join(map(chr, [*range(0x500), 0x2028, 0xFFFD, 0x1F436, 0x10FFFF]))
    assert mask not in tokenizer.encode(text).ids
