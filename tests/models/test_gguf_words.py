"""Pre-tokenizers of GGUF files: how each divides text into words. The right words follow from the
expressions in the tokenizer.json of the models: Llama 3, Mistral Nemo, Command R, Tiny Aya, and
DeepSeek LLM, Coder and V3."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from nanoserve.errors import ModelError
from nanoserve.models.gguf_directory import gguf_directory
from tests.oracle.gguf_files import write_vocabulary

LETTERS = ["a", "b", "c", "Ġ", "ab", "abc"]


def tokenizer_of(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(gguf_directory(path) / "tokenizer.json"))


@pytest.mark.parametrize(
    ("words", "text", "expected"),
    [
        ("llama3", "I'LL pay 12345", ["I", "'LL", " pay", " ", "123", "45"]),
        ("smaug-bpe", "iPhone  x\n", ["iPhone", " ", " x", "\n"]),
        ("deepseek-r1-qwen", "pay 123", ["pay", " ", "1", "2", "3"]),
        ("tekken", "HTTPServer's 12/\n", ["HTTPServer", "'s", " ", "1", "2", "/\n"]),
        ("tekken", "camelCase ABCdef", ["camel", "Case", " ABCdef"]),
        ("command-r", "pay 123's", ["pay", " ", "1", "2", "3", "'s"]),
        ("tiny_aya", "We've 1234567", ["We've", " ", "1", "234", "567"]),
        ("deepseek-llm", "a 中文b 12\n", ["a", " ", "中文", "b", " ", "1", "2", "\n"]),
        ("deepseek-coder", "x.y (1)\n", ["x", ".", "y", " (", "1", ")", "\n"]),
        ("deepseek-v3", "a_b 1234中文!x", ["a", "_b", " ", "123", "4", "中文", "!x"]),
    ],
)
def test_text_is_divided_as_the_models_tokenizer_does(
    words: str, text: str, expected: list[str], tmp_path: Path
) -> None:
    path = write_vocabulary(tmp_path / "model.gguf", LETTERS, model="gpt2", words=words)
    divided = tokenizer_of(path).pre_tokenizer.pre_tokenize_str(text)
    assert [text[first:end] for _, (first, end) in divided] == expected


@pytest.mark.parametrize(
    ("words", "expected"), [("tekken", [5]), ("glm4", [5]), ("smaug-bpe", [5]), ("dbrx", [4, 2])]
)
def test_a_word_that_is_a_token_stays_whole(
    words: str, expected: list[int], tmp_path: Path
) -> None:
    """Here no merge makes abc."""
    path = write_vocabulary(
        tmp_path / "model.gguf", LETTERS, model="gpt2", words=words, merges=["a b"]
    )
    assert tokenizer_of(path).encode("abc", add_special_tokens=False).ids == expected


@pytest.mark.parametrize(("words", "first"), [("tekken", [0]), ("pixtral", [0]), ("smaug-bpe", [])])
def test_text_begins_with_bos_where_llama_cpp_adds_it(
    words: str, first: list[int], tmp_path: Path
) -> None:
    path = write_vocabulary(
        tmp_path / "model.gguf", LETTERS, model="gpt2", words=words, bos_token_id=0
    )
    assert tokenizer_of(path).encode("b").ids == [*first, 1]


def test_text_of_command_r_is_normalized(tmp_path: Path) -> None:
    tokens = [*LETTERS, "Ã", "©", "Ã©"]
    path = write_vocabulary(
        tmp_path / "model.gguf", tokens, model="gpt2", words="command-r", merges=["Ã ©"]
    )
    assert tokenizer_of(path).encode("e\u0301", add_special_tokens=False).ids == [8]


def test_another_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "model.gguf", LETTERS, model="gpt2", words="bloom")
    with pytest.raises(ModelError, match=r"pre-tokenizer 'bloom' is not supported.*deepseek-v3"):
        gguf_directory(path)
