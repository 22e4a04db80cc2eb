"""The tokens of a GGUF file, and those at which an answer ends. What a file leaves out is filled in as llama.cpp does
(`llama_vocab::impl::load` in its llama-vocab.cpp)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanoserve.errors import shown
from nanoserve.models.gguf_file import GgufFile, Item, is_array

# Token types of GGUF, which are those of sentencepiece.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

_KINDS = ("gpt2", "llama")
_DEFAULT_IDS: Mapping[str, Mapping[str, int]] = {"llama": {"bos": 1, "eos": 2, "unknown": 0}, "gpt2": {}}
"""Ids of named tokens where a file has no keys for them. llama.cpp has some for gpt2 too, which no vocabulary fits."""
_ENDING_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_NAMED = ("bos", "unknown", "padding", *_ENDING_KEYS)

# Spellings of tokens that end a turn, whatever their type is.
_TURN_ENDS = (
    "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <|return|> <|call|> <|calls|> <|flush|> <|endoftext|> <|end_of_text|>"
    " <end_of_turn> <turn|> <|tool_response> <end_of_utterance> <EOT> _<EOT> [EOT] [EOS] <eos> </s> [e~["
    " <｜end▁of▁sentence｜>"
)
# Spellings of tokens that end a file, for models that fill in code.
_FILE_ENDS = (
    "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>"
)
_CHANNELS = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})
"""With all of one of these, <|end|> ends a part of an answer and not the answer."""
_BYTE_PIECES = dict.fromkeys(f"<0x{byte:02X}>" for byte in range(256))


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """The tokens by their ids, with types, and scores where the file has or needs some."""

    kind: str
    """gpt2 for byte-level BPE, llama for sentencepiece's BPE."""
    tokens: list[str]
    types: list[int]
    scores: list[float]
    named: Mapping[str, int]
    """Ids of special tokens by their keys in GGUF: bos, eos, unknown and others."""
    end_tokens: tuple[int, ...]
    """Ids of the tokens that end an answer."""


def read_vocabulary(file: GgufFile) -> GgufVocabulary | None:
    """The file's vocabulary; None if it says that it has none. Raises ModelError, one line that names the file."""
    kind = file.find("tokenizer.ggml.model", str)
    if kind in ("none", "no_vocab"):
        return None
    if kind not in _KINDS:
        raise file.fail(f"tokenizer {shown(kind)} is not supported; supported: {', '.join(_KINDS)}")
    tokens = listed(file, "tokens", str)
    tokens = [token or f"[EMPTY_{number}]" for number, token in enumerate(tokens)]
    if len(set(tokens)) < len(tokens):
        ((token, _),) = Counter(tokens).most_common(1)
        first = tokens.index(token)
        places = f"as {first} and {tokens.index(token, first + 1)}"
        raise file.fail(f"the tokenizer's piece {shown(token)} occurs twice, {places}; convert the model again")
    types = _filled(file, "token_type", int, NORMAL, len(tokens))
    scores = _filled(file, "scores", float, 0.0, len(tokens)) if kind == "llama" else []
    named = _named_tokens(file, kind, len(tokens))
    turn_ends = set(_TURN_ENDS.split()) - {"</s>"}  # which may be a piece of HTML
    for number, token in enumerate(tokens):
        if token in turn_ends:
            types[number] = CONTROL
    if "tokenizer.ggml.token_type" not in file.metadata:  # a template could not write BOS if it were text
        for number in named.values():
            types[number] = CONTROL
    if kind == "llama":
        _check_pieces(file, tokens, types, named)
    return GgufVocabulary(kind, tokens, types, scores, named, _end_tokens(tokens, types, named))


def listed(file: GgufFile, name: str, kind: type[Item]) -> list[Item]:
    """The tokenizer's list of that name, whose items are of one kind."""
    value: Any = file.metadata.get(f"tokenizer.ggml.{name}")
    items = list(value) if is_array(value) else []
    if not is_array(value) or not set(map(type, items)) <= {kind}:
        raise file.fail(f"tokenizer.ggml.{name} is missing or not a list of {kind.__name__}")
    return items


def _filled(file: GgufFile, name: str, kind: type[Item], default: Item, count: int) -> list[Item]:
    """A list with one item for each of `count` tokens; where it is missing, all are the default."""
    if f"tokenizer.ggml.{name}" not in file.metadata:
        return [default] * count
    found = listed(file, name, kind)
    if len(found) < count:
        raise file.fail(f"the tokenizer has {count} tokens, but tokenizer.ggml.{name} has {len(found)}")
    return found[:count]


def _named_tokens(file: GgufFile, kind: str, count: int) -> dict[str, int]:
    ids = dict(_DEFAULT_IDS[kind])
    for name in _NAMED:
        found = file.find(f"tokenizer.ggml.{name}_token_id", int)
        if found is not None and 0 <= found < count:
            ids[name] = found
    return {name: number for name, number in ids.items() if number < count}


def _check_pieces(file: GgufFile, tokens: Sequence[str], types: list[int], named: Mapping[str, int]) -> None:
    """Give the pieces the types without which sentencepiece takes none of them. Raises ModelError if bytes are missing
    from those that spell unknown characters."""
    for number, token in enumerate(tokens):
        if types[number] == NORMAL and token in _BYTE_PIECES:
            types[number] = BYTE
    if UNKNOWN not in types and "unknown" in named:
        types[named["unknown"]] = UNKNOWN
    known = {token for token, token_type in zip(tokens, types, strict=True) if token_type == BYTE}
    missing = [piece for piece in _BYTE_PIECES if piece not in known]
    if known and missing:
        problem = f"the tokenizer has {256 - len(missing)} byte pieces instead of 256, {missing[0]} is missing"
        raise file.fail(f"{problem}; convert the model again")


def _end_tokens(tokens: Sequence[str], types: Sequence[int], named: Mapping[str, int]) -> tuple[int, ...]:
    spellings = {*_TURN_ENDS.split(), *_FILE_ENDS.split()}
    spelled = {token: number for number, token in enumerate(tokens) if token in spellings}
    if "</s>" in spelled and (types[spelled["</s>"]] != CONTROL or "<|tool_response>" in spelled):
        del spelled["</s>"]
    found = [*(named[name] for name in _ENDING_KEYS if name in named), *spelled.values()]
    if any(names <= spelled.keys() for names in _CHANNELS) and "<|end|>" in spelled:
        found = [number for number in found if number != spelled["<|end|>"]]
    return tuple(dict.fromkeys(found))
