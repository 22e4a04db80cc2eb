"""Limits on what a tokenizer.json may ask of the `tokenizers` library.

The file is a program that arrives with the weights: its patterns may backtrack without end, its
normalizers may make a gigabyte of one character, and some of its errors end the library in a panic.
The library limits none of these. So the parts of a loaded tokenizer are checked before its first
text: how much longer they make a text, and in how many ways their patterns may match one.
"""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from nanoserve.errors import ModelError, shown
from nanoserve.text.patterns import PatternError, measure_pattern

# times its length that a text may have after all steps; compatibility forms of Unicode reach 18
MAX_GROWTH = 64
MAX_ADDED = 64  # tokens that a post-processor may put around a text

Step = Mapping[str, Any]
"""One step of a tokenizer, as in tokenizer.json."""

_LISTS = ("normalizers", "pretokenizers", "processors", "decoders")
_FIXED_GROWTH = {"ByteLevel": 4.0, "Metaspace": 2.0, "BertNormalizer": 3.0}
"""A character becomes up to four bytes, or has a mark before it, or a blank on both sides."""


def check_tokenizer(tokenizer: Any) -> float:
    """Check a tokenizer of the `tokenizers` library. Returns the largest factor by which a text may
    grow before it is divided into tokens. Raises ModelError, one line, for a step with unbounded
    work, or that fails with every text."""
    before = _steps_of(tokenizer.normalizer)
    words = _steps_of(tokenizer.pre_tokenizer)
    after = _steps_of(tokenizer.post_processor)
    decoding = _steps_of(tokenizer.decoder)
    growth = prod(map(_growth, before + words))
    worst = max(growth, prod(map(_growth, decoding)))
    if worst > MAX_GROWTH:
        raise ModelError(
            f"its steps could make a text {worst:.3g} times as long; at most {MAX_GROWTH} times is "
            "allowed"
        )
    precompiled = [step for step in before if step["type"] == "Precompiled"]
    if len(precompiled) > 1:
        raise ModelError("it has more than one precompiled normalizer")
    for step in words:
        if step["type"] == "FixedLength" and step["length"] == 0:
            raise ModelError("its pre-tokenizer makes pieces of length 0")
    for step in decoding:
        if step["type"] == "Strip" and step["stop"] > 0:
            raise ModelError("its decoder strips the ends of tokens, which is not supported")
    for step in after:
        _check_post_processor(step, tokenizer)
    return growth


def _steps_of(part: Any) -> list[Step]:
    """The steps of a part of a tokenizer in their order; none if the tokenizer lacks this part."""
    if part is None:
        return []
    return list(_steps(json.loads(part.__getstate__())))


def _steps(step: Step) -> Iterator[Step]:
    """The step itself, or the steps that it puts in a row."""
    inner = next((step[name] for name in _LISTS if name in step), None)
    if inner is None:
        yield step
        return
    for one in inner:
        yield from _steps(one)


def _growth(step: Step) -> float:
    """The most characters that a step may make of one character."""
    kind = step["type"]
    pattern = step.get("pattern")
    shortest = 1
    if isinstance(pattern, dict):
        if "Regex" in pattern:
            shortest = _shortest_match(pattern["Regex"])
        else:
            shortest = len(pattern["String"])
    if kind == "Replace":
        if shortest == 0 and step["content"]:
            raise ModelError(
                f"it would put {shown(step['content'])} between all characters of a text"
            )
        return max(1.0, len(step["content"]) / max(1, shortest))
    if kind == "Prepend":
        return 1.0 + len(step["prepend"])
    if kind == "Precompiled":
        return float(_longest_replacement(step["precompiled_charsmap"]))
    return _FIXED_GROWTH.get(kind, 1.0)


def _shortest_match(pattern: str) -> int:
    try:
        return measure_pattern(pattern).shortest
    except PatternError as error:
        raise ModelError(f"the pattern {shown(pattern)} {error}") from None


def _longest_replacement(encoded: str) -> int:
    """Length of the longest replacement in a character map of sentencepiece. The map is the size of
    its index, the index, and all replacements, each with a NUL at its end."""
    table = base64.b64decode(encoded)
    index = int.from_bytes(table[:4], "little")
    if index % 4 or 4 + index > len(table):
        raise ModelError("its precompiled normalizer is damaged")
    replacements = table[4 + index :].decode(errors="replace").split("\0")
    return max(1, max(map(len, replacements)))


def _check_post_processor(step: Step, tokenizer: Any) -> None:
    """Check that the post-processor takes the text once, and adds only tokens that exist."""
    added: Sequence[int] = ()
    if step["type"] in ("BertProcessing", "RobertaProcessing"):
        added = [step["sep"][1], step["cls"][1]]
    elif step["type"] == "TemplateProcessing":
        added = _added_by_template(step)
    for token_id in added:
        if tokenizer.id_to_token(token_id) is None:
            raise ModelError(
                f"its post-processor adds the token {token_id}, which is not in the vocabulary"
            )
    if len(added) > MAX_ADDED:
        raise ModelError(
            f"its post-processor adds {len(added)} tokens; at most {MAX_ADDED} are allowed"
        )


def _added_by_template(step: Step) -> Sequence[int]:
    names = [piece["SpecialToken"]["id"] for piece in step["single"] if "SpecialToken" in piece]
    texts = [piece["Sequence"]["id"] for piece in step["single"] if "Sequence" in piece]
    if texts != ["A"]:
        raise ModelError("its post-processor must put tokens around one text")
    for name in names:
        if name not in step["special_tokens"]:
            raise ModelError(
                f"its post-processor adds {shown(name)}, a token that it does not define"
            )
    if len(names) > MAX_ADDED:
        raise ModelError(
            f"its post-processor adds {len(names)} tokens; at most {MAX_ADDED} are allowed"
        )
    return [token_id for name in names for token_id in step["special_tokens"][name]["ids"]]
