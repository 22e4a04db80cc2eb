"""Convert argument values that a model writes without JSON's quotes to JSON, by the schema of the
tool."""

import json
from collections.abc import Mapping
from typing import Any

_KINDS = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    dict: "object",
    list: "array",
}
"""JSON schema's words for the types of JSON values in Python."""
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_ANY = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})


def escaped(text: str) -> str:
    """Text as it stands within the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def value_as_json(text: str, types: frozenset[str]) -> str:
    """Convert a value that was written as text to JSON.

    JSON of an allowed type other than string is passed on, and so are Python's words for such
    values. Any other text becomes a string, unless it is JSON and the types allow no string.
    """
    literal = text.strip()
    literal = _PYTHON_WORDS.get(literal, literal)
    kind = _kind_of(literal)
    is_allowed = kind in types or (kind == "integer" and "number" in types)
    if kind is None or ("string" in types and (kind == "string" or not is_allowed)):
        return json.dumps(text, ensure_ascii=False)
    return literal


def _kind_of(literal: str) -> str | None:
    """JSON schema's word for the type of a JSON text; None for text that is no JSON."""
    try:
        value = json.loads(literal, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return _KINDS[type(value)]


def _refuse(name: str) -> None:
    raise ValueError(name)  # NaN and the infinities, which are not JSON


def types_of(schema: Any, name: str) -> frozenset[str]:
    """The types that a tool's JSON schema allows for one argument; all types if it names none."""
    if not isinstance(schema, Mapping):
        return _ANY
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or name not in properties:
        return _ANY
    return _allowed(properties[name], schema, set())


def _allowed(schema: Any, root: Mapping[str, Any], met: set[str]) -> frozenset[str]:
    """The types that part of a schema allows. A reference counts where it is `met` first: schemas
    may have cycles."""
    allowed = _ANY
    if not isinstance(schema, Mapping):
        return allowed
    declared = schema.get("type")
    if isinstance(declared, str):
        allowed &= {declared}
    elif isinstance(declared, list):
        allowed &= {kind for kind in declared if isinstance(kind, str)}
    values = schema.get("enum")
    if "const" in schema:
        values = [schema["const"]]
    if isinstance(values, list):
        allowed = allowed.intersection(_kind_of(json.dumps(value)) for value in values)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in met:
        met.add(reference)
        allowed &= _allowed(_referred(reference, root), root, met)
    for word in ("anyOf", "oneOf"):
        options = schema.get(word)
        if isinstance(options, list):
            of_any = frozenset[str]()
            for option in options:
                of_any |= _allowed(option, root, met)
            allowed &= of_any
    parts = schema.get("allOf")
    if isinstance(parts, list):
        for part in parts:
            allowed &= _allowed(part, root, met)
    return allowed


def _referred(reference: str, root: Any) -> Any:
    """The part of the schema that a reference such as "#/$defs/City" names, or None."""
    for step in reference.removeprefix("#").split("/")[1:]:
        if not isinstance(root, Mapping):
            return None
        root = root.get(step.replace("~1", "/").replace("~0", "~"))
    return root
