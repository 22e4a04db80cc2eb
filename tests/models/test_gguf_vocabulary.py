"""Vocabularies of GGUF files as llama.cpp reads them: what ends an answer, and what is filled in
for missing keys.

The right values are those of `llama_vocab::impl::load` in llama.cpp's llama-vocab.cpp.
"""

import logging
from pathlib import Path

import gguf
import pytest

from nanoserve.config.model_config import ModelConfig
from nanoserve.errors import ModelError
from nanoserve.models.gguf_directory import gguf_directory
from nanoserve.models.hub import known_models, resolve_model
from nanoserve.models.loading import load_model
from nanoserve.text.tokenizer import load_tokenizer
from tests.oracle.gguf_files import BYTES, write_vocabulary

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
PIECES = ["<unk>", "<s>", "</s>", *BYTES, "▁", "a", "b", "▁a", "ab", "<|im_start|>", "<|im_end|>"]
TYPES = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 5, CONTROL, CONTROL]
SCORES = [-float(number) for number in range(len(PIECES))]
IM_START, IM_END = len(PIECES) - 2, len(PIECES) - 1
LETTERS = ["a", "b", "c", "Ġ", "ab"]
"""A byte-level vocabulary, for texts of these letters."""
CHATML = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def config_of(path: Path) -> ModelConfig:
    return ModelConfig.from_directory(gguf_directory(path))


def test_a_file_without_keys_has_the_tokens_of_llama(tmp_path: Path) -> None:
    """The unknown piece, beginning and end are 0, 1 and 2, the others are ordinary pieces of one
    score."""
    path = write_vocabulary(tmp_path / "model.gguf", PIECES[:-2])
    config, tokenizer = config_of(path), load_tokenizer(gguf_directory(path))
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    a, space_a = PIECES.index("a"), PIECES.index("▁a")
    unknown = [3 + byte for byte in "ü".encode()]
    assert tokenizer.encode("aü") == [1, space_a, *unknown]
    assert tokenizer.decode([1, space_a, *unknown, a]) == "aüa"
    assert tokenizer.encode("a<s>")[2:].count(1) == 0
    tokenizer.close()


def test_ids_beyond_the_vocabulary_are_not_believed(tmp_path: Path) -> None:
    path = write_vocabulary(
        tmp_path / "model.gguf", PIECES, types=TYPES, eos_token_id=9999, bos_token_id=9999
    )
    config = config_of(path)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, IM_END))
    path = write_vocabulary(
        tmp_path / "other.gguf", LETTERS, model="gpt2", words="gpt-2", eos_token_id=9999
    )
    assert config_of(path).eos_token_ids == ()


@pytest.mark.parametrize(
    "name",
    [
        *(
            "<|eot_id|>",
            "<|im_end|>",
            "<|end|>",
            "<end_of_turn>",
            "<|endoftext|>",
            "<|eom_id|>",
            "<EOT>",
            "[EOT]",
        ),
        *(
            "<|end_of_text|>",
            "<turn|>",
            "<eos>",
            "<｜end▁of▁sentence｜>",
            "<|fim_pad|>",
            "<|file_sep|>",
        ),
    ],
)
def test_tokens_that_are_named_like_an_end_are_ends(name: str, tmp_path: Path) -> None:
    tokens = [*LETTERS, "<base>", name]
    types = [NORMAL] * 5 + [CONTROL, USER_DEFINED]
    path = write_vocabulary(
        tmp_path / "model.gguf", tokens, model="gpt2", words="qwen2", types=types, eos_token_id=5
    )
    assert config_of(path).eos_token_ids == (5, 6)


def test_keys_name_ends_too(tmp_path: Path) -> None:
    tokens = [*LETTERS, "<x>", "<y>", "<z>", "<|im_start|>"]
    ids = {"eos_token_id": 5, "eot_token_id": 7, "eom_token_id": 6}
    path = write_vocabulary(tmp_path / "model.gguf", tokens, model="gpt2", words="qwen2", **ids)
    assert config_of(path).eos_token_ids == (5, 7, 6)


@pytest.mark.parametrize(
    ("names", "ends"),
    [
        # Harmony, where it ends a channel
        (["<|end|>", "<|return|>", "<|call|>"], ["<|return|>", "<|call|>"]),
        (["<|end|>", "<|return|>"], ["<|end|>", "<|return|>"]),
        # Gemma 4, where it is a piece of HTML
        (["</s>", "<|tool_response>"], ["<|tool_response>"]),
        (["</s>", "<|im_end|>"], ["</s>", "<|im_end|>"]),
    ],
)
def test_ends_of_parts_are_not_ends_of_answers(
    names: list[str], ends: list[str], tmp_path: Path
) -> None:
    types = [NORMAL] * 5 + [CONTROL] * len(names)
    path = write_vocabulary(
        tmp_path / "model.gguf", LETTERS + names, model="gpt2", words="qwen2", types=types
    )
    assert config_of(path).eos_token_ids == tuple((LETTERS + names).index(name) for name in ends)


def test_html_in_a_vocabulary_ends_nothing(tmp_path: Path) -> None:
    tokens = [*LETTERS, "</s>"]
    path = write_vocabulary(
        tmp_path / "model.gguf", tokens, model="gpt2", words="qwen2", types=[NORMAL] * 6
    )
    assert config_of(path).eos_token_ids == ()


def test_an_end_of_turn_is_a_control_token_whatever_its_type(tmp_path: Path) -> None:
    """Otherwise the template's spelling of it would be text."""
    types = [*TYPES[:-2], CONTROL, NORMAL]
    path = write_vocabulary(
        tmp_path / "model.gguf", PIECES, types=types, scores=SCORES, template=CHATML
    )
    tokenizer = load_tokenizer(gguf_directory(path))
    assert tokenizer.encode_chat([{"role": "user", "content": "b"}])[-1] == IM_END
    assert tokenizer.encode("<|im_end|>")[-1] != IM_END
    tokenizer.close()


def test_words_that_the_file_does_not_name_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_vocabulary(tmp_path / "model.gguf", LETTERS, model="gpt2")
    with caplog.at_level(logging.WARNING, "nanoserve"):
        resolve_model(str(path))
        resolve_model(str(path))
        gguf_directory(
            write_vocabulary(tmp_path / "named.gguf", LETTERS, model="gpt2", words="gpt-2")
        )
    (line,) = caplog.messages
    assert line.startswith(f"nanoserve: {path}: tokenizer.ggml.pre is missing")


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_a_piece_that_occurs_twice_is_named(model: str, tmp_path: Path) -> None:
    tokens = [*PIECES, "ab", "ab"]
    path = write_vocabulary(tmp_path / "model.gguf", tokens, model=model, words="gpt-2")
    assert refusal(path) == (
        f"{path}: the tokenizer's piece 'ab' occurs twice, as {tokens.index('ab')} and "
        f"{len(PIECES)};"
        " convert the model again"
    )


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_pieces_may_be_empty(model: str, tmp_path: Path) -> None:
    tokens = [*PIECES, "", ""]
    path = write_vocabulary(tmp_path / "model.gguf", tokens, model=model, words="gpt-2")
    tokenizer = load_tokenizer(gguf_directory(path))
    assert tokenizer.vocab_size == len(tokens)
    assert tokenizer.decode([len(PIECES)]) == f"[EMPTY_{len(PIECES)}]"
    tokenizer.close()


def test_a_byte_that_is_missing_is_named(tmp_path: Path) -> None:
    tokens, types = [*PIECES], [*TYPES]
    tokens[PIECES.index("<0x41>")], types[PIECES.index("<0x41>")] = "A", NORMAL
    path = write_vocabulary(tmp_path / "model.gguf", tokens, types=types, scores=SCORES)
    problem = "the tokenizer has 255 byte pieces instead of 256, <0x41> is missing"
    assert refusal(path) == f"{path}: {problem}; convert the model again"


def test_other_faults_name_the_users_file(tmp_path: Path) -> None:
    twice_unknown = [UNKNOWN, UNKNOWN, *TYPES[2:]]
    path = write_vocabulary(tmp_path / "model.gguf", PIECES, types=twice_unknown, scores=SCORES)
    assert refusal(path) == f"{path} is not a usable sentencepiece model"
    path = write_vocabulary(tmp_path / "template.gguf", PIECES, types=TYPES, template="{% for %}")
    assert refusal(path).startswith(f"the chat template in {path} fails: ")
    path = write_vocabulary(tmp_path / "short.gguf", PIECES, types=TYPES[:-1])
    count = len(PIECES)
    assert (
        refusal(path)
        == f"{path}: the tokenizer has {count} tokens, but tokenizer.ggml.token_type has "
        f"{count - 1}"
    )


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_tokenizer(gguf_directory(path))
    return str(caught.value)


def test_a_tensor_that_is_missing_names_the_users_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = gguf.GGUFWriter.add_tensor
    left_out = "blk.0.ffn_down.weight"
    monkeypatch.setattr(
        gguf.GGUFWriter,
        "add_tensor",
        lambda self, name, data: name == left_out or add(self, name, data),
    )
    path = write_vocabulary(tmp_path / "model.gguf", PIECES, types=TYPES)
    with pytest.raises(ModelError) as caught:
        load_model(gguf_directory(path), "float32")
    assert str(caught.value) == f"{path}: tensor {left_out} is missing from the checkpoint"


def test_an_ending_in_capitals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_vocabulary(tmp_path / "MODEL.GGUF", PIECES, types=TYPES)
    found = resolve_model(str(path))
    assert found.name == "MODEL" and found.directory is not None
    load_model(found.directory, "float32")
    monkeypatch.chdir(tmp_path)
    assert any(name == "MODEL.GGUF" for name, *_ in known_models())


def test_a_big_endian_file_says_so(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        ModelError, match=r"model.gguf: a big-endian file; convert it with `gguf-convert-endian"
    ):
        gguf_directory(tmp_path / "model.gguf")
