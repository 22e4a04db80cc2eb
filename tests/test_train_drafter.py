"""Training drafters: chains of draft tokens, what they learn from, and what is measured of them."""

import sys
from pathlib import Path

import pytest
import torch

from nanoserve.config.model_config import ModelConfig
from nanoserve.models.attention import DenseCausalAttention
from nanoserve.models.decoder import Decoder

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import train_drafter
from train_drafter import (
    GREEDY,
    SAMPLED,
    STORYTELLER,
    acceptance,
    answers,
    load,
    new_drafter,
    write,
)

from nanoserve.models.loading import load_model

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


def test_a_chain_sees_the_tokens_up_to_its_root_and_its_own() -> None:
    torch.manual_seed(0)
    decoder, tokens = Decoder(CONFIG), torch.randint(50, (2, 7))
    followers = [torch.randint(50, (14,)) for _ in range(3)]
    with torch.inference_mode():
        found = [
            *train_drafter.chains(
                decoder, tokens, torch.empty(0), 4, [tokens.flatten(), *followers].__getitem__
            )
        ]
        for row in range(2):
            for root in range(7):
                chain = [one[7 * row + root].item() for one in followers]
                whole = torch.tensor([*tokens[row, : root + 1].tolist(), *chain])
                hidden = decoder(
                    whole, torch.arange(len(whole)), DenseCausalAttention(CONFIG, 1, len(whole))
                )
                expected = decoder.compute_logits(hidden)[root:]
                for logits, one in zip(found, expected, strict=True):
                    torch.testing.assert_close(logits[7 * row + root], one, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_storyteller_draft_tokens_all_that_it_says_itself(params) -> None:
    target, _ = load_model(STORYTELLER, "float32")
    told = answers(["a story about a dog and a kite", "hello"], params)
    assert acceptance("draft", target, target, told, params) == [1.0] * 4
    fewer = acceptance("draft", new_drafter("draft", target, 64), target, told, params)
    assert fewer[0] < 0.2


@pytest.mark.parametrize("kind", ["eagle", "medusa", "draft"])
def test_each_kind_learns_and_is_read_again(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    target, _ = load_model(STORYTELLER, "float32")
    drafter, tokens = new_drafter(kind, target, 64), torch.randint(4096, (1, 24))
    before = [parameter.clone() for parameter in target.parameters()]
    optimizers, losses = train_drafter.make_optimizers(drafter), []
    for _ in range(4):
        loss = train_drafter.distillation_loss(kind, drafter, target, tokens)
        loss.backward()
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.1
    assert all(torch.equal(one, two) for one, two in zip(before, target.parameters(), strict=True))
    write(drafter, tmp_path)
    again = load(kind, tmp_path, target)
    for name, parameter in drafter.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(again.get_parameter(name), parameter.bfloat16().float()), name
