"""Checkpoints that `nanoserve quantize` writes: unpacked by hand for transformers, loaded by
nanoserve, interrupted."""

import errno
import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoserve import LLM, SamplingParams
from nanoserve.config.model_config import ModelConfig
from nanoserve.config.quantization import CALIBRATING
from nanoserve.errors import ModelError, RuntimeFailure, UsageError
from nanoserve.models import checkpoint_writing
from nanoserve.models.attention import DenseCausalAttention
from nanoserve.models.gguf_directory import gguf_directory
from nanoserve.models.hub import resolve_model
from nanoserve.models.loading import INDEX_NAME, load_model
from nanoserve.models.quantizing import Recipe, quantize_checkpoint
from nanoserve.utils.files import replace_file
from tests.oracle.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.oracle.gguf_files import write_gguf


def texts(count: int, length: int, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE, (length,)) for _ in range(count)]


def quantize(
    source: Path,
    output: Path,
    recipe: Recipe,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[float, float]:
    calibration = texts(3, 60, 1) if recipe.method in CALIBRATING else []
    found = quantize_checkpoint(source, output, recipe, calibration, texts(2, 40, 2), progress)
    assert found is not None
    return found


def unpacked_by_hand(output: Path) -> dict[str, Tensor]:
    """All tensors with the values that the quantized ones stand for, float32."""
    index = json.loads((output / INDEX_NAME).read_text())
    stored = {name: load_file(output / file)[name] for name, file in index["weight_map"].items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())
    section = json.loads((output / "config.json").read_text())["quantization_config"]
    bits = section["config_groups"]["group_0"]["weights"]["num_bits"]
    for name in [name for name in stored if name.endswith("weight_scale")]:
        module, scales = name.removesuffix(".weight_scale"), stored.pop(name).float()
        if section["format"] == "int-quantized":
            assert stored[f"{module}.weight"].dtype == torch.int8
            stored[f"{module}.weight"] = stored[f"{module}.weight"].float() * scales
            continue
        words, (rows, columns) = (
            stored.pop(f"{module}.weight_packed"),
            stored.pop(f"{module}.weight_shape").tolist(),
        )
        assert words.shape == (rows, math.ceil(columns * bits / 32))
        streams = [int.from_bytes(row.numpy().tobytes(), "little") for row in words]
        codes = [
            [stream >> bits * place & (1 << bits) - 1 for place in range(columns)]
            for stream in streams
        ]
        groups = (torch.tensor(codes) - (1 << bits - 1)).float().view(rows, scales.shape[1], -1)
        stored[f"{module}.weight"] = (groups * scales[:, :, None]).view(rows, columns)
    return {name: tensor.float() for name, tensor in stored.items()}


def plain_model(output: Path, plain: Path) -> transformers.PreTrainedModel:
    """transformers' model of the values that an output stands for."""
    plain.mkdir()
    save_file(unpacked_by_hand(output), plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((output / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    return model.eval()


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("llama", Recipe("rtn", 4, 32)),
        ("llama-tied-biased", Recipe("awq", 3, 32)),
        ("glm4", Recipe("awq", 4, 32)),
        ("qwen3", Recipe("gptq", 3, -1, act_order=True)),
        ("mistral", Recipe("gptq", 4, 32)),
        ("qwen2", Recipe("llm-int8", 8, -1)),
        ("glm", Recipe("rtn", 8, -1)),
        ("mixtral", Recipe("rtn", 4, -1)),
        ("lfm2-biased", Recipe("gptq", 4, 32)),
    ],
)
def test_transformers_computes_the_same(family: str, recipe: Recipe, tmp_path: Path) -> None:
    """Logits of the values unpacked by hand, of the packed model, and the perplexity that the run
    returned."""
    source, output = tmp_path / "source", tmp_path / "output"
    original = make_checkpoint(family, source)
    measured = quantize(source, output, recipe)
    oracle, (decoder, config) = (
        plain_model(output, tmp_path / "plain"),
        load_model(output, "float32"),
    )
    losses: dict[str, list[Tensor]] = {"before": [], "after": []}
    with torch.inference_mode():
        for text in texts(2, 40, 2):
            hidden = decoder(text, torch.arange(40), DenseCausalAttention(config, 1, 40))
            logits, wanted = decoder.compute_logits(hidden), oracle(text[None]).logits[0]
            torch.testing.assert_close(
                logits, wanted, atol=5e-4 * float(wanted.abs().max()), rtol=0
            )
            for name, found in (("before", original(text[None]).logits[0]), ("after", wanted)):
                losses[name].append(
                    torch.nn.functional.cross_entropy(found[:-1].double(), text[1:])
                )
    perplexities = [math.exp(torch.stack(found).mean()) for found in losses.values()]
    assert measured == pytest.approx(perplexities, rel=2e-3)
    parameters = dict(original.named_parameters())
    if recipe.bits == 8:
        for name, tensor in unpacked_by_hand(output).items():
            torch.testing.assert_close(tensor, parameters[name], atol=0.006, rtol=0)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    make_checkpoint("llama", directory)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "README.md").write_text("not copied")
    return directory


@pytest.mark.parametrize("recipe", [Recipe("gptq", 4, 32), Recipe("awq", 4, 32)])
def test_an_interrupted_run_goes_on_where_it_was(
    llama: Path, recipe: Recipe, tmp_path: Path
) -> None:
    wanted = quantize(llama, tmp_path / "whole", recipe)
    output = tmp_path / "deep" / "output"

    def interrupt(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(
        KeyboardInterrupt,
        match=r"2 of 3 layers are in .*output; the same command continues after them",
    ):
        quantize(llama, output, recipe, interrupt)
    written = {path.name: path.stat().st_mtime_ns for path in output.glob("*.safetensors")}
    assert len(written) == 3
    assert not (output / "config.json").exists()
    (output / ".model-00004-of-00004.safetensors.123").write_text(
        "the draft of a process that was killed"
    )
    assert quantize(llama, output, recipe) == wanted
    assert {name: (output / name).stat().st_mtime_ns for name in written} == written
    names = sorted(path.name for path in output.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert {"config.json", "generation_config.json", "tokenizer.json", INDEX_NAME} <= set(names)
    assert "README.md" not in names
    assert all(
        (output / name).read_bytes() == (tmp_path / "whole" / name).read_bytes() for name in names
    )


def test_a_full_disk_is_one_line_and_leaves_whole_layers(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, calls, recipe = os.fsync, iter(range(100)), Recipe("rtn", 4, 32)

    def fill_up(descriptor: int) -> None:
        if next(calls) == 3:  # after the settings, the embedding and a layer
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fill_up)
    says = (
        "cannot write .*model-00003-of-00004.safetensors: No space left on device; 1 of 3 layers "
        "are in"
    )
    with pytest.raises(RuntimeFailure, match=says):
        quantize(llama, tmp_path / "output", recipe)
    assert len(list((tmp_path / "output").iterdir())) == 3
    whole = quantize(llama, tmp_path / "whole", recipe)
    assert quantize(llama, tmp_path / "output", recipe) == whole


@pytest.mark.parametrize(("times", "done"), [(1, 1), (2, 0)])
def test_ctrl_c_waits_for_a_file_and_the_second_one_does_not(
    llama: Path, times: int, done: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path, content: str | bytes) -> None:
        for _ in range(times if path.name.startswith("model-00002") else 0):
            signal.raise_signal(signal.SIGINT)
        replace_file(path, content)

    monkeypatch.setattr(checkpoint_writing, "replace_file", interrupted)
    with pytest.raises(KeyboardInterrupt, match=f"{done} of 3 layers are in"):
        quantize(llama, tmp_path / "output", Recipe("rtn", 4, 32))
    assert len(list((tmp_path / "output").iterdir())) == 2 + done


def _stop(done: int, total: int) -> None:
    raise KeyboardInterrupt


def test_other_settings_do_not_go_on(llama: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    with pytest.raises(KeyboardInterrupt):
        quantize(llama, output, Recipe("gptq", 4, 32), _stop)
    for recipe, says in (
        (Recipe("gptq", 3, 32), "bits"),
        (Recipe("rtn", 4, -1), "method, group, calibration"),
    ):
        with pytest.raises(
            UsageError, match=f"was begun with another {says}; give the same to go on"
        ):
            quantize(llama, output, recipe)
    with pytest.raises(UsageError, match="was begun with another calibration;"):
        quantize_checkpoint(llama, output, Recipe("gptq", 4, 32), texts(2, 60, 1), [], _stop)
    with pytest.raises(UsageError, match="was begun with another model;"):
        shutil.copytree(llama, tmp_path / "copy")
        quantize(tmp_path / "copy", output, Recipe("gptq", 4, 32))


def test_a_damaged_layer_is_named(llama: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"

    def damage(done: int, total: int) -> None:
        if done == 1:
            (output / "model-00002-of-00004.safetensors").write_bytes(b"short")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(llama, output, Recipe("rtn", 4, 32), damage)
    with pytest.raises(
        ModelError, match=r"model-00002-of-00004.safetensors: not a complete safetensors file"
    ):
        quantize(llama, output, Recipe("rtn", 4, 32))


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        (
            Recipe("rtn", 4, 64),
            "--group 64 does not divide the 96 columns of .*down_proj.weight; choose 32",
        ),
        (
            Recipe("rtn", 4, 128),
            "--group 128 does not divide the 64 columns of .*q_proj.weight; choose 32",
        ),
    ],
)
def test_groups_that_do_not_divide(llama: Path, recipe: Recipe, says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        quantize(llama, tmp_path / "output", recipe)
    assert not (tmp_path / "output").exists()


def test_outputs_that_are_not_begun(llama: Path, tmp_path: Path) -> None:
    recipe, output = Recipe("rtn", 4, 32), tmp_path / "output"
    quantize(llama, output, recipe)
    for place in (output, llama):
        with pytest.raises(UsageError, match="exists and is not empty; choose another --output"):
            quantize(llama, place, recipe)
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeFailure, match=r"cannot write .*file: File exists"):
        quantize(llama, tmp_path / "file", recipe)
    with pytest.raises(UsageError, match=r"is quantized already \(compressed-tensors\)"):
        quantize(output, tmp_path / "again", recipe)


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_experts_are_refused_by_name(method: str, tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path / "source")
    with pytest.raises(
        UsageError,
        match=f"--method {method} does not quantize the experts of qwen3_moe; choose rtn",
    ):
        quantize(tmp_path / "source", tmp_path / "output", Recipe(method, 4, 32))


@pytest.mark.parametrize(
    ("family", "method", "line"),
    [
        (
            "gpt_oss",
            "rtn",
            "the experts of gpt_oss are not quantized here; take its checkpoint in MXFP4",
        ),
        (
            "qwen3_5_text",
            "rtn",
            "the layers of qwen3_5_text with a recurrent state are not quantized here; round the "
            "model as it is loaded, by --quantization",
        ),
        (
            "granitemoe",
            "rtn",
            "the experts of granitemoe, which are one tensor, are not quantized here; round the",
        ),
        (
            "gemma4_text-moe",
            "rtn",
            "the experts of gemma4_text, which are one tensor, are not quantized here; round the",
        ),
        (
            "olmo3",
            "awq",
            "--method awq needs norms before both parts of a layer, which olmo3 has not; choose "
            "gptq",
        ),
        (
            "mamba2",
            "gptq",
            "the layers of mamba2 with a recurrent state are not quantized here; round the model",
        ),
        (
            "lfm2",
            "awq",
            "--method awq does not scale the layers of lfm2 that have a recurrent state; choose "
            "gptq",
        ),
    ],
)
def test_families_that_a_method_does_not_suit_are_refused(
    family: str, method: str, line: str, tmp_path: Path
) -> None:
    make_checkpoint(family, tmp_path / "source")
    with pytest.raises(UsageError, match=line):
        quantize(tmp_path / "source", tmp_path / "output", Recipe(method, 4, 32))


def test_a_gguf_file_is_refused(tmp_path: Path) -> None:
    write_gguf(make_checkpoint("llama", tmp_path / "source"), tmp_path / "model.gguf", "F16")
    with pytest.raises(
        UsageError, match="a GGUF file cannot be quantized again; give the Hugging Face directory"
    ):
        quantize(gguf_directory(tmp_path / "model.gguf"), tmp_path / "output", Recipe("rtn", 4, 32))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [Recipe("gptq", 4, 128, act_order=True), Recipe("awq", 3, 64)])
def test_greedy_tokens_of_the_storyteller_are_those_of_transformers(
    recipe: Recipe, tmp_path: Path
) -> None:
    source = resolve_model(None).directory
    assert source is not None
    output = tmp_path / "output"
    llm = LLM(str(source), dtype="float32")
    story = llm.generate(
        "Once upon a time", SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    )[0]
    text = torch.tensor(story.outputs[0].token_ids)
    measured = quantize_checkpoint(
        source, output, recipe, [text], [text[:200]], lambda done, total: None
    )
    assert measured is not None and measured[1] < 1.3 * measured[0]
    prompt = llm.tokenizer.encode("One day, a little girl named Lily")
    llm.close()
    model: Any = plain_model(output, tmp_path / "plain")
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        settings = {
            "max_new_tokens": 60,
            "min_new_tokens": 60,
            "do_sample": False,
            "pad_token_id": 0,
        }
        wanted = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[
            0, len(prompt) :
        ].tolist()
    assert ModelConfig.from_directory(output).quantization is not None
    packed = LLM(str(output), dtype="float32")
    found = packed.generate(
        prompt, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    )[0]
    packed.close()
    assert list(found.outputs[0].token_ids) == wanted
