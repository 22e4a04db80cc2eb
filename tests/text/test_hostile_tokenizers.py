"""A tokenizer.json is a program from outside: what it asks of the library is bounded, or it is
refused in one line."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from nanoserve.errors import ModelError
from nanoserve.server.http_bodies import as_api_error
from nanoserve.text.patterns import PatternError, measure_pattern
from nanoserve.text.tokenizer import PromptTooLong, Tokenizer, load_backend, load_tokenizer
from tests.text.building import make_byte_level, write_json

BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def in_a_row(kind: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: list(steps)}


def split(pattern: str) -> dict[str, Any]:
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return in_a_row("pretokenizers", step, BYTE_LEVEL)


def template(*names: str, texts: str = "A", **special: list[int]) -> dict[str, Any]:
    single = [{"SpecialToken": {"id": name, "type_id": 0}} for name in names]
    single += [{"Sequence": {"id": text, "type_id": 0}} for text in texts]
    tokens = {
        name: {"id": name, "ids": ids, "tokens": ["x"] * len(ids)} for name, ids in special.items()
    }
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": tokens}


def charsmap(index: bytes, replacements: bytes) -> str:
    """A precompiled normalizer, as sentencepiece stores it."""
    return base64.b64encode(len(index).to_bytes(4, "little") + index + replacements).decode()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = make_byte_level(tmp_path_factory.mktemp("sound"))
    state: dict[str, Any] = json.loads((directory / "tokenizer.json").read_text())
    return state


def load(state: dict[str, Any], directory: Path) -> Tokenizer:
    write_json(directory / "tokenizer.json", state)
    return load_tokenizer(directory)


DOUBLED = replace("a", "aa")
# Each doubling is a factor of 2, and a character may have four bytes, each of which is a character
# behind ByteLevel.
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "exponential words": (
        {"pre_tokenizer": split("(a+)+$")},
        r"the pattern '\(a\+\)\+\$' may be tried in too many",
    ),
    "exponential normalizer": (
        {"normalizer": replace("(a|aa)+$", "x", "Regex")},
        "may be tried in too many",
    ),
    "exponential decoder": (
        {"decoder": replace("(a+)+$", "x", "Regex")},
        "may be tried in too many",
    ),
    "24 doublings": (
        {"normalizer": in_a_row("normalizers", *[DOUBLED] * 24)},
        r"6\.71e\+07 times as long",
    ),
    "doublings within": (
        {"normalizer": in_a_row("normalizers", *[in_a_row("normalizers", *[DOUBLED] * 4)] * 2)},
        "1.02e",
    ),
    "one long replacement": (
        {"normalizer": replace("a", "a" * 65)},
        "260 times as long; at most 64",
    ),
    "a long beginning": (
        {"normalizer": {"type": "Prepend", "prepend": "x" * 64}},
        "260 times as long",
    ),
    "bytes of bytes": (
        {"pre_tokenizer": in_a_row("pretokenizers", *[BYTE_LEVEL] * 4)},
        "256 times as long",
    ),
    "a decoder that doubles": (
        {"decoder": in_a_row("decoders", *[DOUBLED] * 24)},
        r"1\.68e\+07 times as long",
    ),
    "text between characters": ({"normalizer": replace("", "x")}, "between all characters"),
    "text at every place": ({"normalizer": replace("y*", "x", "Regex")}, "between all characters"),
    "pieces of no length": (
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        "pieces of length 0",
    ),
    "a missing token": (
        {"post_processor": template("<zz>")},
        "adds '<zz>', a token that it does not define",
    ),
    "a missing id": (
        {"post_processor": template("b", b=[4_000_000])},
        "the token 4000000, which is not in the vocab",
    ),
    "a missing separator": (
        {"post_processor": {"type": "BertProcessing", "sep": ["x", 4_000_000], "cls": ["x", 1]}},
        "the token 4000000, which is not in the vocabulary",
    ),
    "many tokens": ({"post_processor": template("b", b=[1] * 65)}, "adds 65 tokens; at most 64"),
    "the text twice": ({"post_processor": template(texts="AA")}, "around one text"),
    "another text": ({"post_processor": template(texts="B")}, "around one text"),
    "a precompiled replacement": (
        {
            "normalizer": {
                "type": "Precompiled",
                "precompiled_charsmap": charsmap(bytes(4), b"x" * 65 + b"\0"),
            }
        },
        "260 times as long",
    ),
    "half a token": (
        {"decoder": {"type": "Strip", "content": "a", "start": 0, "stop": 9}},
        "strips the ends",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_without_bounds_is_refused_in_one_line(
    name: str, sound: dict[str, Any], tmp_path: Path, capfd
) -> None:
    changes, problem = HOSTILE[name]
    with pytest.raises(ModelError, match=problem) as caught:
        load(sound | changes, tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'tokenizer.json'} is not a usable tokenizer: ")
    assert len(message.splitlines()) == 1 and len(message) < 400
    assert capfd.readouterr().err == "", "the library would print its panic"


def test_what_grows_within_its_bounds_is_loaded(sound: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = load(sound | {"normalizer": in_a_row("normalizers", *[DOUBLED] * 4)}, tmp_path)
    assert tokenizer.decode(tokenizer.encode("ab")) == "a" * 2**4 + "b"
    tokenizer.close()


def test_of_a_text_that_grows_a_shorter_beginning_is_tokenized(
    sound: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = sound | {
        "normalizer": in_a_row("normalizers", *[DOUBLED] * 4),
        "model": sound["model"] | {"merges": []},
    }
    tokenizer = load(state, tmp_path)
    lengths: list[int] = []
    encode = tokenizer._backend.encode

    def counting(pieces: Any, **settings: Any) -> list[int]:
        lengths.append(len(ids := encode(pieces, **settings)))
        return ids

    monkeypatch.setattr(tokenizer._backend, "encode", counting)
    with pytest.raises(PromptTooLong, match="more than 100 tokens"):
        tokenizer.encode("a" * 100_000, limit=100)
    assert lengths == [100 * 2**4]
    tokenizer.close()


def test_a_text_with_which_the_library_panics_is_an_error_of_the_request(
    sound: dict[str, Any], tmp_path: Path, capfd
) -> None:
    """The index of this character map leads outside itself."""
    damaged = charsmap(bytes(4) + b"\xff\xff\xff\xff", b"x\0")
    tokenizer = load(
        sound | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": damaged}}, tmp_path
    )
    for _ in range(2):
        with pytest.raises(
            ModelError, match="the model's tokenizer fails with this text: index out of bounds"
        ) as caught:
            tokenizer.encode("ab")
        assert as_api_error(caught.value).status == 400
    capfd.readouterr()  # the library's own words
    tokenizer.close()


def test_a_word_that_a_vocabulary_lacks_is_an_error_of_the_request(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<zz>"}
    tokenizer = load({"version": "1.0", "added_tokens": [], "model": model}, tmp_path)
    assert tokenizer.encode("a") == [0]
    with pytest.raises(ModelError, match="fails with this text: WordLevel error"):
        tokenizer.encode("b")
    tokenizer.close()


def test_an_interrupt_is_no_failure_of_the_library(sound: dict[str, Any], tmp_path: Path) -> None:
    write_json(tmp_path / "tokenizer.json", sound)
    backend: Any = load_backend(tmp_path)

    class Interrupted:
        def encode_batch_fast(self, *_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

    backend._tokenizer = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        backend.encode(["a"], add_special_tokens=False)


def test_a_control_token_of_many_characters_is_refused(
    sound: dict[str, Any], tmp_path: Path
) -> None:
    long = {"id": 0, "content": f"<|{'x' * 100_000}|>", "special": True, "normalized": False}
    long |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    with pytest.raises(ModelError, match="longer than 256 characters") as caught:
        load(sound | {"added_tokens": [*sound["added_tokens"], long]}, tmp_path)
    assert len(str(caught.value)) < 400


# --------------------------------------------------------------------------------------------------
# Patterns

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
REAL = {
    "gpt-2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama 3": CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "o200k": rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    + rf"{CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "cl100k, possessive": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+|"
    r" ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    "deepseek": r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "kimi": r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{M}&&[^\p{Han}]]+|\s+",
    "bloom": r" ?[^(\s|[.,!?…。，、।۔،])]+",
    "groups of digits": r"(?=(\d{3})+(?!\d))",
    "letters with their marks": r"(?:\p{L}\p{M}*)+| ?\p{N}",
}
ENDLESS = [
    *(
        "(a+)+$",
        "(?:a|aa)+$",
        "((a+)+b)",
        "((a+)+b)?",
        "(?=(a+)+b)x",
        "(?!(a*)*b)",
        "(a+){30,}b",
        "a{1,3}+$",
        "a+{2,}b",
    ),
    *(
        r"(a*)*\1$",
        r"(?<r>a|a\g<r>\g<r>)$",
        "(?:[ab]|[ab]{2}){25}c",
        "(a?){50}a{50}",
        "a*a*b",
        "(?x)(a + )+b",
    ),
    *(
        r"(?:\p{L}\p{Lu}*)+b",
        r"(?:\p{L}*\p{M})+b",
        "(?~a)",
        "(?(1)a|b)",
        "(" * 200 + "a" + ")" * 200,
        "(?#)[^)(a+)+$]|(",
    ),
]


@pytest.mark.parametrize("name", REAL)
def test_patterns_of_real_models_are_bounded(name: str) -> None:
    assert measure_pattern(REAL[name]).tried < 1000


@pytest.mark.parametrize("pattern", ENDLESS)
def test_patterns_that_try_too_many_ways_are_not(pattern: str) -> None:
    with pytest.raises(PatternError):
        measure_pattern(pattern)


def test_ways_are_counted() -> None:
    """`a{1,3}` has three, and each of a hundred characters that are given back is one more."""
    assert measure_pattern("a{1,3}b").tried == 3
    assert measure_pattern("(?:a{1,3}){2}b").tried == 9
    assert measure_pattern("a*b").tried == 100
    assert measure_pattern("a*b|a*c").tried == 100 + 100
    assert measure_pattern("a*").tried == 1, "nothing can fail behind it"
    assert [
        measure_pattern(one).shortest for one in (" {2,}", "a|bcd", "a*b?$", r"\p{L}\x{61}+")
    ] == [2, 1, 0, 2]
