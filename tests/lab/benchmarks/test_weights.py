"""The peers' files hold the weights that nanoserve computes with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoserve.errors import RuntimeFailure, UsageError
from nanoserve.lab.benchmarks.peers import weights
from nanoserve.lab.benchmarks.peers.process import Opening
from nanoserve.models.dummy import make_dummy_model
from nanoserve.models.hub import ResolvedModel, resolve_model

SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
PROMPTS = (tuple(range(100, 109)), tuple(range(7, 16)))


@pytest.fixture(params=["llama", "qwen3", "qwen2"])
def dummy(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a tiny dummy model; what is written for it goes below tmp_path."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SHAPE | {"model_type": request.param}))
    return f"dummy:{config}"


def opening(engine: str, model: str, dtype: str = "float32") -> Opening:
    return Opening(
        engine=engine, model=model, dtype=dtype, threads=1, max_batch=2, max_length=14, eager=True
    )


def answers(peer: Any) -> Any:
    result = peer.run(PROMPTS, output_tokens=5)
    assert [timing.output_tokens for timing in result.timings] == [5, 5]
    assert all(timing.ttft > 0 for timing in result.timings)
    return result.tokens


def nanoserve_answers(model: str) -> Any:
    from nanoserve.lab.benchmarks.peers.engine_peers import NanoservePeer

    peer = NanoservePeer(opening("nanoserve", model))
    with peer.llm:
        return answers(peer)


def test_transformers_gives_the_same_tokens(dummy: str) -> None:
    from nanoserve.lab.benchmarks.peers.engine_peers import TransformersPeer

    directory = weights.checkpoint_directory(resolve_model(dummy), "float32")
    assert answers(TransformersPeer(opening("transformers", str(directory)))) == nanoserve_answers(
        dummy
    )


def test_llama_cpp_gives_the_same_tokens(dummy: str) -> None:
    pytest.importorskip("llama_cpp")
    from nanoserve.lab.benchmarks.peers.llama_cpp_peer import LlamaCppPeer

    file = weights.gguf_file(resolve_model(dummy), "float32", None)
    assert answers(LlamaCppPeer(opening("llama.cpp", str(file)))) == nanoserve_answers(dummy)


@pytest.fixture
def gemma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A tiny Gemma 3, whose sixth layer sees more than the last 4 positions."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fields = {
        "num_hidden_layers": 6,
        "sliding_window": 4,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 16,
    }
    config = tmp_path / "gemma.json"
    config.write_text(json.dumps(SHAPE | {"model_type": "gemma3_text", "rope_theta": 1e6} | fields))
    return f"dummy:{config}"


def test_llama_cpp_gives_the_same_tokens_of_gemma(gemma: str) -> None:
    pytest.importorskip("llama_cpp")
    from nanoserve.lab.benchmarks.peers.llama_cpp_peer import LlamaCppPeer

    file = weights.gguf_file(resolve_model(gemma), "float32", None)
    assert answers(LlamaCppPeer(opening("llama.cpp", str(file)))) == nanoserve_answers(gemma)


def test_a_gguf_file_of_gemma_has_windows_and_norms_that_multiply(gemma: str) -> None:
    gguf = pytest.importorskip("gguf")
    decoder, _ = make_dummy_model(gemma, "float32")
    reader = gguf.GGUFReader(weights.gguf_file(resolve_model(gemma), "float32", None))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert (fields["gemma3.attention.sliding_window"], fields["gemma3.rope.freq_base"]) == (4, 1e6)
    stored = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    layer = decoder.layers[1]
    assert torch.equal(
        stored["blk.1.post_attention_norm.weight"], layer.attention_output_norm.weight + 1
    )
    assert torch.equal(stored["blk.1.attn_q_norm.weight"], layer.query_norm.weight + 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_gguf_file_holds_every_number(dummy: str, dtype: str) -> None:
    gguf = pytest.importorskip("gguf")
    decoder, config = make_dummy_model(dummy, dtype)
    stored = {
        tensor.name: tensor
        for tensor in gguf.GGUFReader(weights.gguf_file(resolve_model(dummy), dtype, None)).tensors
    }
    down = torch.from_numpy(stored["blk.1.ffn_down.weight"].data.copy()).view(torch.uint8)
    assert torch.equal(
        down.flatten(), decoder.layers[1].feed_forward.down.weight.view(torch.uint8).flatten()
    )
    matrices = sum(parameter.numel() for parameter in decoder.parameters() if parameter.dim() == 2)
    of_type = [tensor for tensor in stored.values() if len(tensor.shape) == 2]
    assert sum(int(tensor.n_elements) for tensor in of_type) == matrices
    assert {tensor.tensor_type.name for tensor in of_type} == {
        {"float32": "F32", "bfloat16": "BF16"}.get(dtype, "F16")
    }
    assert config.tie_word_embeddings
    assert "output.weight" not in stored


def test_nanoserve_reads_the_file_of_a_dummy(dummy: str) -> None:
    pytest.importorskip("gguf")
    model = resolve_model(str(weights.gguf_file(resolve_model(dummy), "float32", None)))
    assert weights.gguf_file(model, "float32", None) == weights.own_gguf_file(model)
    assert model.tokenizer_directory == resolve_model(dummy).tokenizer_directory
    assert nanoserve_answers(str(weights.own_gguf_file(model))) == nanoserve_answers(dummy)


@pytest.mark.parametrize(("quantization", "stored"), [("int4", "Q4_0"), ("int8", "Q8_0")])
def test_llama_cpp_rounds_its_own_file(dummy: str, quantization: str, stored: str) -> None:
    pytest.importorskip("llama_cpp")
    gguf = pytest.importorskip("gguf")
    file = weights.gguf_file(resolve_model(dummy), "bfloat16", quantization)
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert types["blk.0.ffn_down.weight"] == stored
    assert weights.gguf_file(resolve_model(str(file)), "bfloat16", None) == file
    other = {"int4": "int8", "int8": "int4"}[quantization]
    with pytest.raises(
        RuntimeFailure, match=f"cannot round .* to {other}; if it is quantized already, leave"
    ):
        weights.gguf_file(resolve_model(str(file)), "bfloat16", other)


def test_a_quantized_checkpoint_has_no_gguf_file(dummy: str, tmp_path: Path) -> None:
    section = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (tmp_path / "config.json").write_text(
        json.dumps(SHAPE | {"model_type": "llama", "quantization_config": section})
    )
    with pytest.raises(
        UsageError, match=r"is quantized, and cannot be written for llama\.cpp; compare a GGUF file"
    ):
        weights.gguf_file(ResolvedModel("packed", tmp_path, tmp_path), "bfloat16", None)


def test_what_was_written_is_kept(dummy: str) -> None:
    first = weights.checkpoint_directory(resolve_model(dummy), "float32")
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert weights.checkpoint_directory(resolve_model(dummy), "float32") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written


def test_a_shape_that_changed_is_written_anew(dummy: str) -> None:
    first = weights.checkpoint_directory(resolve_model(dummy), "float32")
    config = Path(dummy.removeprefix("dummy:"))
    config.write_text(
        config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 1')
    )
    assert weights.checkpoint_directory(resolve_model(dummy), "float32") != first


def test_a_model_that_gguf_has_no_place_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SHAPE | {"model_type": "glm", "tie_word_embeddings": False}))
    with pytest.raises(UsageError, match=r"glm with default rope cannot be written for llama\.cpp"):
        weights.gguf_file(resolve_model(f"dummy:{config}"), "float32", None)
    assert not (tmp_path / "nanoserve").exists()
