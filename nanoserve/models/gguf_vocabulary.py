"""The tokens of a GGUF file, and those at which an answer ends. What a file leaves out is filled in
as llama.cpp does (`llama_vocab::impl::load` in its llama-vocab.cpp)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanoserve.errors import shown
from nanoserve.models.gguf_file import GgufFile, Item, is_array

# Token types of GGUF, which are those of sentencepiece.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

_KINDS = ("gpt2", "llama", "gemma4")
_DEFAULT_IDS: Mapping[str, Mapping[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "gpt2": {},
    "gemma4": {},
}
"""Ids of named tokens where a file has no keys for them. llama.cpp has some for gpt2 too, which no
vocabulary fits."""
_ENDING_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_NAMED = ("bos", "unknown", "padding") + _ENDING_KEYS

# Spellings of tokens that end a turn, whatever their type is.
_TURN_ENDS = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<end_of_utterance>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<eos>",
    "</s>",
    "[e~[",
    "<｜end▁of▁sentence｜>",
]
# Spellings of tokens that end a file, for models that fill in code.
_FILE_ENDS = [
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
]
_ENDS = frozenset(_TURN_ENDS + _FILE_ENDS)
_CHANNELS = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})
"""With all of one of these, <|end|> ends a part of an answer and not the answer."""
_BYTE_PIECES = dict.fromkeys(f"<0x{byte:02X}>" for byte in range(256))


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """The tokens by their ids, with types, and scores where the file has or needs some."""

    kind: str
    """gpt2 for byte-level BPE, llama for sentencepiece's BPE, gemma4 for merges of characters."""
    tokens: list[str]
    types: list[int]
    scores: list[float]
    named: Mapping[str, int]
    """Ids of special tokens by their keys in GGUF: bos, eos, unknown and others."""
    end_tokens: tuple[int, ...]
    """Ids of the tokens that end an answer."""


def read_vocabulary(file: GgufFile) -> GgufVocabulary | None:
    """The file's vocabulary; None if it says that it has none. Raises ModelError, one line that
    names the file."""
    kind = file.find("tokenizer.ggml.model", str)
    if kind in ("none", "no_vocab"):
        return None
    if kind not in _KINDS:
        raise file.fail(f"tokenizer {shown(kind)} is not supported; supported: {', '.join(_KINDS)}")
    tokens = _tokens(file)
    types = _filled(file, "token_type", int, NORMAL, len(tokens))
    scores: list[float] = []
    if kind == "llama":
        scores = _filled(file, "scores", float, 0.0, len(tokens))
    named = _named_tokens(file, kind, len(tokens))
    turn_ends = set(_TURN_ENDS)
    turn_ends.remove("</s>")  # which may be a piece of HTML
    for number, token in enumerate(tokens):
        if token in turn_ends:
            types[number] = CONTROL
    # a template could not write BOS if it were text
    if "tokenizer.ggml.token_type" not in file.metadata:
        for number in named.values():
            types[number] = CONTROL
    if kind == "llama":
        _check_pieces(file, tokens, types, named)
    return GgufVocabulary(kind, tokens, types, scores, named, _end_tokens(tokens, types, named))


def _tokens(file: GgufFile) -> list[str]:
    """The spellings of all tokens, of which no two may be equal; empty ones are numbered."""
    tokens = listed(file, "tokens", str)
    for number, token in enumerate(tokens):
        if not token:
            tokens[number] = f"[EMPTY_{number}]"
    if len(set(tokens)) < len(tokens):
        token = Counter(tokens).most_common(1)[0][0]
        first = tokens.index(token)
        second = tokens.index(token, first + 1)
        twice = f"the tokenizer's piece {shown(token)} occurs twice, as {first} and {second}"
        raise file.fail(f"{twice}; convert the model again")
    return tokens


def listed(file: GgufFile, name: str, kind: type[Item]) -> list[Item]:
    """The tokenizer's list of that name, whose items are of one kind."""
    value: Any = file.metadata.get(f"tokenizer.ggml.{name}")
    if is_array(value):
        items = list(value)
        if set(map(type, items)) <= {kind}:
            return items
    raise file.fail(f"tokenizer.ggml.{name} is missing or not a list of {kind.__name__}")


def _filled(file: GgufFile, name: str, kind: type[Item], default: Item, count: int) -> list[Item]:
    """A list with one item for each of `count` tokens; where it is missing, all are the default."""
    if f"tokenizer.ggml.{name}" not in file.metadata:
        return [default] * count
    found = listed(file, name, kind)
    if len(found) < count:
        raise file.fail(
            f"the tokenizer has {count} tokens, but tokenizer.ggml.{name} has {len(found)}"
        )
    return found[:count]


def _named_tokens(file: GgufFile, kind: str, count: int) -> dict[str, int]:
    """The ids of special tokens, as far as the vocabulary of `count` tokens has them."""
    ids: dict[str, int] = {}
    for name, number in _DEFAULT_IDS[kind].items():
        if number < count:
            ids[name] = number
    for name in _NAMED:
        found = file.find(f"tokenizer.ggml.{name}_token_id", int)
        if found is not None and 0 <= found < count:
            ids[name] = found
    return ids


def _check_pieces(
    file: GgufFile, tokens: Sequence[str], types: list[int], named: Mapping[str, int]
) -> None:
    """Give the pieces the types without which sentencepiece takes none of them. Raises ModelError
    if bytes are missing from those that spell unknown characters."""
    known = set()
    for number, token in enumerate(tokens):
        if types[number] == NORMAL and token in _BYTE_PIECES:
            types[number] = BYTE
        if types[number] == BYTE:
            known.add(token)
    if UNKNOWN not in types and "unknown" in named:
        unknown = named["unknown"]
        types[unknown] = UNKNOWN
        known.discard(tokens[unknown])
    missing = [piece for piece in _BYTE_PIECES if piece not in known]
    if known and missing:
        problem = (
            f"the tokenizer has {256 - len(missing)} byte pieces instead of 256, {missing[0]} is "
            "missing"
        )
        raise file.fail(f"{problem}; convert the model again")


def _end_tokens(
    tokens: Sequence[str], types: Sequence[int], named: Mapping[str, int]
) -> tuple[int, ...]:
    """The ids of tokens that end an answer: special tokens by their keys, then tokens by their
    spellings."""
    spelled: dict[str, int] = {}
    for number, token in enumerate(tokens):
        if token in _ENDS:
            spelled[token] = number
    if "</s>" in spelled:
        is_text = types[spelled["</s>"]] != CONTROL
        if is_text or "<|tool_response>" in spelled:
            del spelled["</s>"]
    ids = [named[name] for name in _ENDING_KEYS if name in named]
    ids.extend(spelled.values())
    part_end = spelled.get("<|end|>")
    if part_end is not None and any(names <= spelled.keys() for names in _CHANNELS):
        ids = [number for number in ids if number != part_end]
    return tuple(dict.fromkeys(ids))
