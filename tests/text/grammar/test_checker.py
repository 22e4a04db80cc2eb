"""Schemas that no text meets, that are not supported, or that cost too much: one clear line within
moments."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoserve.errors import UsageError
from nanoserve.text.grammar.checker import GrammarChecker
from nanoserve.utils.installation import install_command
from tests.text.grammar.conftest import BUNDLED
from tests.text.grammar.schemas import PERSON

ROOT = Path(__file__).parents[3]
NODE: dict[str, Any] = {
    "type": "object",
    "properties": {"next": {"$ref": "#/$defs/node"}},
    "required": ["next"],
}
LIST = {
    "type": "object",
    "properties": {"c": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["c"],
}
OPTIONAL = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker(BUNDLED)
    yield checker
    checker.close()


GOOD: dict[str, Any] = {
    "any object": {"type": "object"},
    "a person": PERSON,
    "annotations": {
        "title": "t",
        "description": "d",
        "type": "string",
        "examples": [1],
        "x-order": 3,
        "default": 1,
    },
    "a list that may end": {
        "$defs": {"node": NODE | {"properties": {"next": OPTIONAL}}},
        "$ref": "#/$defs/node",
    },
    "a tree": LIST,
    "a pointer with escapes": {"$defs": {"a/b %": {"type": "null"}}, "$ref": "#/$defs/a~1b%20%25"},
    "only finite values are needed": NODE | {"required": [], "$defs": {"node": NODE}},
    "one of kinds": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    "a value that looks like a keyword": {"const": {"minProperties": 9, "$ref": "#"}},
    "nested quantifiers": {"type": "string", "pattern": "^((a+)+)+$"},
    "many properties": {
        "type": "object",
        "properties": {f"p{i}": {"type": "string"} for i in range(300)},
    },
    "a long enum": {"enum": [f"value {i}" for i in range(3000)]},
}


@pytest.mark.parametrize("name", GOOD)
def test_what_is_supported(checker: GrammarChecker, name: str) -> None:
    checker.check(json.dumps(GOOD[name]))
    assert checker.knows(json.dumps(GOOD[name]))


BAD: dict[str, tuple[Any, str]] = {
    "no type of JSON": ({"type": "text"}, "Invalid type: text"),
    "properties in a list": ({"properties": [1]}, "properties must be an object"),
    "a keyword that is not supported": ({"not": {"type": "string"}}, 'Unimplemented keys: ."not"'),
    "a format that is not": ({"type": "string", "format": "poem"}, "Unknown format: poem"),
    "oneOf that overlaps": (
        {"oneOf": [{"type": "number"}, {"type": "integer"}]},
        "oneOf .* not supported.$",
    ),
    "another grammar than JSON's": (
        {"x-guidance": {"whitespace_pattern": "a*"}},
        "x-guidance is not supported",
    ),
    "no value at all": ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
    "names that may repeat": (
        {"type": "object", "minProperties": 2},
        "minProperties 2 is not supported",
    ),
    "the same, in a property that is called like a keyword": (
        {"properties": {"const": {"type": "object", "minProperties": 3}}},
        "minProperties 3 is not supported",
    ),
    "nothing but itself": ({"$ref": "#"}, "refers to itself without end"),
    "itself twice": ({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, "refers to itself without end"),
    "a list without end": (
        {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
        "refers to itself without end",
    ),
    "an array without end": (
        {"type": "array", "minItems": 1, "items": {"$ref": "#"}},
        "refers to itself without end",
    ),
    "extra names without end": (
        {"type": "object", "required": ["a"], "additionalProperties": {"$ref": "#"}},
        "refers to itself without end",
    ),
    "two that need each other": (
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        "refers to itself without end",
    ),
    "another place": ({"$ref": "http://127.0.0.1:9/schema.json"}, "does not fetch"),
    "a file": ({"$ref": "file:///etc/passwd"}, "does not fetch"),
    "look-ahead": ({"type": "string", "pattern": "^(?!a).*$"}, "look-around, .* is not supported"),
    "a backreference": (
        {"type": "string", "pattern": "^(a)\\1$"},
        "backreferences are not supported",
    ),
    "no regular expression": ({"type": "string", "pattern": "("}, "unclosed group"),
    "nested too deeply": (json.loads('{"items":' * 400 + "{}" + "}" * 400), "recursion limit"),
    "20k properties": (
        {"type": "object", "properties": {f"p{i}": {} for i in range(20_000)}},
        "too large|too complex",
    ),
    "100k values": ({"enum": [f"value {i}" for i in range(100_000)]}, "too big|too complex"),
    "combinations": (
        {
            "allOf": [
                {"anyOf": [{"properties": {f"{i} {j}": {"const": j}}} for j in range(5)]}
                for i in range(12)
            ]
        },
        "too large|too complex",
    ),
    "regular expressions to intersect": (
        {
            "allOf": [
                {"type": "string", "pattern": f"(a|b)*{'ab'[i % 2]}(a|b){{{i}}}"} for i in range(12)
            ]
        },
        "regex|too complex",
    ),
    "minutes of computing": ({"type": "integer", "multipleOf": 123_456_789}, "too complex"),
    "a chain that overflows the stack": (
        {
            "$defs": {f"{i}": {"$ref": f"#/$defs/{i + 1}"} for i in range(9000)} | {"9000": {}},
            "$ref": "#/$defs/0",
        },
        "too complex",
    ),
    "a very long value": ({"const": "x" * 900_000}, "too complex"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(checker: GrammarChecker, name: str) -> None:
    schema, message = BAD[name]
    with pytest.raises(UsageError, match=message) as caught:
        checker.check(json.dumps(schema))
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)
    assert not checker.knows(json.dumps(schema))


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "null", "true", '"a"', '{"minimum": NaN}', '{"const": "\\ud800"}']
)
def test_texts_that_are_no_schema(checker: GrammarChecker, text: str) -> None:
    with pytest.raises(UsageError, match="JSON schema: "):
        checker.check(text)


def test_nothing_starts_before_the_first_schema() -> None:
    before = _children()
    checker = GrammarChecker(BUNDLED)
    assert _children() == before
    checker.check('{"type":"null"}')
    assert _children() > before
    checker.close()
    assert _children() == before


def _children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_a_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    checker = GrammarChecker(tmp_path)
    with pytest.raises(UsageError, match="no tokenizer in"):
        checker.check('{"type":"null"}')
    checker.close()


def test_without_llguidance() -> None:
    program = (
        "import sys; sys.modules['llguidance'] = None\n"
        "from pathlib import Path; from nanoserve.text.grammar.compiler import GrammarCompiler\n"
        f"GrammarCompiler(Path({str(BUNDLED)!r})).matcher('{{}}')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (
        f"UsageError: structured output needs llguidance: {install_command('json')}" in done.stderr
    )
