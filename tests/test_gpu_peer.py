"""The plain decoder of torch alone, and the script that compares nanoserve with it, on the CPU."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoserve.config.model_config import ModelConfig
from nanoserve.errors import UsageError
from nanoserve.models.attention import DenseCausalAttention
from nanoserve.models.decoder import Decoder
from scripts.gpu_peer import PlainDecoder, main

SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SHAPE, "rope_parameters": LLAMA3_ROPE},
    "qwen3": {"model_type": "qwen3", **SHAPE, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("family", MODELS)
@torch.inference_mode()
def test_logits_are_those_of_the_decoder(family: str) -> None:
    """Compares a prompt, and each token behind it that is decoded from the cache."""
    config = ModelConfig.from_hf(MODELS[family], source=family)
    decoder = Decoder(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in decoder.parameters():
        parameter.normal_(0.0, 0.3, generator=generator)
    tokens = torch.randint(config.vocab_size, (2, 14), generator=generator)
    peer = PlainDecoder(decoder, batch=2, length=16)
    for first, end in ((0, 10), (10, 11), (11, 12), (12, 13), (13, 14)):
        found = peer(tokens[:, first:end], torch.arange(first, end))
        attention = DenseCausalAttention(config, 2, end)
        hidden = decoder(tokens[:, :end].flatten(), torch.arange(end).repeat(2), attention)
        expected = decoder.compute_logits(hidden.view(2, end, -1)[:, -1])
        assert expected.std() > 0.1
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen2", {}), ("llama", {"attention_bias": True}), ("llama", {"mlp_bias": True})],
)
def test_other_families_and_biases_are_refused(family: str, changes: dict[str, Any]) -> None:
    config = ModelConfig.from_hf(MODELS["llama"] | {"model_type": family} | changes, source=family)
    with pytest.raises(UsageError, match=r"^the peer knows"):
        PlainDecoder(Decoder(config), batch=1, length=8)


def test_both_decode_the_same_tokens_in_turns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    # a model that ties its embeddings repeats its last token
    path.write_text(json.dumps(MODELS["llama"] | {"num_hidden_layers": 1}), encoding="utf-8")
    sizes = ["--batch", "2", "--context", "9", "--tokens", "5", "--rounds", "2"]
    main([str(path), "--device", "cpu", "--backend", "eager", *sizes])
    ours, peer, together = capsys.readouterr().out.splitlines()
    assert ours.startswith(f"{path}, nanoserve: ") and ours.endswith("% of the floor")
    assert peer.startswith(f"{path}, torch.compile: ") and peer.endswith("% of the floor")
    assert re.search(r"nanoserve over torch.compile [\d.]+ \([\d.]+-[\d.]+\)", together)
    assert together.endswith("10 of 10 tokens are the same")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["qwen3-0.6b"],
            "gpu_peer: .*; install a CUDA build of torch, or try it with --device cpu",
        ),
        (["no-such-model", "--device", "cpu"], "unknown shape"),
    ],
)
def test_an_error_is_one_line(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    with pytest.raises(SystemExit, match=message) as error:
        main(words)
    assert "\n" not in str(error.value)
