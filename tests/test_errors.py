"""Errors are one line of bounded length, whatever a file or a client has put into them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.published_shapes import published_shapes
from nanoserve.errors import (
    LONGEST_MESSAGE,
    ModelError,
    NanoserveError,
    UsageError,
    first_line,
    one_line,
    shown,
)
from nanoserve.models.hub import resolve_model
from nanoserve.text.tokenizer import load_backend, load_tokenizer
from tests.text.building import make_byte_level, make_metaspace, make_sentencepiece, write_json

# 100,000 characters, with ends of lines and an escape sequence of terminals
LONG = "x\ny\u2028\x1b[2J" * 12_500
VALUES: tuple[Any, ...] = (LONG, [LONG, {LONG: LONG}])


def check_message(error: NanoserveError) -> None:
    message = str(error)
    assert message.isprintable() and len(message) <= LONGEST_MESSAGE, message


def changed(value: Any, values: tuple[Any, ...] = VALUES) -> Iterator[Any]:
    """The JSON value with each of its fields, at all depths, replaced by each of the values. Of a
    list, and of a vocabulary, the first item stands for all."""
    yield from values
    if isinstance(value, dict):
        items: Any = list(value.items())[: 1 if len(value) > 100 else None]
    else:
        items = enumerate(value[:1]) if isinstance(value, list) else ()
    for key, item in items:
        for other in changed(item, values):
            whole = deepcopy(value) if len(value) < 1000 else dict(value)
            whole[key] = other
            yield whole


def test_a_message_is_one_line_and_keeps_both_ends() -> None:
    error = UsageError(f"the name {LONG} is wrong: choose another")
    assert str(error).startswith("the name x y \ufffd[2Jx") and str(error).endswith(
        "y \ufffd[2J is wrong: choose another"
    )
    assert len(str(error)) <= LONGEST_MESSAGE and str(error).isprintable()
    assert one_line("a\r\n\tb\x85c\x00d") == "a b c\ufffdd"
    assert shown("short\n") == r"'short\n'" and shown(None) == "None"
    assert len(shown([LONG])) <= 80 and shown("é" * 1000).count("é") >= 70
    assert str(ModelError("as it is")) == "as it is"


SHAPES = {shape["model_type"]: shape for shape in published_shapes().values()}
MORE: dict[str, Any] = {  # fields that published shapes leave out
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
    }
    | {
        "config_groups": {
            "0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True}}
        }
    },
    "layer_types": ["full_attention"],
    "architectures": ["LlamaForCausalLM"],
    "eos_token_id": [1],
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "per_layer_config": {"0": {"head_dim": 64}},
}
GENERATION = {
    "do_sample": True,
    "temperature": 1.0,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
}


@pytest.mark.parametrize("family", SHAPES)
def test_every_field_of_a_config(family: str) -> None:
    shape, failures = SHAPES[family], 0
    ModelConfig.from_hf(shape)
    for part in (
        shape,
        *({key: value} for key, value in MORE.items() if family in ("llama", "gemma4_text")),
    ):
        for whole in changed(part):
            if not isinstance(whole, dict):
                continue
            try:
                ModelConfig.from_hf({**shape, **whole}, source="config.json")
            except ModelError as error:
                check_message(error)
                assert str(error).count("x") < 100, "the value is shortened, not only the message"
                failures += 1
    assert failures > len(shape)


def test_every_field_of_a_generation_config() -> None:
    config, failures = SHAPES["qwen2"], 0
    for generation in changed({**GENERATION, "eos_token_id": [1], "bos_token_id": 1}):
        if not isinstance(generation, dict):
            continue
        try:
            ModelConfig.from_hf(config, generation, source="config.json")
        except ModelError as error:
            check_message(error)
            failures += 1
    assert failures > len(GENERATION)


SETTINGS = {
    "bos_token": {"content": "<s>", "lstrip": False},
    "eos_token": "</s>",
    "added_tokens_decoder": {"700": {"content": "<x>", "special": True, "lstrip": False}},
    "additional_special_tokens": ["<y>"],
    "legacy": True,
    "add_bos_token": True,
}


@pytest.mark.parametrize("make", [make_metaspace, make_sentencepiece])
def test_every_field_of_the_settings_of_a_tokenizer(make: Any, tmp_path: Path) -> None:
    make(tmp_path)
    failures = 0
    for whole in changed(SETTINGS, (LONG,)):
        write_json(tmp_path / "tokenizer_config.json", whole)
        try:
            load_tokenizer(tmp_path).close()
        except ModelError as error:
            check_message(error)
            failures += 1
    assert failures >= 4


def test_every_field_of_a_tokenizer(tmp_path: Path) -> None:
    make_byte_level(tmp_path)
    path, failures = tmp_path / "tokenizer.json", 0
    state = json.loads(path.read_text())
    # the bytes, without merges
    few = [token for token in state["model"]["vocab"] if len(token) == 1]
    state["model"] |= {"vocab": {token: number for number, token in enumerate(few)}, "merges": []}
    state["added_tokens"] = [state["added_tokens"][0] | {"id": len(few)}]
    replace = {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "a"}
    single = [{"SpecialToken": {"id": "!", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    state["normalizer"] = {"type": "Sequence", "normalizers": [replace]}
    state["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": []}
    state["post_processor"]["special_tokens"] = {"!": {"id": "!", "ids": [0], "tokens": ["!"]}}
    write_json(path, state)
    load_backend(tmp_path)
    for key in state:
        for part in changed(state[key], (LONG,)):
            write_json(path, state | {key: part})
            try:
                load_backend(tmp_path)
            except ModelError as error:
                check_message(error)
                failures += 1
    assert failures > 40


def test_a_long_template_and_its_refusal(tmp_path: Path) -> None:
    make_byte_level(tmp_path, chat_template="{{ raise_exception(messages[0].content) }}")
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(
        UsageError, match="the model's chat template refuses these messages: x y"
    ) as refusal:
        tokenizer.encode_chat([{"role": "user", "content": LONG}])
    check_message(refusal.value)
    tokenizer.close()
    make_byte_level(tmp_path, chat_template={LONG: LONG, "default": 3})
    with pytest.raises(ModelError) as caught:
        load_tokenizer(tmp_path)
    check_message(caught.value)


def test_a_long_name_of_a_model() -> None:
    for name in (LONG, "dummy:" + LONG, "owner/" + "x" * 100_000, LONG + ".json"):
        with pytest.raises(ModelError) as caught:
            resolve_model(name, offline=True)
        check_message(caught.value)


WORDS = ["-I/a/long/path"] * 60
"""Arguments, as many as the command of a compiler has."""


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("sys.exit(3)", f"{sys.executable} ended with exit code 3"),
        ("sys.exit('x.c:1: no such file\\nmore')", "x.c:1: no such file"),
        ("print('said'); sys.exit(1)", "said"),
    ],
)
def test_a_command_that_failed_is_not_repeated(program: str, expected: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        subprocess.run(
            [sys.executable, "-ISc", f"import sys; {program}", *WORDS],
            check=True,
            capture_output=True,
        )
    assert first_line(caught.value) == expected


def test_nor_is_one_that_took_too_long() -> None:
    assert first_line(subprocess.TimeoutExpired(["gcc", *WORDS], 10.0)) == "gcc took more than 10 s"
    assert (
        first_line(subprocess.TimeoutExpired("gcc " + " ".join(WORDS), 0.5))
        == "gcc took more than 0.5 s"
    )


def test_a_message_is_its_first_line_and_not_too_much_of_it() -> None:
    assert first_line(ValueError("\n one\ntwo")) == "one"
    assert first_line(ValueError()) == ""
    assert first_line(ValueError("x" * 1000)) == "x" * 300
