"""Faults of a model directory: each is one line that names the file and the tensor."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoserve.config.model_config import ModelConfig
from nanoserve.errors import ModelError, UsageError
from nanoserve.models.decoder import Decoder
from nanoserve.models.dtypes import resolve_dtype
from nanoserve.models.loading import INDEX_NAME, load_model
from nanoserve.models.shards import Shard, make_shards
from scripts.saving import save_hf

CONFIG = ModelConfig.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "eos_token_id": 2,
    }
)
HEAD = "lm_head.weight"
UP = "model.layers.1.mlp.up_proj.weight"
GATE = "model.layers.0.block_sparse_moe.gate.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("saved")
    save_hf(Decoder(CONFIG), CONFIG, directory)
    return directory


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    """A directory of the test's own, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def shard(directory: Path) -> Path:
    """Split the checkpoint into two files with an index; returns the second file, which holds
    UP."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    files = {name: "b.safetensors" if "layers.1" in name else "a.safetensors" for name in tensors}
    for file in ("a.safetensors", "b.safetensors"):
        save_file(
            {name: tensors[name] for name in tensors if files[name] == file}, directory / file
        )
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": files}))
    return directory / "b.safetensors"


def refusal(directory: Path, shard: Shard | None = None) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(directory, "fp32", shard=shard)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_what_is_saved_is_loaded_again(tmp_path: Path) -> None:
    torch.manual_seed(1)
    decoder = Decoder(CONFIG)
    save_hf(decoder, CONFIG, tmp_path)
    again, config = load_model(tmp_path, "fp32")
    parameters = dict(again.named_parameters())
    assert all(
        torch.equal(parameter, parameters[name]) for name, parameter in decoder.named_parameters()
    )
    assert config == CONFIG
    assert not any(parameter.requires_grad for parameter in again.parameters())


def test_progress_ends_at_the_bytes_of_the_checkpoint(model: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_model(model, "bf16", progress=lambda done, total: seen.append((done, total)))
    sizes = [tensor.numel() * 4 for tensor in load_file(model / "model.safetensors").values()]
    assert len(seen) == len(sizes)
    assert seen[-1] == (sum(sizes), sum(sizes))
    assert seen == sorted(seen)


def tie(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))


@pytest.mark.parametrize("written", [True, False])
def test_tied_embeddings_share_memory_and_a_written_copy_is_ignored(
    model: Path, *, written: bool
) -> None:
    tie(model)
    if written:
        rewrite(model, lambda tensors: tensors[HEAD].copy_(tensors["model.embed_tokens.weight"]))
    else:
        rewrite(model, lambda tensors: tensors.pop(HEAD))
    decoder, _ = load_model(model, "fp32")
    assert decoder.lm_head.weight is decoder.embedding.weight


def test_a_tied_embedding_may_be_stored_as_the_output_matrix(model: Path) -> None:
    tie(model)
    tensors = load_file(model / "model.safetensors")
    rewrite(model, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    decoder, _ = load_model(model, "fp32")
    assert torch.equal(decoder.embedding.weight, tensors[HEAD])
    assert decoder.lm_head.weight is decoder.embedding.weight


def test_an_output_matrix_that_is_not_the_embedding_it_is_tied_to_is_refused(model: Path) -> None:
    tie(model)
    rewrite(
        model,
        lambda tensors: tensors[HEAD].copy_(tensors["model.embed_tokens.weight"])[49, 15].add_(1),
    )
    shard = make_shards(CONFIG, pipeline_parallel=2, tensor_parallel=1)[0]
    # no worker begins without the others
    for load in (refusal, lambda directory: refusal(directory, shard)):
        assert f"model.safetensors: tensor {HEAD} differs from model.embed_tokens.weight" in load(
            model
        )
    rewrite(model, lambda tensors: tensors.update({HEAD: torch.zeros(50, 8)}))
    assert (
        f"model.safetensors: tensor {HEAD} has shape [50, 8], config.json says [50, 16]"
        in refusal(model)
    )


def test_rotary_angles_stay_exact_in_half_precision(model: Path) -> None:
    halved, _ = load_model(model, "bf16")
    exact, _ = load_model(model, "fp32")
    assert halved.embedding.weight.dtype == torch.bfloat16
    assert torch.equal(halved.rotary[0].inverse_frequencies, exact.rotary[0].inverse_frequencies)


def test_a_missing_tensor_is_named(model: Path) -> None:
    rewrite(model, lambda tensors: tensors.pop(UP))
    assert f"tensor {UP} is missing" in refusal(model)


def test_an_extra_tensor_is_named(model: Path) -> None:
    rewrite(model, lambda tensors: tensors.update({"model.layers.2.extra": torch.zeros(1)}))
    assert "model.safetensors: tensor model.layers.2.extra does not belong" in refusal(model)


BIAS = UP.replace("weight", "bias")


def test_a_bias_of_zeros_adds_nothing(model: Path) -> None:
    rewrite(
        model,
        lambda tensors: tensors.update({BIAS: torch.zeros(24), "model.norm.bias": torch.zeros(16)}),
    )
    load_model(model, "fp32")
    rewrite(model, lambda tensors: tensors[BIAS][23].fill_(1e-7))
    assert f"model.safetensors: tensor {BIAS} does not belong" in refusal(model)
    rewrite(model, lambda tensors: tensors[BIAS][23].fill_(float("nan")))
    assert f"model.safetensors: tensor {BIAS} does not belong" in refusal(model)


def test_a_wrong_shape_is_named(model: Path) -> None:
    rewrite(model, lambda tensors: tensors.update({UP: torch.zeros(24, 8)}))
    assert (
        f"model.safetensors: tensor {UP} has shape [24, 8], config.json says [24, 16]"
        in refusal(model)
    )


def test_integers_are_not_weights(model: Path) -> None:
    rewrite(model, lambda tensors: tensors.update({UP: torch.zeros(24, 16, dtype=torch.int8)}))
    assert f"model.safetensors: tensor {UP} is stored as I8" in refusal(model)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_tensor_that_holds_no_numbers_is_named(model: Path, value: float) -> None:
    rewrite(model, lambda tensors: tensors[UP][3].fill_(value))
    assert f"model.safetensors: tensor {UP} has NaN or infinite values as float32" in refusal(model)


def test_a_dtype_too_narrow_for_the_weights_is_named(model: Path) -> None:
    rewrite(model, lambda tensors: tensors[UP].fill_(1e6))
    load_model(model, "bf16")
    with pytest.raises(
        ModelError, match=f"{UP} has NaN or infinite values as float16; .* --dtype is too narrow"
    ):
        load_model(model, "fp16")


def test_a_config_of_a_billion_experts_ends_at_the_first_that_is_missing(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    experts = {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 2**30,
    }
    (model / "config.json").write_text(json.dumps(config | experts))
    rewrite(model, lambda tensors: tensors.update({GATE: torch.zeros(1, 1)}))
    assert f"tensor {GATE} has shape [1, 1]" in refusal(model)


@pytest.mark.parametrize("kept", [0, 4, 300, -1])
def test_a_truncated_file_is_named(model: Path, kept: int) -> None:
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[:kept])
    assert "model.safetensors: not a complete safetensors file" in refusal(model)


def test_a_corrupt_header_is_named(model: Path) -> None:
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[:8] + b"!" * 40 + content[48:])
    assert "model.safetensors: not a complete safetensors file" in refusal(model)


def test_pickles_are_not_read(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert "convert them to safetensors" in refusal(model)
    (model / "pytorch_model.bin").unlink()
    assert "no weights found" in refusal(model)


def test_shards_are_read_and_a_missing_one_is_named(model: Path) -> None:
    second = shard(model)
    load_model(model, "fp32")
    second.unlink()
    assert "b.safetensors: missing" in refusal(model)


def test_a_tensor_the_index_promises_must_be_in_its_shard(model: Path) -> None:
    second = shard(model)
    tensors = load_file(second)
    del tensors[UP]
    save_file(tensors, second)
    assert f"b.safetensors: tensor {UP} is missing" in refusal(model)


def test_an_index_may_promise_tensors_that_no_model_needs(model: Path) -> None:
    shard(model)
    index = json.loads((model / INDEX_NAME).read_text())
    index["weight_map"]["model.layers.1.self_attn.rotary_emb.inv_freq"] = "b.safetensors"
    (model / INDEX_NAME).write_text(json.dumps(index))
    load_model(model, "fp32")


def test_an_index_left_beside_a_whole_file_is_not_followed(saved: Path, model: Path) -> None:
    second = shard(model)
    shutil.copy(saved / "model.safetensors", model)
    rewrite(model, lambda tensors: tensors[UP].fill_(3.0))
    # the whole file's
    assert float(load_model(model, "fp32")[0].layers[1].feed_forward.gate_up.weight[24, 0]) == 3.0
    second.unlink()
    load_model(model, "fp32")


def test_an_index_that_names_the_usual_file_among_others_is_followed(model: Path) -> None:
    second = shard(model)
    (model / "a.safetensors").rename(model / "model.safetensors")
    index = (model / INDEX_NAME).read_text()
    (model / INDEX_NAME).write_text(index.replace("a.safetensors", "model.safetensors"))
    load_model(model, "fp32")
    second.unlink()
    assert f"b.safetensors: missing; {INDEX_NAME} names it" in refusal(model)


def test_files_may_have_names_of_their_own(saved: Path, model: Path) -> None:
    (model / "model.safetensors").rename(model / "weights.safetensors")
    load_model(model, "fp32")
    (model / "weights.safetensors").rename(model / "model.safetensors")
    second = shard(model)
    (model / INDEX_NAME).rename(model / "weights.safetensors.index.json")
    load_model(model, "fp32")
    second.unlink()
    assert "b.safetensors: missing; weights.safetensors.index.json names it" in refusal(model)


POINTER = (
    "version https://git-lfs.github.com/spec/v1\noid "
    "sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1\nsize 12345\n"
)


def test_a_pointer_of_git_lfs_says_what_to_do(model: Path) -> None:
    (model / "model.safetensors").write_text(POINTER)
    assert "model.safetensors: only a Git-LFS pointer to the file; run `git lfs pull`" in refusal(
        model
    )


def test_a_tensor_may_not_be_in_two_shards(model: Path) -> None:
    second = shard(model)
    save_file(load_file(second) | {"model.norm.weight": torch.ones(16)}, second)
    assert "b.safetensors: tensor model.norm.weight is also in a.safetensors" in refusal(model)


@pytest.mark.parametrize(
    "name", ["../b.safetensors", "/etc/passwd", "sub/b.safetensors", "b.bin", 3, ".."]
)
def test_an_index_that_leads_out_of_the_directory_is_refused(model: Path, name: object) -> None:
    shard(model)
    (model / INDEX_NAME).write_text(json.dumps({"weight_map": {UP: name}}))
    assert f"{INDEX_NAME}: {name!r} is not the name" in refusal(model)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}'])
def test_an_unreadable_index_is_named(model: Path, content: str) -> None:
    shard(model)
    (model / INDEX_NAME).write_text(content)
    assert INDEX_NAME in refusal(model)


def test_an_unknown_dtype_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="unknown dtype 'int4'; use auto, bf16"):
        resolve_dtype("int4", torch.device("cpu"))


def test_auto_is_bf16_on_a_gpu() -> None:
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("auto", torch.device("cpu")) in (torch.bfloat16, torch.float32)


def test_only_plain_llamas_are_saved(tmp_path: Path) -> None:
    mistral = ModelConfig.from_hf(
        {
            "model_type": "mistral",
            "vocab_size": 8,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
        }
    )
    with pytest.raises(UsageError, match="only Llama models"):
        save_hf(Decoder(mistral), mistral, tmp_path)
