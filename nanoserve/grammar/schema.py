"""Checks beyond those of llguidance: it accepts schemas that no finite text meets, and some that it cannot enforce."""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from nanoserve.errors import UsageError

_BY_NAME = ("properties", "patternProperties")
_PARTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items", "additionalProperties")


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise UsageError for a schema that no finite JSON text meets, or that a grammar cannot enforce.

    The schema has passed llguidance, so its keywords are well formed and it is not nested too deeply to recurse.
    """
    if "x-guidance" in schema:  # its settings could allow text that is not JSON
        raise UsageError("JSON schema: x-guidance is not supported")
    targets: dict[str, Any] = {}
    to_do: list[Any] = [schema]
    while to_do:
        for node in _subschemas(to_do.pop()):
            _check_property_count(node)
            if isinstance(ref := node.get("$ref"), str) and ref not in targets:
                targets[ref] = _resolve(schema, ref)
                to_do.append(targets[ref])
    # The least fixed point: a reference has a finite value only if its target has one by the references known so far.
    endless = set(targets)
    while found := {ref for ref in endless if _is_finite(targets[ref], endless)}:
        endless -= found
    if not _is_finite(schema, endless):
        raise UsageError("the JSON schema refers to itself without end: no text can ever be complete")


def _check_property_count(node: Mapping[str, Any]) -> None:
    """Refuse a large minProperties: a grammar does not know the names so far, so it can enforce only one free name."""
    required = node.get("required")
    names = len(set(required)) if isinstance(required, list) else 0
    if isinstance(least := node.get("minProperties"), int | float) and least > names + 1:
        raise UsageError(f"JSON schema: minProperties {least} is not supported: at most one more than are required")


def _subschemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """The schema and all schemas within it, except those that are only reached through a reference."""
    if not isinstance(schema, dict):
        return
    yield schema
    children: list[Any] = []
    for word in _BY_NAME:
        if isinstance(value := schema.get(word), dict):
            children += value.values()
    for word in _PARTS:
        value = schema.get(word)
        children += value if isinstance(value, list) else [value]
    for child in children:
        yield from _subschemas(child)


def _resolve(schema: Any, reference: str) -> Any:
    """The target of a JSON pointer into the schema (RFC 6901); None for other references."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    target = schema
    for part in unquote(reference[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        try:
            target = target[int(name)] if isinstance(target, list) else target[name]
        except (KeyError, IndexError, ValueError, TypeError):
            return None
    return target


def _is_finite(schema: Any, endless: set[str]) -> bool:
    """Whether the schema has a finite value, if the references in `endless` have none."""
    if not isinstance(schema, dict):
        return True
    if schema.get("$ref") in endless:
        return False
    if not all(_is_finite(part, endless) for part in schema.get("allOf", ())):
        return False
    for word in ("anyOf", "oneOf"):
        if word in schema and not any(_is_finite(part, endless) for part in schema[word]):
            return False
    return _is_own_type_finite(schema, endless)


def _is_own_type_finite(schema: Mapping[str, Any], endless: set[str]) -> bool:
    types = schema.get("type", "string")
    if "const" in schema or "enum" in schema:
        return True
    possible = {
        "object": lambda: _is_object_finite(schema, endless),
        "array": lambda: _is_array_finite(schema, endless),
    }
    return any(
        possible[kind]() if kind in possible else True for kind in ([types] if isinstance(types, str) else types)
    )


def _is_object_finite(schema: Mapping[str, Any], endless: set[str]) -> bool:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties")
    return all(_is_finite(properties.get(name, others), endless) for name in schema.get("required", ()))


def _is_array_finite(schema: Mapping[str, Any], endless: set[str]) -> bool:
    least, first = schema.get("minItems", 0), schema.get("prefixItems", [])
    return all(_is_finite(item, endless) for item in first[: int(least)]) and (
        least <= len(first) or _is_finite(schema.get("items"), endless)
    )
