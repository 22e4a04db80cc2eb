"""JSON schemas for tests: small random ones, and an independent check that a value meets one."""

import re
from typing import Any

from hypothesis import strategies as st

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["cats", "boats"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
"""Every text that meets it is short."""

_TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "number": (int, float),
    "integer": int,
}


def meets(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a parsed JSON value meets a schema of the keywords that are used here."""
    if "anyOf" in schema and not any(meets(value, option) for option in schema["anyOf"]):
        return False
    if "enum" in schema and not any(_same(value, option) for option in schema["enum"]):
        return False
    if "const" in schema and not _same(value, schema["const"]):
        return False
    kind = schema.get("type")
    if kind is not None and (
        not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")
    ):
        return False
    return {"object": _object_meets, "array": _array_meets, "string": _string_meets}.get(
        kind or "", _number_meets
    )(value, schema)


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


def _object_meets(value: dict[str, Any], schema: dict[str, Any]) -> bool:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", {})
    return set(schema.get("required", ())) <= set(value) and all(
        meets(item, properties[name])
        if name in properties
        else others is not False and meets(item, others)
        for name, item in value.items()
    )


def _array_meets(value: list[Any], schema: dict[str, Any]) -> bool:
    counts = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
    return counts and all(meets(item, schema.get("items", {})) for item in value)


def _string_meets(value: str, schema: dict[str, Any]) -> bool:
    lengths = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
    return lengths and re.search(schema.get("pattern", ""), value) is not None


def _number_meets(value: Any, schema: dict[str, Any]) -> bool:
    return "minimum" not in schema or bool(schema["minimum"] <= value <= schema["maximum"])


_NAMES = st.sampled_from(["a", "name", "size of it", 'a"b', "ü", "{", "😀"])
_LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.tuples(st.integers(-1000, 1000), st.integers(0, 500)).map(
        lambda ends: {"type": "integer", "minimum": ends[0], "maximum": ends[0] + ends[1]}
    ),
    st.tuples(st.integers(0, 3), st.integers(0, 5)).map(
        lambda ends: {"type": "string", "minLength": ends[0], "maxLength": ends[0] + ends[1]}
    ),
    st.just({"type": "string", "pattern": "^[a-c]{1,4}(x|yz)$"}),
    st.lists(_NAMES | st.integers(-5, 5) | st.none(), min_size=1, max_size=3).map(
        lambda values: {"enum": values}
    ),
    st.sampled_from([{"const": "ü\n"}, {"const": [1, {"b": None}]}, {"const": 1.5}]),
)


def _objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    properties = st.dictionaries(_NAMES, inner, max_size=3)
    return st.tuples(properties, st.sets(_NAMES)).map(
        lambda parts: {
            "type": "object",
            "properties": parts[0],
            "required": [name for name in parts[0] if name in parts[1]],
            "additionalProperties": False,
        }
    )


def _arrays(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
        lambda parts: {
            "type": "array",
            "items": parts[0],
            "minItems": parts[1],
            "maxItems": parts[1] + parts[2],
        }
    )


SCHEMAS: st.SearchStrategy[dict[str, Any]] = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        _objects(inner),
        _arrays(inner),
        st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=4,
)
"""Schemas whose texts are all finite, and short."""
